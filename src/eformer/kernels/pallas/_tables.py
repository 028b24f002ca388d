"""What the sixteen values of half a byte stand for, as 32-bit words of two bfloat16 numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from eformer.kernels import reference

VALUES_PER_BYTE = {"int8": 1, "nf4": 2, "ternary": 4}


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)


def nibble_words(format: str) -> np.ndarray:
    """int32 (2, 16): the words that the high and the low half of a byte select.

    "nf4": the first number of the word, or the second; a byte's word is both together. "ternary": a word of its own,
    of which the low half of a byte has the first.
    """
    if format == "nf4":
        first = _bits(reference.NF4_CODES)
        words = np.stack([first, first << 16])
    else:
        code = np.arange(16)
        word = _bits(reference.TERNARY_CODES[code & 3]) | _bits(reference.TERNARY_CODES[code >> 2]) << 16
        words = np.stack([word, word])
    return words.astype(np.uint32).view(np.int32)
