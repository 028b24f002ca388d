"""How far a long command is, on standard error: a bar of rich on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from eformer._text import in_bytes, printable

from ._interrupt import check_interrupt

Progress = Callable[[str, int, int], object]  # (name, bytes done, bytes in all)
SECONDS = 1.0  # between two lines
ENOUGH = 0.05  # done, to say how long the rest takes: the first arrays wait for compilation


@contextlib.contextmanager
def showing(what: str, stream: TextIO) -> Iterator[Progress]:
    """A function to call as bytes are done; rate and time left are shown. It raises if Ctrl-C got lost on the way."""

    def checked(show: Progress) -> Progress:
        return lambda name, done, total: (check_interrupt(), show(name, done, total))

    if stream.isatty():
        with contextlib.suppress(ImportError):
            import rich.progress  # noqa: F401  # is it there?

            with _bar(what, stream) as show:
                yield checked(show)
            return
    yield checked(lines(what, stream))


def stage(text: str, stream: TextIO) -> None:
    """A line for the next part of what is too short for a bar."""
    check_interrupt()
    print(printable(text), file=stream, flush=True)


@contextlib.contextmanager
def _bar(what: str, stream: TextIO) -> Iterator[Progress]:
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total)


def lines(what: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Progress:
    """A line each second, and one at the end."""
    start = last = clock()

    def show(name: str, done: int, total: int) -> None:
        nonlocal last
        del name
        now = clock()
        if now - last < SECONDS and done < total:
            return
        last = now
        rate = done / max(now - start, 1e-9)
        share = done / total if total else 1.0
        time = f"{now - start:.1f} s" if done >= total else f"{(total - done) / rate:.0f} s left" if rate else ""
        rest = f", {in_bytes(int(rate))}/s, {time}" if share >= ENOUGH else ""
        print(
            f"{what} {share:4.0%}  {in_bytes(done)} of {in_bytes(total)}{rest}",
            file=stream,
            flush=True,
        )

    return show
