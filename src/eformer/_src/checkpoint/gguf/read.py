"""Reading GGUF: metadata, a list of tensors, and their data, plain or in blocks along the last axis."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any, TypeAlias

import numpy as np

from eformer._src.checkpoint.arrays import Entry
from eformer._src.checkpoint.file import CheckpointError, MappedFile
from eformer._src.checkpoint.header import Tensor, checked_shape
from eformer._src.kernels import cpu

from .blocks import GONE, IDS, PLAIN, TYPES
from .entry import GgufEntry

MAGIC = b"GGUF"
MAX_AXES = 4
MAX_DEPTH = 4  # of arrays of arrays in the metadata
# Steps of about a microsecond that parsing a header may take. A text of the metadata takes one; the largest
# vocabularies have some 800,000 tokens and merges. Tensors, pairs and arrays take longer, and count for more.
MAX_STEPS = 1 << 21
STEPS_OF_TENSOR, STEPS_OF_PAIR, STEPS_OF_ARRAY = 16, 8, 8

STRING, ARRAY = 8, 9
_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
SCALARS: dict[int, struct.Struct] = {number: struct.Struct("<" + code) for number, code in _CODES.items()}
_U32, _U64 = SCALARS[4], SCALARS[10]


Kind: TypeAlias = "int | list[Kind]"


class Metadata(dict[str, object]):
    """The metadata of a file. `kinds` has the number of the type of each value or, for a list, of its elements; for a
    list of lists it has a list of these.

    Programs that run models want the types that they know: a number of 32 bits, not the same number of 64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, Kind] = {}


