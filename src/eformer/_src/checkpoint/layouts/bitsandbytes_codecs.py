"""NF4 and INT8 of bitsandbytes as `ArrayNF4` and `Array8B`, both ways, with codes and scales bit for bit."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
from jax import tree_util as jtu

from eformer._src.checkpoint.arrays import Dense, Item, Part, Record, record_of
from eformer._src.checkpoint.serialization import names_of
from eformer._src.kernels.reference import NF4_CODES, dynamic_map
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.nf4 import ArrayNF4
from eformer._src.quantization.stored import array_from_fields

from .bitsandbytes import (
    CODECS,
    FLOATS,
    STATE,
    BitsandbytesCodec,
    EightBit,
    FourBit,
    decode_absmax,
    register_bitsandbytes_codec,
)

NESTED_BLOCK = 256  # scales that share a scale, in `ArrayNF4`
OFFSET_DIGITS = 24  # room for any float64 as JSON; the rest is filled with spaces
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # block sizes that bitsandbytes has kernels for


def bitsandbytes_record(item: Item) -> Record:
    """The tensors of an array in the layout of bitsandbytes; dense arrays stay as they are."""
    if not isinstance(item.like, QuantizedArray):
        return record_of(item)
    codec = next((codec for codec in CODECS.values() if codec.array_type is type(item.like)), None)
    if codec is None:
        names = names_of(codec.array_type for codec in CODECS.values())
        raise _wrong(item, f"it has no such format: `dequantize()` it first, or quantize it to {names}")
    return codec.encode(item, item.like)


def _wrong(item: Item, why: str) -> ValueError:
    return ValueError(f"{item.name!r}, {item.like}, can't be written for bitsandbytes: {why}")


# --- NF4 ---


def _block_size(weight: FourBit) -> int | None:
    """The block size of an `ArrayNF4` with the same values; None if there is no such array."""
    if not weight.shape or not np.array_equal(weight.flat("quant_map"), NF4_CODES):
        return None
    block = _in_rows(weight.blocksize, weight.shape)
    return block if block % 2 == 0 else None


def _in_rows(block: int, shape: tuple[int, ...]) -> int:
    """The largest block size that divides `block` and ends where rows end; of a single row, the end may be short."""
    row = shape[-1]
    return block if math.prod(shape) == row or row % block == 0 else math.gcd(row, block)


def _keeps_nested(weight: FourBit, block: int) -> bool:
    """Whether `ArrayNF4` has the same scales of scales: one per 256 scales of a single matrix, and the same map."""
    return (
        weight.nested_blocksize == NESTED_BLOCK
        and block == weight.blocksize
        and math.prod(weight.shape[:-2]) == 1
        and np.array_equal(weight.flat("nested_quant_map"), dynamic_map())
    )


def _nf4_like(weight: FourBit) -> ArrayNF4 | None:
    block = _block_size(weight)
    if block is None:
        return None
    (*rows, row), kept = weight.shape, _keeps_nested(weight, block)
    leaves = {
        "packed": jax.ShapeDtypeStruct((*rows, -(-row // 2)), np.uint8),
        "absmax": jax.ShapeDtypeStruct((*rows, -(-row // block)), np.uint8 if kept else np.float32),
    }
    if kept:
        leaves["nested"] = jax.ShapeDtypeStruct((-(-weight.blocks // NESTED_BLOCK),), np.float32)
        leaves["offset"] = jax.ShapeDtypeStruct((), np.float32)
    return array_from_fields(
        ArrayNF4, {**leaves, "block_size": block, "axis": -1, "padding": row % 2, "dtype": weight.dtype}
    )


def _nf4_decode(weight: FourBit, like: ArrayNF4) -> ArrayNF4:
    packed = weight.parts["packed"].raw()
    if like.nested is not None:
        leaves = [packed, weight.flat("absmax"), weight.flat("nested_absmax"), np.array(weight.offset, np.float32)]
    else:
        absmax = weight.absmax()
        if like.block_size != weight.blocksize:
            absmax = np.repeat(absmax, weight.blocksize // like.block_size)[: weight.size // like.block_size]
        leaves = [packed, absmax]
    shapes, structure = jtu.tree_flatten(like)
    return jtu.tree_unflatten(structure, [a.reshape(s.shape) for a, s in zip(leaves, shapes, strict=True)])


def _nf4_encode(item: Item, like: ArrayNF4) -> Record:
    block = _written_block_size(item, like)
    size, blocks = like.size, -(-like.size // block)
    nested = like.nested is not None and block == like.block_size and math.prod(like.shape[:-2]) == 1
    state = {"quant_type": "nf4", "blocksize": block, "dtype": like.dtype.name, "shape": like.shape}
    if nested:
        # The offset is a value of the array, so the length of the text must not depend on it.
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.0}
    length = len(json.dumps(state)) + OFFSET_DIGITS * nested
    name, u8, f32 = item.name, np.dtype(np.uint8), np.dtype(np.float32)
    parts = [
        Part(name, u8, ((size + 1) // 2, 1)),
        Part(f"{name}.absmax", u8 if nested else f32, (blocks,)),
        Part(f"{name}.quant_map", f32, (16,)),
        Part(f"{name}{STATE}nf4", u8, (length,)),
    ]
    if nested:
        parts.append(Part(f"{name}.nested_absmax", f32, (-(-blocks // NESTED_BLOCK),)))
        parts.append(Part(f"{name}.nested_quant_map", f32, (256,)))

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayNF4)
        offset = {"nested_offset": np.asarray(q.offset).item()} if nested else {}
        text = np.frombuffer(json.dumps({**state, **offset}).encode().ljust(length), np.uint8)
        absmax = np.asarray(q.absmax).reshape(-1) if nested else _absmax(q, block)
        scales = [np.asarray(q.nested).reshape(-1), dynamic_map()] if nested else []
        return [np.asarray(q.packed).reshape(-1, 1), absmax, NF4_CODES, text, *scales]

    return Record(name, parts, values, item.done)


def _written_block_size(item: Item, like: ArrayNF4) -> int:
    """The block size to write: the array's own, or the largest that divides it and the rows."""
    if like.dtype.name not in FLOATS:
        raise _wrong(item, f"its dtype must be one of {', '.join(FLOATS)}")
    if not like.ndim or like.axis != -1:
        raise _wrong(item, f"blocks must run along the last axis, not axis {like.axis}; transpose it (`q.T`)")
    block = _in_rows(like.block_size, like.shape)
    if block not in BLOCKS:
        cut = f"blocks of {like.block_size} in rows of {like.shape[-1]} would have to be cut into {block}"
        raise _wrong(item, f"{cut}; there are {', '.join(map(str, BLOCKS))}. Quantize it again with one of these")
    return block


