"""Writing GGUF: plain tensors, and Q8_0, Q4_0 and TQ2_0 blocks."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer.ops.quantization import Array1B, QuantizedArray

from ._dtypes import narrowed
from ._gguf import ARRAY, MAGIC, MAX_AXES, ROWS_AT_ONCE, SCALARS, STRING
from ._gguf_blocks import ENCODERS, IDS, PLAIN, TYPES
from ._progress import Meter, Progress
from ._records import Item, Part, contiguous_bytes, items_of
from ._saving import atomic_file
from ._sources import GGUF_SUFFIX
from ._suffix import target_file
from ._tree import flattened
from ._write import CHUNK

ALIGNMENT = 32
MAX_NAME = 63  # bytes; ggml keeps 64 with the closing zero
TypeFor = str | Callable[[str, tuple[int, ...]], str | None] | None
_PLAIN_NAMES = {dtype: name for name, dtype in PLAIN.items()}
_BOOL, _U32, _I32, _U64, _I64, _F64 = 7, 4, 5, 10, 11, 12
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": _U32, "i4": _I32, "f4": 6, "u8": _U64, "i8": _I64, "f8": _F64}


def save_gguf(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    type: TypeFor = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a tree as one GGUF file, "model.gguf" in a folder unless `path` ends so, under the names of its leaves.

    Dense arrays keep their type. Quantized ones take the nearest there is: TQ2_0 for ternary with one scale or one per
    row, else Q8_0 (GGUF has no NF4: each element moves by at most 1/254 of the largest in its 32), or their own dtype
    where rows do not fit into blocks. `type`, "F32", "F16", "BF16", "Q8_0", "Q4_0" or "TQ2_0", is for all floating
    point arrays of two axes or more in whose rows its blocks fit; a function of name and shape chooses for each, None
    for the default.

    `metadata` maps names to text, numbers, truth values and lists of these; programs that run models want
    "general.architecture" and more. The structure of the tree is not kept.
    """
    return write_gguf(
        path, items_of(flattened(tree)[0]), type=type, metadata=metadata, overwrite=overwrite, progress=progress
    )


class _Planned(NamedTuple):
    item: Item
    type: str
    nbytes: int


