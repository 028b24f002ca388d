"""How far a long piece of work is: the function that is told, a count of bytes for it, and a bar that shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from .text import printable

Progress = Callable[[str, int, int], object]  # (name of an array, bytes done, bytes in all)


@contextlib.contextmanager
def progress_bar(what: str | None = None, stream: TextIO | None = None) -> Iterator[Progress]:
    """A bar of rich, labelled `what` or the name of the array at hand; on standard output unless `stream` is given."""
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError:
        raise ImportError("a progress bar needs rich: pip install rich") from None
    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(file=stream), transient=what is not None) as bar:
        task = bar.add_task(what or "", total=None)

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, description=what or printable(name), completed=done, total=total)

        yield show


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