def _absmax(q: ArrayNF4, block: int) -> np.ndarray:
    """A float32 scale for each block of the flat array, of shape (blocks,)."""
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


# --- INT8 ---


def _int8_like(weight: EightBit) -> Array8B:
    scale = jax.ShapeDtypeStruct((weight.shape[0], 1), np.float32)
    codes = jax.ShapeDtypeStruct(weight.shape, np.int8)
    return array_from_fields(Array8B, {"scale": scale, "weight": codes, "axis": (-1,), "dtype": weight.dtype})


def _int8_decode(weight: EightBit, like: Array8B) -> Array8B:
    return jtu.tree_unflatten(jtu.tree_structure(like), [weight.scale(), weight.weight.view()])


def _int8_encode(item: Item, like: Array8B) -> Record:
    prefix, _, last = item.name.rpartition(".")
    if last != "weight":
        raise _wrong(item, 'it finds scales by names that end in "weight"')
    if like.ndim != 2 or like.scale.shape[1] != 1:
        raise _wrong(item, "it has a scale for each row of a matrix: quantize with `axis=-1`, or transpose it (`q.T`)")
    prefix = f"{prefix}." if prefix else ""
    rows = like.shape[0]
    parts = [
        Part(item.name, np.dtype(np.int8), tuple(like.shape)),
        Part(f"{prefix}SCB", np.dtype(np.float32), (rows,)),
        Part(f"{prefix}weight_format", np.dtype(np.uint8), ()),
    ]

    def values() -> list[Dense]:
        q = item.make()
        assert isinstance(q, Array8B)
        scale = np.broadcast_to(np.asarray(q.scale, np.float32), (rows, 1))
        return [q.weight, scale[:, 0] * np.float32(127), np.uint8(0)]

    return Record(item.name, parts, values, item.done)


register_bitsandbytes_codec(BitsandbytesCodec("nf4", ArrayNF4, _nf4_like, _nf4_decode, _nf4_encode))
register_bitsandbytes_codec(BitsandbytesCodec("int8", Array8B, _int8_like, _int8_decode, _int8_encode))
