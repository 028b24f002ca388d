"""Writing GGUF: plain tensors, and blocks of the types that have an encoder or a codec."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer._src.atomic_files import Target, filling
from eformer._src.checkpoint.arrays import AbstractArray, ArrayToWrite, TensorSpec, contiguous_bytes
from eformer._src.checkpoint.file import MappedFile
from eformer._src.checkpoint.header import Tensor, narrowed
from eformer._src.checkpoint.paths import GGUF_SUFFIX, target_file
from eformer._src.checkpoint.saving.folder import CHUNK, CheckpointSaving
from eformer._src.jaximus.array import materialize
from eformer._src.model.rules import warn_nonfinite
from eformer._src.progress import Meter
from eformer._src.quantization.base import QuantizedArray

from .codecs import GgufEntry, encoder_of, writer_of
from .encode import ENCODERS
from .read import MAGIC, MAX_AXES, Metadata, pairs_of, text_of
from .types import IDS, PLAIN, TYPES

ALIGNMENT = 32
MAX_NAME = 63  # bytes; ggml keeps 64 with the closing zero
AT_ONCE = 1 << 18  # elements encoded at a time
SMALLEST_SCALE = 2.0**-22  # below, a float16 is off by up to an eighth
TypeFor = str | Callable[[str, tuple[int, ...]], str | None] | None
_PLAIN_NAMES = {dtype: name for name, dtype in PLAIN.items()}


class _TensorPlan(NamedTuple):
    item: ArrayToWrite
    kind: str  # name of the GGUF type
    encode: Callable[[QuantizedArray], np.ndarray] | None  # None: dequantize, or write as it is
    asked: bool  # for this type: values may be rounded to it
    nbytes: int


def write_gguf(
    target: Target, items: Sequence[ArrayToWrite], type: TypeFor, metadata: Mapping[str, object] | None
) -> Path:
    path = target_file(target.path, GGUF_SUFFIX)
    planned = [_planned(item, type) for item in items]
    given = {name: value for name, value in (metadata or {}).items() if name != "general.alignment"}
    if any(plan.kind not in PLAIN for plan in planned):
        given.setdefault("general.quantization_version", 2)
    kinds = metadata.kinds if isinstance(metadata, Metadata) else {}
    header = bytearray(MAGIC + struct.pack("<IQ", 3, len(planned)) + pairs_of(given, kinds))
    offset = 0
    for item, kind, _, _, nbytes in planned:
        shape = item.like.shape
        header += text_of(item.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
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


def _planned(item: ArrayToWrite, type: TypeFor) -> _TensorPlan:
    like, name = item.like, item.name
    if len(name.encode()) > MAX_NAME or len(like.shape) > MAX_AXES:
        raise ValueError(f"{name!r}, {list(like.shape)}: GGUF has names up to {MAX_NAME} bytes and {MAX_AXES} axes")
    kind = type(name, tuple(like.shape)) if callable(type) else type if _fits(type, like) else None
    asked = kind is not None
    kind = _default(item, None if callable(type) else type) if kind is None else kind
    encode = encoder_of(kind, like)
    if kind not in PLAIN and kind not in ENCODERS and encode is None:
        raise ValueError(f"{name!r}: the type {kind!r} can't be written; {', '.join([*PLAIN, *ENCODERS])} can")
    form = TYPES[IDS[kind]]
    row = like.shape[-1] if like.shape else 1
    if row % form.elements:
        raise ValueError(f"{name!r}: rows of {row} are no multiple of the {form.elements} elements of a {kind} block")
    return _TensorPlan(item, kind, encode, asked, math.prod(like.shape) // form.elements * form.bytes)


def _fits(kind: str | None, like: AbstractArray) -> bool:
    """Whether `like` is a floating point array of two axes or more whose rows are a multiple of the type's block."""
    if kind is None or not jnp.issubdtype(like.dtype, jnp.floating) or len(like.shape) < 2:
        return False
    return kind not in IDS or like.shape[-1] % TYPES[IDS[kind]].elements == 0


