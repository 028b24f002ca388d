"""Writing what bitsandbytes loads: NF4 and INT8 bit for bit, wherever it has a layout for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer.kernels.reference import NF4_CODES, dynamic_map
from eformer.ops.quantization import Array8B, ArrayNF4, QuantizedArray

from ._bitsandbytes import FLOATS, NESTED_BLOCK, STATE, decode_absmax
from ._progress import Progress
from ._records import Item, Part, Record, items_of
from ._save import record_of
from ._tree import flattened
from ._write import write_safetensors

OFFSET_DIGITS = 24  # room for any float64 as JSON; what is not used is filled with spaces
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def save_bitsandbytes(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """`save` with the names and layouts of bitsandbytes, which loads the file; codes and scales stay as they are.

    NF4 needs blocks along the last axis of 32, 64, ... or 4096 that end where rows end, as torch's (out, in) weights
    have them: `q.T` brings blocks along K of a (K, N) weight there. INT8 needs two axes, a scale per row, and a name
    that ends in "weight"; the file does not tell its dtype, and it reads as float32. Other formats raise a ValueError:
    materialize them first. Dense arrays are written as they are.
    """
    named, structure = flattened(tree)
    return write_bitsandbytes(
        path,
        items_of(named),
        tree=structure,
        metadata=metadata,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        progress=progress,
    )


def write_bitsandbytes(path: str | os.PathLike[str], items: Sequence[Item], **how: Any) -> Path:
    return write_safetensors(path, [_record(item) for item in items], **how)


def _record(item: Item) -> Record:
    like = item.like
    if isinstance(like, ArrayNF4):
        return _four_bit(item, like)
    if isinstance(like, Array8B):
        return _eight_bit(item, like)
    if isinstance(like, QuantizedArray):
        raise _wrong(item, "it has no such format: `materialize()` it, or quantize it to nf4 or int8")
    return record_of(item)


def _wrong(item: Item, why: str) -> ValueError:
    return ValueError(f"{item.name!r}, {item.like}, can't be written for bitsandbytes: {why}")


def _four_bit(item: Item, like: ArrayNF4) -> Record:
    block = _block(item, like)
    size, blocks = like.size, -(-like.size // block)
    nested = like.nested is not None and block == like.block_size and math.prod(like.shape[:-2]) == 1
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": like.dtype.name, "shape": like.shape}
    if nested:
        # The mean of the scales is a value of the array, so the length of its text must not depend on it.
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.0}
    length = len(json.dumps(state)) + OFFSET_DIGITS * nested
    name = item.name
    parts = [
        Part(name, np.dtype(np.uint8), ((size + 1) // 2, 1)),
        Part(f"{name}.absmax", np.dtype(np.uint8 if nested else np.float32), (blocks,)),
        Part(f"{name}.quant_map", np.dtype(np.float32), (16,)),
        Part(f"{name}{STATE}nf4", np.dtype(np.uint8), (length,)),
    ]
    if nested:
        parts.append(Part(f"{name}.nested_absmax", np.dtype(np.float32), (-(-blocks // NESTED_BLOCK),)))
        parts.append(Part(f"{name}.nested_quant_map", np.dtype(np.float32), (256,)))

    def values() -> list[np.ndarray]:
        q = item.make()
        packed = np.asarray(q.packed).reshape(-1, 1)
        if not nested:
            text = json.dumps(state).encode()
            return [packed, _absmax(q, block), NF4_CODES, np.frombuffer(text, np.uint8)]
        text = json.dumps({**state, "nested_offset": float(q.offset)}).encode().ljust(length)
        absmax, scales = np.asarray(q.absmax).reshape(-1), np.asarray(q.nested).reshape(-1)
        return [packed, absmax, NF4_CODES, np.frombuffer(text, np.uint8), scales, dynamic_map()]

    return Record(name, parts, values, done=item.done)


def _block(item: Item, like: ArrayNF4) -> int:
    """The block size to write: the array's own, or the largest that divides it and the rows."""
    if like.dtype.name not in FLOATS:
        raise _wrong(item, f"its dtype must be one of {', '.join(FLOATS)}")
    if not like.ndim or like.axis != -1:
        raise _wrong(item, f"blocks must run along the last axis, not axis {like.axis}; transpose it (`q.T`)")
    row = like.shape[-1]
    one_row = like.size == row
    block = like.block_size if one_row or row % like.block_size == 0 else math.gcd(row, like.block_size)
    if block not in BLOCKS:
        whole = f"blocks of {like.block_size} in rows of {row} would have to be cut into {block}"
        raise _wrong(item, f"{whole}; there are {', '.join(map(str, BLOCKS))}. Quantize it again with one of these")
    return block


def _absmax(q: ArrayNF4, block: int) -> np.ndarray:
    """A float32 scale for each block of the flat array."""
    absmax = np.asarray(q.absmax)
    if q.nested is not None and q.offset is not None:
        stack, matrix = absmax.shape[:-2], math.prod(absmax.shape[-2:])
        codes, scales = absmax.reshape(-1, matrix), np.asarray(q.nested).reshape(math.prod(stack), -1)
        offsets = np.asarray(q.offset).reshape(-1)
        decoded = [
            decode_absmax(c, s, dynamic_map(), NESTED_BLOCK, float(o))
            for c, s, o in zip(codes, scales, offsets, strict=True)
        ]
        absmax = np.array(decoded, np.float32).reshape(absmax.shape)
    blocks, own = -(-q.shape[-1] // block), q.absmax.shape[-1]
    index = np.arange(blocks) * block // q.block_size if own > 1 else np.zeros(blocks, int)
    return np.broadcast_to(absmax, (*q.shape[:-1], own))[..., index].astype(np.float32).reshape(-1)


def _eight_bit(item: Item, like: Array8B) -> Record:
    prefix, _, last = item.name.rpartition(".")
    if last != "weight":
        raise _wrong(item, 'it finds scales by names that end in "weight"')
    if like.ndim != 2 or like.scale.shape[1] != 1:
        raise _wrong(item, "it has a scale for each row of a matrix: quantize with `axis=-1`, or transpose it (`q.T`)")
    prefix = f"{prefix}." if prefix else ""
    parts = [
        Part(item.name, np.dtype(np.int8), tuple(like.shape)),
        Part(f"{prefix}SCB", np.dtype(np.float32), (like.shape[0],)),
        Part(f"{prefix}weight_format", np.dtype(np.uint8), ()),
    ]

    def values() -> list[Any]:
        q = item.make()
        scale = np.broadcast_to(np.asarray(q.scale, jnp.float32), (like.shape[0], 1))
        return [q.weight, scale[:, 0] * np.float32(127), np.uint8(0)]

    return Record(item.name, parts, values, done=item.done)
