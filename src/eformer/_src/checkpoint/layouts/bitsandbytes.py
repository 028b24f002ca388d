"""Reading bitsandbytes: 4-bit weights in blocks of the flat array, and 8-bit weights with a scale per row.

Codecs say which of its types stay quantized, as which class. A weight that no codec takes is dequantized.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import numpy as np

from eformer._src.checkpoint.arrays import Entry, Item, Q, Record
from eformer._src.checkpoint.header import BY_NUMPY_NAME, Tensor, checked_shape, parse_json
from eformer._src.quantization.base import QuantizedArray

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

    def _settle(self) -> None:
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
    encode: Callable[[Item, Q], Record]


CODECS: dict[tuple[str, type[QuantizedArray]], BitsandbytesCodec] = {}


def register_bitsandbytes_codec(codec: BitsandbytesCodec) -> None:
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
        self._settle()

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
        self._settle()

    def scale(self) -> np.ndarray:
        """The scale of each row, of shape (rows, 1)."""
        with np.errstate(all="ignore"):  # it may be a NaN that signals
            return self.scb.view().reshape(-1, 1) / np.float32(127)

    def dequantized(self) -> np.ndarray:
        return self.weight.view() * self.scale()
