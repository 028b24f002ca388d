"""Gathering from a quantized array: rows of an embedding are decoded, whole matrices of experts stay quantized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from eformer._src.jaximus.rules import register
from eformer._src.quantization.base import Leaves
from eformer._src.quantization.elementwise_layout import ALL, LeafwiseArray, Moved, replaced
from eformer._src.quantization.sharding import bind_alike


@register("gather")
def gather(
    primitive: Primitive,
    q: LeafwiseArray,
    indices: jax.Array,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: lax.GatherScatterMode,
    fill_value: float | None,
    **params: object,
) -> Moved | jax.Array:
    """Decode the rows that are asked for and no others, as in an embedding; keep whole matrices, as of experts."""
    q = q._single()
    numbers = dimension_numbers
    indexed = numbers.start_index_map
    batched = numbers.operand_batching_dims
    cut = [a for a in indexed if q._block(a) > 1]
    if cut and not any(q._block(axis) > 1 for axis in batched):
        how: dict[str, Any] = {"slice_sizes": slice_sizes, "mode": mode, "fill_value": fill_value, **params}
        return _gather_along_blocks(primitive, q, indices, cut[0], numbers, **how)
    for axis, size in enumerate(slice_sizes):
        is_part, cuts = size != q.shape[axis], axis in indexed or axis in batched
        if q._block(axis) > 1 and (cuts or is_part or axis in numbers.collapsed_slice_dims):
            return NotImplemented
        if (axis in batched and ALL in q._grains(axis).values()) or (is_part and not cuts):
            return NotImplemented

    def beside_indices(values: Sequence[int]) -> jax.Array:
        return jnp.array(values, indices.dtype).reshape(*[1] * (indices.ndim - 1), len(values))

    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    inner_mode = lax.GatherScatterMode.CLIP if fills else mode

    def part(name: str, leaf: jax.Array) -> jax.Array:
        grains = [q._grains(axis)[name] for axis in range(q.ndim)]
        sizes = [n if grain == 1 else d for grain, n, d in zip(grains, slice_sizes, leaf.shape, strict=True)]
        # A leaf that is broadcast along an indexed axis has its only entry at 0.
        at = indices * beside_indices([grains[axis] != ALL for axis in indexed])
        return bind_alike(
            primitive,
            leaf,
            at,
            dimension_numbers=numbers,
            slice_sizes=tuple(sizes),
            mode=inner_mode,
            fill_value=None,
            **params,
        )

    leaves = {name: part(name, leaf) for name, leaf in q._named_leaves().items()}
    offset_axes = [a for a in range(q.ndim) if a not in numbers.collapsed_slice_dims and a not in batched]
    moved = dict(zip(offset_axes, numbers.offset_dims, strict=True))
    rank = len(numbers.offset_dims) + indices.ndim - 1
    batch_sizes = iter(indices.shape[:-1])
    offset_sizes = {new: slice_sizes[old] for old, new in moved.items()}
    shape = tuple(offset_sizes[a] if a in offset_sizes else next(batch_sizes) for a in range(rank))
    last = beside_indices([q.shape[a] - slice_sizes[a] for a in indexed])
    inside = jnp.all((indices >= 0) & (indices <= last), axis=-1) if fills else None
    batch_axes = [a for a in range(rank) if a not in offset_sizes]
    whole_axes = [a for a in offset_axes if slice_sizes[a] == q.shape[a] > 1]
    if len(whole_axes) > 1 and (not fills or fill_value is None or math.isnan(fill_value)):
        filled = leaves if inside is None else _nan_outside(q, leaves, inside, batch_axes)
        if filled is not None:
            return q._rebuilt(filled, shape, moved)
    dense = q._rebuilt(leaves, shape, moved)._decoded()
    if inside is None:
        return dense
    inside = lax.broadcast_in_dim(inside, shape, batch_axes)
    fill = _fill_value(dense.dtype) if fill_value is None else fill_value
    return jnp.where(inside, dense, jnp.asarray(fill, dense.dtype))


def _nan_outside(q: LeafwiseArray, leaves: Leaves, inside: jax.Array, axes: Sequence[int]) -> Leaves | None:
    """The leaves of an array that is NaN where `inside`, along `axes`, is false; None if the format has no NaN."""
    if not jnp.issubdtype(q.dtype, jnp.floating):
        return None
    scales = [name for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    fills = dict.fromkeys(scales, jnp.nan) if scales else q._nan_codes

    def mask(leaf: jax.Array, fill: float) -> jax.Array:
        return jnp.where(lax.broadcast_in_dim(inside, leaf.shape, axes), leaf, jnp.asarray(fill, leaf.dtype))

    return {n: mask(leaf, fills[n]) if n in fills else leaf for n, leaf in leaves.items()} if fills else None


def _fill_value(dtype: DTypeLike) -> float:
    """What JAX fills out-of-bounds elements with."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max


