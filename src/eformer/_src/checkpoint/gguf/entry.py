"""A tensor of a GGUF file: plain, in blocks that stay quantized, or in blocks that are decoded."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from eformer._src.checkpoint.arrays import Entry, Like
from eformer._src.checkpoint.file import CheckpointError, MappedFile
from eformer._src.checkpoint.header import Tensor
from eformer._src.checkpoint.memory import aligned_empties, aligned_empty
from eformer._src.checkpoint.placement import Index, Unread
from eformer._src.checkpoint.serialization import FORMAT_ERRORS
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.stored import array_from_fields
from eformer._src.user_warnings import warn

from .blocks import IDS, PLAIN, TYPES
from .codecs import GgufCodec, reader_of

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
    def like(self) -> Like:  # pyright: ignore[reportIncompatibleVariableOverride]  # a file may have many tensors
        (tensor,) = self.tensors
        if self._codec.like is not None:
            return self._codec.like(tensor.shape)
        return jax.ShapeDtypeStruct(tensor.shape, PLAIN.get(self.kind, np.dtype(np.float32)))

    def host(self) -> np.ndarray | QuantizedArray:
        return jax.tree.map(lambda leaf: leaf.read(leaf.whole) if isinstance(leaf, Unread) else leaf, self.unread())

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
                leaves[name] = BlockLeaf(tensor, codec, name, leaf)
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
        return self.wrong(f'its type {self.kind} is decoded by the package gguf: pip install "eformer[gguf]"')


class BlockLeaf(Unread):
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
    def read_whole(cls, leaves: Sequence[Unread]) -> list[np.ndarray]:
        own = [leaf for leaf in leaves if isinstance(leaf, BlockLeaf)]
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
