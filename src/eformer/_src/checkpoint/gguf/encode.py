"""Dense arrays as GGUF's blocks: `float32[blocks, elements]` becomes `uint8[blocks, bytes]`, in NumPy.

Q8_0, Q4_0, Q4_1 and TQ2_0 have the bytes that the package `gguf` writes. Scales are float16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .k_quants import encode_q4_k, encode_q6_k


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


# The function, and the largest magnitude of a block in units of its largest float16.
ENCODERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "Q8_0": (_encode_q8_0, 127),
    "Q4_0": (_encode_q4_0, 8),
    "Q4_1": (_encode_q4_1, 1),
    "Q4_K": (encode_q4_k, 32),
    "Q6_K": (encode_q6_k, 2048),
    "TQ2_0": (_encode_tq2_0, 1),
}
