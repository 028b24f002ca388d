"""Dense arrays as GGUF's blocks: `float32[blocks, elements]` becomes `uint8[blocks, bytes]`, in NumPy.

Q8_0, Q4_0, Q4_1 and TQ2_0 have the bytes that the package `gguf` writes. Scales are float16. Of Q4_K and Q6_K, the
scale and minimum of each block are found by least squares, then those of superblocks; ggml searches in a way of its
own, so its bytes differ from ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from eformer._src.checkpoint.gguf.types import GROUPED


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


def _encode_q4_1(x: np.ndarray) -> np.ndarray:
    low, high = np.min(x, axis=1, keepdims=True), np.max(x, axis=1, keepdims=True)
    scale = (high - low) / np.float32(15)
    codes = np.clip(np.floor(_scaled(x - low, scale) + np.float32(0.5)), 0, 15).astype(np.uint8)
    return np.concatenate([_bytes_of(scale), _bytes_of(low), codes[:, :16] | (codes[:, 16:] << 4)], axis=1)


def _encode_tq2_0(x: np.ndarray) -> np.ndarray:
    scale = np.max(np.abs(x), axis=1, keepdims=True)
    codes = (_rounded(_scaled(x, scale)) + 1).astype(np.uint8).reshape(-1, 2, 4, 32)
    packed = codes[:, :, 0] | (codes[:, :, 1] << 2) | (codes[:, :, 2] << 4) | (codes[:, :, 3] << 6)
    return np.concatenate([packed.reshape(-1, 64), _bytes_of(scale)], axis=1)


# Steps, more or less than a block has, into which its range is divided to begin with.
TRIED_4, TRIED_6 = (-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6), (-2.0, -1.0, 0.0, 1.0)


def encode_q4_k(x: np.ndarray) -> np.ndarray:
    """`d * scale * code - dmin * minimum`, with codes of 4 bits, and scales and minima of 6."""
    x, bad = _finite_blocks(x, 32)
    scale, offset = _fitted_lines(x)
    (d, scales), (dmin, minima) = _divided(scale, 63), _divided(-offset, 63)

    def rounded(d: np.ndarray, dmin: np.ndarray) -> tuple[np.ndarray, ...]:
        codes = _codes(x + dmin * minima, d * scales, 0, 15)
        return d, dmin, codes, _error(x, d * scales * codes - dmin * minima, (1, 2))

    first = rounded(d, dmin)
    # For these codes, the superblock is a plane over `scales * codes` and `minima`: two unknowns, two equations.
    a, b = scales * first[2], np.broadcast_to(-minima, x.shape)
    aa, ab, bb, ax, bx = (_sum(u * v, (1, 2)) for u, v in ((a, a), (a, b), (b, b), (a, x), (b, x)))
    unknown = aa * bb - ab * ab
    solved = _ratio(ax * bb - bx * ab, unknown), _ratio(bx * aa - ax * ab, unknown)
    again = rounded(*(np.where(new > 0, _half(new), old) for new, old in zip(solved, first, strict=False)))
    d, dmin, codes, _ = (np.where(again[-1] < first[-1], new, old) for new, old in zip(again, first, strict=True))
    leaves = {"scale": scales.astype(np.uint8), "offset": minima.astype(np.uint8), "offset_scale": -dmin}
    return _joined("Q4_K", codes, {**leaves, "scale_scale": np.where(bad, np.nan, d)})


def encode_q6_k(x: np.ndarray) -> np.ndarray:
    """`d * scale * (code - 32)`, with codes of 6 bits and scales of 8."""
    x, bad = _finite_blocks(x, 16)
    d, scales = _divided(_fitted_scales(x), 127)

    def rounded(d: np.ndarray) -> tuple[np.ndarray, ...]:
        codes = _codes(x, d * scales, -32, 31)
        return d, codes, _error(x, d * scales * codes, (1, 2))

    first = rounded(d)
    steps = scales * first[1]
    solved = _half(_ratio(_sum(steps * x, (1, 2)), _sum(steps * steps, (1, 2))))
    again = rounded(np.where(solved > 0, solved, d))
    d, codes, _ = (np.where(again[-1] < first[-1], new, old) for new, old in zip(again, first, strict=True))
    leaves = {"scale": scales.astype(np.int8), "scale_scale": np.where(bad, np.nan, d)}
    return _joined("Q6_K", codes + 32, leaves)


def _finite_blocks(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`x` of shape (superblocks, blocks, size), zero where it is not finite, and the superblocks where it is not."""
    blocks = x.reshape(len(x), -1, size)
    finite = np.isfinite(blocks)
    return np.where(finite, blocks, 0), ~np.all(finite, axis=(1, 2), keepdims=True)


