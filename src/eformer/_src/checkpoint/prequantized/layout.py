"""Arrays that other projects quantized: several tensors beside a name, found by the ends of their names.

A `Layout` says which tensors make an array, and which class of ours holds the same values. It decides per array, from
the names, dtypes and shapes that are there. The configuration beside the weights settles only what these leave open.
Most arrays are integers in blocks: `grouped_like` makes an `ArrayGrouped` of their shape without values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from eformer._src.checkpoint.arrays import AbstractArray, Entry
from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.header import Json, Tensor, checked_shape
from eformer._src.checkpoint.prequantized.bit_fields import pack_planes, plane_shapes
from eformer._src.checkpoint.serialization import FORMAT_ERRORS, check_decoding
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields

Config = Mapping[str, Json]


@dataclass(frozen=True)
class Group:
    """The tensors of one array, by the ends of their names, and the array's own name.

    `config()` is what the files beside the weights say of quantization; empty if there are none. `metadata` is that of
    the file's own header.
    """

    name: str
    tensors: Mapping[str, Tensor]
    config: Callable[[], Config]
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __getitem__(self, end: str) -> Tensor:
        return self.tensors[end]

    def get(self, end: str) -> Tensor | None:
        return self.tensors.get(end)

    def wrong(self, what: str) -> CheckpointError:
        return next(iter(self.tensors.values())).file.wrong(what, self.name)


@dataclass(frozen=True)
class Layout:
    """How another project keeps one array.

    `needs` are the ends of the names of its tensors (".qweight", "_blocks"), first the one that others have least, and
    `may_have` are ends of others that belong to it if they are there. What comes before is the same for all; with
    `array` behind, it is the array's name. Where that is not enough, `array` is a function of what comes before.
    `kind` is the project, for `Checkpoint.kind`, and `name` is the array's format, for `ArrayInfo.format`.

    `fits(group)` looks at dtypes and shapes. `like(group)` gives the array without values; it may read small tensors,
    and raises `group.wrong(...)` about a group that fits and contradicts itself. `read(group, like)` gives the leaves
    of that array by name, or the array itself if it is dense: NumPy arrays of the shapes and dtypes that `like` has.
    A leaf that is a quantized array is made of NumPy arrays, too. `agrees(group, like)` raises where the configuration
    says something else of the array; most call `check_said`.
    """

    kind: str
    name: str
    needs: Sequence[str]
    fits: Callable[[Group], bool]
    like: Callable[[Group], AbstractArray]
    read: Callable[[Group, Any], np.ndarray | Mapping[str, Any]]  # Any: the class that `like` gives, and its leaves
    may_have: Sequence[str] = ()
    array: str | Callable[[str], str] = ".weight"
    agrees: Callable[[Group, Any], None] = lambda group, like: None


def check_said(
    group: Group, name: str, schemes: Iterable[Mapping[str, Json]], facts: Mapping[str, Callable[[Any], bool]]
) -> None:
    """Raise if no scheme of a configuration can be that of the group: each has an entry that is no fact of it.

    Which modules a scheme is for is not looked at: names may have been changed since. An entry of null says nothing.
    """
    wrong = None
    for scheme in schemes:
        others = [key for key, is_so in facts.items() if scheme.get(key) is not None and not is_so(scheme[key])]
        if not others:
            return
        wrong = wrong or (others[0], scheme[others[0]])
    if wrong is not None:
        raise group.wrong(f"it is {name}, and the configuration says `{wrong[0]}` is {str(wrong[1])[:50]!r}")


LAYOUTS: list[Layout] = []


def register_layout(layout: Layout) -> None:
    """Read arrays of `layout` from now on. Of several that fit, the one that needs most tensors is taken."""
    LAYOUTS.append(layout)
    LAYOUTS.sort(key=lambda each: -len(each.needs))


class PrequantizedEntry(Entry):
    """The tensors of a group, which are read as one array."""

    def __init__(self, layout: Layout, group: Group) -> None:
        self.name, self.tensors = group.name, tuple(group.tensors.values())
        self.kind, self.format = layout.kind, layout.name
        self._layout, self._group = layout, group
        try:
            self.like = layout.like(group)
            shape = checked_shape(list(self.like.shape))
            if isinstance(self.like, QuantizedArray):
                check_decoding(self.like)
            layout.agrees(group, self.like)
        except CheckpointError as error:
            raise error if error.file is not None else self.wrong(error.what) from None
        except FORMAT_ERRORS as error:
            raise self.wrong(f"its tensors do not fit together as {layout.name}: {str(error)[:300]}") from None
        if shape is None:
            raise self.wrong(f"its shape {str(self.like.shape)[:100]} is absurd")

    def host(self) -> np.ndarray | QuantizedArray:
        like, made = self.like, self._layout.read(self._group, self.like)
        if isinstance(made, np.ndarray):
            return made
        assert isinstance(like, QuantizedArray)
        for name, leaf in made.items():
            expected = getattr(like, name)
            assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype), name
        return self.checked(lambda: array_from_fields(type(like), {**vars(like), **made}))


def find_prequantized(
    tensors: Mapping[str, Tensor],
    config: Callable[[], Config],
    own: Container[str] = (),
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, PrequantizedEntry]:
    """The arrays of known layouts among `tensors`, by name. Those that `own` names are arrays of their own."""
    found: dict[str, PrequantizedEntry] = {}
    taken: set[str] = set()
    # A dot in front, because a name may have no prefix: "weight" ends in ".weight", too.
    dotted = [f".{name}" for name in tensors]
    for layout in LAYOUTS:
        first = layout.needs[0]
        for prefix in [name.removesuffix(first) for name in dotted if name.endswith(first)]:
            group = _group(prefix, layout, tensors, config, metadata)
            names = set() if group is None else {tensor.name for tensor in group.tensors.values()}
            if group is None or names & taken or any(each in own for each in names - {group.name}):
                continue
            if layout.fits(group):
                if group.name in found:
                    raise group.wrong(f"it is there as {found[group.name].format} and as {layout.name}")
                found[group.name] = PrequantizedEntry(layout, group)
                taken |= names
    return found


def _group(
    prefix: str,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    config: Callable[[], Config],
    metadata: Mapping[str, object],
) -> Group | None:
    """The tensors of `layout` whose names begin with `prefix`, or None if one that it needs is missing."""
    names = {end: (prefix + end)[1:] for end in (*layout.needs, *layout.may_have)}
    there = {end: tensors[name] for end, name in names.items() if name in tensors}
    if not all(end in there for end in layout.needs):
        return None
    name = layout.array(prefix) if callable(layout.array) else prefix + layout.array
    return Group(name[1:], there, config, metadata)


FLOATS = tuple(np.dtype(each) for each in (np.float32, np.float16, jax.numpy.bfloat16))
E8M0 = np.dtype(jax.numpy.float8_e8m0fnu)
AT_ONCE = 1 << 22  # elements that are unpacked at a time
Leaf = tuple[Sequence[int], DTypeLike]  # its shape and dtype


def grouped_like(
    shape: Sequence[int],
    bits: int,
    block_size: int,
    dtype: DTypeLike,
    leaves: Mapping[str, Leaf],
    codebook: str = "integer",
) -> ArrayGrouped:
    """An `ArrayGrouped` of this shape without values, packed along its last axis, with these leaves besides its codes.

    A TypeError or ValueError says why there is no such array.
    """
    planes = {name: jax.ShapeDtypeStruct(plane, np.uint8) for name, plane in plane_shapes(shape, bits).items()}
    others = {name: jax.ShapeDtypeStruct(tuple(size), np.dtype(kind)) for name, (size, kind) in leaves.items()}
    # A block can be no longer than the row; where a row is empty, blocks of one element have no entries either.
    sizes = {"block_size": max(block_size, 1), "padding": -shape[-1] % (8 // PLANES[bits][0])}
    return array_from_fields(
        ArrayGrouped, {**planes, **others, **sizes, "bits": bits, "codebook": codebook, "dtype": np.dtype(dtype)}
    )


def bytes_of(tensor: Tensor, count: int) -> np.ndarray:
    """The first `count` bytes of each row of a tensor, still in the file."""
    *rows, last = tensor.shape
    return tensor.raw().reshape(*rows, last * tensor.dtype.itemsize)[..., :count]


def planes_of(
    like: ArrayGrouped, words: np.ndarray, unpack: Callable[[np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    """The planes of `like` from rows of words, some at a time: codes take up to eight times the memory of planes."""
    rows, count = math.prod(like.shape[:-1]), like.shape[-1]
    shapes = plane_shapes((rows, count), like.bits)
    planes = {name: np.empty(shape, np.uint8) for name, shape in shapes.items()}
    words, step = words.reshape(rows, words.shape[-1]), max(AT_ONCE // max(count, 1), 1)
    for start in range(0, rows, step):
        for name, plane in pack_planes(unpack(words[start : start + step]), like.bits).items():
            planes[name][start : start + step] = plane
    return {name: plane.reshape(getattr(like, name).shape) for name, plane in planes.items()}


def block_of(group: Group, length: int, blocks: int, said: Iterable[int] = (), usual: int = 0) -> int:
    """The size of each of `blocks` blocks along an axis; `said` are the sizes that the configuration names.

    A CheckpointError if there is none: one says it, or `usual` fits where none says any, or blocks divide the axis.
    """
    named = sorted({size for size in said if size > 0})
    fitting = [size for size in named or [usual] if size > 0 and -(-length // size) == blocks]
    if len(fitting) == 1:
        return fitting[0]
    if blocks < 1 or length % blocks:
        raise group.wrong(f"{blocks} blocks do not divide {length} columns, and no configuration says their size")
    if named and not fitting:
        sizes = " or ".join(map(str, named))[:100]
        what = f"{blocks} blocks of {length} columns have {length // blocks}"
        raise group.wrong(f"{what}, and the configuration says {sizes}")
    return length // blocks


def one_per_matrix(group: Group, end: str, ndim: int) -> tuple[int, ...]:
    """The shape, of `ndim` axes, of a tensor with one entry, or one for each matrix of a stack."""
    tensor, stack = group[end], ndim - 2
    if math.prod(tensor.shape) == 1:
        return (1,) * ndim
    if len(tensor.shape) == stack:
        return (*tensor.shape, 1, 1)
    raise group.wrong(f"`{end[1:]}` must have one entry, or one for each matrix, got {list(tensor.shape)}")
