"""Products of a dense and a quantized array in JAX's own operations, without a dense copy of it where that pays.

XLA:CPU writes a decoded weight to memory before it multiplies. With few rows of `x`, a loop that decodes a tile into
cache and multiplies it at once is many times faster: `benchmarks/matmul.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eformer.jaximus import note_materialized
from eformer.kernels.reference import cast

from ._leafwise import LeafwiseArray

# `benchmarks/matmul.py` shows what these do; chosen on 2 cores of an AMD EPYC (AVX2).
MAX_ROWS = 32  # of x; above, decoding everything once costs less than a loop of short products
TILE_ELEMENTS = 2**20  # decoded at once: 4 MB


class Contraction(NamedTuple):
    """Which axes of `x` and `q` are summed over, and which run in parallel; the result has batch, x's, q's axes."""

    x_summed: tuple[int, ...]
    q_summed: tuple[int, ...]
    x_batch: tuple[int, ...]
    q_batch: tuple[int, ...]

    @property
    def numbers(self) -> Any:
        return (self.x_summed, self.q_summed), (self.x_batch, self.q_batch)

    def x_free(self, ndim: int) -> list[int]:
        return [a for a in range(ndim) if a not in self.x_summed and a not in self.x_batch]

    def q_free(self, ndim: int) -> list[int]:
        return [a for a in range(ndim) if a not in self.q_summed and a not in self.q_batch]


def product(x: jax.Array, q: LeafwiseArray, contraction: Contraction, *, in_tiles: bool = True) -> jax.Array:
    """In float32, or in the dtype of both; with many rows of x, or without `in_tiles`, of the array made dense."""
    axis, tile = _tiling(q, contraction)
    rows = math.prod(x.shape[a] for a in contraction.x_free(x.ndim))
    if not in_tiles or rows > MAX_ROWS:
        tile = q.shape[axis] if q.ndim else 1
    if q.ndim == 0 or tile >= q.shape[axis]:
        if q.size > TILE_ELEMENTS:
            note_materialized(q)
        return _whole(x, q, contraction)
    return _tiled_on_cpu(x, q, contraction, axis, tile)


def _tiling(q: LeafwiseArray, contraction: Contraction) -> tuple[int, int]:
    """The axis whose parts lie together in memory, and how much of it to decode at once."""
    axis = next((a for a in range(q.ndim) if a not in contraction.q_batch and q.shape[a] > 1), 0)
    if not q.ndim:
        return axis, 1
    if not q.size or axis in contraction.q_batch:  # nothing to cut
        return axis, q.shape[axis]
    step, size = q.alignment(axis), q.shape[axis]
    most = max(step, TILE_ELEMENTS * size // q.size // step * step)
    # Without a rest there is no leaf to cut; unless that makes tiles small.
    even = (tile for tile in range(most, most // 2, -step) if size % tile == 0)
    return axis, next(even, most)


@functools.partial(jax.jit, static_argnums=2)
def _whole(x: jax.Array, q: LeafwiseArray, contraction: Contraction) -> jax.Array:
    return contract(x, q, contraction, x.dtype if x.dtype == q.dtype else jnp.float32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _tiled_on_cpu(x: jax.Array, q: LeafwiseArray, contraction: Contraction, axis: int, tile: int) -> jax.Array:
    tiled = functools.partial(_tiled, contraction=contraction, axis=axis, tile=tile)
    # Compilers of other devices fuse the decoding into the product by themselves.
    return lax.platform_dependent(x, q, cpu=tiled, default=lambda x, q: _whole(x, q, contraction))


def _tiled(x: jax.Array, q: LeafwiseArray, contraction: Contraction, axis: int, tile: int) -> jax.Array:
    summed = axis in contraction.q_summed
    x_axis = contraction.x_summed[contraction.q_summed.index(axis)] if summed else None

    # Differentiation decodes again instead of keeping what was decoded.
    @jax.checkpoint
    def part(x: jax.Array, start: Any, piece: LeafwiseArray) -> jax.Array:
        if x_axis is not None:
            x = lax.dynamic_slice_in_dim(x, start, piece.shape[axis], x_axis)
        return contract(x, piece, contraction, jnp.float32)

    count, rest = divmod(q.shape[axis], tile)
    tiles = (jnp.arange(count) * tile, q.tiles(axis, tile))
    parts = lax.map(lambda tile: part(x, *tile), tiles)
    last = [part(x, count * tile, q.sliced(count * tile, rest, axis))] if rest else []
    if summed:
        return sum(last, jnp.sum(parts, 0))
    out_axis = len(contraction.x_batch) + len(contraction.x_free(x.ndim)) + contraction.q_free(q.ndim).index(axis)
    parts = jnp.moveaxis(parts, 0, out_axis)
    merged = parts.reshape(*parts.shape[:out_axis], count * tile, *parts.shape[out_axis + 2 :])
    return jnp.concatenate([merged, *last], out_axis)


def contract(x: jax.Array, q: LeafwiseArray, contraction: Contraction, dtype: Any) -> jax.Array:
    """The product in float32, of operands in `dtype`; a scale goes where it costs least.

    One that varies only along axes that are summed over multiplies `x`; one that varies along none of them multiplies
    the result; any other, the array.
    """
    values, scale = q.factors()
    varies = set() if scale is None else {a for a in range(q.ndim) if scale.shape[a] != 1}
    if scale is None:
        return _dot(x.astype(dtype), values.astype(dtype), contraction)
    if varies and varies <= set(contraction.q_summed):
        x = x.astype(jnp.float32) * _beside_x(scale, x, contraction)
        dtype = jnp.float32 if dtype == jnp.float16 else dtype  # which would lose the digits of a small scale
        return _dot(x.astype(dtype), values.astype(dtype), contraction)
    if not varies & set(contraction.q_summed):
        out = _dot(x.astype(dtype), values.astype(dtype), contraction)
        return out * _beside_result(scale, x, out, contraction)
    return _dot(x.astype(dtype), cast(q.decode(), q.dtype).astype(dtype), contraction)


def _dot(x: jax.Array, values: jax.Array, contraction: Contraction) -> jax.Array:
    return lax.dot_general(x, values, contraction.numbers, preferred_element_type=jnp.float32)


def _beside_x(scale: jax.Array, x: jax.Array, contraction: Contraction) -> jax.Array:
    at = dict(zip(contraction.q_summed, contraction.x_summed, strict=True))
    return _aligned(scale, at, x.shape)


def _beside_result(scale: jax.Array, x: jax.Array, out: jax.Array, contraction: Contraction) -> jax.Array:
    first = len(contraction.q_batch) + len(contraction.x_free(x.ndim))
    at = {a: i for i, a in enumerate(contraction.q_batch)}
    at |= {a: first + i for i, a in enumerate(contraction.q_free(scale.ndim))}
    return _aligned(scale, at, out.shape)


def _aligned(scale: jax.Array, at: dict[int, int], shape: Sequence[int]) -> jax.Array:
    """`scale` without the axes that `at` does not place, the others where it says, broadcast to `shape`."""
    kept = sorted(at)
    scale = lax.squeeze(scale, [a for a in range(scale.ndim) if a not in at])
    order = sorted(range(len(kept)), key=lambda i: at[kept[i]])
    return lax.broadcast_in_dim(lax.transpose(scale, order), shape, sorted(at.values()))
