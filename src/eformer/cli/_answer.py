"""What a command gives back: the same facts for readers and for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from eformer._text import printable


class Answer:
    """Lines for readers, each of them printable whatever names it holds, and data for machines."""

    def __init__(self, lines: Iterable[str], data: dict[str, Any]) -> None:
        self.lines, self.data = tuple(map(printable, lines)), data

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> str:
        """Strict JSON: null for what is no finite number."""
        return json.dumps(_finite(self.data), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> list[str]:
    """Lines of columns under a header: the first `words` stand to the left, the others, numbers, to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return [
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
