"""Ctrl-C that is never lost and never waits.

Python alone may lose it: an import turns KeyboardInterrupt into another error, a destructor swallows it, and a call
that compiles does not notice it before its end. Here, Ctrl-C ends the process at once while it imports. Later
KeyboardInterrupt is raised as usual; if that has not ended the command soon, a thread removes unfinished files and ends
the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

INTERRUPTED = 130  # 128 plus the number of the signal, as shells count
LINE = "interrupted; nothing is left half-written"
PATIENCE = 0.25  # seconds that an interrupt has to end the command

_pressed = threading.Event()
_leaving = threading.RLock()
_undo: list[Callable[[], object]] = []  # functions that remove unfinished files


@contextlib.contextmanager
def undone_by(remove: Callable[[], object]) -> Iterator[None]:
    """During this block, `remove` is called if the process has to end at once."""
    _undo.append(remove)
    try:
        yield
    finally:
        _undo.remove(remove)


def leave(*, printed: bool = False) -> NoReturn:
    """End the process without waiting for anything that runs in it; `printed`: the reason was printed already."""
    with _leaving:  # never released: a second thread waits here for the end
        for remove in tuple(_undo):  # files before the folders that were made for them
            with contextlib.suppress(OSError):
                remove()
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which a progress bar hides
            print(shown if printed else f"{shown}eformer: {LINE}\n", end="", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """During this block, Ctrl-C waits; KeyboardInterrupt is raised after it."""
    with handled_by(lambda *_: _pressed.set()):
        yield
        check_interrupt()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """During this block, Ctrl-C raises KeyboardInterrupt; if the block does not end soon then, the process does."""
    with handled_by(_raise_once), contextlib.ExitStack() as stack:
        if signal.getsignal(signal.SIGINT) is _raise_once:  # else somebody else handles it
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


def raise_interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt; if that gets lost, `check_interrupt` raises it again."""
    _pressed.set()
    raise KeyboardInterrupt


def _raise_once(*_: object) -> None:
    if not _pressed.is_set():  # else it is being handled already
        raise_interrupt()


@contextlib.contextmanager
def answered_by() -> Iterator[threading.Event]:
    """During this block, Ctrl-C sets the event that is yielded, and ends nothing; the second one ends the process."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def press(*_: object) -> None:
        if pressed.is_set():
            leave()
        pressed.set()

    waking, before = signal.set_wakeup_fd(-1), signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)


@contextlib.contextmanager
def handled_by(handler: Callable[..., None]) -> Iterator[None]:
    """During this block, `handler` handles Ctrl-C: in the main thread, and only if nobody else has set a handler."""
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
