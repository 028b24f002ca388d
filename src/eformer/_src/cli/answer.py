"""What a command gives back: the same facts for readers and for machines."""

from __future__ import annotations

from collections.abc import Iterable

from eformer._src.text import as_json, printable


class Answer:
    """Lines for readers, printable whatever names they hold, and data for machines."""

    def __init__(self, lines: Iterable[str], data: dict[str, object]) -> None:
        self.lines, self.data = tuple(map(printable, lines)), data

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> str:
        return as_json(self.data)
