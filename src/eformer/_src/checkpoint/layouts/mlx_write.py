"""Quantized arrays in the layout of MLX: words of codes with a scale and a bias per block, and MXFP4.

A value is `scale * code + bias`. An array without offsets gets biases that give the same values; scales are repeated
where its blocks are longer than MLX's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from eformer._src.checkpoint.arrays import Item, Part, Record, Written, record_of
from eformer._src.checkpoint.header import Json
from eformer._src.checkpoint.prequantized.bit_fields import dense_of_planes, dense_words
from eformer._src.checkpoint.prequantized.grouped_like import E8M0, FLOATS
from eformer._src.checkpoint.prequantized.quantization_config import CONFIG
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.grouped import ArrayGrouped

from .compressed_tensors_write import cannot, module_of, planes_in
from .mlx import SIZES

Mode = tuple[int, int, str]  # block size, bits, and the name of the mode
UINT32, FLOAT32 = np.dtype(np.uint32), np.dtype(np.float32)


def mlx_records(items: Iterable[Item]) -> Written:
    """The tensors of arrays in the layout of MLX, and the part of config.json that describes them.

    Dense arrays stay as they are. Modules that differ from the most common mode are named.
    """
    records: list[Record] = []
    modes: dict[str, Mode] = {}
    for item in items:
        if isinstance(item.like, QuantizedArray):
            record, modes[module_of(item, "MLX")] = _record(item, item.like)
            records.append(record)
        else:
            records.append(record_of(item))
    if not modes:
        return Written(records, {}, {"format": "mlx"})
    usual = Counter(modes.values()).most_common(1)[0][0]
    others: dict[str, Json] = {module: _said(mode) for module, mode in modes.items() if mode != usual}
    return Written(records, {CONFIG: {"quantization": {**_said(usual), **others}}}, {"format": "mlx"})


def _said(mode: Mode) -> dict[str, Json]:
    size, bits, name = mode
    return {"group_size": size, "bits": bits, "mode": name}


def _cannot(item: Item, why: str) -> ValueError:
    return cannot(item, "MLX", why)


def _record(item: Item, like: QuantizedArray) -> tuple[Record, Mode]:
    if not isinstance(like, ArrayGrouped) or like.ndim < 2 or (like.codebook != "integer" and like.scale.dtype != E8M0):
        raise _cannot(item, "it has no such format: quantize it to int4 or its kin, or `dequantize()` it first")
    if like.axis != -1:
        raise _cannot(item, f"blocks must run along the last axis, not axis {like.axis}; transpose it (`q.mT`)")
    if like.scale_scale is not None or like.offset_scale is not None:
        raise _cannot(item, "its scales have scales of their own: `dequantize()` it, and quantize it again")
    return _affine(item, like) if like.codebook == "integer" else _mxfp4(item, like)


def _affine(item: Item, like: ArrayGrouped) -> tuple[Record, Mode]:
    size, dtype = _block_size(item, like), _written_dtype(item, like)
    bits, (*rows, count), prefix = like.bits, like.shape, item.name.removesuffix("weight")
    entries = (*rows, count // size)
    parts = [
        Part(item.name, UINT32, (*rows, dense_words(count, bits))),
        Part(f"{prefix}scales", dtype, entries),
        Part(f"{prefix}biases", dtype, entries),
    ]

    def spread(leaf: object) -> np.ndarray:
        """An entry for each block of `size`."""
        given = np.asarray(leaf)
        if given.shape[-1] > 1:
            given = np.repeat(given, like.block_size // size, -1)
        return np.broadcast_to(given, entries)

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayGrouped)
        scale = spread(q.scale).astype(dtype)
        if q.offset is not None:
            biases = spread(q.offset).astype(dtype)
        else:
            zero = 2 ** (bits - 1) if q.zero is None else spread(q.zero).astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                biases = (-scale.astype(np.float32) * zero).astype(dtype)
            if not np.array_equal(np.isfinite(biases), np.isfinite(scale)):
                raise _cannot(
                    item, f"{dtype} can't hold the biases that its scales make; `astype(jnp.float32)` it first"
                )
        return [dense_of_planes(planes_in(q), bits, count), scale, biases]

    return Record(item.name, parts, values, item.done), (size, bits, "affine")


def _block_size(item: Item, like: ArrayGrouped) -> int:
    """The largest block size of MLX that divides rows and the array's own blocks."""
    count, block = like.shape[-1], like.shape[-1] if like.scale.shape[-1] == 1 else like.block_size
    found = [size for size in SIZES if count % size == 0 and block % size == 0]
    if not found or not count:
        sizes = ", ".join(map(str, SIZES))
        raise _cannot(item, f"blocks of {block} in rows of {count} must be divided by one of {sizes}")
    return max(found)


def _written_dtype(item: Item, like: ArrayGrouped) -> np.dtype:
    """The dtype of scales and biases: one that holds both, and the array's values as exactly as its own dtype."""
    leaves = [leaf for leaf in (like.scale, like.offset) if leaf is not None]
    kinds = {np.dtype(each.dtype) for each in (like, *leaves)}
    if not kinds <= set(FLOATS):
        raise _cannot(item, f"it holds float32, bfloat16 and float16, not {' and '.join(sorted(map(str, kinds)))}")
    if like.offset is None and like.scale.dtype == FLOAT32:
        what = "with biases, float32 scales would give values that are rounded otherwise"
        raise _cannot(item, f"{what}: quantize with `symmetric=False`")
    # Zero points times scales of 16 bits need more than 16 bits.
    return kinds.pop() if len(kinds) == 1 and like.zero is None else FLOAT32


def _mxfp4(item: Item, like: ArrayGrouped) -> tuple[Record, Mode]:
    if like.codebook != "e2m1" or like.block_size != 32 or like.shape[-1] % 32 or like.offset is not None:
        raise _cannot(item, "of powers of two as scales it holds MXFP4: E2M1 in whole blocks of 32")
    (*rows, count), u8 = like.shape, np.dtype(np.uint8)
    parts = [
        Part(item.name, UINT32, (*rows, count // 8)),
        Part(f"{item.name.removesuffix('weight')}scales", u8, (*rows, count // 32)),
    ]

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayGrouped)
        scale = np.broadcast_to(np.asarray(q.scale), parts[1].shape)
        return [np.ascontiguousarray(q.packed).view(np.uint32), scale.view(np.uint8)]

    return Record(item.name, parts, values, item.done), (32, 4, "mxfp4")
