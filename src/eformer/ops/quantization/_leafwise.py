"""Formats whose leaves have the array's own axes: moving the array is moving its leaves, exactly.

Along each axis an entry of a leaf stands for so many elements of the array, its grain: 1, a block of them, or
all (0, a leaf of length 1 that is broadcast). The rules below hold for every such format.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from eformer.jaximus import Deferred, ImplicitArray, register

from ._base import sharding_of, shards
from ._divisible import DivisibleArray, Grain, Leaves

ALL: Grain = 0


class LeafwiseArray(DivisibleArray):
    """A quantized array each leaf of which has the array's rank."""

    array_fields: ClassVar[tuple[str, ...]]  # the leaves that have the array's axes, the codes first
    nan_code: ClassVar[int | None] = None  # an entry of the codes that decodes to NaN alone, if there is one

    @abc.abstractmethod
    def _grain(self, name: str, axis: int) -> Grain:
        """How many elements along the non-negative `axis` an entry of the leaf stands for, were it not broadcast."""

    @abc.abstractmethod
    def _rebuilt(self, leaves: Leaves, moved: Mapping[int, int], shape: tuple[int, ...]) -> Self:
        """The same format of other leaves: `moved` says where each axis went, `shape` is the new array's."""

    def factors(self) -> tuple[jax.Array, jax.Array | None]:
        """`values` and `scale`, of this array's rank, with `values * scale == decode()`; a None is 1."""
        return self.decode(), None

    def deferred(self) -> ImplicitArray | Deferred:
        if self.moved_from is None:
            return self
        origin, permutation = self.moved_from
        return Deferred(origin, Transposition(permutation))

    @property
    def moved_from(self) -> tuple[Self, tuple[int, ...]] | None:
        """The array and the permutation that this one is the transpose of, while a function is traced."""
        return self.__dict__.get("_moved_from")

    @abc.abstractmethod
    def requantized(self, array: jax.Array) -> LeafwiseArray:
        """`array`, of any shape, in this format with its default axes."""

    def _single(self) -> Self:
        """An equal array that has only leaves of the array's rank."""
        return self

    def divisible(self) -> Self:
        return self._single()

    def of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        del grains  # they are what they were, unless blocks can be cut
        return self._mapped(lambda name, _: leaves[name])

    def leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        grains = [self.grains(axis) for axis in range(self.ndim)]
        return {name: tuple((axis, each[name]) for axis, each in enumerate(grains)) for name in self.named_leaves()}

    def named_leaves(self) -> Leaves:
        found = {name: getattr(self, name) for name in self.array_fields}
        return {name: leaf for name, leaf in found.items() if leaf is not None}

    def grains(self, axis: int) -> dict[str, Grain]:
        """The grain of each leaf along `axis`."""
        size = self.shape[axis]

        def grain(name: str, leaf: Any) -> Grain:
            given = self._grain(name, axis)
            return ALL if leaf.shape[axis] == 1 and -(-size // max(given, 1)) != 1 else given

        return {name: grain(name, leaf) for name, leaf in self.named_leaves().items()}

    def _is_blocked(self, axis: int) -> bool:
        return any(grain > 1 for grain in self.grains(axis).values())

    def is_stacked(self) -> bool:
        lengths = {leaf.shape[:1] for leaf in jtu.tree_leaves(self)}
        return self.ndim > 0 and not self._is_blocked(0) and lengths == {self.shape[:1]}

    def vmap_error(self, leaf: Any, axis: int) -> str | None:
        packed = getattr(self, "axis", None)  # counted from the end
        codes = getattr(self, self.array_fields[0])
        if not isinstance(packed, int) or axis <= leaf.ndim + packed or leaf.ndim < getattr(codes, "ndim", 0):
            return None  # a leaf of fewer axes has none that is packed
        return (
            f"`jax.vmap` took axis {axis} of the leaves of this {type(self).__name__}, but its codes are packed along "
            f"axis {packed}: only axes in front of that one can be mapped over. `implicit(jax.vmap(f, ...))` maps over "
            f"any axis of the array"
        )

    def leaf_specs(self, spec: PartitionSpec) -> Any:
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        if self._single() is not self:
            return super().leaf_specs(spec)
        mesh = jax.sharding.get_abstract_mesh()
        for axis, entry in enumerate(entries):
            # Inside `shard_map` a device sees its own part only, so the part must hold whole entries of every leaf.
            part = self.shape[axis] // (shards(mesh, entry) if not mesh.empty else 1)
            if entry is not None and (mesh.empty or any(g > 1 and part % g for g in self.grains(axis).values())):
                return None
        return self._mapped(lambda _, leaf: PartitionSpec(*self._leaf_entries(leaf, entries)))

    def _leaf_entries(self, leaf: Any, entries: Sequence[Any]) -> list[Any]:
        return [None if leaf.shape[a] == 1 and self.shape[a] != 1 else e for a, e in enumerate(entries)]

    def _mapped(self, function: Any) -> Self:
        """This tree with `function(name, leaf)` in place of each leaf."""
        leaves = ((name, getattr(self, name)) for name in self._data_fields)
        results = [function(name, leaf) for name, leaf in leaves if leaf is not None]
        return jtu.tree_unflatten(jtu.tree_structure(self), results)

    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        def place(name: str, leaf: Any) -> NamedSharding:
            if name not in self.array_fields:
                return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
            entries = self._leaf_entries(leaf, [*sharding.spec])
            fits = [e if leaf.shape[a] % shards(sharding.mesh, e) == 0 else None for a, e in enumerate(entries)]
            return NamedSharding(sharding.mesh, PartitionSpec(*fits), memory_kind=sharding.memory_kind)

        return self._mapped(place)

    @property
    def sharding(self) -> NamedSharding | None:
        return sharding_of(getattr(self, self.array_fields[0]))  # the codes have an entry for every element

    def sliced(self, start: int, size: int, axis: int) -> Self:
        """The part of `size` elements from `start` along `axis`, where every leaf can be cut."""
        single = self._single()
        grains = single.grains(axis)

        def part(name: str, leaf: jax.Array) -> jax.Array:
            grain = grains[name]
            if grain == ALL:
                return leaf
            return lax.slice_in_dim(leaf, start // grain, -(-(start + size) // grain), axis=axis)

        leaves = {name: part(name, leaf) for name, leaf in single.named_leaves().items()}
        return single._rebuilt(leaves, _unmoved(self.ndim), _replaced(self.shape, axis, size))

    def tiles(self, axis: int, size: int) -> Self:
        """All whole parts of `size` elements along `axis`, each leaf of each part stacked along a new first axis.

        To scan over: the slices of this tree, not the tree, are arrays. `size` is where every leaf can be cut.
        """
        count = self.shape[axis] // size
        whole = self.sliced(0, count * size, axis) if self.shape[axis] % size else self._single()
        first = self.sliced(0, size, axis)  # knows the static fields of a part
        grains = whole.grains(axis)

        def stack(name: str, leaf: jax.Array) -> jax.Array:
            if grains[name] == ALL:
                return jnp.broadcast_to(leaf, (count, *leaf.shape))
            split = leaf.reshape(*leaf.shape[:axis], count, leaf.shape[axis] // count, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(split, axis, 0)

        stacked = whole._mapped(stack)
        return jtu.tree_unflatten(jtu.tree_structure(first), jtu.tree_leaves(stacked))

    def alignment(self, axis: int) -> int:
        """Positions along `axis` at which every leaf can be cut."""
        return math.lcm(*(max(grain, 1) for grain in self._single().grains(axis % self.ndim).values()))


def axis_from_start(axis: int, ndim: int) -> int:
    """The non-negative form of the `axis` that codes are packed along."""
    if axis < -ndim:
        raise ValueError(
            f"codes are packed along axis {axis}, but the leaves have {ndim} axes left: `vmap` and slices of the "
            f"leaves may take axes before it only; inside `implicit` any axis works"
        )
    return axis % ndim


def _unmoved(ndim: int) -> dict[int, int]:
    return {axis: axis for axis in range(ndim)}


def _replaced(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


@register("transpose")
def transpose(primitive: Any, q: LeafwiseArray, *, permutation: Sequence[int], **params: Any) -> Any:
    origin, q = q, q._single()
    leaves = {n: primitive.bind(leaf, permutation=permutation, **params) for n, leaf in q.named_leaves().items()}
    moved = {old: new for new, old in enumerate(permutation)}
    result = q._rebuilt(leaves, moved, tuple(q.shape[old] for old in permutation))
    if isinstance(leaves[q.array_fields[0]], Tracer):
        object.__setattr__(result, "_moved_from", (origin, tuple(permutation)))
    return result


@dataclasses.dataclass(frozen=True)
class Transposition:
    permutation: tuple[int, ...]

    def __call__(self, q: Any) -> Any:
        return transpose(lax.transpose_p, q, permutation=self.permutation)


@register("broadcast_in_dim")
def broadcast_in_dim(
    primitive: Any, q: LeafwiseArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **params: Any
) -> Any:
    if not q.ndim or any(value is not None for value in params.values()):  # a scalar; a sharding asked for
        return NotImplemented
    q = q._single()
    moved = dict(enumerate(broadcast_dimensions))
    if any(q.shape[old] != shape[new] and q._is_blocked(old) for old, new in moved.items()):
        return NotImplemented
    came_from = {new: old for old, new in moved.items()}
    codes = q.array_fields[0]

    def target(name: str, leaf: jax.Array) -> tuple[int, ...]:
        def length(new: int) -> int:
            old = came_from.get(new)
            if old is None:  # a new axis: only the codes need be repeated
                return shape[new] if name == codes else 1
            return leaf.shape[old] if q.shape[old] == shape[new] or name != codes else shape[new]

        return tuple(map(length, range(len(shape))))

    leaves = {
        name: primitive.bind(leaf, shape=target(name, leaf), broadcast_dimensions=tuple(broadcast_dimensions), **params)
        for name, leaf in q.named_leaves().items()
    }
    return q._rebuilt(leaves, moved, tuple(shape))


@register("reshape")
def reshape(primitive: Any, q: LeafwiseArray, *, new_sizes: Sequence[int], **params: Any) -> Any:
    del primitive
    if any(value is not None for value in params.values()):  # a permutation, or a sharding asked for
        return NotImplemented
    return reshaped(q, new_sizes)


def reshaped(q: LeafwiseArray, new_sizes: Sequence[int]) -> Any:
    """The array with its leaves reshaped; NotImplemented if that would move elements out of their blocks."""
    q = q._single()
    if 0 in q.shape or math.prod(q.shape) != math.prod(new_sizes):
        return NotImplemented
    sizes: dict[str, list[int]] = {name: [] for name in q.named_leaves()}
    moved: dict[int, int] = {}
    for olds, news in _groups(q.shape, new_sizes):
        for name, leaf in q.named_leaves().items():
            grains = {q.grains(old)[name] for old in olds}
            if len(olds) == len(news) == 1:
                sizes[name] += [leaf.shape[olds[0]]]
            elif grains <= {1}:
                sizes[name] += [new_sizes[new] for new in news]
            elif grains == {ALL}:
                sizes[name] += [1] * len(news)
            else:
                return NotImplemented
        moved.update(zip(olds, news, strict=False))
    leaves = {name: lax.reshape(leaf, sizes[name]) for name, leaf in q.named_leaves().items()}
    return q._rebuilt(leaves, moved, tuple(new_sizes))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest pairs of runs of axes, (old, new), that hold the same elements; sizes are positive."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        olds, news, a, b = [], [], 1, 1
        if i < len(old) and j < len(new) and old[i] == new[j]:
            olds, news, i, j = [i], [j], i + 1, j + 1
        elif i < len(old) and old[i] == 1:
            olds, i = [i], i + 1
        elif j < len(new) and new[j] == 1:
            news, j = [j], j + 1
        else:
            while not olds or a != b:
                if a <= b:
                    olds, a, i = [*olds, i], a * old[i], i + 1
                else:
                    news, b, j = [*news, j], b * new[j], j + 1
            groups.append((olds, news))
            continue
        groups.append((olds, news))
    return groups


@register("squeeze")
def squeeze(primitive: Any, q: LeafwiseArray, *, dimensions: Sequence[int], **params: Any) -> Any:
    q = q._single()
    gone = {axis % q.ndim for axis in dimensions}
    kept = [axis for axis in range(q.ndim) if axis not in gone]
    if any(q._grain(name, axis) > 1 for axis in gone for name in q.named_leaves()):
        return NotImplemented
    leaves = {n: primitive.bind(leaf, dimensions=dimensions, **params) for n, leaf in q.named_leaves().items()}
    return q._rebuilt(leaves, {old: new for new, old in enumerate(kept)}, tuple(q.shape[axis] for axis in kept))


@register("slice")
def slice_rule(
    primitive: Any,
    q: LeafwiseArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
    **params: Any,
) -> Any:
    q = q._single()
    strides = strides or (1,) * q.ndim
    bounds = list(zip(start_indices, limit_indices, strides, strict=True))
    for axis, (start, limit, stride) in enumerate(bounds):
        at = q.alignment(axis)
        if at > 1 and (start % at or stride != 1 or (limit % at and limit != q.shape[axis])):
            return NotImplemented

    def part(name: str, leaf: jax.Array) -> jax.Array:
        ranges = [
            (0, 1, 1) if grain == ALL else (start // grain, -(-limit // grain), stride)
            for grain, (start, limit, stride) in zip((q.grains(a)[name] for a in range(q.ndim)), bounds, strict=True)
        ]
        starts, limits, steps = zip(*ranges, strict=True) if ranges else ((), (), ())
        return primitive.bind(leaf, start_indices=starts, limit_indices=limits, strides=steps, **params)

    shape = tuple(-(-(limit - start) // stride) for start, limit, stride in bounds)
    return q._rebuilt({n: part(n, leaf) for n, leaf in q.named_leaves().items()}, _unmoved(q.ndim), shape)


@register("dynamic_slice")
def dynamic_slice(primitive: Any, q: LeafwiseArray, *starts: Any, slice_sizes: Sequence[int], **params: Any) -> Any:
    q = q._single()
    if any(q.alignment(axis) > 1 and size != q.shape[axis] for axis, size in enumerate(slice_sizes)):
        return NotImplemented
    # JAX moves a start that would run over the end; a leaf that is broadcast must not move with it.
    bounds = [d - n for d, n in zip(q.shape, slice_sizes, strict=True)]
    starts = tuple(jnp.clip(start, 0, bound) for start, bound in zip(starts, bounds, strict=True))

    def part(name: str, leaf: jax.Array) -> jax.Array:
        whole = [q.grains(axis)[name] != 1 for axis in range(q.ndim)]
        first = [jnp.zeros_like(s) if w else s for s, w in zip(starts, whole, strict=True)]
        sizes = [d if w else n for d, n, w in zip(leaf.shape, slice_sizes, whole, strict=True)]
        return primitive.bind(leaf, *first, slice_sizes=tuple(sizes), **params)

    return q._rebuilt({n: part(n, leaf) for n, leaf in q.named_leaves().items()}, _unmoved(q.ndim), tuple(slice_sizes))


@register("gather")
def gather(
    primitive: Any,
    q: LeafwiseArray,
    indices: jax.Array,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    """Rows are decoded, those asked for and no others: an embedding lookup. Whole matrices stay quantized: experts."""
    q = q._single()
    numbers = dimension_numbers
    indexed = numbers.start_index_map
    batched = numbers.operand_batching_dims
    for axis, size in enumerate(slice_sizes):
        in_blocks = any(q._grain(name, axis) > 1 for name in q.named_leaves())
        if in_blocks and (axis in indexed or axis in batched or size != q.shape[axis]):
            return NotImplemented
        if in_blocks and axis in numbers.collapsed_slice_dims:
            return NotImplemented
        if axis in batched and ALL in q.grains(axis).values():
            return NotImplemented
        if axis not in indexed and axis not in batched and size != q.shape[axis]:
            return NotImplemented

    def beside_indices(values: Sequence[int]) -> jax.Array:
        return jnp.array(values, indices.dtype).reshape(*[1] * (indices.ndim - 1), len(values))

    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    inner_mode = lax.GatherScatterMode.CLIP if fills else mode

    def part(name: str, leaf: jax.Array) -> jax.Array:
        grains = [q.grains(axis)[name] for axis in range(q.ndim)]
        sizes = [n if grain == 1 else d for grain, n, d in zip(grains, slice_sizes, leaf.shape, strict=True)]
        # A leaf that is broadcast along an indexed axis has its only entry at 0.
        at = indices * beside_indices([grains[axis] != ALL for axis in indexed])
        return primitive.bind(
            leaf, at, dimension_numbers=numbers, slice_sizes=tuple(sizes), mode=inner_mode, fill_value=None, **params
        )

    leaves = {name: part(name, leaf) for name, leaf in q.named_leaves().items()}
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
            return q._rebuilt(filled, moved, shape)
    dense = q._rebuilt(leaves, moved, shape).decoded()
    if inside is None:
        return dense
    inside = lax.broadcast_in_dim(inside, shape, batch_axes)
    fill = _fill_value(dense.dtype) if fill_value is None else fill_value
    return jnp.where(inside, dense, jnp.asarray(fill, dense.dtype))


def _nan_outside(q: LeafwiseArray, leaves: Leaves, inside: jax.Array, axes: Sequence[int]) -> Leaves | None:
    """The leaves of an array that is NaN where `inside`, along `axes`, is false; None if none of them can say it."""
    if not jnp.issubdtype(q.dtype, jnp.floating):
        return None
    scales = [name for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    names, fill = (scales, jnp.nan) if scales else (q.array_fields[:1], q.nan_code)
    if fill is None:
        return None

    def mask(leaf: jax.Array) -> jax.Array:
        return jnp.where(lax.broadcast_in_dim(inside, leaf.shape, axes), leaf, jnp.asarray(fill, leaf.dtype))

    return {name: mask(leaf) if name in names else leaf for name, leaf in leaves.items()}


def _fill_value(dtype: Any) -> Any:
    """What JAX fills out-of-bounds elements with."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max


@register("concatenate")
def concatenate(primitive: Any, *operands: LeafwiseArray, dimension: int, **params: Any) -> Any:
    arrays = [q._single() for q in operands]
    first = arrays[0]
    names = first.named_leaves().keys()
    alike = all(
        type(q) is type(first) and q.named_leaves().keys() == names and _unlike(q) == _unlike(first) for q in arrays
    )
    if not alike or any(ALL in q.grains(dimension).values() for q in arrays):
        return NotImplemented
    if any(q.shape[dimension] % q.alignment(dimension) for q in arrays[:-1]):
        return NotImplemented
    columns = {name: [q.named_leaves()[name] for q in arrays] for name in first.named_leaves()}
    for leaves in columns.values():
        if len({_replaced(leaf.shape, dimension, 0) for leaf in leaves}) > 1:
            return NotImplemented
    joined = {name: primitive.bind(*leaves, dimension=dimension, **params) for name, leaves in columns.items()}
    total = sum(q.shape[dimension] for q in arrays)
    return first._rebuilt(joined, _unmoved(first.ndim), _replaced(first.shape, dimension, total))


def _unlike(q: LeafwiseArray) -> tuple[Any, ...]:
    """The static fields that must agree for arrays to be joined: all but how much padding there is."""
    return tuple(getattr(q, name) for name in q._static_fields if name != "padding")


@register("convert_element_type")
def convert_element_type(
    primitive: Any, q: LeafwiseArray, *, new_dtype: Any, weak_type: bool = False, **params: Any
) -> Any:
    """Only the dtype on record changes: the array is rounded to it when it is decoded."""
    del primitive, params
    if weak_type or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return q.with_dtype(new_dtype)


@register("copy")
def copy(primitive: Any, q: LeafwiseArray, **params: Any) -> Any:
    return jtu.tree_map(lambda leaf: primitive.bind(leaf, **params), q)


@register("sharding_constraint")
def sharding_constraint(primitive: Any, q: LeafwiseArray, *, sharding: Any, **params: Any) -> Any:
    del primitive, params
    return q.with_sharding(sharding) if isinstance(sharding, NamedSharding) else NotImplemented
