"""Reading what bitsandbytes writes: 4-bit weights in blocks over the flat array, and 8-bit ones with a scale per row.

Codes and scales of NF4 are taken over bit for bit wherever its blocks fit into rows. What this package has no format
for (FP4, blocks of odd lengths across rows) is decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer.kernels.reference import NF4_CODES, dynamic_map
from eformer.ops.quantization import Array8B, ArrayNF4

from ._dtypes import BY_NUMPY_NAME
from ._entries import ArrayInfo, Entry
from ._error import CheckpointError
from ._header import Tensor, checked_shape, parse_json

STATE = ".quant_state.bitsandbytes__"
FLOATS = ("float32", "float16", "bfloat16")
NESTED_BLOCK = 256
LARGEST = float(np.finfo(np.float32).max)
AT_ONCE = 1 << 16  # elements that are decoded at a time; even, since two share a byte
MAX_STATE = 1 << 16  # bytes of a state, which has some 200


def recognise(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """The arrays that bitsandbytes wrote among `tensors`."""
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
            raise CheckpointError("two quantization states are of that weight", file=tensor.file.name, tensor=weight)
        found[weight] = made
    return found


@dataclass(frozen=True)
class State:
    """The quantization state of a 4-bit weight, as its JSON says."""

    blocksize: int
    dtype: np.dtype
    shape: tuple[int, ...]
    nested_blocksize: int | None
    offset: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        return -(-self.size // self.blocksize)


class FourBit(Entry):
    """`code[q] * absmax[i // blocksize]` over the flat array; the even element is in the high four bits."""

    def __init__(self, name: str, state: str, tensors: Mapping[str, Tensor]) -> None:
        self.name, self.file = name, tensors[state].file.name
        self.kind = state.partition(STATE)[2]
        if self.kind not in ("nf4", "fp4"):
            raise self._wrong(f"a 4-bit weight is nf4 or fp4, got {self.kind[:20]!r}")
        self.state = self._state(tensors[state])
        wanted = {"packed": name, "absmax": f"{name}.absmax", "quant_map": f"{name}.quant_map"}
        if self.state.nested_blocksize is not None:
            wanted |= {key: f"{name}.{key}" for key in ("nested_absmax", "nested_quant_map")}
        missing = [key for key in wanted.values() if key not in tensors]
        if missing:
            raise self._wrong(f"its tensor {missing[0][-100:]!r} is missing")
        self.parts = {part: tensors[key] for part, key in wanted.items()}
        self.tensors = (*self.parts.values(), tensors[state])
        self._check_parts()

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(what, file=self.file, tensor=self.name)

    def _state(self, tensor: Tensor) -> State:
        if tensor.dtype != np.uint8 or not 2 <= tensor.nbytes <= MAX_STATE:
            raise self._wrong(f"the quantization state must be bytes, got {tensor.dtype}{list(tensor.shape)}")
        given = parse_json(tensor.raw().tobytes(), self.file, f"the quantization state of {self.name[:100]!r}")
        if not isinstance(given, dict):
            raise self._wrong("the quantization state is no JSON object")
        block, shape = given.get("blocksize"), checked_shape(given.get("shape"))
        if type(block) is not int or not 2 <= block <= 2**20 or block % 2:
            raise self._wrong(f"`blocksize` must be even and at most 2**20, got {str(block)[:50]}")
        if shape is None:
            raise self._wrong(f"`shape` must be a list of sizes, got {str(given.get('shape'))[:100]}")
        dtype = given.get("dtype")
        if given.get("quant_type") != self.kind or dtype not in FLOATS:
            raise self._wrong(f"`quant_type` must be {self.kind} and `dtype` one of {', '.join(FLOATS)}")
        nested, offset = given.get("nested_blocksize"), given.get("nested_offset", 0.0)
        if nested is not None and (type(nested) is not int or not 1 <= nested <= 2**20):
            raise self._wrong(f"`nested_blocksize` must be an integer from 1 to 2**20, got {str(nested)[:50]}")
        if type(offset) not in (int, float) or abs(offset) > LARGEST:
            raise self._wrong(f"`nested_offset` must be a number that float32 holds, got {str(offset)[:50]}")
        return State(block, BY_NUMPY_NAME[dtype], shape, nested, float(offset))

    def _check_parts(self) -> None:
        state = self.state
        nested = state.nested_blocksize
        wanted = {"absmax": (np.float32 if nested is None else np.uint8, state.blocks), "quant_map": (np.float32, 16)}
        if nested is not None:
            wanted |= {"nested_absmax": (np.float32, -(-state.blocks // nested)), "nested_quant_map": (np.float32, 256)}
        for part, (dtype, count) in wanted.items():
            tensor = self.parts[part]
            if tensor.dtype != dtype or math.prod(tensor.shape) != count:
                raise self._wrong(
                    f"`{part}` must be {count} of {np.dtype(dtype)} for {list(state.shape)} in blocks of "
                    f"{state.blocksize}, got {tensor.dtype}{list(tensor.shape)}"
                )
        # Any dtype may carry the bytes: `quant_storage` of bitsandbytes chooses.
        if self.parts["packed"].nbytes != (state.size + 1) // 2:
            raise self._wrong(
                f"{state.size} codes take {(state.size + 1) // 2} bytes, got {self.parts['packed'].nbytes}"
            )

    @property
    def info(self) -> ArrayInfo:
        return ArrayInfo(self.state.shape, self.state.dtype, self.kind, self.nbytes)

    @property
    def _row(self) -> int:
        return self.state.shape[-1] if self.state.shape else 1

    @functools.cached_property
    def _block(self) -> int | None:
        """The length of blocks of an ArrayNF4 with the same values; None if there is none such."""
        state = self.state
        codes = self.parts["quant_map"].view().reshape(16)
        if self.kind != "nf4" or not state.shape or not np.array_equal(codes, NF4_CODES):
            return None
        if state.size == self._row or self._row % state.blocksize == 0:  # one row, whose last block may be short
            return state.blocksize
        shared = math.gcd(self._row, state.blocksize)
        return shared if shared % 2 == 0 else None

    @functools.cached_property
    def _keeps_nested(self) -> bool:
        """Whether the scales of scales are those that ArrayNF4 has: per 256 of one matrix, and the same map."""
        state = self.state
        return (
            state.nested_blocksize == NESTED_BLOCK
            and self._block == state.blocksize
            and math.prod(state.shape[:-2]) == 1
            and np.array_equal(self.parts["nested_quant_map"].view().reshape(256), dynamic_map())
        )

    @property
    def like(self) -> Any:
        state, block = self.state, self._block
        if block is None:
            return jax.ShapeDtypeStruct(state.shape, state.dtype)
        rows, kept = state.shape[:-1], self._keeps_nested
        shapes: dict[str, Any] = {
            "packed": jax.ShapeDtypeStruct((*rows, -(-self._row // 2)), np.uint8),
            "absmax": jax.ShapeDtypeStruct((*rows, -(-self._row // block)), np.uint8 if kept else np.float32),
        }
        if kept:
            shapes["nested"] = jax.ShapeDtypeStruct((-(-state.blocks // NESTED_BLOCK),), np.float32)
            shapes["offset"] = jax.ShapeDtypeStruct((), np.float32)
        return ArrayNF4(**shapes, block_size=block, axis=-1, padding=self._row % 2, dtype=state.dtype)

    def host(self) -> Any:
        packed, block, state = self.parts["packed"].raw(), self._block, self.state
        if block is None:
            return self._decoded(packed)
        if self._keeps_nested:
            nested = self.parts["nested_absmax"].view()
            leaves = [packed, self.parts["absmax"].view(), nested, np.array(state.offset, np.float32)]
        else:
            absmax = self._absmax()
            if block != state.blocksize:
                absmax = np.repeat(absmax, state.blocksize // block)[: state.size // block]
            leaves = [packed, absmax]
        shapes, structure = jtu.tree_flatten(self.like)
        return jtu.tree_unflatten(structure, [a.reshape(s.shape) for a, s in zip(leaves, shapes, strict=True)])

    def _absmax(self) -> np.ndarray:
        absmax = self.parts["absmax"].view().reshape(-1)
        if self.state.nested_blocksize is None:
            return absmax
        scale = self.parts["nested_absmax"].view().reshape(-1)
        values = self.parts["nested_quant_map"].view().reshape(256)
        return decode_absmax(absmax, scale, values, self.state.nested_blocksize, self.state.offset)

    def _decoded(self, packed: np.ndarray) -> np.ndarray:
        """Piece by piece: what lies between codes and values takes many times the room of either."""
        state, absmax = self.state, self._absmax()
        values = self.parts["quant_map"].view().reshape(16)
        out = np.empty(state.size, state.dtype)
        for start in range(0, state.size, AT_ONCE):
            codes = packed[start // 2 : (start + AT_ONCE) // 2]
            piece = out[start : start + AT_ONCE]
            found = values[np.stack([codes >> 4, codes & 15], -1).reshape(-1)[: piece.size]]
            with np.errstate(invalid="ignore", over="ignore"):
                piece[:] = found * absmax[np.arange(start, start + piece.size) // state.blocksize]
        return out.reshape(state.shape)


def decode_absmax(codes: np.ndarray, scale: np.ndarray, values: np.ndarray, block: int, offset: float) -> np.ndarray:
    """`values[code] * scale + offset`, with a scale per `block` of the flat codes."""
    out = np.empty(codes.size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, codes.size, AT_ONCE):
            piece = codes[start : start + AT_ONCE]
            out[start : start + piece.size] = values[piece] * scale[np.arange(start, start + piece.size) // block]
        out += np.float32(offset)
    return out


class EightBit(Entry):
    """`weight * SCB / 127`, with an `SCB` per row."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        prefix = name.removesuffix("weight")
        self.weight, self.scale = tensors[name], tensors[f"{prefix}SCB"]
        layout = tensors.get(f"{prefix}weight_format")
        self.tensors = (self.weight, self.scale, *([] if layout is None else [layout]))
        rows = self.weight.shape[:1]
        if len(self.weight.shape) != 2 or self.scale.dtype != np.float32 or self.scale.shape != rows:
            raise CheckpointError(
                f"an 8-bit weight of two axes has a float32 `SCB` per row, got {list(self.weight.shape)} and "
                f"{self.scale.dtype}{list(self.scale.shape)}",
                file=self.weight.file.name,
                tensor=name,
            )
        if layout is not None and (layout.nbytes != 1 or int(layout.raw()[0]) != 0):
            raise CheckpointError(
                "`weight_format` must be 0, row by row; other orders are made for one GPU: save it again with a "
                "bitsandbytes of 2023 or later",
                file=self.weight.file.name,
                tensor=name,
            )

    @property
    def info(self) -> ArrayInfo:
        return ArrayInfo(self.weight.shape, np.dtype(np.float32), "int8", self.nbytes)

    @property
    def like(self) -> Array8B:
        rows, columns = self.weight.shape
        scale, weight = (jax.ShapeDtypeStruct(s, d) for s, d in (((rows, 1), jnp.float32), ((rows, columns), jnp.int8)))
        return Array8B(scale, weight, (-1,))  # pyright: ignore[reportArgumentType]  # shapes in place of arrays

    def host(self) -> Array8B:
        with np.errstate(all="ignore"):  # a scale may be a NaN that signals
            scale = self.scale.view().reshape(-1, 1) / np.float32(127)
        return Array8B(scale, self.weight.view(), (-1,))  # pyright: ignore[reportArgumentType]  # until it is placed
