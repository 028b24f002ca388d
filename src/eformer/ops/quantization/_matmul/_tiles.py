"""Matmuls of a dense and a quantized array in JAX's own operations, without a dense copy of the quantized one.

XLA:CPU writes a decoded weight to memory before it multiplies. A loop that decodes a tile into cache and multiplies it
at once needs no such copy, and is many times faster with few rows of `x`: `benchmarks/matmul.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eformer.jaximus import note_materialized
from eformer.kernels.reference import cast
from eformer.ops.quantization._leafwise import LeafwiseArray

# `benchmarks/matmul.py` shows what this does; chosen on 2 cores of an AMD EPYC (AVX2).
TILE_ELEMENTS = 2**20  # decoded at once: 4 MB
MIN_TILES = 4  # a smaller array is cut too: a single tile would be a dense copy of it


Numbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


class Contraction(NamedTuple):
    """Which axes of `x` and `q` are summed over, and which run in parallel; the result has batch, x's, q's axes."""

    x_summed: tuple[int, ...]
    q_summed: tuple[int, ...]
    x_batch: tuple[int, ...]
    q_batch: tuple[int, ...]

    @property
    def numbers(self) -> Numbers:
        return (self.x_summed, self.q_summed), (self.x_batch, self.q_batch)

    @property
    def x_summed_in_order(self) -> list[int]:
        """The axes of x that are summed over, in the order in which the quantized array has them."""
        return [x_axis for _, x_axis in sorted(zip(self.q_summed, self.x_summed, strict=True))]

    def x_free(self, ndim: int) -> list[int]:
        return [a for a in range(ndim) if a not in self.x_summed and a not in self.x_batch]

    def q_free(self, ndim: int) -> list[int]:
        return [a for a in range(ndim) if a not in self.q_summed and a not in self.q_batch]


class AsDense(NamedTuple):
    """What a dense `dot_general` is given: its result's dtype and its precision. Its rounding and wrapping are met."""

    dtype: Any
    precision: Any = None

    @property
    def sums(self) -> Any:
        """The dtype in which tiles are added up: half precision would round each time."""
        algorithm = not (self.precision is None or isinstance(self.precision, tuple))
        return self.dtype if algorithm or self.dtype not in (jnp.bfloat16, jnp.float16) else jnp.dtype(jnp.float32)


def matmul_in_tiles(
    x: jax.Array,
    q: LeafwiseArray,
    contraction: Contraction,
    as_dense: AsDense | None = None,
    *,
    in_tiles: bool = True,
    why: str = "it is too small to be cut into tiles",
) -> jax.Array:
    """In float32, or as `as_dense` says (its `sums`); without `in_tiles`, of the array made dense, `why` being told."""
    tiling = _tiling(q, contraction) if in_tiles else None
    if tiling is None:
        note_materialized(q, why)
        return _whole(x, q, contraction, as_dense)
    return _tiled_on_cpu(x, q, contraction, as_dense, tiling)


def _tiling(q: LeafwiseArray, contraction: Contraction) -> tuple[int, int] | None:
    """The axis to cut, the outermost that is not parallel if there is one, and how much of it to decode at once."""
    if not q.size:
        return None
    for axis in sorted(range(q.ndim), key=lambda axis: axis in contraction.q_batch):
        if q.shape[axis] > q.alignment(axis):
            return axis, _tile(q, axis)
    return None


