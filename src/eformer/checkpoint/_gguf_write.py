"""Writing GGUF: plain tensors, and blocks of the types that have an encoder or a codec."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer._progress import Meter, Progress
from eformer._saving import Target, filling
from eformer.ops.quantization import QuantizedArray

from ._arrays import Item, Like, Part, contiguous_bytes, items_of
from ._file import StrPath
from ._gguf import ARRAY, MAGIC, MAX_AXES, SCALARS, STRING, Metadata
from ._gguf_blocks import IDS, PLAIN, TYPES
from ._gguf_codecs import encoder_of, writer_of
from ._gguf_encode import ENCODERS
from ._header import narrowed
from ._paths import GGUF_SUFFIX, target_file
from ._saving import CheckpointSaving
from ._tree import flattened
from ._write import CHUNK

ALIGNMENT = 32
MAX_NAME = 63  # bytes; ggml keeps 64 with the closing zero
AT_ONCE = 1 << 18  # elements encoded at a time
TypeFor = str | Callable[[str, tuple[int, ...]], str | None] | None
_PLAIN_NAMES = {dtype: name for name, dtype in PLAIN.items()}
_U32, _I32, _U64, _I64 = 4, 5, 10, 11
_NUMBERS = {np.dtype(scalar.format[1:]): kind for kind, scalar in SCALARS.items()}
_RANGES = {_U32: (0, 2**32), _I32: (-(2**31), 0), _U64: (0, 2**64), _I64: (-(2**63), 0)}


def save_gguf(
    path: StrPath,
    tree: object,
    *,
    type: TypeFor = None,
    metadata: Mapping[str, object] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a tree as one GGUF file under the names of its leaves; a folder gets a "model.gguf".

    Dense arrays keep their type. A quantized array takes the type of its codec: what was read from GGUF as an
    ArrayGrouped becomes the same bytes again; ternary with one scale or one per row becomes TQ2_0; INT8, NF4 and RSR
    become Q8_0 (GGUF has no NF4: each element moves by at most 1/254 of the largest in its 32). Where rows are no
    multiple of the block, it keeps its own dtype. An ArrayGrouped of another layout, such as "int4", and a class
    without a codec raise a ValueError; `register_gguf_codec` adds one.

    `type`, "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_1", "Q4_0" or "TQ2_0", is for all floating point arrays of
    two axes or more whose rows are a multiple of its block, also for quantized ones, which are decoded and rounded
    unless they are of that type; a function of name and shape chooses for each array, None for the default.

    `metadata` maps names to text, numbers, booleans and lists of these; programs that run models want
    "general.architecture" and more, with the types that they know (`numpy.float32`). The metadata of an open GGUF
    checkpoint keeps its types. The structure of the tree is not kept.
    """
    return write_gguf(Target(path, overwrite, progress), items_of(flattened(tree)[0]), type, metadata)


class _Planned(NamedTuple):
    item: Item
    kind: str  # name of the GGUF type
    encode: Callable[[QuantizedArray], np.ndarray] | None  # None: dequantize, or write as it is
    nbytes: int


