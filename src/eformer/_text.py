"""Numbers and names as text for readers; every package prints with these."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence


def printable(text: str) -> str:
    """`text` on one line: letters that end a line, move a cursor or turn the writing direction are shown as escapes.

    Names in a file are whatever its author wrote, so everything that is printed goes through here.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if unicodedata.category(letter) == "Zs" else letter.encode("unicode_escape").decode()


def in_bytes(count: int) -> str:
    """A number of bytes with three digits, in units of 1000.

    >>> from eformer._text import in_bytes
    >>> in_bytes(1_234_567)
    '1.23 MB'
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"


def as_bits(bits: float) -> str:
    return "" if math.isnan(bits) else f"{bits:.2f}"


def as_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
