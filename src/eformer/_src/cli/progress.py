"""How far a long command is, on standard error: a bar on a terminal that has rich, else plain lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from eformer._src.progress import Progress, progress_bar
from eformer._src.text import in_bytes, printable

from .interrupt import check_interrupt

SECONDS = 1.0  # between two lines
ENOUGH = 0.05  # done, before the time left is told: the first arrays wait for compilation


@contextlib.contextmanager
def showing(what: str, stream: TextIO) -> Iterator[Progress]:
    """A function to call as bytes are done; it shows rate and time left, and raises if Ctrl-C got lost on the way."""
    with contextlib.ExitStack() as stack:
        show = lines(what, stream)
        if stream.isatty():
            with contextlib.suppress(ImportError):  # without rich
                show = stack.enter_context(progress_bar(what, stream))
        yield lambda name, done, total: (check_interrupt(), show(name, done, total))


def stage(text: str, stream: TextIO) -> None:
    """Print a line for the next part of work that is too short for a bar."""
    check_interrupt()
    print(printable(text), file=stream, flush=True)


def lines(what: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Progress:
    """A function that prints a line each second, and one at the end."""
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
        print(f"{what} {share:4.0%}  {in_bytes(done)} of {in_bytes(total)}{rest}", file=stream, flush=True)

    return show
