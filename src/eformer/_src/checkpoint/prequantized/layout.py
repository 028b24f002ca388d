"""Arrays that other projects quantized: several tensors beside a name, found by the ends of their names.

A `Layout` says which tensors make an array, and which class of ours holds the same values. It decides per array, from
the names, dtypes and shapes that are there. The configuration beside the weights settles only what these leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from eformer._src.checkpoint.arrays import Entry, Like
from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.header import Json, Tensor, checked_shape
from eformer._src.checkpoint.serialization import FORMAT_ERRORS, check_decoding
from eformer._src.quantization.base import QuantizedArray
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
    A leaf that is a quantized array is made of NumPy arrays, too.
    """

    kind: str
    name: str
    needs: Sequence[str]
    fits: Callable[[Group], bool]
    like: Callable[[Group], Like]
    read: Callable[[Group, Any], np.ndarray | Mapping[str, Any]]  # Any: the class that `like` gives, and its leaves
    may_have: Sequence[str] = ()
    array: str | Callable[[str], str] = ".weight"


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
