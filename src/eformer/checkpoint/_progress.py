"""Progress of long reads and writes, in bytes."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], object]  # (name, bytes done, bytes in all)


class Meter:
    """Counts bytes, and reports them to `progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        if progress is not None and not callable(progress):
            raise TypeError(f"`progress` must be None or a function of name, done and total, got {progress!r}")
        self.progress, self.total, self.done = progress, total, 0

    def add(self, name: str, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(name, self.done, self.total)
