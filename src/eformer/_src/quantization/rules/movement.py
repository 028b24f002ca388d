"""Slices, joins, updates and padding move the leaves of an array, and decode nothing.

A rule cuts and joins leaves between blocks. To join arrays along an axis that a scale covers whole, it first repeats
the scale (`_spread`), as long as that stays smaller than the array. Everything else is declined.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.typing import ArrayLike, DTypeLike

from eformer._src.jaximus.rules import register
from eformer._src.quantization.base import Leaves, MatmulOperand
from eformer._src.quantization.elementwise_layout import ALL, LeafwiseArray, Moved, replaced
from eformer._src.quantization.sharding import asked_of, bind_alike

from .gather import rows_along


@register("broadcast_in_dim")
def broadcast_in_dim(
    primitive: Primitive,
    q: LeafwiseArray,
    *,
    shape: Sequence[int],
    broadcast_dimensions: Sequence[int],
    **params: object,
) -> Moved:
    if not q.ndim or any(value is not None for value in params.values()):  # a scalar; a sharding asked for
        return NotImplemented
    q = q._single()
    moved = dict(enumerate(broadcast_dimensions))
    if any(q.shape[old] != shape[new] and q._alignment(old) > 1 for old, new in moved.items()):
        return NotImplemented

    def broadcast(name: str, leaf: jax.Array) -> jax.Array:
        lengths = [*shape] if name in q._code_fields else [1] * len(shape)  # only the codes need be repeated
        for old, new in moved.items():
            if q.shape[old] == shape[new] or name not in q._code_fields:
                lengths[new] = leaf.shape[old]
        return primitive.bind(leaf, shape=tuple(lengths), broadcast_dimensions=tuple(broadcast_dimensions), **params)

    return q._mapped_to(broadcast, tuple(shape), moved)


@register("squeeze")
def squeeze(primitive: Primitive, q: LeafwiseArray, *, dimensions: Sequence[int], **params: object) -> Moved:
    q = q._single()
    gone = {axis % q.ndim for axis in dimensions}
    kept = [axis for axis in range(q.ndim) if axis not in gone]
    if any(q._block(axis) > 1 for axis in gone):
        return NotImplemented
    shape, moved = tuple(q.shape[axis] for axis in kept), {old: new for new, old in enumerate(kept)}
    return q._mapped_to(lambda _, leaf: primitive.bind(leaf, dimensions=dimensions, **params), shape, moved)


@register("slice")
def slice_rule(
    primitive: Primitive,
    q: LeafwiseArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **params: object,
) -> Moved | jax.Array:
    q = q._single()
    strides = strides or (1,) * q.ndim
    bounds = list(zip(start_indices, limit_indices, strides, strict=True))
    cut = [
        axis
        for axis, (start, limit, stride) in enumerate(bounds)
        if (at := q._alignment(axis)) > 1 and (start % at or stride != 1 or (limit % at and limit != q.shape[axis]))
    ]
    if cut:
        return _slice_of_blocks(primitive, q, bounds, cut, **params)

    def part(name: str, leaf: jax.Array) -> jax.Array:
        ranges = [
            (0, 1, 1) if grain == ALL else (start // grain, -(-limit // grain), stride)
            for grain, (start, limit, stride) in zip((q._grains(a)[name] for a in range(q.ndim)), bounds, strict=True)
        ]
        starts, limits, steps = zip(*ranges, strict=True) if ranges else ((), (), ())
        return primitive.bind(leaf, start_indices=starts, limit_indices=limits, strides=steps, **params)

    shape = tuple(-(-(limit - start) // stride) for start, limit, stride in bounds)
    return _as_part(q, q._mapped_to(part, shape))


def _slice_of_blocks(
    primitive: Primitive, q: LeafwiseArray, bounds: list[tuple[int, int, int]], cut: Sequence[int], **params: Any
) -> Moved | jax.Array:
    """A slice that cuts blocks along the axes `cut`: only its elements are decoded, or the blocks that hold them."""
    bounds, whole = [*bounds], [*bounds]
    for axis in cut:
        at, (start, limit, _) = q._alignment(axis), bounds[axis]
        whole[axis] = (start // at * at, min(-(-limit // at) * at, q.shape[axis]), 1)
    asked = [range(*each) for each in bounds]
    least = min(cut, key=lambda axis: len(asked[axis]) * q._codes_together(axis) / q.shape[axis])
    by_row = len(asked[least]) * q._codes_together(least) < whole[least][1] - whole[least][0]
    if by_row:
        whole[least] = (0, q.shape[least], 1)
        found = rows_along(_sliced(primitive, q, whole, **params), jnp.arange(*bounds[least], dtype=jnp.int32), least)
        whole[least] = bounds[least] = (0, len(asked[least]), 1)
    elif all((start, limit) == (0, size) for (start, limit, _), size in zip(whole, q.shape, strict=True)):
        return NotImplemented
    else:
        found = _sliced(primitive, q, whole, **params)._decoded()
    inside = [
        (start - first, limit - first, stride) if axis in cut else (0, n, 1)
        for axis, ((start, limit, stride), (first, _, _), n) in enumerate(zip(bounds, whole, found.shape, strict=True))
    ]
    return _sliced(primitive, found, inside, **params)


def _sliced(primitive: Primitive, x: Any, bounds: Sequence[tuple[int, int, int]], **params: object) -> Any:
    if [*bounds] == [(0, size, 1) for size in x.shape]:
        return x
    starts, limits, strides = zip(*bounds, strict=True)
    run = slice_rule if isinstance(x, LeafwiseArray) else Primitive.bind
    names = {"start_indices": starts, "limit_indices": limits, "strides": strides}
    return run(primitive, x, **names, **params)


def _as_part(q: LeafwiseArray, part: LeafwiseArray) -> LeafwiseArray:
    """`part`, cut from `q`; a vector of a larger array counts as a row of it."""
    if part.size < q.size and sum(size > 1 for size in part.shape) < 2:
        part._keep(part=part.size)
    return part


@register("split")
def split(
    primitive: Primitive, q: LeafwiseArray, *, sizes: Sequence[int], axis: int, **params: object
) -> list[Moved] | NotImplementedType:
    del primitive, params
    q = q._single()
    starts = [int(start) for start in itertools.accumulate(sizes, initial=0)]
    if any(start % q._alignment(axis) for start in starts[:-1]):
        return NotImplemented
    return [q._sliced(start, int(size), axis) for start, size in zip(starts, sizes, strict=False)]


@register("unstack")
def unstack(primitive: Primitive, q: LeafwiseArray, *, axis: int, **params: object) -> list[Moved] | NotImplementedType:
    del primitive, params
    q = q._single()
    if q._block(axis) > 1:
        return NotImplemented
    return [squeeze(lax.squeeze_p, q._sliced(i, 1, axis), dimensions=(axis,)) for i in range(q.shape[axis])]


@register("rev")
def rev(primitive: Primitive, q: LeafwiseArray, *, dimensions: Sequence[int], **params: object) -> Moved:
    q = q._single()
    if any(q._block(axis) > 1 for axis in dimensions):
        return NotImplemented
    # A leaf of length 1 is its own reverse.
    return q._mapped_to(lambda _, leaf: primitive.bind(leaf, dimensions=tuple(dimensions), **params), q.shape)


@register("tile")
def tile(primitive: Primitive, q: LeafwiseArray, *, reps: Sequence[int], **params: object) -> Moved:
    q = q._single()
    if any(count != 1 and q.shape[axis] % q._alignment(axis) for axis, count in enumerate(reps)):
        return NotImplemented

    def tiled(name: str, leaf: jax.Array) -> jax.Array:
        counts = tuple(1 if q._grains(axis)[name] == ALL else count for axis, count in enumerate(reps))
        return primitive.bind(leaf, reps=counts, **params)

    shape = tuple(n * count for n, count in zip(q.shape, reps, strict=True))
    return q._mapped_to(tiled, shape)


def _alike(arrays: Sequence[LeafwiseArray], axes: Sequence[int]) -> list[Leaves] | None:
    """The leaves of arrays of one format, repeated along `axes` where they are broadcast, and alike in all other axes.

    None if the arrays can't be brought to this form.
    """
    found = [q._spread(dict.fromkeys(q._named_leaves(), axes)) for q in arrays]

    def described(q: LeafwiseArray, leaves: Leaves | None) -> list[object]:
        lengths = {n: [d for a, d in enumerate(leaf.shape) if a not in axes] for n, leaf in (leaves or {}).items()}
        dtypes = [leaf.dtype for leaf in (leaves or {}).values()]
        return [type(q), lengths, dtypes, *(getattr(q, name) for name in q._static_fields if name != "padding")]

    first, *others = map(described, arrays, found)
    complete = [leaves for leaves in found if leaves is not None]
    return complete if len(complete) == len(found) and all(each == first for each in others) else None


def _bound(bind: Callable[..., jax.Array], leaves: Sequence[Leaves]) -> Leaves:
    """`bind` of the leaves of several arrays, name by name."""
    return {name: bind(*(each[name] for each in leaves)) for name in leaves[0]}


@register("concatenate")
def concatenate(primitive: Primitive, *operands: LeafwiseArray, dimension: int, **params: object) -> Moved:
    arrays = [q._single() for q in operands]
    leaves = _alike(arrays, (dimension,))
    if leaves is None or any(q.shape[dimension] % q._block(dimension) for q in arrays[:-1]):
        return NotImplemented
    joined = _bound(functools.partial(bind_alike, primitive, dimension=dimension, **params), leaves)
    first, total = arrays[0], sum(q.shape[dimension] for q in arrays)
    return first._rebuilt(joined, replaced(first.shape, dimension, total))


@register("stack")
def stack(primitive: Primitive, *operands: LeafwiseArray, axis: int, **params: object) -> Moved:
    arrays = [q._single() for q in operands]
    leaves = _alike(arrays, ())
    if leaves is None:
        return NotImplemented
    joined = _bound(functools.partial(bind_alike, primitive, axis=axis, **params), leaves)
    return arrays[0]._rebuilt(joined, *inserted(arrays[0], axis, len(arrays)))


def inserted(q: LeafwiseArray, axis: int, size: int) -> tuple[tuple[int, ...], dict[int, int]]:
    """The shape of `q` with an axis of `size` put before `axis`, and where its own axes go."""
    return (*q.shape[:axis], size, *q.shape[axis:]), {old: old + (old >= axis) for old in range(q.ndim)}


@register("select_n")
def select_n(primitive: Primitive, which: jax.Array, *cases: LeafwiseArray, **params: object) -> Moved:
    """Select whole arrays; select by element only if every leaf has an entry for each element."""
    arrays = [q._single() for q in cases]
    leaves, first = _alike(arrays, ()), arrays[0]
    if leaves is None or (which.ndim and any(leaf.shape != first.shape for leaf in leaves[0].values())):
        return NotImplemented
    return first._rebuilt(_bound(functools.partial(bind_alike, primitive, which, **params), leaves), first.shape)


def _clipped(starts: Sequence[ArrayLike], shape: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
    """The starts as JAX clips them at the end of the array; clipped per leaf, they could differ."""
    return [jnp.clip(start, 0, d - n) for start, d, n in zip(starts, shape, sizes, strict=True)]


@register("dynamic_slice")
def dynamic_slice(
    primitive: Primitive, q: LeafwiseArray, *starts: Any, slice_sizes: Sequence[int], **params: object
) -> Moved | jax.Array:
    """Slice the leaves; along blocks, in whose middle a slice may start, decode just the blocks that hold it."""
    q = q._single()
    clipped = _clipped(starts, q.shape, slice_sizes)
    at = [q._alignment(axis) if size != q.shape[axis] else 1 for axis, size in enumerate(slice_sizes)]
    # The most blocks that `n` neighbouring elements can touch, wherever they begin.
    sizes = [n if b == 1 else (1 + -(-(n - 1) // b)) * b for n, b in zip(slice_sizes, at, strict=True)]
    cut = [axis for axis, b in enumerate(at) if b > 1]
    uneven = any(n > d or (b > 1 and d % b) for n, d, b in zip(sizes, q.shape, at, strict=True))
    if cut and (uneven or slice_sizes[cut[0]] * q._codes_together(cut[0]) < sizes[cut[0]]):
        return _dynamic_slice_by_row(primitive, q, clipped, slice_sizes, cut, **params)
    firsts = [
        start if b == 1 else jnp.minimum(start // b * b, d - n)
        for start, d, n, b in zip(clipped, q.shape, sizes, at, strict=True)
    ]

    def part(name: str, leaf: jax.Array) -> jax.Array:
        grains = [q._grains(axis)[name] if sizes[axis] != q.shape[axis] else ALL for axis in range(q.ndim)]
        first = [jnp.zeros_like(s) if g == ALL else s // g for s, g in zip(firsts, grains, strict=True)]
        lengths = [d if g == ALL else n // g for d, n, g in zip(leaf.shape, sizes, grains, strict=True)]
        return bind_alike(primitive, leaf, *first, slice_sizes=tuple(lengths), **params)

    found = q._mapped_to(part, tuple(sizes))
    if tuple(sizes) == tuple(slice_sizes) and max(at, default=1) == 1:
        return _as_part(q, found)
    within = [start - first for start, first in zip(clipped, firsts, strict=True)]
    return bind_alike(primitive, found._decoded(), *within, slice_sizes=slice_sizes, **params)


def _dynamic_slice_by_row(
    primitive: Primitive,
    q: LeafwiseArray,
    starts: Sequence[jax.Array],
    slice_sizes: Sequence[int],
    cut: Sequence[int],
    **params: Any,
) -> jax.Array:
    """A slice that cuts blocks along the axes `cut`, in which only its own elements along the first are decoded."""
    axis, size = cut[0], slice_sizes[cut[0]]
    first = [jnp.zeros_like(start) if a in cut else start for a, start in enumerate(starts)]
    sizes = tuple(q.shape[a] if a in cut else n for a, n in enumerate(slice_sizes))
    part: Any = q if sizes == q.shape else dynamic_slice(primitive, q, *first, slice_sizes=sizes, **params)
    rows = rows_along(part, starts[axis] + jnp.arange(size, dtype=starts[axis].dtype), axis)
    rest = [start if a in cut[1:] else jnp.zeros_like(start) for a, start in enumerate(starts)]
    return bind_alike(primitive, rows, *rest, slice_sizes=slice_sizes, **params)


@register("dynamic_update_slice")
def dynamic_update_slice(
    primitive: Primitive, q: LeafwiseArray, update: LeafwiseArray, *starts: Any, **params: object
) -> Moved:
    q, update = q._single(), update._single()
    partial = [axis for axis in range(q.ndim) if q.shape[axis] != update.shape[axis]]
    leaves = _alike([q, update], partial)
    if leaves is None or any(q._block(axis) > 1 for axis in partial):
        return NotImplemented
    clipped = _clipped(starts, q.shape, update.shape)
    firsts = [start if axis in partial else jnp.zeros_like(start) for axis, start in enumerate(clipped)]
    return q._rebuilt(_bound(lambda old, new: bind_alike(primitive, old, new, *firsts, **params), leaves), q.shape)


@register("pad")
def pad(
    primitive: Primitive,
    q: LeafwiseArray,
    value: jax.Array,
    *,
    padding_config: Sequence[Sequence[int]],
    **params: object,
) -> Moved:
    """Pad codes with the code of 1 and scales with the value, which is known only when the program runs."""
    q = q._single()._with_scale()
    longer = [axis for axis, amounts in enumerate(padding_config) if max(amounts) > 0]
    if not q._unit_codes or any(q._block(axis) > 1 for axis, amounts in enumerate(padding_config) if any(amounts)):
        return NotImplemented
    leaves = q._spread(dict.fromkeys(q._named_leaves(), longer))
    if leaves is None or not all(holds(leaves[name].dtype, value.dtype) for name in q._scale_fields if name in leaves):
        return NotImplemented

    def padded(name: str, leaf: jax.Array) -> jax.Array:
        kept = [leaf.shape[axis] == 1 and q.shape[axis] != 1 for axis in range(q.ndim)]
        amounts = [(0, 0, 0) if k else tuple(amount) for k, amount in zip(kept, padding_config, strict=True)]
        filling = jnp.asarray(q._unit_codes.get(name, value)).astype(leaf.dtype)
        return bind_alike(primitive, leaf, filling, padding_config=tuple(amounts), **params)

    pairs = zip(q.shape, padding_config, strict=True)
    shape = tuple(n + max(n - 1, 0) * interior + low + high for n, (low, high, interior) in pairs)
    return q._rebuilt({name: padded(name, leaf) for name, leaf in leaves.items()}, shape)


@register("convert_element_type")
def convert_element_type(
    primitive: Primitive, q: MatmulOperand, *, new_dtype: DTypeLike, weak_type: bool = False, **params: object
) -> MatmulOperand | NotImplementedType:
    del primitive
    if weak_type or asked_of(params) or not q._can_become(new_dtype):
        return NotImplemented
    return q.with_dtype(new_dtype)


def holds(wide: DTypeLike, narrow: DTypeLike) -> bool:
    """Whether each number of the floating point dtype `narrow` is one of `wide`."""
    if not jnp.issubdtype(narrow, jnp.floating):
        return False
    outer, inner = jnp.finfo(wide), jnp.finfo(narrow)
    return outer.nexp >= inner.nexp and outer.nmant >= inner.nmant
