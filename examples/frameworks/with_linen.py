"""Flax Linen: parameters are a dict of arrays. Run it with `python examples/frameworks/with_linen.py`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from eformer import dequantize, implicit, quantize_model, stored_bytes


class Block(nn.Module):
    """Knows nothing of quantization."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(512, 128)(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(x)))


def main() -> None:
    model, tokens = Block(), jnp.arange(12)[None]
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    quantized = quantize_model(params, function=model.apply, inputs=(tokens,))
    y = jax.jit(implicit(model.apply))(quantized, tokens)
    dense = jax.jit(model.apply)(dequantize(quantized), tokens)
    sizes = f"{stored_bytes(params):,} -> {stored_bytes(quantized):,} bytes"
    print(f"linen: {sizes}, max error {jnp.max(jnp.abs(y - dense)):.1e}")


if __name__ == "__main__":
    main()
