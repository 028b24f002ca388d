"""Reading GGUF: metadata, a list of tensors, and their data, plain or in blocks along the last axis.

A model may be in several files, as `llama-gguf-split` writes it: each says how many they are, and which it is. Metadata
are pairs of a name and a value with its type. A file of safetensors, whose own metadata is text, holds such pairs as
they are.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import itertools
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from eformer._src.checkpoint.arrays import Entry
from eformer._src.checkpoint.file import CheckpointError, MappedFile
from eformer._src.checkpoint.gguf.codecs import GgufEntry
from eformer._src.checkpoint.gguf.types import GONE, IDS, PLAIN, TYPES
from eformer._src.checkpoint.header import Tensor, checked_shape
from eformer._src.checkpoint.paths import check_inside
from eformer._src.kernels import cpu

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


ValueKind: TypeAlias = "int | list[ValueKind]"


class Metadata(dict[str, object]):
    """The metadata of a file. `kinds` has the number of the type of each value or, for a list, of its elements; for a
    list of lists it has a list of these.

    Programs that run models want the types that they know: a number of 32 bits, not the same number of 64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, ValueKind] = {}


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
        """`count` texts: a vocabulary and its merges are 300,000."""
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

    def value(self, kind: int, depth: int = 0) -> tuple[object, ValueKind]:
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


_UINT32, _INT32, _UINT64, _INT64 = 4, 5, 10, 11
_NUMBERS = {np.dtype(scalar.format[1:]): kind for kind, scalar in SCALARS.items()}
_RANGES = {_UINT32: (0, 2**32), _INT32: (-(2**31), 0), _UINT64: (0, 2**64), _INT64: (-(2**63), 0)}


def pairs_of(metadata: Mapping[str, object], kinds: Mapping[str, ValueKind]) -> bytes:
    """The entries of the metadata as in a file, their number first; `kinds` are the types that they had in another."""
    made = bytearray(struct.pack("<Q", len(metadata)))
    for name, value in metadata.items():
        kind = _kind(name, value, kinds.get(name))
        made += text_of(name) + struct.pack("<I", kind) + _content(name, value, kind, kinds.get(name))
    return bytes(made)


