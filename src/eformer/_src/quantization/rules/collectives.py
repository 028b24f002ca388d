"""Collectives in `shard_map` that move a quantized array as it is stored: codes and scales, never the dense array."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from eformer._src.jaximus.rules import register
from eformer._src.quantization.elementwise_layout import ALL, LeafwiseArray, Moved, replaced

from .movement import inserted

Names = Hashable  # a name, or several
_TYPED = {"all_gather": "varying", "all_gather_invariant": "invarying"}  # whether devices may differ in the result


def _gathered(
    primitive: Primitive,
    q: LeafwiseArray,
    *,
    all_gather_dimension: int,
    axis_name: Names,
    tiled: bool,
    **params: Any,
) -> Moved:
    q, axis, groups = q._single(), all_gather_dimension, params.get("axis_index_groups")
    count = _group_size(axis_name, groups)
    gather = {"axis": axis, "tiled": tiled, "axis_index_groups": groups, "to": _TYPED[primitive.name]}

    def gathered(leaf: jax.Array) -> jax.Array:
        if not (jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 1):
            return lax.all_gather(leaf, axis_name, **gather)
        bits = lax.bitcast_convert_type(leaf, jnp.uint8)  # XLA on CPU would move float8 as float16
        return lax.bitcast_convert_type(lax.all_gather(bits, axis_name, **gather), leaf.dtype)

    if not tiled:
        return q._mapped_to(lambda _, leaf: gathered(leaf), *inserted(q, axis, count))
    parts = _joinable(q, axis, axis_name)
    if parts is None:  # devices may have scales of their own: then each part is a block
        q = q._finer()._in_blocks(axis)
        parts = _joinable(q, axis, axis_name)
    if parts is None:
        return NotImplemented
    leaves = {name: leaf if shared else gathered(leaf) for name, (leaf, shared) in parts.items()}
    return q._rebuilt(leaves, replaced(q.shape, axis, count * q.shape[axis]))


for _name in _TYPED:
    register(_name)(_gathered)


@register("all_to_all")
def all_to_all(
    primitive: Primitive, q: LeafwiseArray, *, axis_name: Names, split_axis: int, concat_axis: int, **params: Any
) -> Moved:
    del primitive
    q, groups = q._single(), params.get("axis_index_groups")
    count = _group_size(axis_name, groups)
    length = q.shape[split_axis] // count
    if q.shape[concat_axis] % q._block(concat_axis) or length % q._block(split_axis):
        q = q._finer()
    parts = _joinable(q, concat_axis, axis_name)
    if parts is None or length % q._block(split_axis):
        return NotImplemented

    def moved(name: str, leaf: jax.Array, shared: bool) -> jax.Array:
        over = {"axis_index_groups": groups, "tiled": True}
        if q._grains(split_axis)[name] == ALL and leaf.shape[split_axis] == 1:  # one entry for all parts
            return leaf if shared else lax.all_gather(leaf, axis_name, axis=concat_axis, **over)
        parts = lax.all_to_all(leaf, axis_name, split_axis, concat_axis, **over)
        return lax.slice_in_dim(parts, 0, 1, axis=concat_axis) if shared else parts  # all the same

    shape = replaced(q.shape, split_axis, length)
    shape = replaced(shape, concat_axis, shape[concat_axis] * count)
    return q._rebuilt({name: moved(name, *part) for name, part in parts.items()}, shape)


def _group_size(axis_name: Names, groups: Sequence[Sequence[int]] | None) -> int:
    return lax.axis_size(axis_name) if groups is None else len(groups[0])


def _joinable(q: LeafwiseArray, axis: int, axis_name: Names) -> dict[str, tuple[jax.Array, bool]] | None:
    """The leaves that devices can join along `axis`, each with whether all devices share its one entry.

    None where a block would be cut, or a leaf become as large as the array.
    """
    if q.shape[axis] % q._block(axis):
        return None
    shared = {n: q._grains(axis)[n] == ALL and _is_shared(q, n, axis_name) for n in q._named_leaves()}
    leaves = q._spread({name: () if one else (axis,) for name, one in shared.items()})
    return None if leaves is None else {name: (leaf, shared[name]) for name, leaf in leaves.items()}


def _is_shared(q: LeafwiseArray, name: str, axis_name: Names) -> bool:
    """Whether the devices along `axis_name` are known to have the same leaf, as each has the one scale of an axis.

    JAX knows which arrays differ, unless `shard_map` is told not to check (`check_vma=False`): then not even codes do.
    """
    axes = {*axis_name} if isinstance(axis_name, (tuple, list)) else {axis_name}
    varying = {each: jax.typeof(leaf).mat.varying for each, leaf in q._named_leaves().items()}
    return axes <= varying[q._code_fields[0]] and not axes & varying[name]