def write_gguf(
    path: str | os.PathLike[str],
    items: Sequence[Item],
    *,
    type: TypeFor,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    progress: Progress | None,
    **how: Sequence[Path],
) -> Path:
    path = target_file(path, GGUF_SUFFIX)
    planned = [_planned(item, type) for item in items]
    given = {name: value for name, value in (metadata or {}).items() if name != "general.alignment"}
    if any(plan.type in ENCODERS for plan in planned):
        given.setdefault("general.quantization_version", 2)
    header = bytearray(MAGIC + struct.pack("<IQQ", 3, len(planned), len(given)))
    for name, value in given.items():
        header += _text(name) + _value(name, value)
    offset = 0
    for item, kind, nbytes in planned:
        shape = item.like.shape
        header += _text(item.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", IDS[kind], offset)
        offset += nbytes + -nbytes % ALIGNMENT
    meter = Meter(progress, sum(plan.nbytes for plan in planned))
    header += bytes(-len(header) % ALIGNMENT)
    with atomic_file(path, overwrite=overwrite, size=len(header) + offset, **how) as file:
        file.write(header)
        for item, kind, nbytes in planned:
            for start in range(0, len(data := _data(item, kind)), CHUNK):
                file.write(data[start : start + CHUNK])
                meter.add(item.name, len(data[start : start + CHUNK]))
            file.write(bytes(-nbytes % ALIGNMENT))
            del data
            item.done()
    return path


def _planned(item: Item, type: TypeFor) -> _Planned:
    like, name = item.like, item.name
    if len(name.encode()) > MAX_NAME or len(like.shape) > MAX_AXES:
        raise ValueError(f"{name!r}, {list(like.shape)}: GGUF has names up to {MAX_NAME} bytes and {MAX_AXES} axes")
    kind = type(name, tuple(like.shape)) if callable(type) else type if _fits(type, like) else None
    kind = _default(like) if kind is None else kind
    if kind is None:
        raise TypeError(
            f"{name!r} is {like.dtype}, which GGUF can't hold; it has {', '.join(d.name for d in PLAIN.values())}"
        )
    if kind not in PLAIN and kind not in ENCODERS:
        raise ValueError(f"{name!r}: the type {kind!r} can't be written; {', '.join([*PLAIN, *ENCODERS])} can")
    form = TYPES[IDS[kind]]
    row = like.shape[-1] if like.shape else 1
    if row % form.elements:
        raise ValueError(f"{name!r}: rows of {row} are no multiple of the {form.elements} elements of a {kind} block")
    return _Planned(item, kind, math.prod(like.shape) // form.elements * form.bytes)


def _fits(kind: str | None, like: Any) -> bool:
    if kind is None or not jnp.issubdtype(like.dtype, jnp.floating) or len(like.shape) < 2:
        return False
    return kind not in IDS or like.shape[-1] % TYPES[IDS[kind]].elements == 0


def _default(like: Any) -> str | None:
    plain = _PLAIN_NAMES.get(np.dtype(like.dtype))
    if not isinstance(like, QuantizedArray):
        return plain
    by_row = isinstance(like, Array1B) and (like.scale is None or like.scale.shape[-1:] == (1,))
    fitting = (kind for kind in (["TQ2_0"] if by_row else ["Q8_0"]) if _fits(kind, like))
    return next(fitting, plain)


def _data(item: Item, kind: str) -> memoryview:
    value = item.make()
    if isinstance(value, QuantizedArray):
        value = jtu.tree_map(jnp.asarray, value).materialize()
    array = np.asarray(jax.block_until_ready(value))
    if kind in PLAIN:
        return contiguous_bytes(_cast(item.name, array, kind), Part(item.name, PLAIN[kind], array.shape))
    form, encode = TYPES[IDS[kind]], ENCODERS[kind]
    blocks = array.reshape(-1, form.elements)
    out = np.empty((len(blocks), form.bytes), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), ROWS_AT_ONCE):
            piece = narrowed(item.name, blocks[start : start + ROWS_AT_ONCE], np.float32)
            _check_range(item.name, kind, piece, {"Q8_0": 127, "Q4_0": 8, "TQ2_0": 1}[kind])
            out[start : start + ROWS_AT_ONCE] = encode(piece)
    return out.reshape(-1).data


def _cast(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    if array.dtype == PLAIN[kind]:
        return array
    if not (jnp.issubdtype(array.dtype, jnp.floating) and kind in ("F16", "BF16", "F32", "F64")):
        raise TypeError(f"{name!r} is {array.dtype}: it can't be written as {kind}")
    return narrowed(name, array, PLAIN[kind])


def _check_range(name: str, kind: str, array: np.ndarray, steps: int) -> None:
    """A ValueError if a finite value would become infinite: scales are float16."""
    peak = np.max(np.abs(array), initial=0, where=np.isfinite(array)).astype(np.float64)
    if peak / steps >= 65520:  # halfway between the largest float16 and what would come next
        raise ValueError(f"{name!r} has values up to {peak:g}, which {kind} can't hold; F32 can")


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(name: str, value: Any) -> bytes:
    kind = _kind(name, value)
    return struct.pack("<I", kind) + _content(name, value, kind)


def _kind(name: str, value: Any) -> int:
    """The type that a value takes: NumPy's numbers their own, Python's the smallest usual one."""
    if isinstance(value, (bool, np.bool_)):
        return _BOOL
    if isinstance(value, (np.integer, np.floating)) and value.dtype.str[1:] in _NUMBERS:
        return _NUMBERS[value.dtype.str[1:]]
    if isinstance(value, str):
        return STRING
    if isinstance(value, float):
        return _F64
    if isinstance(value, int):
        ranges = {_U32: (0, 2**32), _I32: (-(2**31), 0), _U64: (0, 2**64), _I64: (-(2**63), 0)}
        for kind, (low, high) in ranges.items():
            if low <= value < high:
                return kind
    if isinstance(value, (list, tuple)):
        return ARRAY
    raise TypeError(f"the metadata {name!r} is {value!r}; GGUF holds text, numbers, truth values and lists of these")


def _content(name: str, value: Any, kind: int) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return SCALARS[kind].pack(value)
    kinds = {_kind(name, each) for each in value}
    if kinds <= {_U32, _I32, _U64, _I64} and len(kinds) > 1:  # integers of several sizes and signs
        kinds = {_I64}
    if len(kinds) > 1:
        raise TypeError(f"the metadata {name!r} is a list of several types; GGUF has lists of one")
    inner = kinds.pop() if kinds else _U32
    return struct.pack("<IQ", inner, len(value)) + b"".join(_content(name, each, inner) for each in value)
