"""Arrays of GGUF files: plain, in blocks that stay quantized, or in blocks that are decoded.

Codecs say which types hold which quantized classes. A class without a codec is not written to GGUF.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import jax
import numpy as np

from eformer._src.checkpoint.arrays import AbstractArray, ArrayToWrite, Entry, Q
from eformer._src.checkpoint.file import CheckpointError, MappedFile
from eformer._src.checkpoint.gguf.encode import ENCODERS
from eformer._src.checkpoint.gguf.types import GRIDS, GROUPED, IDS, PLAIN, TYPES
from eformer._src.checkpoint.header import Tensor
from eformer._src.checkpoint.placement import Index, LazyLeaf, aligned_empties, aligned_empty
from eformer._src.checkpoint.serialization import FORMAT_ERRORS
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.nf4 import ArrayNF4
from eformer._src.quantization.formats.ternary import Array1B
from eformer._src.quantization.stored import array_from_fields
from eformer._src.user_warnings import warn


@dataclass(frozen=True)
class GgufCodec(Generic[Q]):
    """How arrays of one quantized class are stored as blocks of one GGUF type, such as "Q4_0".

    Blocks are `uint8[count, bytes]`, in the order of the array's elements. `encode(q)` gives the blocks of an array;
    without it, the array is dequantized and rounded to the nearest values of the type. `decode(blocks, shape)` gives an
    array of NumPy leaves, and `like(shape)` the same without values; without them, the blocks are read as float32.
    `leaf(name, blocks)` may take the place of `decode`: it gives the entries of one leaf for any of the blocks, (count,
    entries), as many for each along the last axis. Then the array is read in pieces, and each device reads its own.
    `separate(blocks, out)` may do the same faster: it writes the entries of all leaves in the dict `out` at once.
    `fits(q)` says of an array without values whether the type holds its layout.
    """

    block_type: str
    array_type: type[Q]
    encode: Callable[[Q], np.ndarray] | None = None
    decode: Callable[[np.ndarray, tuple[int, ...]], Q] | None = None
    like: Callable[[tuple[int, ...]], Q] | None = None
    fits: Callable[[Q], bool] = lambda q: True
    leaf: Callable[[str, np.ndarray], np.ndarray] | None = None
    separate: Callable[[np.ndarray, Mapping[str, np.ndarray]], None] | None = None

    def fill(self, blocks: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Write the entries of the leaves in `out`, (count, entries) each, for the blocks (count, bytes)."""
        if self.separate is not None:
            return self.separate(blocks, out)
        assert self.leaf is not None
        for name, entries in out.items():
            entries[...] = self.leaf(name, blocks).reshape(entries.shape)
        return None

    @property
    def reads(self) -> bool:
        """Whether it keeps blocks quantized."""
        return self.decode is not None or self.leaf is not None


MANY = 4  # types that a message does not list
CODECS: dict[tuple[str, type[QuantizedArray]], GgufCodec[Any]] = {}


def register_gguf_codec(codec: GgufCodec[Any]) -> None:
    """Use `codec` for its class from now on.

    Of several codecs for a class, the first that fits an array writes it; of several for a type, the last reads it.
    """
    kind, cls = codec.block_type, codec.array_type
    own = codec.encode is not None or codec.reads
    known = [form.name for form in TYPES.values() if form.elements > 1] if own else list(ENCODERS)
    if kind not in known:
        raise ValueError(f"the block type {kind!r} of a codec must be one of {', '.join(known)}")
    if codec.reads != (codec.like is not None):
        raise ValueError("`decode` or `leaf` goes with `like`: the layout of an array is known before it is read")
    if (kind, cls) in CODECS:
        raise ValueError(f"there is a codec of {kind} for {cls.__name__} already")
    CODECS[kind, cls] = codec


def reader_of(kind: str) -> GgufCodec:
    """The codec that keeps blocks of this type quantized; one that reads nothing if they are read as float32."""
    readers = (codec for codec in reversed(CODECS.values()) if codec.block_type == kind and codec.reads)
    return next(readers, GgufCodec(kind, QuantizedArray))


