"""Haiku: parameters are a dict of dicts of arrays. Run it with `python examples/frameworks/with_haiku.py`."""

import haiku as hk
import jax
import jax.numpy as jnp

from eformer import dequantize, implicit, quantize_model, stored_bytes


def block(tokens: jax.Array) -> jax.Array:
    """Knows nothing of quantization."""
    x = hk.Embed(512, 128)(tokens)
    normed = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    init = hk.initializers.VarianceScaling()
    x = x + hk.MultiHeadAttention(4, 32, model_size=128, w_init=init)(normed, normed, normed)
    return x + hk.Linear(128)(jax.nn.gelu(hk.Linear(512)(x)))


def main() -> None:
    model, tokens = hk.without_apply_rng(hk.transform(block)), jnp.arange(12)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    quantized = quantize_model(params, function=model.apply, inputs=(tokens,))
    y = jax.jit(implicit(model.apply))(quantized, tokens)
    dense = jax.jit(model.apply)(dequantize(quantized), tokens)
    sizes = f"{stored_bytes(params):,} -> {stored_bytes(quantized):,} bytes"
    print(f"haiku: {sizes}, max error {jnp.max(jnp.abs(y - dense)):.1e}")


if __name__ == "__main__":
    main()
