"""Formats whose leaves have the array's own axes: moving the array is moving its leaves, exactly.

Along each axis an entry of a leaf covers a fixed number of elements of the array, its grain: 1, a block, or the whole
axis (0, a leaf of length 1 that is broadcast). The rules below hold for every such format.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NotImplementedType
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from eformer._src.jaximus.array import Deferred, ImplicitArray
from eformer._src.jaximus.rules import register

from .base import Grain, Leaves, MatmulOperand
from .input import as_floats
from .sharding import Entry, sharding_of, shards

ALL: Grain = 0
AxisMap = Mapping[int, int]  # where axes go


class LeafwiseArray(MatmulOperand):
    """A quantized array whose leaves have the array's rank.

    `_code_fields`, `_scale_fields` and `_other_fields` name them. Codes have entries for every element. The others may
    have length 1 along an axis; `decode()` is linear in the scales. Leaves of another rank are gone after `_single()`.
    """

    _code_fields: ClassVar[tuple[str, ...]]
    _scale_fields: ClassVar[tuple[str, ...]] = ()
    _other_fields: ClassVar[tuple[str, ...]] = ()
    _nan_codes: ClassVar[Mapping[str, int]] = {}  # entries of the code leaves that decode to NaN, if there are any
    _unit_codes: ClassVar[Mapping[str, int]] = {}  # entries of the code leaves that decode to their scale, if any

    # While a function is traced: the array that this one is the transpose of, and the permutation.
    _moved_from: ClassVar[tuple[LeafwiseArray, tuple[int, ...]] | None] = None

    @abc.abstractmethod
    def _grain(self, name: str, axis: int) -> Grain:
        """How many elements along the non-negative `axis` an entry of the leaf covers, unless it is broadcast."""

    @abc.abstractmethod
    def _rebuilt(self, leaves: Leaves, shape: tuple[int, ...], moved: AxisMap | None = None) -> Self:
        """This array with other leaves and another shape; `moved` says where its axes went, if any did."""

    def _mapped_to(
        self, function: Callable[..., jax.Array], shape: tuple[int, ...], moved: AxisMap | None = None
    ) -> Self:
        """`_rebuilt` from `function(name, leaf)` of each leaf."""
        return self._rebuilt({name: function(name, leaf) for name, leaf in self._named_leaves().items()}, shape, moved)

    def _check_shapes(self) -> None:
        """Each leaf has the array's axes, and along each an entry per grain; or one for all, if it is a scale."""
        shape, first = self.shape, self._code_fields[0]
        for name, leaf in self._named_leaves().items():
            is_code = name in self._code_fields
            if len(leaf.shape) != len(shape):
                raise ValueError(f"{name} {leaf.shape} must have the {len(shape)} axes of {first} {shape}")
            for axis, (found, size) in enumerate(zip(leaf.shape, shape, strict=True)):
                entries = -(-size // self._grain(name, axis))
                if found != entries and (found != 1 or is_code):
                    raise ValueError(
                        f"{name} {leaf.shape} does not broadcast over a {type(self).__name__} of shape {shape}: along "
                        f"axis {axis} it must have {entries} entries{'' if is_code else ' or 1'}"
                    )

    def _code_bits(self) -> int:
        """The bits of a code."""
        return 8

    def _coded(self, codes: jax.Array) -> Self:
        """This array with other `codes`, uint8 of its shape; its scales stay."""
        (name,) = self._code_fields
        return self._replaced(**{name: lax.bitcast_convert_type(codes, getattr(self, name).dtype)})

    def _factors(self) -> tuple[jax.Array, jax.Array | None]:
        """`values` and `scale`, of this array's rank, with `values * scale == decode()`; a scale of None is 1."""
        return self.decode(), None

    def _deferred(self) -> ImplicitArray | Deferred:
        if self._moved_from is None:
            return self
        origin, permutation = self._moved_from
        return Deferred(origin, Transposition(permutation))

    @abc.abstractmethod
    def _encoded_again(self, array: jax.Array) -> LeafwiseArray:
        """`array`, floating point of any shape, in this format along its default axes."""

    def _requantized(self, array: jax.Array) -> LeafwiseArray:
        """`array`, of any shape, quantized as this array is."""
        switches = {"use_kernel": self.use_kernel, "activation_dtype": self.activation_dtype}
        return self._encoded_again(as_floats(array))._replaced(dtype=self.dtype, **switches)

    def _single(self) -> Self:
        """An equal array without leaves that have another rank."""
        return self

    def _divisible(self) -> Self:
        return self._single()

    def _finer(self) -> Self:
        return self._single()

    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        del grains  # they are what they were, unless blocks can be cut
        return self._mapped(lambda name, _: leaves[name])

    def _leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        grains = [self._grains(axis) for axis in range(self.ndim)]
        return {name: tuple((axis, each[name]) for axis, each in enumerate(grains)) for name in self._named_leaves()}

    def _named_leaves(self) -> Leaves:
        found = {name: getattr(self, name) for name in (*self._code_fields, *self._scale_fields, *self._other_fields)}
        return {name: leaf for name, leaf in found.items() if leaf is not None}

    def _grains(self, axis: int) -> dict[str, Grain]:
        """The grain of each leaf along `axis`."""
        size, leaves = self.shape[axis], self._named_leaves()
        grains = {name: self._grain(name, axis) for name in leaves}
        broadcast = [n for n, leaf in leaves.items() if leaf.shape[axis] == 1 and not 0 < size <= grains[n]]
        return grains | dict.fromkeys(broadcast, ALL)

    def _spread(self, axes: Mapping[str, Iterable[int]]) -> Leaves | None:
        """The leaves, each repeated along its `axes` where it was broadcast.

        None if a leaf would get an entry for each element of the array: it would be as large as the dense array.
        """
        leaves = self._named_leaves()
        for name, wanted in axes.items():
            grains = {axis: self._grains(axis)[name] for axis in range(self.ndim)}
            missing = {axis: self._grain(name, axis) for axis in wanted if grains[axis] == ALL}
            if missing and {*(grains | missing).values()} == {1}:
                return None
            lengths = [-(-self.shape[a] // missing[a]) if a in missing else n for a, n in enumerate(leaves[name].shape)]
            leaves[name] = jnp.broadcast_to(leaves[name], lengths) if missing else leaves[name]
        return leaves

    def _with_scale(self) -> Self:
        """An equal array that has a leaf for its scale."""
        return self

    def _in_blocks(self, axis: int) -> LeafwiseArray:
        """An equal array whose scale, if it covers `axis` whole, is that of a block of this length; else this one."""
        del axis
        return self

    def _block(self, axis: int) -> int:
        """How many elements along `axis` share whole entries of every leaf, if none is broadcast; 1 without blocks."""
        return math.lcm(*(self._grain(name, axis) for name in self._named_leaves()))

    def _codes_together(self, axis: int) -> int:
        """How many elements along `axis` share whole entries of the leaves of codes."""
        leaves = self._named_leaves()
        return math.lcm(*(self._grain(name, axis) for name in self._code_fields if name in leaves))

    def is_stacked(self) -> bool:
        lengths = {leaf.shape[:1] for leaf in jtu.tree_leaves(self)}
        return self.ndim > 0 and self._alignment(0) == 1 and lengths == {self.shape[:1]}

    def _vmap_error(self, leaf: jax.Array, axis: int) -> str | None:
        packed = getattr(self, "axis", None)  # counted from the end
        codes = getattr(self, self._code_fields[0])
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
            leaves, grains = self._named_leaves(), self._grains(axis)
            cut = any(g > 1 and part % g for name, g in grains.items() if leaves[name].shape[axis] > 1)
            if entry is not None and (mesh.empty or cut):  # a single entry is there on every device
                return None
        return self._mapped(lambda _, leaf: PartitionSpec(*self._leaf_entries(leaf, entries)))

    def _leaf_entries(self, leaf: jax.Array, entries: Sequence[Entry]) -> list[Entry]:
        return [None if leaf.shape[a] == 1 and self.shape[a] != 1 else e for a, e in enumerate(entries)]

    def _mapped(self, function: Callable[[str, Any], Any]) -> Self:
        """This tree with `function(name, leaf)` in place of each leaf."""
        leaves = ((name, getattr(self, name)) for name in self._data_fields)
        results = [function(name, leaf) for name, leaf in leaves if leaf is not None]
        return jtu.tree_unflatten(jtu.tree_structure(self), results)

    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        def place(name: str, leaf: jax.Array) -> NamedSharding:
            if name not in self._named_leaves():
                return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
            entries = self._leaf_entries(leaf, [*sharding.spec])
            fits = [e if leaf.shape[a] % shards(sharding.mesh, e) == 0 else None for a, e in enumerate(entries)]
            return NamedSharding(sharding.mesh, PartitionSpec(*fits), memory_kind=sharding.memory_kind)

        return self._mapped(place)

    @property
    def sharding(self) -> NamedSharding | None:
        return sharding_of(getattr(self, self._code_fields[0]))  # the codes have an entry for every element

    def _sliced(self, start: int, size: int, axis: int) -> Self:
        """The part of `size` elements from `start` along `axis`, where every leaf can be cut."""
        single = self._single()
        grains = single._grains(axis)

        def part(name: str, leaf: jax.Array) -> jax.Array:
            grain = grains[name]
            if grain == ALL:
                return leaf
            return lax.slice_in_dim(leaf, start // grain, -(-(start + size) // grain), axis=axis)

        return single._mapped_to(part, replaced(self.shape, axis, size))

    def _tiles(self, axis: int, size: int) -> Self:
        """All whole parts of `size` elements along `axis`, with their leaves stacked along a new first axis.

        To scan over: the slices of this tree, not the tree, are arrays. `size` is where every leaf can be cut.
        """
        count = self.shape[axis] // size
        whole = self._sliced(0, count * size, axis) if self.shape[axis] % size else self._single()
        first = self._sliced(0, size, axis)  # knows the static fields of a part
        grains = whole._grains(axis)

        def stack(name: str, leaf: jax.Array) -> jax.Array:
            if grains[name] == ALL:
                return jnp.broadcast_to(leaf, (count, *leaf.shape))
            split = leaf.reshape(*leaf.shape[:axis], count, leaf.shape[axis] // count, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(split, axis, 0)

        stacked = whole._mapped(stack)
        return jtu.tree_unflatten(jtu.tree_structure(first), jtu.tree_leaves(stacked))

    def _alignment(self, axis: int) -> int:
        """Positions along `axis` at which every leaf can be cut."""
        return math.lcm(*(max(grain, 1) for grain in self._grains(axis % self.ndim).values()))


Moved = LeafwiseArray | NotImplementedType  # what a rule gives


def replaced(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


@register("transpose")
def transpose(primitive: Primitive, q: LeafwiseArray, *, permutation: Sequence[int], **params: object) -> LeafwiseArray:
    origin, q = q, q._single()
    shape, moved = tuple(q.shape[old] for old in permutation), {old: new for new, old in enumerate(permutation)}
    result = q._mapped_to(lambda _, leaf: primitive.bind(leaf, permutation=permutation, **params), shape, moved)
    if isinstance(getattr(result, q._code_fields[0]), Tracer):
        object.__setattr__(result, "_moved_from", (origin, tuple(permutation)))
    return result


@dataclasses.dataclass(frozen=True)
class Transposition:
    permutation: tuple[int, ...]

    def __call__(self, q: Any) -> LeafwiseArray:
        return transpose(lax.transpose_p, q, permutation=self.permutation)


@register("reshape")
def reshape(primitive: Primitive, q: LeafwiseArray, *, new_sizes: Sequence[int], **params: object) -> Moved:
    del primitive
    if any(value is not None for value in params.values()):  # a permutation, or a sharding asked for
        return NotImplemented
    return reshaped(q, new_sizes)


def reshaped(q: LeafwiseArray, new_sizes: Sequence[int]) -> Moved:
    """The array with its leaves reshaped; NotImplemented if that would move elements out of their blocks.

    Axes with blocks may be split and merged where blocks stay whole, that is, along the last of the merged axes.
    """
    q = q._single()
    if 0 in q.shape or math.prod(q.shape) != math.prod(new_sizes):
        return NotImplemented
    moved: dict[int, int] = {}
    sizes: dict[str, list[int]] = {name: [] for name in q._named_leaves()}
    merged: dict[str, list[int]] = {name: [] for name in q._named_leaves()}  # axes along which entries are needed
    for olds, news in _groups(q.shape, new_sizes):
        kept = len(olds) == len(news) == 1
        blocked = [] if kept else [old for old in olds if q._block(old) > 1]
        if blocked and not _keeps_blocks(q, olds, [new_sizes[new] for new in news]):
            return NotImplemented
        moved.update(zip(olds, news, strict=False))
        moved.update({old: new for old in blocked for new in news[-1:]})
        for name, leaf in q._named_leaves().items():
            lengths = [new_sizes[new] for new in news]
            if kept:
                lengths = [leaf.shape[olds[0]]]
            elif {q._grains(old)[name] for old in olds} == {ALL}:
                lengths = [1] * len(news)
            else:
                merged[name] += olds
                if blocked:
                    lengths[-1] //= q._grain(name, blocked[0])
            sizes[name] += lengths
    leaves = q._spread(merged)
    if leaves is None:  # each element would need its own scale, unless elements that share one are blocks
        blocks = q
        for olds, _ in _groups(q.shape, new_sizes):
            blocks = blocks._in_blocks(olds[-1]) if len(olds) > 1 else blocks
        return NotImplemented if blocks is q else reshaped(blocks, new_sizes)
    return q._rebuilt({n: lax.reshape(leaf, sizes[n]) for n, leaf in leaves.items()}, tuple(new_sizes), moved)


def _keeps_blocks(q: LeafwiseArray, olds: Sequence[int], new_sizes: Sequence[int]) -> bool:
    """Whether only the last of the axes has blocks, and the last of the new ones takes them over whole."""
    *others, last = olds
    fits = all(size % q._block(last) == 0 for size in (q.shape[last], *new_sizes[-1:]))
    return len(new_sizes) > 0 and fits and all(q._block(axis) == 1 for axis in others)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest pairs of runs of axes, (old, new), that hold the same elements; sizes are positive."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first, a, b = (i, j), 1, 1
        if i < len(old) and j < len(new) and old[i] == new[j]:
            i, j = i + 1, j + 1
        elif j < len(new) and new[j] == 1:
            j += 1
        while (i, j) == first or a != b:
            if a <= b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        groups.append((list(range(first[0], i)), list(range(first[1], j))))
    return groups