def writer_of(item: ArrayToWrite, instead: str | None = None) -> GgufCodec:
    """The codec that writes a quantized array; a ValueError if there is none, which may say what would do `instead`."""
    cls = type(item.like)
    codecs = [codec for codec in CODECS.values() if codec.array_type is cls]
    found = next((codec for codec in codecs if codec.fits(item.like)), None)
    if found is not None:
        return found
    kinds = " or ".join(codec.block_type for codec in codecs)
    some = f"{kinds} does not hold" if len(codecs) < MANY else "no type of GGUF holds"
    why = f"{some} this layout of it" if codecs else "GGUF has no codec for it"
    instead = instead or "`dequantize()` it first, or say by `type` which type it is to be rounded to"
    raise ValueError(f"{item.name!r} is a {cls.__name__}, and {why}: {instead}")


def encoder_of(kind: str, like: AbstractArray) -> Callable[[QuantizedArray], np.ndarray] | None:
    """The function that gives the blocks of a quantized array as they are; None if it has to be dequantized."""
    codec = CODECS.get((kind, type(like))) if isinstance(like, QuantizedArray) else None
    return codec.encode if codec is not None and codec.fits(like) else None


def _has_scale_per_row(q: Array1B) -> bool:
    return q.scale is None or q.scale.shape[-1:] == (1,)


# GGUF has no type with one scale per row, nor one with NF4's values. Q8_0 is the nearest, if someone asks for it: it
# moves each element by at most 1/254 of the largest of its 32. TQ2_0 holds ternary values as they are.
for _codec in (
    GgufCodec("TQ2_0", Array1B, fits=_has_scale_per_row),
    GgufCodec("Q8_0", Array1B, fits=lambda q: not _has_scale_per_row(q)),
    *(GgufCodec("Q8_0", cls) for cls in (Array8B, ArrayNF4)),
    *(
        GgufCodec(
            name,
            ArrayGrouped,
            form.encode,
            like=form.like,
            fits=form.fits,
            leaf=form.read,
            separate=form.separate,
        )
        for name, form in GROUPED.items()
    ),
    *(
        GgufCodec(name, ArrayGrouped, like=form.like, decode=form.decode, fits=lambda q: False)
        for name, form in GRIDS.items()
    ),
):
    register_gguf_codec(_codec)


AT_ONCE = 1 << 22  # bytes of blocks repacked at a time, after which their pages of the file are given back
DECODED_AT_ONCE = 1 << 16  # elements decoded at a time: intermediate arrays take several times the memory of the result


class DecodedWarning(UserWarning):
    """A GGUF file has types that no quantized array holds; they are read as float32."""


class GgufEntry(Entry):
    """A tensor of a GGUF file; blocks are read as the class of their codec, or else as float32."""

    def __init__(self, kind: str, tensor: Tensor) -> None:
        self.name, self.kind, self.tensors = tensor.name, kind, (tensor,)
        self.format = None if kind in PLAIN else kind
        self._codec = reader_of(kind)

    @functools.cached_property
    def like(self) -> AbstractArray:  # pyright: ignore[reportIncompatibleVariableOverride]  # a file may have many tensors
        (tensor,) = self.tensors
        if self._codec.like is not None:
            return self._codec.like(tensor.shape)
        return jax.ShapeDtypeStruct(tensor.shape, PLAIN.get(self.kind, np.dtype(np.float32)))

    def host(self) -> np.ndarray | QuantizedArray:
        return jax.tree.map(lambda leaf: leaf.read(leaf.whole) if isinstance(leaf, LazyLeaf) else leaf, self.unread())

    def unread(self) -> np.ndarray | QuantizedArray:
        (tensor,), codec, like = self.tensors, self._codec, self.like
        if self.kind in PLAIN:
            return tensor.view()
        blocks = tensor.raw().reshape(-1, TYPES[IDS[self.kind]].bytes)
        if codec.decode is not None:
            try:
                return self.checked(functools.partial(codec.decode, blocks, tensor.shape))
            except ImportError:
                raise self._without_package() from None
        if codec.leaf is None:
            return self._decoded(blocks)
        assert isinstance(like, QuantizedArray)
        leaves = {}
        for name, leaf in vars(like).items():
            if isinstance(leaf, jax.ShapeDtypeStruct):
                leaves[name] = LazyBlockLeaf(tensor, codec, name, leaf)
        return array_from_fields(type(like), {**vars(like), **leaves})

    def _decoded(self, blocks: np.ndarray) -> np.ndarray:
        form = TYPES[IDS[self.kind]]
        out = np.empty((len(blocks), form.elements), np.float32)
        with np.errstate(all="ignore"):
            rows = DECODED_AT_ONCE // form.elements
            for start in range(0, len(blocks), rows):
                out[start : start + rows] = self._decoded_by_package(blocks[start : start + rows])
        _say_once(self)
        return out.reshape(self.tensors[0].shape)

    def _decoded_by_package(self, blocks: np.ndarray) -> np.ndarray:
        try:
            import gguf  # pyright: ignore[reportMissingImports]  # an extra

            return gguf.quants.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[self.kind])
        except ImportError:
            raise self._without_package() from None
        except FORMAT_ERRORS as error:  # above all, a type that it does not decode either
            what = f"the package gguf does not decode its type {self.kind}: {error!r}"
        raise self.wrong(what)

    def _without_package(self) -> CheckpointError:
        return self.wrong(f"its type {self.kind} is decoded by the package gguf: pip install gguf")