def _default(item: ArrayToWrite, wanted: str | None) -> str:
    """The type of an array that is not asked for one, or whose rows do not fit the `wanted` one."""
    like = item.like
    if isinstance(like, QuantizedArray) and jnp.issubdtype(like.dtype, jnp.floating):  # integers stay exact
        kind = writer_of(item, _fitting(like, wanted)).block_type
        if not _fits(kind, like):
            raise ValueError(f"{item.name!r} is {like}: {_fitting(like, kind)}")
        return kind
    plain = _PLAIN_NAMES.get(np.dtype(like.dtype))
    if plain is None:
        known = ", ".join(dtype.name for dtype in PLAIN.values())
        raise TypeError(f"{item.name!r} is {like.dtype}, which GGUF can't hold; it has {known}")
    return plain


def _fitting(like: AbstractArray, kind: str | None) -> str | None:
    """Why an array does not fit a type, and which it does; None for no type."""
    if kind is None:
        return None
    row = like.shape[-1] if like.shape else 1
    others = [each for each in (*ENCODERS, "F16", "F32") if _fits(each, like)]
    size = TYPES[IDS[kind]].elements if kind in IDS else "?"
    what = f"rows of {row} are no multiple of the {size} elements of a {kind} block"
    return f"{what}; `type` may be {', '.join(others)}" if others else f"{what}, and it has to be dequantized first"


def _data(plan: _TensorPlan) -> memoryview:
    item, kind = plan.item, plan.kind
    value, form = item.make(), TYPES[IDS[kind]]
    if isinstance(value, QuantizedArray):
        if plan.encode is not None:
            part = TensorSpec(item.name, np.dtype(np.uint8), (plan.nbytes // form.bytes, form.bytes))
            return contiguous_bytes(plan.encode(value), part)
        value = jtu.tree_map(jnp.asarray, value).materialize()
    array = np.asarray(jax.block_until_ready(value))
    if kind in PLAIN:
        return contiguous_bytes(_cast(item.name, array, kind), TensorSpec(item.name, PLAIN[kind], array.shape))
    blocks, (encode, steps) = array.reshape(-1, form.elements), ENCODERS[kind]
    out, count = np.empty((len(blocks), form.bytes), np.uint8), AT_ONCE // form.elements
    nan, infinite, largest = 0, 0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), count):
            piece = narrowed(item.name, blocks[start : start + count], np.float32)
            peak = np.max(np.abs(piece), initial=0, where=np.isfinite(piece)).astype(np.float64)
            if peak / steps >= 65520:  # the scale, a float16, would be infinite
                raise _unheld(plan, peak)
            out[start : start + count] = encode(piece)
            largest, nan, infinite = max(largest, peak), nan + np.isnan(piece).sum(), infinite + np.isinf(piece).sum()
    if 0 < largest / steps < SMALLEST_SCALE:
        raise _unheld(plan, largest)
    warn_nonfinite(item.name, int(nan), int(infinite))
    if not plan.asked:
        _check_exact(plan, array, out)
    return out.reshape(-1).data


def _unheld(plan: _TensorPlan, peak: float) -> ValueError:
    return ValueError(f"{plan.item.name!r} has values up to {peak:g}, which {plan.kind} can't hold; F32 can")


def _check_exact(plan: _TensorPlan, array: np.ndarray, blocks: np.ndarray) -> None:
    """Raise a ValueError if blocks that nobody asked for do not have the values of the array."""
    tensor = Tensor(plan.item.name, np.dtype(np.uint8), array.shape, MappedFile(blocks.tobytes()), 0, blocks.nbytes)
    found = materialize(jax.tree.map(jnp.asarray, GgufEntry(plan.kind, tensor).host()))
    if not np.array_equal(np.asarray(found), array.astype(np.float32), equal_nan=True):
        raise ValueError(
            f"{plan.item.name!r} is {plan.item.like}, and GGUF has no type with its values: `type={plan.kind!r}` "
            f"rounds them to {plan.kind}, and `type='F32'` writes them dense"
        )


def _cast(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    if array.dtype == PLAIN[kind]:
        return array
    if not (jnp.issubdtype(array.dtype, jnp.floating) and kind in ("F16", "BF16", "F32", "F64")):
        raise TypeError(f"{name!r} is {array.dtype}: it can't be written as {kind}")
    return narrowed(name, array, PLAIN[kind])
