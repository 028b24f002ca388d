"""Where the bits of codes and of small scales are in GGUF's blocks, and where they are in this package's leaves.

A `BlockField` turns some bytes of each block, `uint8[blocks, bytes]` in C order, into the entries of one leaf,
`[blocks, entries]`, and back. Along a row this package packs neighbours into a byte, the first in the lowest bits.
GGUF packs elements that are 16 to 64 apart: vector units unpack these without a shuffle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

Bytes = np.ndarray  # uint8


class BlockField(NamedTuple):
    """How the entries of a leaf are read from bytes of a block, and written; bits that belong to other leaves are 0.

    `move` is the name of the same as `read` in the native core, if that has it.
    """

    dtype: np.dtype
    read: Callable[[Bytes], np.ndarray]
    write: Callable[[np.ndarray], Bytes]
    move: str | None = None


def _viewed(dtype: type) -> BlockField:
    return BlockField(np.dtype(dtype), lambda data: data.view(dtype), lambda leaf: leaf.view(np.uint8), "bytes")


def _negated(halves: np.ndarray) -> np.ndarray:
    return halves.view(np.uint16) ^ np.uint16(0x8000)


BYTES, INT8, FLOAT16 = _viewed(np.uint8), _viewed(np.int8), _viewed(np.float16)
# Minima are subtracted, and offsets are added.
MINUS_FLOAT16 = BlockField(
    np.dtype(np.float16),
    lambda data: _negated(data).view(np.float16),
    lambda leaf: _negated(leaf).view(np.uint8),
    "minus_halves",
)
# int8 codes; ours have no sign, and 128 is the zero.
SIGNED = BlockField(np.dtype(np.uint8), lambda data: data ^ np.uint8(128), lambda leaf: leaf ^ np.uint8(128), "signed")


# --- codes ---


def nibbles(width: int) -> BlockField:
    """4-bit codes: of `width` bytes, the low halves are as many elements, and the high halves the next ones."""
    half = width // 2
    item = np.dtype({8: np.uint64, 16: np.complex128}.get(half, f"V{half}"))  # copied at once

    def read(data: Bytes) -> Bytes:
        pairs = data.view(np.uint16)
        out = np.empty((data.size // width, 2), item)
        for part, codes in enumerate((pairs & 0x0F0F, (pairs >> 4) & 0x0F0F)):
            codes |= codes >> 4  # the low byte now has both codes
            out[:, part] = codes.astype(np.uint8).reshape(-1).view(item)
        return out.view(np.uint8).reshape(data.shape)

    def write(leaf: Bytes) -> Bytes:
        pairs = leaf.reshape(-1, 2, half).astype(np.uint16)
        pairs |= pairs << 4
        pairs &= 0x0F0F
        return (pairs[:, 0] | pairs[:, 1] << 4).view(np.uint8).reshape(leaf.shape)

    return BlockField(np.dtype(np.uint8), read, write, f"nibbles_{width}")


def _read_quarters(data: Bytes) -> Bytes:
    fours = data.view(np.uint32).reshape(-1, 8)
    out = np.empty((len(fours), 4), np.uint64)
    for part in range(4):
        codes = (fours >> (2 * part)) & 0x03030303
        codes |= codes >> 6
        codes |= codes >> 12  # the low byte now has four codes
        out[:, part] = codes.astype(np.uint8).view(np.uint64)[:, 0]
    return out.view(np.uint8).reshape(data.shape)


def _write_quarters(leaf: Bytes) -> Bytes:
    fours = leaf.reshape(-1, 4, 8).astype(np.uint32)
    fours = (fours | fours << 12) & 0x000F000F
    fours = (fours | fours << 6) & 0x03030303
    fours <<= np.arange(0, 8, 2, dtype=np.uint32)[:, None]
    return np.bitwise_or.reduce(fours, axis=1).view(np.uint8).reshape(leaf.shape)


# 2-bit codes: of 32 bytes, the lowest two bits are 32 elements, the next two the next ones, and so on.
QUARTERS = BlockField(np.dtype(np.uint8), _read_quarters, _write_quarters, "quarters")


def _transposed_bits(words: np.ndarray) -> np.ndarray:
    """uint64 as 8 x 8 bits, transposed: swap bits, pairs and fours across the diagonal."""
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        swapped = (words ^ (words >> np.uint64(shift))) & np.uint64(mask)
        words = words ^ swapped ^ (swapped << np.uint64(shift))
    return words


def _read_bits(data: Bytes) -> Bytes:
    words = _transposed_bits(data.view(np.uint64)).view(np.uint8)
    return words.reshape(-1, 4, 8).swapaxes(1, 2).reshape(data.shape)


def _write_bits(leaf: Bytes) -> Bytes:
    words = np.ascontiguousarray(leaf.reshape(-1, 8, 4).swapaxes(1, 2)).view(np.uint64)
    return _transposed_bits(words).view(np.uint8).reshape(leaf.shape)


# 1-bit codes: of 32 bytes, the lowest bits are 32 elements, the next ones the next 32, and so on.
BITS = BlockField(np.dtype(np.uint8), _read_bits, _write_bits, "bits")


def _read_trits(data: Bytes) -> Bytes:
    """A byte is a fraction of 256 whose base-3 digits are five trits; the last four bytes have four."""
    codes, at = np.empty((len(data), 256), np.uint8), 0
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        digits = data[:, start:stop].copy()
        for _ in range(count):
            # The integer part of three times the fraction.
            np.add(digits >= 86, digits >= 171, out=codes[:, at : at + stop - start], dtype=np.uint8)
            digits *= 3  # wraps: the fraction that is left
            at += stop - start
    fours = codes.view(np.uint32)
    fours |= fours >> 6
    fours |= fours >> 12
    return fours.astype(np.uint8)


def _no_trits(leaf: Bytes) -> Bytes:
    raise NotImplementedError("TQ1_0 is not written; TQ2_0 holds the same values")


TRITS = BlockField(np.dtype(np.uint8), _read_trits, _no_trits)


def e2m1(width: int) -> BlockField:
    """4-bit codes as `nibbles`. E2M1 has a negative zero, code 8; ggml has zero in its place."""
    plain = nibbles(width)

    def read(data: Bytes) -> Bytes:
        codes = data.view(np.uint64)
        low = codes & np.uint64(0x7777777777777777)
        nonzero = (low + np.uint64(0x7777777777777777)) & np.uint64(0x8888888888888888)
        return plain.read((low | codes & nonzero).view(np.uint8))

    return BlockField(np.dtype(np.uint8), read, plain.write)


def _read_signs(data: Bytes) -> Bytes:
    """A bit of 0 or 1 is the code 0 or 2, for -1 and 1."""
    pairs = data.astype(np.uint16)
    for shift, mask in ((4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        pairs = (pairs | pairs << shift) & mask
    return (pairs << 1).view(np.uint8)


def _write_signs(leaf: Bytes) -> Bytes:
    pairs = np.ascontiguousarray(leaf).view(np.uint16)
    if np.any(pairs & 0x5555):
        raise ValueError("Q1_0 has the codes 0 and 2 alone, for -1 and 1")
    pairs = pairs >> 1
    for shift, mask in ((1, 0x3333), (2, 0x0F0F), (4, 0x00FF)):
        pairs = (pairs | pairs >> shift) & mask
    return pairs.astype(np.uint8)


SIGNS = BlockField(np.dtype(np.uint8), _read_signs, _write_signs)


# --- scales ---


def _read_exponents(data: Bytes) -> np.ndarray:
    if np.any(data == 255):
        raise ValueError("a block has the scale 255, which is NaN in the MX formats and 2 ** 128 in ggml")
    return data.view(ml_dtypes.float8_e8m0fnu)


def _read_e4m3(data: Bytes) -> np.ndarray:
    """E4M3 without a sign; ggml has zero in place of NaN."""
    if np.any(data == 255):
        raise ValueError("a block has the scale 255, which is NaN in E4M3 and 480 in ggml")
    low = data & 127
    return np.where(low == 127, 0, low).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


UNSIGNED_E4M3 = BlockField(np.dtype(ml_dtypes.float8_e4m3fn), _read_e4m3, lambda leaf: leaf.view(np.uint8))
EXPONENTS = BlockField(np.dtype(ml_dtypes.float8_e8m0fnu), _read_exponents, lambda leaf: leaf.view(np.uint8))

# A zero point that every block has, and that is not in the file.
ONES = BlockField(np.dtype(np.uint8), np.ones_like, np.zeros_like)
LOW_NIBBLES = BlockField(np.dtype(np.uint8), lambda data: data & 15, lambda leaf: leaf & 15)
HIGH_NIBBLES = BlockField(np.dtype(np.uint8), lambda data: data >> 4, lambda leaf: leaf << 4)


_LOW, _NEXT = np.uint32(0x0F0F0F0F), np.uint32(0x30303030)  # bits 0 to 3, and bits 4 and 5, of four bytes


def _six_bits(word: int, shift: int) -> BlockField:
    """Eight numbers of 6 bits in three words of four bytes: four in `word`, beside the high bits of the other four.

    The low bits of these are in the last word, beside those of another eight numbers.
    """

    def read(data: Bytes) -> Bytes:
        words = data.view(np.uint32)
        first, rest = words[:, word], words[:, 2] >> shift
        return np.stack([first & (_LOW | _NEXT), rest & _LOW | (first >> 2) & _NEXT], axis=1).view(np.uint8)

    def write(leaf: Bytes) -> Bytes:
        first, rest = np.ascontiguousarray(leaf).view(np.uint32).T
        out = np.zeros((len(leaf), 3), np.uint32)
        out[:, word] = first & (_LOW | _NEXT) | (rest & _NEXT) << 2
        out[:, 2] = (rest & _LOW) << shift
        return out.view(np.uint8)

    return BlockField(np.dtype(np.uint8), read, write, f"six_bits_{word}")


K_SCALES, K_MINIMA = _six_bits(0, 0), _six_bits(1, 4)


def _read_q3(data: Bytes) -> np.ndarray:
    words = data.view(np.uint32)
    high = words[:, 2]
    low = (words[:, 0], words[:, 1], words[:, 0] >> 4, words[:, 1] >> 4)
    fours = [part & _LOW | (high >> 2 * i << 4) & _NEXT for i, part in enumerate(low)]
    return np.stack(fours, axis=1).view(np.int8) - np.int8(32)


def _write_q3(leaf: np.ndarray) -> Bytes:
    a, b, c, d = (leaf + np.int8(32)).view(np.uint32).T
    low = [first & _LOW | (second & _LOW) << 4 for first, second in ((a, c), (b, d))]
    high = (a & _NEXT) >> 4 | (b & _NEXT) >> 2 | c & _NEXT | (d & _NEXT) << 2
    return np.stack([*low, high], axis=1).view(np.uint8)


# Sixteen numbers of 6 bits in three words, 32 for zero: two words of low bits, one of high ones.
Q3_SCALES = BlockField(np.dtype(np.int8), _read_q3, _write_q3)
_TWOS = np.arange(0, 8, 2, dtype=np.uint8)


def _read_iq4(data: Bytes) -> np.ndarray:
    low = np.stack([data[:, 2:] & 15, data[:, 2:] >> 4], axis=2).reshape(-1, 8)
    high = (data[:, :2, None] >> _TWOS & 3).reshape(-1, 8)
    return (low | high << 4).view(np.int8) - np.int8(32)


def _write_iq4(leaf: np.ndarray) -> Bytes:
    codes = (leaf + np.int8(32)).view(np.uint8)
    high = np.bitwise_or.reduce((codes.reshape(-1, 2, 4) >> 4 & 3) << _TWOS, axis=2)
    return np.concatenate([high, codes[:, ::2] & 15 | codes[:, 1::2] << 4], axis=1)


# Eight numbers of 6 bits in 6 bytes, 32 for zero: two bytes of high bits, four of low ones.
IQ4_SCALES = BlockField(np.dtype(np.int8), _read_iq4, _write_iq4)
