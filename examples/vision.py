"""A vision transformer of Flax NNX with random weights in each format: size, speed, and how far its output is off.

    pip install flax
    python examples/vision.py --width 768 --layers 12     # ViT-B/16 with 224 x 224 pixels

Random weights tell nothing of quality. They tell what is quantized (kernels of the convolution, attention and MLP, and
neither positions nor norms), and what that saves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from eformer import implicit, quantize_model, stored_bytes
from eformer.ops.quantization import FormatSpec

FORMATS = "int8", "int8,activation_dtype=int8", "int4", "int4,activation_dtype=int8", "nf4", "mxfp4"
SECONDS = 1.0


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Vision(nnx.Module):
    """Knows nothing of quantization."""

    def __init__(self, size: int, patch: int, width: int, layers: int, classes: int, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, width, (patch, patch), strides=patch, padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, (size // patch) ** 2, width)))
        self.blocks = nnx.List([Block(width, width // 64, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(images), -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(jnp.mean(x, axis=1)))


def run(model: Vision, images: jax.Array) -> jax.Array:
    return model(images)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in {"size": 224, "patch": 16, "width": 256, "layers": 4, "classes": 1000, "batch": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args(argv)
    dense = nnx.jit(lambda: Vision(args.size, args.patch, args.width, args.layers, args.classes, nnx.Rngs(0)))()
    images = jax.random.normal(jax.random.key(0), (args.batch, args.size, args.size, 3))
    expected = None
    print(f"{'':28}{'MB':>8}{'ms':>8}{'off by':>9}")
    for form in ("float32", *FORMATS):
        model = dense if form == "float32" else quantize_model(dense, FormatSpec(form), function=run, inputs=(images,))
        step = nnx.jit(implicit(run))
        found = step(model, images)
        expected = found if expected is None else expected
        times, end = [], time.perf_counter() + SECONDS
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            step(model, images).block_until_ready()
            times.append(time.perf_counter() - start)
        off = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
        print(f"{form:28}{stored_bytes(model) / 1e6:8.2f}{1e3 * min(times):8.1f}{off:9.2%}", flush=True)


if __name__ == "__main__":
    main()