def _fitted_lines(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the offset of each block, not above 0, with 4-bit codes that bring it nearest."""
    low = np.minimum(np.min(x, axis=2, keepdims=True), 0)
    span = np.max(x, axis=2, keepdims=True) - low
    best = span / 15, low, np.full_like(low, np.inf)
    total = _sum(x, 2)
    for more in TRIED_4:
        codes = _codes(x - low, span / np.float32(15 + more), 0, 15)
        q, qq, qx = _sum(codes, 2), _sum(codes * codes, 2), _sum(codes * x, 2)
        scale = _ratio(x.shape[2] * qx - q * total, x.shape[2] * qq - q * q)
        offset = (total - scale * q) / x.shape[2]
        scale, offset = np.where(offset > 0, _ratio(qx, qq), scale), np.minimum(offset, 0)
        scale = np.maximum(scale, 0)
        found = scale, offset, _error(x, scale * codes + offset, 2)
        best = tuple(np.where(found[-1] < best[-1], new, old) for new, old in zip(found, best, strict=True))
    return best[0], best[1]


def _fitted_scales(x: np.ndarray) -> np.ndarray:
    """The scale of each block, of either sign, with codes from -32 to 31 that bring it nearest."""
    peak = np.take_along_axis(x, np.argmax(np.abs(x), axis=2, keepdims=True), axis=2)
    best = peak / -32, np.full_like(peak, np.inf)
    for more in TRIED_6:
        codes = _codes(x, peak / np.float32(-32 - more), -32, 31)
        scale = _ratio(_sum(codes * x, 2), _sum(codes * codes, 2))
        found = scale, _error(x, scale * codes, 2)
        best = tuple(np.where(found[-1] < best[-1], new, old) for new, old in zip(found, best, strict=True))
    return best[0]


def _divided(scale: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """A float16 number for each superblock, and `scale` in integers of it, up to `largest`."""
    d = _half(np.max(np.abs(scale), axis=1, keepdims=True) / largest)
    return d, _codes(scale, d, -largest, largest)


def _codes(x: np.ndarray, step: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(x * _ratio(np.ones_like(step), step)), low, high)


def _ratio(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """`x / by`; 0 where `by` is."""
    return np.divide(x, by, where=by != 0, out=np.zeros_like(x))


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def _sum(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    return np.sum(x, axis=axis, keepdims=True)


def _error(x: np.ndarray, found: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    off = found - x
    return _sum(off * off, axis)


def _joined(name: str, codes: np.ndarray, leaves: dict[str, np.ndarray]) -> np.ndarray:
    """The blocks of these codes and scales."""
    codes = codes.astype(np.uint8).reshape(-1, 256)
    low = codes & 15
    planes = {"packed": low[:, ::2] | low[:, 1::2] << 4}
    if name == "Q6_K":
        high = codes >> 4
        planes["high"] = high[:, ::4] | high[:, 1::4] << 2 | high[:, 2::4] << 4 | high[:, 3::4] << 6
    halves = {leaf: leaves[leaf].astype(np.float16) for leaf in leaves if leaf.endswith("_scale")}
    return GROUPED[name].joined({**planes, **leaves, **halves})


# The function, and the largest magnitude of a block in units of its largest float16.
ENCODERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "Q8_0": (_encode_q8_0, 127),
    "Q4_0": (_encode_q4_0, 8),
    "Q4_1": (_encode_q4_1, 1),
    "Q4_K": (encode_q4_k, 32),
    "Q6_K": (encode_q6_k, 2048),
    "TQ2_0": (_encode_tq2_0, 1),
}
