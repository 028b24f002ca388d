"""torchao's tensors as its safetensors support writes them: `_weight_qdata` and the rest, described in the header.

The header has an entry with the array's own name, JSON that says the class, the sizes of blocks, and the dtype.

| class | value |
|---|---|
| Int8Tensor, IntxUnpackedToInt8Tensor | `(qdata - zero_point) * scale`, codes in bytes |
| Float8Tensor | `qdata * scale` |
| Int4Tensor | `qdata * scale + zero_point`, two signed codes in a byte, the first in the low half |
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
import numpy as np

from eformer._src.checkpoint.header import BY_NUMPY_NAME, Json, parse_json
from eformer._src.checkpoint.prequantized.layout import FLOATS, Group, Layout, grouped_like, planes_of, register_layout
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.stored import array_from_fields

from .float8 import CODES

QDATA, SCALE, ZERO, BEFORE = "_qdata", "_scale", "_zero_point", "_act_pre_scale"
BYTES = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
READ = (*BYTES, "Float8Tensor", "Int4Tensor")


def _described(group: Group) -> tuple[str, Mapping[str, Json]]:
    """The class of the array, and its attributes."""
    text = group.metadata.get(group.name)
    parsed = parse_json(text.encode(), group[QDATA].file.name, "the description") if isinstance(text, str) else None
    kind, data = (parsed.get("_type"), parsed.get("_data")) if isinstance(parsed, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(data, dict):
        raise group.wrong(
            "the header of the file does not say which tensor of torchao it is: it was saved without that"
        )
    if kind not in READ:
        raise group.wrong(f"a {kind[:50]} of torchao is not read; what works: {', '.join(READ)}")
    if BEFORE in group.tensors:
        raise group.wrong("`act_pre_scale` multiplies the activations, so that the weights alone are not the model's")
    return kind, data


def _named(data: Mapping[str, Json], key: str) -> str:
    value = data.get(key)
    value = value.get("_data") if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _blocks(group: Group, data: Mapping[str, Json], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a block, of as many axes as the array; it divides the array."""
    block = data.get("block_size")
    sizes = tuple(size for size in block if type(size) is int and size > 0) if isinstance(block, list) else ()
    if len(sizes) != len(shape) or any(length % size for length, size in zip(shape, sizes, strict=True)):
        raise group.wrong(f"blocks of {str(block)[:50]} do not divide {list(shape)}")
    return sizes


def _bits(group: Group, kind: str, data: Mapping[str, Json]) -> int:
    target = _named(data, "target_dtype") if kind != "Int8Tensor" else "int8"
    found = re.fullmatch("int([1-8])", target)
    if found is None:
        raise group.wrong(f"`target_dtype` must be one of int1 to int8, got {target[:50]!r}")
    return int(found[1])


def _has_zero(group: Group) -> bool:
    zero = group.get(ZERO)
    if zero is not None and zero.dtype.kind != "i":
        raise group.wrong(f"`zero_point` must be integers, got {zero.dtype}")
    return zero is not None and bool(np.any(zero.view()))


