"""Showing how far the work on a model is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ._text import printable

Progress = Callable[[str, int, int], object]  # (path, bytes done, bytes in all)


@contextlib.contextmanager
def showing(progress: Progress | bool | None) -> Iterator[Progress]:
    """A function to call after each leaf: `progress` itself, a bar for True, else one that does nothing."""
    if callable(progress):
        yield progress
    elif progress is True:
        with _bar() as show:
            yield show
    elif progress is None or progress is False:
        yield lambda path, done, total: None
    else:
        raise TypeError(f"`progress` must be None, True or a function of path, done and total, got {progress!r}")


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    try:
        from rich import progress as rich
    except ImportError:
        raise ImportError('`progress=True` needs rich: pip install "eformer[cli]"') from None
    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns) as bar:
        task = bar.add_task("quantizing", total=None)

        def show(path: str, done: int, total: int) -> None:
            bar.update(task, description=printable(path), completed=done, total=total)

        yield show