def write_gguf(target: Target, items: Sequence[Item], type: TypeFor, metadata: Mapping[str, object] | None) -> Path:
    path = target_file(target.path, GGUF_SUFFIX)
    planned = [_planned(item, type) for item in items]
    given = {name: value for name, value in (metadata or {}).items() if name != "general.alignment"}
    if any(plan.kind not in PLAIN for plan in planned):
        given.setdefault("general.quantization_version", 2)
    header = bytearray(MAGIC + struct.pack("<IQQ", 3, len(planned), len(given)))
    kinds = metadata.kinds if isinstance(metadata, Metadata) else {}
    for name, value in given.items():
        kind = _kind(name, value, kinds.get(name))
        header += _text(name) + struct.pack("<I", kind) + _content(name, value, kind, kinds.get(name))
    offset = 0
    for item, kind, _, nbytes in planned:
        shape = item.like.shape
        header += _text(item.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", IDS[kind], offset)
        offset += nbytes + -nbytes % ALIGNMENT
    meter = Meter(target.progress, sum(plan.nbytes for plan in planned))
    header += bytes(-len(header) % ALIGNMENT)
    with filling(CheckpointSaving(target, path, [len(header) + offset])) as file:
        file.write(header)
        for plan in planned:
            for start in range(0, len(data := _data(plan)), CHUNK):
                file.write(data[start : start + CHUNK])
                meter.add(plan.item.name, len(data[start : start + CHUNK]))
            file.write(bytes(-plan.nbytes % ALIGNMENT))
            del data
            plan.item.done()
    return path


def _planned(item: Item, type: TypeFor) -> _Planned:
    like, name = item.like, item.name
    if len(name.encode()) > MAX_NAME or len(like.shape) > MAX_AXES:
        raise ValueError(f"{name!r}, {list(like.shape)}: GGUF has names up to {MAX_NAME} bytes and {MAX_AXES} axes")
    kind = type(name, tuple(like.shape)) if callable(type) else type if _fits(type, like) else None
    kind = _default(item) if kind is None else kind
    encode = encoder_of(kind, like)
    if kind not in PLAIN and kind not in ENCODERS and encode is None:
        raise ValueError(f"{name!r}: the type {kind!r} can't be written; {', '.join([*PLAIN, *ENCODERS])} can")
    form = TYPES[IDS[kind]]
    row = like.shape[-1] if like.shape else 1
    if row % form.elements:
        raise ValueError(f"{name!r}: rows of {row} are no multiple of the {form.elements} elements of a {kind} block")
    return _Planned(item, kind, encode, math.prod(like.shape) // form.elements * form.bytes)


def _fits(kind: str | None, like: Like) -> bool:
    """Whether `like` is a floating point array of two axes or more whose rows are a multiple of the type's block."""
    if kind is None or not jnp.issubdtype(like.dtype, jnp.floating) or len(like.shape) < 2:
        return False
    return kind not in IDS or like.shape[-1] % TYPES[IDS[kind]].elements == 0


def _default(item: Item) -> str:
    like = item.like
    if isinstance(like, QuantizedArray) and _fits(kind := writer_of(item).block_type, like):
        return kind
    plain = _PLAIN_NAMES.get(np.dtype(like.dtype))
    if plain is None:
        known = ", ".join(dtype.name for dtype in PLAIN.values())
        raise TypeError(f"{item.name!r} is {like.dtype}, which GGUF can't hold; it has {known}")
    return plain


def _data(plan: _Planned) -> memoryview:
    item, kind = plan.item, plan.kind
    value, form = item.make(), TYPES[IDS[kind]]
    if isinstance(value, QuantizedArray):
        if plan.encode is not None:
            part = Part(item.name, np.dtype(np.uint8), (plan.nbytes // form.bytes, form.bytes))
            return contiguous_bytes(plan.encode(value), part)
        value = jtu.tree_map(jnp.asarray, value).materialize()
    array = np.asarray(jax.block_until_ready(value))
    if kind in PLAIN:
        return contiguous_bytes(_cast(item.name, array, kind), Part(item.name, PLAIN[kind], array.shape))
    blocks, (encode, steps) = array.reshape(-1, form.elements), ENCODERS[kind]
    out, count = np.empty((len(blocks), form.bytes), np.uint8), AT_ONCE // form.elements
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), count):
            piece = narrowed(item.name, blocks[start : start + count], np.float32)
            peak = np.max(np.abs(piece), initial=0, where=np.isfinite(piece)).astype(np.float64)
            if peak / steps >= 65520:  # the scale, a float16, would be infinite
                raise ValueError(f"{item.name!r} has values up to {peak:g}, which {kind} can't hold; F32 can")
            out[start : start + count] = encode(piece)
    return out.reshape(-1).data


def _cast(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    if array.dtype == PLAIN[kind]:
        return array
    if not (jnp.issubdtype(array.dtype, jnp.floating) and kind in ("F16", "BF16", "F32", "F64")):
        raise TypeError(f"{name!r} is {array.dtype}: it can't be written as {kind}")
    return narrowed(name, array, PLAIN[kind])


# --- metadata ---


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _kind(name: str, value: object, known: int | None = None) -> int:
    """The number of the type of a value: the one it had in a file, NumPy's, or the smallest for integers.

    That has 32 or 64 bits. Python's floats have 64 bits; programs that run models want `numpy.float32`.
    """
    if known in SCALARS and isinstance(value, (bool, int, float)):
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


def _content(name: str, value: object, kind: int, known: int | None = None) -> bytes:
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, (list, tuple)):
        return SCALARS[kind].pack(value)
    kinds = {_kind(name, each, known) for each in value}
    if kinds <= _RANGES.keys() and len(kinds) > 1:  # integers of several sizes and signs
        kinds = {_I64}
    if len(kinds) > 1:
        raise TypeError(f"the metadata {name!r} is a list of several types; GGUF has lists of one")
    inner = kinds.pop() if kinds else _U32 if known is None else known
    return struct.pack("<IQ", inner, len(value)) + b"".join(_content(name, each, inner) for each in value)
