"""Names, numbers and tables as text for readers, and data as JSON; every package prints with these."""

from __future__ import annotations

import html
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence

UNITS = ("B", "kB", "MB", "GB", "TB")


def printable(text: str) -> str:
    """`text` on one line: letters that end a line, move a cursor or turn the writing direction are shown as escapes.

    Names in a file are whatever its author wrote, so everything that is printed goes through here.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if unicodedata.category(letter) == "Zs" else letter.encode("unicode_escape").decode()


def escaped(text: str) -> str:
    """`printable` text for a page."""
    return html.escape(printable(text))


def in_bytes(count: int) -> str:
    """A number of bytes with three digits, in units of 1000.

    >>> from eformer._src.text import in_bytes
    >>> in_bytes(1_234_567)
    '1.23 MB'
    """
    last = len(UNITS) - 1
    power = next((power for power in range(last) if count / 1000**power < 999.5), last)
    value = count / 1000**power
    digits = 0 if not power or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {UNITS[power]}"


def as_bits(bits: float) -> str:
    return "" if math.isnan(bits) else f"{bits:.2f}"


def as_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1, total: Sequence[str] = ()
) -> list[str]:
    """Lines of columns under a header, with a `total` below: the first `words` are aligned left, the rest right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, *([total] if total else []), strict=True)]
    ruler = ["-" * width for width in widths]
    return [
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, ruler, *rows, *([ruler, total] if total else []))
    ]


def as_json(data: object) -> str:
    """`data` as strict JSON, with null for a float that is not finite."""
    return json.dumps(_finite(data), indent=1, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