def _like(group: Group) -> Array8B | ArrayFloat8 | ArrayGrouped:
    kind, data = _described(group)
    qdata, scale = group[QDATA], group[SCALE]
    dtype = BY_NUMPY_NAME.get(_named(data, "dtype"), scale.dtype)
    if scale.dtype not in FLOATS or dtype not in FLOATS or len(qdata.shape) < 2:
        raise group.wrong(f"it has scales of {scale.dtype}, stands for {dtype}, and is {list(qdata.shape)}")
    if kind == "Int4Tensor":
        return _int4_like(group, data)
    shape, block = qdata.shape, _blocks(group, data, qdata.shape)
    entries = tuple(length // size for length, size in zip(shape, block, strict=True))
    scales = (
        scale.shape
        if len(scale.shape) == len(shape)
        else (1,) * len(shape)
        if scale.nbytes == scale.dtype.itemsize
        else ()
    )
    if scales != entries:
        raise group.wrong(f"{list(scale.shape)} scales are not those of {list(shape)} in blocks of {list(block)}")
    if kind == "Float8Tensor":
        return _float8_like(group, block, entries, dtype)
    bits = _bits(group, kind, data)
    if qdata.dtype != np.int8 or any(n not in (1, length) for n, length in zip(entries[:-1], shape, strict=False)):
        raise group.wrong(f"{qdata.dtype} in blocks of {list(block)} of {list(shape)} is not read; blocks lie in rows")
    if bits == 8 and entries[-1] == 1 and not _has_zero(group):
        leaves = {"scale": jax.ShapeDtypeStruct(entries, np.float32), "weight": jax.ShapeDtypeStruct(shape, np.int8)}
        axes = tuple(axis - len(shape) for axis, count in enumerate(entries) if count == 1)
        return array_from_fields(Array8B, {**leaves, "axis": axes, "dtype": dtype})
    leaves = {"scale": (entries, scale.dtype), **({"zero": (entries, np.uint8)} if _has_zero(group) else {})}
    return grouped_like(shape, bits if bits in PLANES else bits + 1, block[-1], dtype, leaves)


def _float8_like(group: Group, block: tuple[int, ...], entries: tuple[int, ...], dtype: np.dtype) -> ArrayFloat8:
    qdata = group[QDATA]
    if qdata.dtype not in CODES:
        raise group.wrong(f"`qdata` must be FP8, got {qdata.dtype}")
    pairs = zip(entries[-2:], qdata.shape[-2:], block[-2:], strict=True)
    sizes = tuple(1 if count in (1, length) else size for count, length, size in pairs)
    fields = {
        "weight": jax.ShapeDtypeStruct(qdata.shape, qdata.dtype),
        "scale": jax.ShapeDtypeStruct(entries, group[SCALE].dtype),
        "block_shape": sizes if sizes[0] > 1 else sizes[1:] if sizes[1] > 1 else (),
    }
    return array_from_fields(ArrayFloat8, {**fields, "dtype": dtype})


def _int4_like(group: Group, data: Mapping[str, Json]) -> ArrayGrouped:
    qdata, scale, zero = group[QDATA], group[SCALE], group.get(ZERO)
    shape = (*qdata.shape[:-1], qdata.shape[-1] * 2)
    size = _blocks(group, data, shape)[-1]
    entries = (*shape[:-2], shape[-1] // size, shape[-2])  # a column for each output
    if (
        qdata.dtype.itemsize != 1
        or zero is None
        or zero.dtype != scale.dtype
        or not entries == scale.shape == zero.shape
    ):
        raise group.wrong(f"`scale` and `zero_point` must be {list(entries)}, got {list(scale.shape)}")
    rows = (*shape[:-1], shape[-1] // size)
    if not np.any(zero.view()):
        return grouped_like(shape, 4, size, scale.dtype, {"scale": (rows, scale.dtype)})
    return grouped_like(shape, 4, size, scale.dtype, {"scale": (rows, np.float32), "offset": (rows, np.float32)})


def _read(group: Group, like: Array8B | ArrayFloat8 | ArrayGrouped) -> dict[str, np.ndarray]:
    kind, data = _described(group)
    qdata, scale = group[QDATA], group[SCALE].view()
    if kind == "Int4Tensor":
        assert isinstance(like, ArrayGrouped)
        packed, scale = qdata.raw().reshape(like.packed.shape) ^ np.uint8(0x88), np.swapaxes(scale, -1, -2)
        if like.offset is None:
            return {"packed": packed, "scale": scale}
        scale, zero = (each.astype(np.float64) for each in (scale, np.swapaxes(group[ZERO].view(), -1, -2)))
        offset = (zero - 8 * scale).astype(np.float32)  # codes are counted from 0 here
        if not np.array_equal(offset - zero, -8 * scale):
            raise group.wrong("`zero_point - 8 * scale` is a number that no float32 is")
        return {"packed": packed, "scale": scale.astype(np.float32), "offset": offset}
    if not isinstance(like, ArrayGrouped):
        return {"weight": qdata.view(), "scale": scale.reshape(like.scale.shape).astype(like.scale.dtype)}
    bits, middle = _bits(group, kind, data), 2 ** (like.bits - 1)

    def codes(rows: np.ndarray) -> np.ndarray:
        if np.any((rows < -(2 ** (bits - 1))) | (rows >= 2 ** (bits - 1))):
            raise group.wrong(f"it has codes that {bits} bits do not reach")
        return (rows.astype(np.int16) + middle).astype(np.uint8)

    made = {**planes_of(like, qdata.view(), codes), "scale": scale.reshape(like.scale.shape)}
    if like.zero is not None:
        zero = group[ZERO].view().astype(np.int64) + middle
        if np.any((zero < 0) | (zero > 255)):
            raise group.wrong("`zero_point` has values that a byte does not reach")
        made["zero"] = zero.astype(np.uint8).reshape(like.zero.shape)
    return made


def _array(prefix: str) -> str:
    """The array "m.weight" for the tensors "m._weight_qdata" and so on."""
    return re.sub(r"\._([^.]*)$", r".\1", prefix)


def _fits(group: Group) -> bool:
    """Whether the names are torchao's; the header says the rest."""
    return re.search(r"(^|\.)_[^.]*_qdata$", group[QDATA].name) is not None


register_layout(Layout("torchao", "torchao", (QDATA, SCALE), _fits, _like, _read, (ZERO, BEFORE), _array))
