"""Matmuls of a dense and a quantized array in XLA's own operations, without a dense copy of the quantized one.

XLA:CPU writes a decoded weight to memory before it multiplies. A loop that decodes a tile into cache and multiplies it
at once needs no such copy, and is many times faster for few rows of `x`: `benchmarks/matmul.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from eformer._src.jaximus.instrumentation import note_materialized
from eformer._src.kernels.reference import cast
from eformer._src.quantization.elementwise_layout import LeafwiseArray

from .primitive import PARTLY_MANUAL, Precision, matmul_in_xla, varying_alike

# `benchmarks/matmul.py` shows what this does; chosen on 2 cores of an AMD EPYC (AVX2).
TILE_ELEMENTS = 2**20  # decoded at once: 4 MB
MIN_TILES = 4  # a smaller array is cut too: a single tile would be a dense copy of it
FLOAT32 = jnp.dtype(jnp.float32)

Axes: TypeAlias = tuple[int, ...]
Numbers: TypeAlias = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]  # the `dimension_numbers` of `lax.dot_general`


class Contraction(NamedTuple):
    """The axes of `x` and `q` by their role in a matmul, whose result has the axes (*batch, *x_free, *q_free).

    `x_summed[i]` is contracted with `q_summed[i]`, in the order of q's axes.
    """

    x_summed: Axes
    q_summed: Axes
    x_batch: Axes
    q_batch: Axes
    x_free: Axes
    q_free: Axes

    @property
    def numbers(self) -> Numbers:
        return (self.x_summed, self.q_summed), (self.x_batch, self.q_batch)

    def in_result(self) -> dict[int, int]:
        """Where each batch axis and free axis of `q` is in the result."""
        first = len(self.x_batch) + len(self.x_free)
        return {a: i for i, a in enumerate(self.q_batch)} | {a: first + i for i, a in enumerate(self.q_free)}


class AsDense(NamedTuple):
    """The result's dtype and the precision of the dense `dot_general` whose rounding and wrapping is wanted."""

    dtype: np.dtype
    precision: Precision = None

    @property
    def sums(self) -> np.dtype:
        """The dtype in which tiles are added up: half precision would round each time."""
        algorithm = not (self.precision is None or isinstance(self.precision, tuple))
        return self.dtype if algorithm or self.dtype not in (jnp.bfloat16, jnp.float16) else FLOAT32


def contract_in_tiles(
    x: jax.Array,
    q: LeafwiseArray,
    contraction: Contraction,
    dtype: np.dtype,
    as_dense: AsDense | None = None,
    dense_because: str | None = None,
) -> jax.Array:
    """x times q as `dtype`, summed in float32 or in `as_dense.sums`.

    A reason in `dense_because` decodes all of `q` at once.
    """
    tiling = None if dense_because else _tiling(q, contraction)
    if tiling is None:
        note_materialized(q, dense_because or "it is too small to be cut into tiles")
        return _whole(x, q, contraction, as_dense).astype(dtype)
    return _tiled(x, q, contraction, as_dense, tiling).astype(dtype)