class Reader:
    """Walks over the header; each step first checks that the bytes are there."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.data, self.size, self.wrong = file, file.data.data, len(file), file.wrong
        self.at, self.steps = 0, MAX_STEPS

    def take(self, count: int) -> memoryview:
        if count > self.size - self.at:
            raise self.ends()
        self.at += count
        return self.data[self.at - count : self.at]

    def ends(self) -> CheckpointError:
        return self.wrong(f"the file ends at byte {self.size}, in the middle of its header")

    def scalar(self, kind: struct.Struct) -> Any:  # a number or a bool, as `struct` gives it
        return kind.unpack(self.take(kind.size))[0]

    def text(self) -> str:
        """A value; bytes that are not UTF-8 (parts of letters in vocabularies) become surrogates."""
        return str(self.take(self.scalar(_U64)), "utf-8", "surrogateescape")

    def texts(self, number: int) -> list[str]:
        """As `text`, so many times: a vocabulary and its merges are 300,000 texts."""
        read = cpu.texts(self.data, self.at, number)
        if read is not None:
            found, self.at = read
            return found
        data, size, at, length, found = self.data, self.size, self.at, _U64.unpack_from, []
        for _ in range(number):
            start = at + 8
            stop = start + length(data, at)[0] if start <= size else start
            if stop > size:
                raise self.ends()
            found.append(str(data[start:stop], "utf-8", "surrogateescape"))
            at = stop
        self.at = at
        return found

    def name(self) -> str:
        try:
            return str(self.take(self.scalar(_U64)), "utf-8")
        except UnicodeDecodeError:
            raise self.wrong("a name is not UTF-8") from None

    def count(self, least: int, what: str, steps: int = 0) -> int:
        """Read a count of items; raise if they need more bytes than are left, or more steps than the budget."""
        number = self.scalar(_U64)
        if number * least > self.size - self.at:
            raise self.wrong(f"{number} {what} can't be in the {self.size - self.at} bytes that are left")
        self.steps -= number * steps
        if self.steps < 0:
            raise self.wrong(f"{number} {what}, with all that came before, are more than a model has")
        return number

    def pairs(self) -> int:
        """Read the count of entries of the metadata."""
        return self.count(13, "metadata entries", STEPS_OF_PAIR)

    def value(self, kind: int, depth: int = 0) -> tuple[object, Kind]:
        """A value of the metadata, and its kind."""
        if kind in SCALARS:
            return self.scalar(SCALARS[kind]), kind
        if kind == STRING:
            return self.text(), kind
        if kind != ARRAY or depth == MAX_DEPTH:
            raise self.wrong(f"the metadata has a value of type {kind}, {depth} levels deep, which GGUF has not")
        inner = self.scalar(_U32)
        if inner in SCALARS:
            number = self.count(SCALARS[inner].size, "numbers")
            return np.frombuffer(self.take(number * SCALARS[inner].size), SCALARS[inner].format).tolist(), inner
        if inner == STRING:
            return self.texts(self.count(8, "texts", 1)), inner
        number = self.count(12, "arrays in an array", STEPS_OF_ARRAY)
        if inner != ARRAY:
            raise self.wrong(f"the metadata has an array of type {inner}, which GGUF has not")
        found = [self.value(inner, depth + 1) for _ in range(number)]
        return [value for value, _ in found], [kind for _, kind in found]


def read_gguf(file: MappedFile) -> tuple[dict[str, Entry], Metadata]:
    """The arrays, by name, of a file that begins with `MAGIC`, and its metadata."""
    reader = Reader(file)
    reader.take(len(MAGIC))
    version = reader.scalar(_U32)
    if version not in (2, 3):
        order = ": it was written for a big-endian machine" if version in (2 << 24, 3 << 24) else ""
        raise reader.wrong(f"GGUF version {version}{order}; versions 2 and 3 can be read, little-endian")
    tensors = reader.count(24, "tensors", STEPS_OF_TENSOR)
    metadata = read_pairs(reader, reader.pairs())
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 2**16 or alignment & (alignment - 1):
        raise reader.wrong(f"`general.alignment` must be a power of two, got {str(alignment)[:50]}")
    found = [_described(reader) for _ in range(tensors)]
    base = -(-reader.at // alignment) * alignment
    entries: dict[str, Entry] = {}
    for name, shape, kind, offset in found:
        if name in entries:
            raise reader.wrong("the name is there twice", name)
        if offset % alignment:
            raise reader.wrong(f"its offset {offset} is no multiple of the alignment {alignment}", name)
        entries[name] = _entry(reader, name, shape, kind, base + offset)
    placed = sorted((entry.tensors[0] for entry in entries.values()), key=lambda t: (t.start, t.stop))
    for before, tensor in itertools.pairwise(placed):
        if tensor.start < before.stop:
            raise reader.wrong("overlaps the tensor before it", tensor.name)
    return entries, metadata


def read_pairs(reader: Reader, count: int) -> Metadata:
    metadata = Metadata()
    for _ in range(count):
        name = reader.name()
        if name in metadata:
            raise reader.wrong(f"the metadata has {name[:100]!r} twice")
        metadata[name], metadata.kinds[name] = reader.value(reader.scalar(_U32))
    return metadata


def _described(reader: Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of the type, and offset of a tensor."""
    name = reader.name()
    axes = reader.scalar(_U32)
    if axes > MAX_AXES:
        raise reader.wrong(f"{axes} axes; GGUF has at most {MAX_AXES}", name)
    shape = checked_shape([reader.scalar(_U64) for _ in range(axes)][::-1])  # the innermost axis comes first
    if shape is None:
        raise reader.wrong("its shape is absurd", name)
    return name, shape, reader.scalar(_U32), reader.scalar(_U64)


def _entry(reader: Reader, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
    if kind not in TYPES:
        known = f"known are {', '.join(IDS)}"
        gone = f"; that was {GONE[kind]}, which llama.cpp does not read any more either" if kind in GONE else ""
        raise reader.wrong(f"its type {kind} is unknown{gone}; {known}", name)
    form = TYPES[kind]
    row = shape[-1] if shape else 1
    if row % form.elements:
        what = f"rows of {row} are no multiple of the {form.elements} elements of a {form.name} block"
        raise reader.wrong(what, name)
    stop = start + math.prod(shape) // form.elements * form.bytes
    if stop > len(reader.file):
        raise reader.wrong(f"its data ends at byte {stop} of a file of {len(reader.file)}: the file is cut off", name)
    dtype = PLAIN.get(form.name, np.dtype(np.uint8))
    return GgufEntry(form.name, Tensor(name, dtype, shape, reader.file, start, stop))