def _tile(q: LeafwiseArray, axis: int) -> int:
    step, size = q.alignment(axis), q.shape[axis]
    most = max(step, min(TILE_ELEMENTS * size // q.size, size // MIN_TILES) // step * step)
    # Without a rest there is no leaf to cut; unless that makes tiles small.
    even = (tile for tile in range(most, most // 2, -step) if size % tile == 0)
    return next(even, most)


def in_pieces(q: LeafwiseArray, axis: int, function: Callable[[LeafwiseArray], jax.Array], out_axis: int) -> jax.Array:
    """`function` of tiles of `q` along `axis`, one after the other, joined along `out_axis`."""
    tile = _tile(q, axis)
    count, rest = divmod(q.shape[axis], tile)
    parts = lax.map(function, q.tiles(axis, tile))
    last = [function(q.sliced(count * tile, rest, axis))] if rest else []
    return _joined(parts, last, out_axis)


def _joined(parts: jax.Array, last: list[jax.Array], axis: int) -> jax.Array:
    """Parts, stacked along the first axis, one after the other along `axis`."""
    parts = jnp.moveaxis(parts, 0, axis)
    return jnp.concatenate([lax.collapse(parts, axis, axis + 2), *last], axis)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _whole(x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense | None) -> jax.Array:
    dtype = x.dtype if x.dtype == q.dtype else jnp.float32
    return _matmul(x, q, contraction, dtype) if as_dense is None else _dense_dot(x, q, contraction, as_dense)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _tiled_on_cpu(
    x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense | None, tiling: tuple[int, int]
) -> jax.Array:
    tiled = functools.partial(_tiled, contraction=contraction, as_dense=as_dense, tiling=tiling)
    # Compilers of other devices fuse the decoding into the product by themselves.
    return lax.platform_dependent(x, q, cpu=tiled, default=lambda x, q: _whole(x, q, contraction, as_dense))


def _tiled(
    x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense | None, tiling: tuple[int, int]
) -> jax.Array:
    axis, tile = tiling
    x_axes = dict(
        zip(contraction.q_summed + contraction.q_batch, contraction.x_summed + contraction.x_batch, strict=True)
    )

    # Differentiation decodes again instead of keeping what was decoded.
    @jax.checkpoint
    def part(x: jax.Array, start: Any, piece: LeafwiseArray) -> jax.Array:
        if axis in x_axes:
            x = lax.dynamic_slice_in_dim(x, start, piece.shape[axis], x_axes[axis])
        if as_dense is None:
            return _matmul(x, piece, contraction, jnp.float32)
        return _dense_dot(x, piece, contraction, as_dense)

    count, rest = divmod(q.shape[axis], tile)
    tiles = (jnp.arange(count) * tile, q.tiles(axis, tile))
    last = [part(x, count * tile, q.sliced(count * tile, rest, axis))] if rest else []
    if axis in contraction.q_summed:
        first = jax.eval_shape(part, x, 0, q.sliced(0, tile, axis))
        zeros, *_ = varying_alike([jnp.zeros(first.shape, first.dtype), x, *jax.tree.leaves(q)])
        total, _ = lax.scan(lambda total, tile: (total + part(x, *tile), None), zeros, tiles)
        return sum(last, total)
    parts = lax.map(lambda tile: part(x, *tile), tiles)
    before = len(contraction.x_batch) + len(contraction.x_free(x.ndim))
    places = [*contraction.q_batch, *[None] * (before - len(contraction.q_batch)), *contraction.q_free(q.ndim)]
    return _joined(parts, last, places.index(axis))


def varying_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, in `shard_map` all typed as differing along each axis of the mesh that one differs along."""
    varying = [jax.typeof(operand).mat.varying for operand in operands]
    every = frozenset().union(*varying)
    pairs = zip(operands, varying, strict=True)
    return [lax.pcast(operand, tuple(sorted(every - own)), to="varying") for operand, own in pairs]


def _dense_dot(x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense) -> jax.Array:
    dense = cast(q.decode(), q.dtype)
    precision = as_dense.precision
    return lax.dot_general(x, dense, contraction.numbers, precision, preferred_element_type=as_dense.sums)


def _matmul(x: jax.Array, q: LeafwiseArray, contraction: Contraction, dtype: Any) -> jax.Array:
    """The product in float32, of operands in `dtype`; a scale goes where it costs least.

    One that varies only along axes that are summed over multiplies `x`; one that varies along none of them multiplies
    the result; any other, the array.
    """
    values, scale = q.factors()
    varies = set() if scale is None else {a for a in range(q.ndim) if scale.shape[a] != 1}
    if scale is None:
        return _dot_general(x.astype(dtype), values.astype(dtype), contraction)
    if varies and varies <= set(contraction.q_summed):
        x = x.astype(jnp.float32) * _beside_x(scale, x, contraction)
        dtype = jnp.float32 if dtype == jnp.float16 else dtype  # which would lose the digits of a small scale
        return _dot_general(x.astype(dtype), values.astype(dtype), contraction)
    if not varies & set(contraction.q_summed):
        out = _dot_general(x.astype(dtype), values.astype(dtype), contraction)
        return out * _beside_result(scale, x, out, contraction)
    return _dot_general(x.astype(dtype), cast(q.decode(), q.dtype).astype(dtype), contraction)


def _dot_general(x: jax.Array, values: jax.Array, contraction: Contraction) -> jax.Array:
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