def _gather_along_blocks(
    primitive: Primitive,
    q: LeafwiseArray,
    indices: jax.Array,
    axis: int,
    numbers: lax.GatherDimensionNumbers,
    **params: Any,
) -> jax.Array:
    """The same gather from an array that has along `axis` just the elements it asks for, in their order."""
    size, column = params["slice_sizes"][axis], list(numbers.start_index_map).index(axis)
    starts, last = indices[..., column].astype(jnp.int32), q.shape[axis] - size
    inside = jnp.clip(starts, 0, last)
    within = jnp.arange(size, dtype=jnp.int32).reshape(*[1] * starts.ndim, size)
    rows = rows_along(q, (inside[..., None] + within).reshape(-1), axis)
    places = jnp.arange(starts.size, dtype=jnp.int32).reshape(starts.shape) * size
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        places = jnp.where(starts == inside, places, rows.shape[axis])
    indices = indices.astype(jnp.int32).at[..., column].set(places)
    return bind_alike(primitive, rows, indices, dimension_numbers=numbers, **params)


def rows_along(q: LeafwiseArray, at: jax.Array, axis: int) -> jax.Array:
    """The elements at the positions `at` (n,) along `axis`, dense. Codes that share a byte are decoded together.

    A step decodes less than the whole axis.
    """
    group, count = q._codes_together(axis), at.shape[0]
    most = max(1, q.shape[axis] // (2 * group))
    if count <= most:
        return _rows_at_once(q, at, axis)
    parts = jnp.pad(at, (0, -count % most)).reshape(-1, most)
    found = lax.map(lambda part: _rows_at_once(q, part, axis), parts)
    found = lax.collapse(jnp.moveaxis(found, 0, axis), axis, axis + 2)
    return lax.slice_in_dim(found, 0, count, axis=axis)


def _rows_at_once(q: LeafwiseArray, at: jax.Array, axis: int) -> jax.Array:
    group, count = q._codes_together(axis), at.shape[0]
    grains = {name: [q._grains(a)[name] for a in range(q.ndim)] for name in q._named_leaves()}

    def taken(name: str, leaf: jax.Array) -> jax.Array:
        grain = grains[name][axis]
        if grain == ALL:
            return leaf
        if name not in q._code_fields:  # the entry of the element itself; for those beside it, it may be a wrong one
            grains[name][axis] = group
            return jnp.take(leaf, at // grain, axis=axis)
        entries = jnp.arange(group // grain, dtype=at.dtype)[None]
        return jnp.take(leaf, ((at // group)[:, None] * entries.size + entries).reshape(-1), axis=axis, mode="clip")

    leaves = {name: taken(name, leaf) for name, leaf in q._named_leaves().items()}
    part = q._of_parts(leaves, {name: tuple(each) for name, each in grains.items()})
    dense = part._rebuilt(part._named_leaves(), replaced(q.shape, axis, count * group))._decoded()
    groups = dense.reshape(*q.shape[:axis], count, group, *q.shape[axis + 1 :])
    within = (at % group).reshape(*[1] * axis, count, *[1] * (q.ndim - axis))
    return jnp.squeeze(jnp.take_along_axis(groups, within, axis=axis + 1), axis + 1)
