"""The header of a safetensors file: eight bytes of length, then JSON; everything is checked before it is used."""

from __future__ import annotations

import functools
import json
import math
from typing import NamedTuple, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from eformer._src.checkpoint.prequantized.foreign import BEGINNING, what_it_is

from .file import CheckpointError, MappedFile

# Name in the file, NumPy type. Types of less than a byte (F4, F6_E2M3, F6_E3M2) are left out: the format does not
# define the order of their bits.
_TABLE = """
    BOOL bool, U8 uint8, I8 int8, F8_E5M2 float8_e5m2, F8_E4M3 float8_e4m3fn, F8_E8M0 float8_e8m0fnu,
    F8_E4M3FNUZ float8_e4m3fnuz, F8_E5M2FNUZ float8_e5m2fnuz, I16 int16, U16 uint16, F16 float16, BF16 bfloat16,
    I32 int32, U32 uint32, F32 float32, C64 complex64, F64 float64, I64 int64, U64 uint64
"""
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, kind, kind)) for name, kind in map(str.split, _TABLE.split(","))
}
NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
BY_NUMPY_NAME: dict[str, np.dtype] = {dtype.name: dtype for dtype in NAMES}

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_HEADER = 100_000_000  # bytes; the limit of the format's own reader
MAX_AXES = 32  # NumPy ends at 64, and nothing real is near
MAX_ELEMENTS = 2**48  # of an array; empty axes are not counted, so an empty array has no absurd shape either
MAX_DEPTH = 400  # of JSON; trees have 100 levels of two
METADATA = "__metadata__"
# A tensor takes an object and two lists, a quantized array four objects more; the largest models have some 200,000.
MAX_TENSORS = 2**18
MAX_OPENED = {b"{": 2**20, b"[": 2**22}  # objects and lists, or these letters in names: each takes a microsecond or two


class Tensor(NamedTuple):
    """An array in a file: bytes `start` to `stop`, in C order and little-endian."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: MappedFile
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def raw(self) -> np.ndarray:
        """The bytes, still in the file."""
        return self.file.data[self.start : self.stop]

    def view(self) -> np.ndarray:
        """The array, still in the file."""
        return np.frombuffer(self.raw(), self.dtype).reshape(self.shape)

    def drop(self) -> None:
        self.file.drop(self.start, self.stop)


def read_header(file: MappedFile) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, in the order of the header, and its metadata."""
    kind = what_it_is(file.data[:BEGINNING].tobytes(), file.path)
    if kind is not None and file.data[8:9].tobytes() != b"{":  # which begins the header of every safetensors file
        raise file.wrong(kind)
    if len(file) < 8:
        raise file.wrong(f"{len(file)} bytes are too few for a safetensors file")
    length = int.from_bytes(file.data[:8].tobytes(), "little")
    if not 2 <= length <= min(MAX_HEADER, len(file) - 8):
        what = f"a header of {length} bytes in a file of {len(file)}: no safetensors file, or it is cut off"
        raise file.wrong(f"{what}; it begins with {file.data[:12].tobytes()!r}")
    header = parse_json(file.data[8 : 8 + length].tobytes(), file.name, "the header")
    if not isinstance(header, dict):
        raise file.wrong("the header is no JSON object")
    metadata = header.pop(METADATA, {})
    metadata = {} if metadata is None else metadata  # as MLX writes
    if not _maps_text_to_text(metadata):
        raise file.wrong(f"`{METADATA}` must map text to text")
    if len(header) > MAX_TENSORS:
        raise file.wrong(f"{len(header)} tensors are more than a model has")
    tensors = {name: _tensor(name, entry, file, 8 + length) for name, entry in header.items()}
    _check_cover(tensors, file, 8 + length)
    return tensors, metadata


def _maps_text_to_text(value: Json) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def parse_json(text: bytes, file: str, what: str) -> Json:
    """Parse any JSON whose objects have no key twice; raise a CheckpointError about `what` otherwise."""
    if text[:1] not in (b"{", b"["):
        raise CheckpointError(f"{what} is no JSON object", file=file)
    for letter, most in MAX_OPENED.items():
        if text.count(letter) > most:
            raise CheckpointError(f"{what} has more than {most} times {letter.decode()!r}: no model has", file=file)
    try:
        found = _DECODER.decode(text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of too many digits, too deep
        raise CheckpointError(f"{what} can't be read: {str(error)[:200]}", file=file) from None
    if _is_deep(found):
        raise CheckpointError(f"{what} can't be read: it is more than {MAX_DEPTH} levels deep", file=file)
    return found


def _is_deep(value: Json) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in inner if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the name {twice[:100]!r} is there twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_KEYS = {"dtype", "shape", "data_offsets"}


def _tensor(name: str, entry: Json, file: MappedFile, base: int) -> Tensor:
    wrong = functools.partial(file.wrong, tensor=name)
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise wrong("an entry of the header has `dtype`, `shape` and `data_offsets`")
    kind, offsets = entry["dtype"], entry["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise wrong(f"the dtype {str(kind)[:50]!r} is not one of {', '.join(DTYPES)}")
    shape = checked_shape(entry["shape"])
    if shape is None:
        given = str(entry["shape"])[:100]
        raise wrong(f"the shape {given} must be a list of at most {MAX_AXES} sizes that are not absurd")
    match offsets:
        case [int(start), int(stop)] if type(start) is type(stop) is int:
            pass
        case _:
            raise wrong(f"`data_offsets` must be two integers, got {str(offsets)[:100]}")
    if not 0 <= start <= stop <= len(file) - base:
        raise wrong(f"`data_offsets` {str(offsets)[:100]} are outside of the {len(file) - base} bytes of data")
    needed = math.prod(shape) * dtype.itemsize
    if stop - start != needed:
        raise wrong(f"{kind}{list(shape)} takes {needed} bytes, `data_offsets` {offsets} give {stop - start}")
    return Tensor(name, dtype, shape, file, base + start, base + stop)


def checked_shape(shape: object) -> tuple[int, ...] | None:
    """`shape` as a tuple; None unless it is a list of sizes that an array can have."""
    if not isinstance(shape, list) or len(shape) > MAX_AXES:
        return None
    if not all(type(size) is int and size >= 0 for size in shape):
        return None
    return tuple(shape) if math.prod(size or 1 for size in shape) <= MAX_ELEMENTS else None


def _check_cover(tensors: dict[str, Tensor], file: MappedFile, base: int) -> None:
    """Raise unless the tensors follow each other from the header to the end of the file, without overlap or gap."""
    end = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start != end:
            gap = tensor.start - end
            what = "overlaps the one before it" if gap < 0 else f"has {gap} stray bytes before it"
            raise file.wrong(what, tensor.name)
        end = tensor.stop
    if end != len(file):
        raise file.wrong(f"{len(file) - end} stray bytes after the last tensor")


def narrowed(name: str, array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """`array` in a dtype of less range; a ValueError if a finite value would become infinite, or all become 0."""
    dtype = np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype, copy=False)
    lost = np.isinf(made) & np.isfinite(array)
    if not np.any(lost) and not np.any(made):
        lost = array != 0
    if np.any(lost):
        peak = float(np.max(np.abs(array), initial=0, where=lost))
        raise ValueError(f"{name!r} has values up to {peak:g}, which {dtype.name} can't hold")
    return made
