"""Flax NNX: a module is a tree of variables. Run it with `python examples/frameworks/with_nnx.py`."""

import jax
import jax.numpy as jnp
from flax import nnx

from eformer import dequantize, implicit, quantize_model, stored_bytes


class Block(nnx.Module):
    """Knows nothing of quantization."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(512, 128, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 128, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


def run(model: Block, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def main() -> None:
    model, tokens = Block(nnx.Rngs(0)), jnp.arange(12)[None]
    quantized = quantize_model(model, function=run, inputs=(tokens,))  # a `Block` that holds quantized arrays
    y = jax.jit(implicit(run))(quantized, tokens)
    dense = jax.jit(run)(dequantize(quantized), tokens)
    sizes = f"{stored_bytes(model):,} -> {stored_bytes(quantized):,} bytes"
    print(f"nnx: {sizes}, max error {jnp.max(jnp.abs(y - dense)):.1e}")


if __name__ == "__main__":
    main()