def text_of(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _kind(name: str, value: object, known: ValueKind | None = None) -> int:
    """The number of the type of a value: the one it had in a file, NumPy's, or the smallest for integers.

    That has 32 or 64 bits. Python's floats have 64 bits; programs that run models want `numpy.float32`.
    """
    if isinstance(known, int) and known in SCALARS and isinstance(value, (bool, int, float)):
        with contextlib.suppress(struct.error, OverflowError):  # it has another value now
            SCALARS[known].pack(value)
            return known
    if isinstance(value, (bool, float, np.generic)) and (dtype := np.asarray(value).dtype) in _NUMBERS:
        return _NUMBERS[dtype]
    if isinstance(value, str):
        return STRING
    if isinstance(value, int):
        for kind, (low, high) in _RANGES.items():
            if low <= value < high:
                return kind
    if isinstance(value, (list, tuple)):
        return ARRAY
    raise TypeError(f"the metadata {name!r} is {value!r}; GGUF holds text, numbers, booleans and lists of these")


def _content(name: str, value: object, kind: int, known: ValueKind | None = None) -> bytes:
    if isinstance(value, str):
        return text_of(value)
    if not isinstance(value, (list, tuple)):
        return SCALARS[kind].pack(value)
    if isinstance(known, list):  # a list of lists, each with a type of its own
        own = known if len(known) == len(value) else [None] * len(value)
        parts = [_content(name, each, ARRAY, kind) for each, kind in zip(value, own, strict=True)]
        return struct.pack("<IQ", ARRAY, len(value)) + b"".join(parts)
    kinds = {_kind(name, each, known) for each in value}
    if kinds <= _RANGES.keys() and len(kinds) > 1:  # integers of several sizes and signs
        kinds = {_INT64}
    if len(kinds) > 1:
        raise TypeError(f"the metadata {name!r} is a list of several types; GGUF has lists of one")
    inner = kinds.pop() if kinds else _UINT32 if known is None else known
    return struct.pack("<IQ", inner, len(value)) + b"".join(_content(name, each, inner) for each in value)


COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"


def read_split(path: Path | None, file: MappedFile, copy: bool) -> tuple[dict[str, Entry], Metadata, list[MappedFile]]:
    """The arrays and the metadata of the model that `file` is or belongs to, and all opened files."""
    entries, metadata = read_gguf(file)
    count = metadata.get(COUNT, 1)
    if type(count) is int and count <= 1:
        return entries, metadata, [file]
    number = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})", path.stem) if path is not None else None
    if path is None or number is None or type(count) is not int or int(number[3]) != count:
        what = f"it is one of {str(count)[:20]} parts of a model, and is not named as they are"
        raise file.wrong(f"{what}: NAME-00001-of-{str(count)[:20]:0>5}.gguf")
    files, merged, first = [], dict[str, Entry](), metadata
    for i in range(count):
        part = path.with_name(f"{number[1]}-{i + 1:05}-of-{count:05}{path.suffix}")
        if not part.is_file():
            what = f"it is one of {count} parts of a model, and {part.name!r} is not beside it"
            raise file.wrong(f"{what}: fetch all of them")
        check_inside(path, part)
        files.append(file if part == path else MappedFile(part, copy=copy))
        if files[-1].data[:4].tobytes() != MAGIC:
            raise files[-1].wrong("it is no GGUF file, and a part of a model")
        entries, found = read_gguf(files[-1])
        if (found.get(NUMBER), found.get(COUNT)) != (i, count):
            said = f"part {str(found.get(NUMBER))[:20]} (counted from 0) of {str(found.get(COUNT))[:20]}"
            raise files[-1].wrong(f"it says that it is {said}, and its name that it is part {i} of {count}")
        first = found if i == 0 else first
        twice = min(entries.keys() & merged.keys(), default=None)
        if twice is not None:
            raise CheckpointError("two parts of the model have it", file=files[-1].name, tensor=twice)
        merged |= entries
    if first.get(TENSORS, len(merged)) != len(merged):
        raise file.wrong(f"the parts have {len(merged)} tensors, and the first says {str(first.get(TENSORS))[:20]}")
    for name in (COUNT, NUMBER, TENSORS):  # the whole is not split
        first.pop(name, None)
        first.kinds.pop(name, None)
    return merged, first, files


KEY = "eformer.gguf"  # its value: the pairs as in a GGUF file, in base64
TOTAL_SIZE = "total_size"  # of an index of shards, which says it of its own files


def text_metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    """The metadata that safetensors holds: text as it is, and what came from GGUF under one name."""
    typed = typed_metadata(metadata)
    if not isinstance(metadata, Metadata):
        return {name: str(value) for name, value in typed.items() if isinstance(value, (str, int, float))}
    text = {name: str(value) for name, value in typed.items() if name not in metadata.kinds}
    own = {name: value for name, value in typed.items() if name in metadata.kinds}
    return {**text, KEY: base64.b64encode(pairs_of(own, metadata.kinds)).decode()}


def typed_metadata(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """The metadata of the arrays, without what an index says of its files."""
    kept = Metadata()
    kept.kinds |= metadata.kinds if isinstance(metadata, Metadata) else {}
    kept |= {name: value for name, value in metadata.items() if name != TOTAL_SIZE or name in kept.kinds}
    return kept if isinstance(metadata, Metadata) else dict(kept)


def with_gguf_metadata(metadata: Mapping[str, object], file: str) -> Mapping[str, object]:
    """The metadata of safetensors with what `text_metadata` put under one name."""
    text = metadata.get(KEY)
    if not isinstance(text, str):
        return metadata
    try:
        data = MappedFile(base64.b64decode(text, validate=True))
        reader = Reader(data)
        found = read_pairs(reader, reader.pairs())
    except (CheckpointError, binascii.Error, ValueError) as error:
        what = error.what if isinstance(error, CheckpointError) else str(error)
        raise CheckpointError(f"the metadata `{KEY}` can't be read: {what}", file=file) from None
    rest = {
        name: value for name, value in metadata.items() if name != KEY and (name != TOTAL_SIZE or name not in found)
    }
    twice = min(found.keys() & rest.keys(), default=None)
    if twice is not None:
        raise CheckpointError(f"the metadata has {twice[:100]!r} twice", file=file)
    found |= rest
    return found
