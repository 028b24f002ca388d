"""Ctrl-C that is never lost, and never waits: an import makes another error of it, a destructor swallows it, and a call
that compiles does not hear it before its end.

In a process of its own, a command ends at once while it imports. Later KeyboardInterrupt is raised as ever; if that has
not ended the command soon, a thread removes what was begun, and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

INTERRUPTED = 130  # 128 and the number of the signal, as shells have it
LINE = "interrupted; nothing is left half-written"
PATIENCE = 0.25  # seconds that an interrupt has to end the command

_pressed = threading.Event()
_leaving = threading.RLock()
_begun: list[Callable[[], object]] = []  # what removes what was begun


@contextlib.contextmanager
def undone_by(remove: Callable[[], object]) -> Iterator[None]:
    """A block during which `remove` is called if the process is to end at once."""
    _begun.append(remove)
    try:
        yield
    finally:
        _begun.remove(remove)


def leave(*, said: bool = False) -> NoReturn:
    """End the process: whatever else runs in it is not waited for. `said` is whether it is known why."""
    with _leaving:  # for good: of two threads the second waits here for the end
        for remove in tuple(_begun):  # files before the folders that were made for them
            with contextlib.suppress(OSError):
                remove()
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which a progress bar hides
            print(shown if said else f"{shown}eformer: {LINE}\n", end="", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """A block in which Ctrl-C ends the process; for a time in which nothing is begun."""
    with _handled_by(lambda *_: leave()):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A block after which Ctrl-C raises KeyboardInterrupt, and not within it."""
    with _handled_by(lambda *_: _pressed.set()):
        yield
        check_interrupt()


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """A block in which Ctrl-C raises KeyboardInterrupt as ever, and `check_interrupt` does again if that got lost."""
    with _handled_by(_raise):
        yield


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """A block in which Ctrl-C raises KeyboardInterrupt; if that has not ended it in time, the process ends."""
    with _handled_by(_raise_once), contextlib.ExitStack() as stack:
        if signal.getsignal(signal.SIGINT) is _raise_once:  # else somebody else hears it
            heard, told = os.pipe()
            os.set_blocking(told, False)
            before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, before)
            ended = threading.Event()
            stack.callback(ended.set)
            threading.Thread(target=_watch, args=(heard, ended), daemon=True).start()
        yield


def _watch(heard: int, ended: threading.Event) -> None:
    while os.read(heard, 1) != bytes([signal.SIGINT]):
        pass
    if not ended.wait(PATIENCE):
        leave()


def check_interrupt() -> None:
    if _pressed.is_set():
        raise KeyboardInterrupt


def _raise(*_: object) -> None:
    _pressed.set()
    raise KeyboardInterrupt


def _raise_once(*_: object) -> None:
    if not _pressed.is_set():  # else it is being answered, and must not be disturbed
        _raise()


@contextlib.contextmanager
def _handled_by(handler: Callable[..., None]) -> Iterator[None]:
    """Python lets its main thread alone hear signals; a handler that someone else set stays."""
    free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _pressed.clear()
