"""The block types of GGUF in NumPy: the bytes of a block hold 32 or 256 elements of a row.

Decoders take `uint8[blocks, bytes]` and give `float32[blocks, elements]`; encoders do the reverse. Scales are float16;
they come first in a block, and last in TQ1_0 and TQ2_0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ._header import DTYPES


class Type(NamedTuple):
    """A tensor type: its name, and the elements and bytes of one block."""

    name: str
    elements: int
    bytes: int


# Number, name, elements and bytes of a block. The numbers are from the specification
# (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), the sizes from the package `gguf`.
_TABLE = """
    0 F32 1 4; 1 F16 1 2; 2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24;
    8 Q8_0 32 34; 9 Q8_1 32 40; 10 Q2_K 256 84; 11 Q3_K 256 110; 12 Q4_K 256 144; 13 Q5_K 256 176;
    14 Q6_K 256 210; 15 Q8_K 256 292; 16 IQ2_XXS 256 66; 17 IQ2_XS 256 74; 18 IQ3_XXS 256 98; 19 IQ1_S 256 50;
    20 IQ4_NL 32 18; 21 IQ3_S 256 110; 22 IQ2_S 256 82; 23 IQ4_XS 256 136; 24 I8 1 1; 25 I16 1 2;
    26 I32 1 4; 27 I64 1 8; 28 F64 1 8; 29 IQ1_M 256 56; 30 BF16 1 2; 34 TQ1_0 256 54;
    35 TQ2_0 256 66; 39 MXFP4 32 17; 40 NVFP4 64 36; 41 Q1_0 128 18
"""
TYPES: dict[int, Type] = {
    int(number): Type(name, int(elements), int(size))
    for number, name, elements, size in map(str.split, _TABLE.split(";"))
}
IDS: dict[str, int] = {kind.name: number for number, kind in TYPES.items()}

# Types without blocks are named as in safetensors.
PLAIN: dict[str, np.dtype] = {form.name: DTYPES[form.name] for form in TYPES.values() if form.elements == 1}

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_E2M1_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 of shape (blocks, 1)."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The codes of 32 elements: byte j has element j in its low four bits, and element j + 16 in its high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    # The byte is an exponent; 127 means a scale of 1. Half the scale is finite for all 256 bytes, as in `gguf`.
    half = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _E2M1_TWICE[_nibbles(blocks[:, 1:])] * half


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    """A byte is a fraction of 256 whose base-3 digits are five trits; the last four bytes of codes have four trits."""
    parts = []
    for start, width, trits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        digits = blocks[:, None, start : start + width]
        powers = np.array([3**n for n in range(trits)], np.uint8)[None, :, None]
        shifted = (digits * powers).astype(np.uint16)  # uint8 times uint8 wraps
        parts.append(((shifted * 3) >> 8).reshape(len(blocks), trits * width))
    return (np.concatenate(parts, axis=1).astype(np.float32) - 1) * _half(blocks, 52)


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    """128 elements take 32 bytes: element m + 32 n is at bits 2 n of byte m."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    codes = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts) & 3
    return (codes.reshape(-1, 256).astype(np.float32) - 1) * _half(blocks, 64)


DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q8_0": lambda b: b[:, 2:].view(np.int8) * _half(b, 0),
    "Q4_0": lambda b: (_nibbles(b[:, 2:]).astype(np.float32) - 8) * _half(b, 0),
    "Q4_1": lambda b: _nibbles(b[:, 4:]).astype(np.float32) * _half(b, 0) + _half(b, 2),
    "IQ4_NL": lambda b: _IQ4[_nibbles(b[:, 2:])] * _half(b, 0),
    "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}


def _scaled(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`x / scale` by the inverse, as other writers compute it; 0 where the scale is 0 or not finite."""
    inverse = np.divide(1, scale, where=np.isfinite(scale) & (scale != 0), out=np.zeros_like(scale))
    return np.where(np.isfinite(x), x, 0) * inverse


def _rounded(x: np.ndarray) -> np.ndarray:
    """Round to the nearest integer, halves away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + np.float32(0.5))


def _bytes_of(scale: np.ndarray) -> np.ndarray:
    return scale.astype(np.float16).view(np.uint8)


def _encode_q8_0(x: np.ndarray) -> np.ndarray:
    scale = np.max(np.abs(x), axis=1, keepdims=True) / np.float32(127)
    codes = _rounded(_scaled(x, scale)).astype(np.int8).view(np.uint8)
    return np.concatenate([_bytes_of(scale), codes], axis=1)


def _encode_q4_0(x: np.ndarray) -> np.ndarray:
    """The element of the largest magnitude becomes -8 times the scale; the scale may be negative."""
    peak = np.take_along_axis(x, np.argmax(np.abs(x), axis=1)[:, None], axis=1)
    scale = peak / np.float32(-8)
    inverse = _scaled(np.ones_like(scale), scale)
    finite = np.where(np.isfinite(x), x, 0)
    codes = np.clip(np.floor(finite.astype(np.float64) * inverse.astype(np.float64) + 8.5), 0, 15).astype(np.uint8)
    return np.concatenate([_bytes_of(scale), codes[:, :16] | (codes[:, 16:] << 4)], axis=1)


def _encode_tq2_0(x: np.ndarray) -> np.ndarray:
    scale = np.max(np.abs(x), axis=1, keepdims=True)
    codes = (_rounded(_scaled(x, scale)) + 1).astype(np.uint8).reshape(-1, 2, 4, 32)
    packed = codes[:, :, 0] | (codes[:, :, 1] << 2) | (codes[:, :, 2] << 4) | (codes[:, :, 3] << 6)
    return np.concatenate([packed.reshape(-1, 64), _bytes_of(scale)], axis=1)


# The function, and the largest magnitude of a block in units of its scale.
ENCODERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "Q8_0": (_encode_q8_0, 127),
    "Q4_0": (_encode_q4_0, 8),
    "TQ2_0": (_encode_tq2_0, 1),
}