class LazyBlockLeaf(LazyLeaf):
    """A leaf of a quantized array whose entries are spread over the blocks of a tensor, as many in each block."""

    def __init__(self, tensor: Tensor, codec: GgufCodec, name: str, like: jax.ShapeDtypeStruct) -> None:
        self.shape, self.dtype = like.shape, np.dtype(like.dtype)
        form = TYPES[IDS[codec.block_type]]
        self._tensor, self._codec, self._name = tensor, codec, name
        self._blocks = tensor.raw().reshape(*tensor.shape[:-1], tensor.shape[-1] // form.elements, form.bytes)
        self._per_block = self.shape[-1] // max(self._blocks.shape[-2], 1) or 1

    def read(self, index: Index) -> np.ndarray:
        *rows, last = (slice(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
        first = last.start // self._per_block
        blocks = self._blocks[(*rows, slice(first, -(-last.stop // self._per_block)))]
        out = aligned_empty((*blocks.shape[:-1], self._per_block), self.dtype)
        self._fill(blocks, {self._name: out})
        whole = out.reshape(*out.shape[:-2], out.shape[-2] * self._per_block)
        cut = slice(last.start - first * self._per_block, last.stop - first * self._per_block)
        return whole if cut == slice(0, whole.shape[-1]) else np.ascontiguousarray(whole[..., cut])

    @classmethod
    def read_whole(cls, leaves: Sequence[LazyLeaf]) -> list[np.ndarray]:
        own = [leaf for leaf in leaves if isinstance(leaf, LazyBlockLeaf)]
        assert len(own) == len(leaves)  # of one array; they differ in their names and entries only
        found = aligned_empties(((*leaf._blocks.shape[:-1], leaf._per_block), leaf.dtype) for leaf in own)
        own[0]._fill(own[0]._blocks, {leaf._name: out for leaf, out in zip(own, found, strict=True)})
        return [out.reshape(leaf.shape) for leaf, out in zip(own, found, strict=True)]

    def _fill(self, blocks: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Write the entries (..., blocks, entries) of leaves for blocks (..., blocks, bytes): all, or some of them."""
        size = blocks.shape[-1]
        for at in _pieces(blocks.shape[:-1], max(AT_ONCE // size, 1)):
            piece = np.ascontiguousarray(blocks[at]).reshape(-1, size)
            try:
                self._codec.fill(piece, {name: leaf[at].reshape(len(piece), -1) for name, leaf in out.items()})
            except ValueError as error:
                raise self._tensor.file.wrong(str(error), self._tensor.name) from None
            self._tensor.drop()


def _pieces(shape: tuple[int, ...], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of parts of an array of this shape, in order, of at most `most` elements each."""
    if not math.prod(shape):  # an axis of any length beside an empty one
        return
    if math.prod(shape[1:]) > most:
        for i in range(shape[0]):
            for rest in _pieces(shape[1:], most):
                yield (i, *rest)
        return
    rows = most // math.prod(shape[1:])
    for start in range(0, shape[0], rows):
        yield (slice(start, start + rows),)


def _say_once(entry: GgufEntry) -> None:
    """Warn, once for each file that is open, that arrays of it do not stay quantized."""
    file = entry.tensors[0].file
    if file not in _SAID:
        _SAID.add(file)
        warn(
            f"{file.name} has arrays of types that no quantized array here holds, such as {entry.kind}: the package "
            f"gguf decodes them to float32",
            DecodedWarning,
        )


_SAID: weakref.WeakSet[MappedFile] = weakref.WeakSet()
