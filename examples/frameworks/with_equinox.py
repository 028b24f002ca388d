"""Equinox: a module is a tree of arrays, and of things that are none, which `eqx.filter_jit` leaves to Python.

Run it with `python examples/frameworks/with_equinox.py`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from eformer import dequantize, implicit, quantize_model, stored_bytes


class Block(eqx.Module):
    """Knows nothing of quantization."""

    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        embedding, attention, mlp = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(512, 128, key=embedding)
        self.attention = eqx.nn.MultiheadAttention(4, 128, key=attention)
        self.norm = eqx.nn.LayerNorm(128)
        self.mlp = eqx.nn.MLP(128, 128, 512, depth=1, key=mlp)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(tokens)
        normed = jax.vmap(self.norm)(x)
        x = x + self.attention(normed, normed, normed)
        return x + jax.vmap(self.mlp)(x)


def run(model: Block, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def main() -> None:
    model, tokens = eqx.filter_jit(Block)(jax.random.key(0)), jnp.arange(12)
    quantized = quantize_model(model, function=run, inputs=(tokens,))
    y = eqx.filter_jit(implicit(run))(quantized, tokens)
    dense = eqx.filter_jit(run)(dequantize(quantized), tokens)
    sizes = f"{stored_bytes(model):,} -> {stored_bytes(quantized):,} bytes"
    print(f"equinox: {sizes}, max error {jnp.max(jnp.abs(y - dense)):.1e}")


if __name__ == "__main__":
    main()
