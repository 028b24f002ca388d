"""Codes of a few bits in words of 32, as other projects pack them, and in planes of bytes, as `ArrayGrouped` does.

All is NumPy: a file is unpacked on the host. Beside their results, these functions take memory of about the size of the
packed words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eformer._src.kernels.grouped import PLANES

WORD = 32  # bits


def unpack_fields(
    words: np.ndarray, bits: int, axis: int, count: int, order: Sequence[int] | None = None
) -> np.ndarray:
    """`count` uint8 codes along `axis`; each 32-bit word holds `32 // bits` of them, the rest of its bits is unused.

    Code j of a word is in field `order[j]`, by default j: field 0 is in the lowest bits.
    """
    fields = range(WORD // bits) if order is None else order
    return _unpacked(words, bits, axis, count, [field * bits for field in fields], 1)


def unpack_dense(words: np.ndarray, bits: int, count: int, axis: int = -1) -> np.ndarray:
    """`count` uint8 codes along `axis`, code i at bit `i * bits` of all words as one string, the lowest bit first."""
    if WORD % bits == 0:
        return unpack_fields(words, bits, axis, count)
    return _unpacked(words, bits, axis, count, [i * bits for i in range(WORD)], bits)


def pack_dense(codes: np.ndarray, bits: int, axis: int = -1) -> np.ndarray:
    """The words that `unpack_dense` takes, as uint32; unused bits are zero."""
    codes = np.moveaxis(codes, axis, -1)
    count = codes.shape[-1]
    words = np.zeros((*codes.shape[:-1], dense_words(count, bits)), np.uint32)
    for i in range(min(WORD, count)):
        word, start = divmod(i * bits, WORD)
        part = codes[..., i::WORD].astype(np.uint32)
        words[..., word::bits][..., : part.shape[-1]] |= part << np.uint32(start)
        if start + bits > WORD:
            words[..., word + 1 :: bits][..., : part.shape[-1]] |= part >> np.uint32(WORD - start)
    return np.moveaxis(words, -1, axis)


def dense_words(count: int, bits: int) -> int:
    """How many words `count` codes take without unused bits between them."""
    return -(-count * bits // WORD)


def _unpacked(words: np.ndarray, bits: int, axis: int, count: int, starts: Sequence[int], period: int) -> np.ndarray:
    """Codes that start at the bits `starts` of each `period` words. A code may go on in the next word."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    codes = np.empty((*words.shape[:-1], count), np.uint8)
    mask = np.uint32(2**bits - 1)
    for i, bit in enumerate(starts[:count]):
        word, start = divmod(bit, WORD)
        into = codes[..., i :: len(starts)]
        part = words[..., word::period][..., : into.shape[-1]] >> np.uint32(start)
        if start + bits > WORD:
            part |= words[..., word + 1 :: period][..., : into.shape[-1]] << np.uint32(WORD - start)
        into[:] = part & mask
    return np.moveaxis(codes, -1, axis)


# --- the leaves of `ArrayGrouped` ---


def plane_shapes(shape: Sequence[int], bits: int, axis: int = -1) -> dict[str, tuple[int, ...]]:
    """The shapes of `packed` and, if codes of `bits` bits have one, of `high`."""
    made = {}
    for name, width in zip(("packed", "high"), PLANES[bits], strict=False):
        sizes = list(shape)
        sizes[axis] = -(-sizes[axis] * width // 8)
        made[name] = tuple(sizes)
    return made


def pack_planes(codes: np.ndarray, bits: int, axis: int = -1) -> dict[str, np.ndarray]:
    """uint8 codes as the leaves `packed` and `high`; unused bits are zero."""
    planes, below = {}, 0
    codes = np.moveaxis(codes, axis, -1)
    for (name, shape), width in zip(plane_shapes(codes.shape, bits).items(), PLANES[bits], strict=True):
        plane, each = np.zeros(shape, np.uint8), 8 // width
        for i in range(min(each, codes.shape[-1])):
            part = codes[..., i::each] >> np.uint8(below) & np.uint8(2**width - 1)
            plane[..., : part.shape[-1]] |= part << np.uint8(i * width)
        planes[name] = np.moveaxis(plane, -1, axis)
        below += width
    return planes


def dense_of_planes(planes: Sequence[np.ndarray], bits: int, count: int) -> np.ndarray:
    """The words of `pack_dense` for the codes in planes, as uint32."""
    if len(planes) > 1:
        return np.ascontiguousarray(pack_dense(unpack_planes(planes, bits, count), bits))
    missing = dense_words(count, bits) * 4 - planes[0].shape[-1]  # the bytes are the same
    padded = np.pad(planes[0], [(0, 0)] * (planes[0].ndim - 1) + [(0, missing)])
    return padded.view(np.uint32)


def unpack_planes(planes: Sequence[np.ndarray], bits: int, count: int) -> np.ndarray:
    """The `count` uint8 codes along the last axis that `pack_planes` has packed."""
    codes, below = np.zeros((*planes[0].shape[:-1], count), np.uint8), 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        each = 8 // width
        for i in range(min(each, count)):
            into = codes[..., i::each]
            part = plane[..., : into.shape[-1]] >> np.uint8(i * width) & np.uint8(2**width - 1)
            into |= part << np.uint8(below)
        below += width
    return codes
