"""bitsandbytes: 4-bit weights in blocks of the flat array, and 8-bit weights with a scale per row.

Codecs say which of its types stay quantized, as which class. A weight that no codec takes is dequantized. NF4 is an
`ArrayNF4` and INT8 an `Array8B`, both ways, with codes and scales bit for bit.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import tree_util as jtu

from eformer._src.checkpoint.arrays import ArrayToWrite, Dense, Entry, Q, TensorSpec, TensorsToWrite, tensors_to_write
from eformer._src.checkpoint.header import BY_NUMPY_NAME, Tensor, checked_shape, parse_json
from eformer._src.checkpoint.serialization import names_of
from eformer._src.kernels.reference import NF4_CODES, dynamic_map
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.nf4 import ArrayNF4
from eformer._src.quantization.stored import array_from_fields

STATE = ".quant_state.bitsandbytes__"
FLOATS = ("float32", "float16", "bfloat16")
LARGEST = float(np.finfo(np.float32).max)
AT_ONCE = 1 << 16  # elements decoded at a time; even, because two share a byte
MAX_STATE = 1 << 16  # bytes of a quantization state; real ones have some 200


class Weight(Entry):
    """A quantized weight of bitsandbytes; `format` is "nf4", "fp4" or "int8"."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def dequantized(self) -> np.ndarray: ...

    def _choose_codec(self) -> None:
        """Choose the codec that keeps this weight quantized; without one, it is dequantized."""
        tried = ((codec, codec.like(self)) for (kind, _), codec in CODECS.items() if kind == self.format)
        dense = None, jax.ShapeDtypeStruct(self.shape, self.dtype)
        self._codec, self.like = next(((codec, like) for codec, like in tried if like is not None), dense)

    def host(self) -> np.ndarray | QuantizedArray:
        return self.dequantized() if self._codec is None else self._codec.decode(self, self.like)


W = TypeVar("W", bound=Weight)


@dataclass(frozen=True)
class BitsandbytesCodec(Generic[W, Q]):
    """How arrays of one quantized class are stored as one type of bitsandbytes: "nf4", "fp4" or "int8".

    `like(weight)` gives the array without values, or None if the class can't hold that weight. `decode(weight, like)`
    gives the array of NumPy leaves. `encode(item, like)` gives the tensors to write; a ValueError says why it can't.
    """

    type_name: str
    array_type: type[Q]
    like: Callable[[W], Q | None]
    decode: Callable[[W, Q], Q]
    encode: Callable[[ArrayToWrite, Q], TensorsToWrite]


CODECS: dict[tuple[str, type[QuantizedArray]], BitsandbytesCodec[Any, Any]] = {}


def register_bitsandbytes_codec(codec: BitsandbytesCodec[Any, Any]) -> None:
    """Read and write weights of a type with `codec` from now on."""
    key = codec.type_name, codec.array_type
    if key in CODECS:
        raise ValueError(f"there is a codec of {codec.type_name} for {codec.array_type.__name__} already")
    CODECS[key] = codec


