"""What a command gives back: the same facts for readers and for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    text: str
    data: dict[str, Any]

    def to_json(self) -> str:
        """Strict JSON: null for what is no finite number."""
        return json.dumps(_finite(self.data), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """What a file says may hold line ends, or move the cursor of a terminal: blanks stand for these."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Columns under a header: the first `words` stand to the left, the others, which are numbers, to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