@matmul_in_xla.register
def _(q: LeafwiseArray, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    free = tuple(range(1, x.ndim - 1))
    contraction = Contraction((x.ndim - 1,), (1 + contracted_axis,), (0,), (0,), free, (2 - contracted_axis,))
    return contract_in_tiles(x, q, contraction, FLOAT32, dense_because=None if in_tiles else PARTLY_MANUAL)


def _tiling(q: LeafwiseArray, contraction: Contraction) -> tuple[int, int] | None:
    """The axis to cut, the first that is no batch axis if there is one, and the length of a tile along it."""
    if not q.size:
        return None
    for axis in sorted(range(q.ndim), key=lambda axis: axis in contraction.q_batch):
        if q.shape[axis] > q._alignment(axis):
            return axis, _tile(q, axis)
    return None


def _tile(q: LeafwiseArray, axis: int) -> int:
    step, size = q._alignment(axis), q.shape[axis]
    most = max(step, min(TILE_ELEMENTS * size // q.size, size // MIN_TILES) // step * step)
    # A tile that divides the length leaves no shorter one to slice off. Less than half of the most would be too small.
    even = (tile for tile in range(most, most // 2, -step) if size % tile == 0)
    return next(even, most)


def map_tiles(
    function: Callable[[ArrayLike, LeafwiseArray], jax.Array], q: LeafwiseArray, axis: int, out_axis: int
) -> jax.Array:
    """`function(start, tile)` of each tile of `q` along `axis`, joined along `out_axis`."""
    tile = _tile(q, axis)
    count, rest = divmod(q.shape[axis], tile)
    parts = lax.map(lambda each: function(*each), (jnp.arange(count) * tile, q._tiles(axis, tile)))
    joined = lax.collapse(jnp.moveaxis(parts, 0, out_axis), out_axis, out_axis + 2)
    last = [function(count * tile, q._sliced(count * tile, rest, axis))] if rest else []
    return jnp.concatenate([joined, *last], out_axis)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _whole(x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense | None) -> jax.Array:
    return _decode_and_matmul(x, q, contraction, as_dense, x.dtype if x.dtype == q.dtype else FLOAT32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _tiled(
    x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense | None, tiling: tuple[int, int]
) -> jax.Array:
    axis, tile = tiling
    (x_summed, q_summed), (x_batch, q_batch) = contraction.numbers
    x_axes = dict(zip(q_summed + q_batch, x_summed + x_batch, strict=True))

    # Differentiation decodes again instead of keeping what was decoded.
    @jax.checkpoint
    def part(x: jax.Array, start: ArrayLike, piece: LeafwiseArray) -> jax.Array:
        if axis in x_axes:
            x = lax.dynamic_slice_in_dim(x, start, piece.shape[axis], x_axes[axis])
        return _decode_and_matmul(x, piece, contraction, as_dense, FLOAT32)

    def on_cpu(x: jax.Array, q: LeafwiseArray) -> jax.Array:
        if axis not in contraction.q_summed:
            return map_tiles(functools.partial(part, x), q, axis, contraction.in_result()[axis])
        count, rest = divmod(q.shape[axis], tile)
        first = jax.eval_shape(part, x, 0, q._sliced(0, tile, axis))
        zeros, *_ = varying_alike([jnp.zeros(first.shape, first.dtype), x, *jax.tree.leaves(q)])
        tiles = (jnp.arange(count) * tile, q._tiles(axis, tile))
        total, _ = lax.scan(lambda total, tile: (total + part(x, *tile), None), zeros, tiles)
        return total + part(x, count * tile, q._sliced(count * tile, rest, axis)) if rest else total

    # Compilers of other devices fuse the decoding into the matmul by themselves.
    return lax.platform_dependent(x, q, cpu=on_cpu, default=lambda x, q: _whole(x, q, contraction, as_dense))


def _decode_and_matmul(
    x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense | None, dtype: np.dtype
) -> jax.Array:
    """The matmul with all of `q`, in float32 with operands cast to `dtype`, or as `as_dense` says.

    A scale is applied where that is cheapest: to `x` if it varies along contracted axes only, to the result if it
    varies along none of them, else to `q`.
    """
    if as_dense is not None:
        dense = cast(q.decode(), q.dtype)
        return lax.dot_general(x, dense, contraction.numbers, as_dense.precision, preferred_element_type=as_dense.sums)
    values, scale = q._factors()
    summed, scale_of_result = set(contraction.q_summed), None
    if scale is not None:
        varies = {a for a in range(q.ndim) if scale.shape[a] != 1}
        if not varies & summed:
            scale_of_result = scale
        elif varies <= summed:
            at = dict(zip(contraction.q_summed, contraction.x_summed, strict=True))
            x = x.astype(jnp.float32) * _aligned(scale, at, x.shape)
            dtype = FLOAT32 if dtype == jnp.float16 else dtype  # float16 loses digits of a small scale
        else:
            values = cast(q.decode(), q.dtype)
    x, values = x.astype(dtype), values.astype(dtype)
    out = lax.dot_general(x, values, contraction.numbers, preferred_element_type=jnp.float32)
    return out if scale_of_result is None else out * _aligned(scale_of_result, contraction.in_result(), out.shape)


def _aligned(scale: jax.Array, at: Mapping[int, int], shape: Sequence[int]) -> jax.Array:
    """`scale` broadcast to `shape`: its axis `a` goes to `at[a]`, and axes that are not in `at` have length 1."""
    kept = sorted(at)
    scale = lax.squeeze(scale, [a for a in range(scale.ndim) if a not in at])
    order = sorted(range(len(kept)), key=lambda i: at[kept[i]])
    return lax.broadcast_in_dim(lax.transpose(scale, order), shape, sorted(at.values()))