def recognise(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """The weights among `tensors` that bitsandbytes quantized, by name."""
    found: dict[str, Entry] = {}
    for name, tensor in tensors.items():
        if STATE in name:
            weight = name.partition(STATE)[0]
            made = FourBit(weight, name, tensors)
        elif name.endswith(".SCB") or name == "SCB":
            weight = name.removesuffix("SCB") + "weight"
            if weight not in tensors or tensors[weight].dtype != np.int8:
                continue
            made = EightBit(weight, tensors)
        else:
            continue
        if weight in found:
            raise tensor.file.wrong("two quantization states are of that weight", weight)
        found[weight] = made
    return found


class FourBit(Weight):
    """`quant_map[code] * absmax[i // blocksize]` over the flat array; an even element is in the high four bits.

    With a `nested_blocksize`, the absmax is 8-bit codes itself: `nested_quant_map[absmax] * nested_absmax + offset`.
    """

    def __init__(self, name: str, state: str, tensors: Mapping[str, Tensor]) -> None:
        self.name, self.tensors = name, (tensors[state],)
        self.format = kind = state.partition(STATE)[2]
        if kind not in ("nf4", "fp4"):
            raise self.wrong(f"a 4-bit weight is nf4 or fp4, got {kind[:20]!r}")
        self._parse(tensors[state])
        self.parts = self._parts(tensors)
        self.tensors = (*self.parts.values(), tensors[state])
        self._choose_codec()

    def _parse(self, tensor: Tensor) -> None:
        """Take the fields of the quantization state, which is JSON, and check each."""
        if tensor.dtype != np.uint8 or not 2 <= tensor.nbytes <= MAX_STATE:
            raise self.wrong(f"the quantization state must be bytes, got {tensor.dtype}{list(tensor.shape)}")
        what = f"the quantization state of {self.name[:100]!r}"
        given = parse_json(tensor.raw().tobytes(), tensor.file.name, what)
        if not isinstance(given, dict):
            raise self.wrong("the quantization state is no JSON object")
        block, shape, dtype = given.get("blocksize"), checked_shape(given.get("shape")), given.get("dtype")
        if type(block) is not int or not 2 <= block <= 2**20 or block % 2:
            raise self.wrong(f"`blocksize` must be even and at most 2**20, got {str(block)[:50]}")
        if shape is None:
            raise self.wrong(f"`shape` must be a list of sizes, got {str(given.get('shape'))[:100]}")
        if given.get("quant_type") != self.format or dtype not in FLOATS:
            raise self.wrong(f"`quant_type` must be {self.format} and `dtype` one of {', '.join(FLOATS)}")
        nested, offset = given.get("nested_blocksize"), given.get("nested_offset", 0.0)
        if nested is not None and (type(nested) is not int or not 1 <= nested <= 2**20):
            raise self.wrong(f"`nested_blocksize` must be an integer from 1 to 2**20, got {str(nested)[:50]}")
        if isinstance(offset, bool) or not isinstance(offset, (int, float)) or abs(offset) > LARGEST:
            raise self.wrong(f"`nested_offset` must be a number that float32 holds, got {str(offset)[:50]}")
        self.shape, self.dtype, self.offset = shape, BY_NUMPY_NAME[dtype], float(offset)
        self.blocksize, self.nested_blocksize = block, nested
        self.size = math.prod(shape)
        self.blocks = -(-self.size // block)

    def _parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        nested, u8, f32 = self.nested_blocksize, np.dtype(np.uint8), np.dtype(np.float32)
        wanted = {"absmax": (f32 if nested is None else u8, self.blocks), "quant_map": (f32, 16)}
        if nested is not None:
            wanted |= {"nested_absmax": (f32, -(-self.blocks // nested)), "nested_quant_map": (f32, 256)}
        names = {"packed": self.name, **{part: f"{self.name}.{part}" for part in wanted}}
        missing = [name for name in names.values() if name not in tensors]
        if missing:
            raise self.wrong(f"its tensor {missing[0][-100:]!r} is missing")
        found = {part: tensors[name] for part, name in names.items()}
        for part, (dtype, count) in wanted.items():
            if found[part].dtype != dtype or math.prod(found[part].shape) != count:
                raise self.wrong(
                    f"`{part}` must be {count} of {dtype} for {list(self.shape)} in blocks of "
                    f"{self.blocksize}, got {found[part].dtype}{list(found[part].shape)}"
                )
        # Any dtype may carry the bytes: `quant_storage` of bitsandbytes chooses.
        taken, needed = found["packed"].nbytes, (self.size + 1) // 2
        if taken != needed:
            raise self.wrong(f"{self.size} codes take {needed} bytes, got {taken}")
        return found

    def flat(self, part: str) -> np.ndarray:
        return self.parts[part].view().reshape(-1)

    def absmax(self) -> np.ndarray:
        """A float32 scale per block, of shape (blocks,)."""
        if self.nested_blocksize is None:
            return self.flat("absmax")
        scale, values = self.flat("nested_absmax"), self.flat("nested_quant_map")
        return decode_absmax(self.flat("absmax"), scale, values, self.nested_blocksize, self.offset)

    def dequantized(self) -> np.ndarray:
        """Decode piece by piece: intermediate arrays take many times the memory of codes and values."""
        packed, absmax, values = self.parts["packed"].raw(), self.absmax(), self.flat("quant_map")
        out = np.empty(self.size, self.dtype)
        for start in range(0, self.size, AT_ONCE):
            codes = packed[start // 2 : (start + AT_ONCE) // 2]
            piece = out[start : start + AT_ONCE]
            found = values[np.stack([codes >> 4, codes & 15], -1).reshape(-1)[: piece.size]]
            with np.errstate(invalid="ignore", over="ignore"):
                piece[:] = found * absmax[np.arange(start, start + piece.size) // self.blocksize]
        return out.reshape(self.shape)


def decode_absmax(codes: np.ndarray, scale: np.ndarray, values: np.ndarray, block: int, offset: float) -> np.ndarray:
    """`values[code] * scale + offset`, with a scale per `block` of the flat codes."""
    out = np.empty(codes.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, codes.size, AT_ONCE):
            piece = codes[start : start + AT_ONCE]
            out[start : start + piece.size] = values[piece] * scale[np.arange(start, start + piece.size) // block]
        out += np.float32(offset)
    return out


class EightBit(Weight):
    """`weight * SCB / 127`, with an `SCB` per row."""

    format, dtype = "int8", np.dtype(np.float32)

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        prefix = name.removesuffix("weight")
        self.name, self.weight, self.scb = name, tensors[name], tensors[f"{prefix}SCB"]
        layout = tensors.get(f"{prefix}weight_format")
        self.tensors = (self.weight, self.scb, *([] if layout is None else [layout]))
        self.shape = self.weight.shape
        if len(self.shape) != 2 or self.scb.dtype != np.float32 or self.scb.shape != self.shape[:1]:
            raise self.wrong(
                f"an 8-bit weight of two axes has a float32 `SCB` per row, got {list(self.shape)} and "
                f"{self.scb.dtype}{list(self.scb.shape)}"
            )
        if layout is not None and (layout.nbytes != 1 or int(layout.raw()[0]) != 0):
            raise self.wrong(
                "`weight_format` must be 0, row by row; other orders are made for one GPU: save it again with a "
                "bitsandbytes of 2023 or later"
            )
        self._choose_codec()

    def scale(self) -> np.ndarray:
        """The scale of each row, of shape (rows, 1)."""
        with np.errstate(all="ignore"):  # it may be a NaN that signals
            return self.scb.view().reshape(-1, 1) / np.float32(127)

    def dequantized(self) -> np.ndarray:
        return self.weight.view() * self.scale()


NESTED_BLOCK = 256  # scales that share a scale, in `ArrayNF4`
OFFSET_DIGITS = 24  # room for any float64 as JSON; the rest is filled with spaces
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # block sizes that bitsandbytes has kernels for


def bitsandbytes_record(item: ArrayToWrite) -> TensorsToWrite:
    """The tensors of an array in the layout of bitsandbytes; dense arrays stay as they are."""
    if not isinstance(item.like, QuantizedArray):
        return tensors_to_write(item)
    codec = next((codec for codec in CODECS.values() if codec.array_type is type(item.like)), None)
    if codec is None:
        names = names_of(codec.array_type for codec in CODECS.values())
        raise _wrong(item, f"it has no such format: `dequantize()` it first, or quantize it to {names}")
    return codec.encode(item, item.like)


def _wrong(item: ArrayToWrite, why: str) -> ValueError:
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


def _nf4_encode(item: ArrayToWrite, like: ArrayNF4) -> TensorsToWrite:
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
        TensorSpec(name, u8, ((size + 1) // 2, 1)),
        TensorSpec(f"{name}.absmax", u8 if nested else f32, (blocks,)),
        TensorSpec(f"{name}.quant_map", f32, (16,)),
        TensorSpec(f"{name}{STATE}nf4", u8, (length,)),
    ]
    if nested:
        parts.append(TensorSpec(f"{name}.nested_absmax", f32, (-(-blocks // NESTED_BLOCK),)))
        parts.append(TensorSpec(f"{name}.nested_quant_map", f32, (256,)))

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayNF4)
        offset = {"nested_offset": np.asarray(q.offset).item()} if nested else {}
        text = np.frombuffer(json.dumps({**state, **offset}).encode().ljust(length), np.uint8)
        absmax = np.asarray(q.absmax).reshape(-1) if nested else _absmax(q, block)
        scales = [np.asarray(q.nested).reshape(-1), dynamic_map()] if nested else []
        return [np.asarray(q.packed).reshape(-1, 1), absmax, NF4_CODES, text, *scales]

    return TensorsToWrite(name, parts, values, item.done)


def _written_block_size(item: ArrayToWrite, like: ArrayNF4) -> int:
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


def _int8_encode(item: ArrayToWrite, like: Array8B) -> TensorsToWrite:
    prefix, _, last = item.name.rpartition(".")
    if last != "weight":
        raise _wrong(item, 'it finds scales by names that end in "weight"')
    if like.ndim != 2 or like.scale.shape[1] != 1:
        raise _wrong(item, "it has a scale for each row of a matrix: quantize with `axis=-1`, or transpose it (`q.T`)")
    prefix = f"{prefix}." if prefix else ""
    rows = like.shape[0]
    parts = [
        TensorSpec(item.name, np.dtype(np.int8), tuple(like.shape)),
        TensorSpec(f"{prefix}SCB", np.dtype(np.float32), (rows,)),
        TensorSpec(f"{prefix}weight_format", np.dtype(np.uint8), ()),
    ]

    def values() -> list[Dense]:
        q = item.make()
        assert isinstance(q, Array8B)
        scale = np.broadcast_to(np.asarray(q.scale, np.float32), (rows, 1))
        return [q.weight, scale[:, 0] * np.float32(127), np.uint8(0)]

    return TensorsToWrite(item.name, parts, values, item.done)


register_bitsandbytes_codec(BitsandbytesCodec("nf4", ArrayNF4, _nf4_like, _nf4_decode, _nf4_encode))
register_bitsandbytes_codec(BitsandbytesCodec("int8", Array8B, _int8_like, _int8_decode, _int8_encode))
