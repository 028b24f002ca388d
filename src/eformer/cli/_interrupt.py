"""Ctrl-C that is never lost: an import makes another error of it, a destructor swallows it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

_pressed = threading.Event()


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


def check_interrupt() -> None:
    if _pressed.is_set():
        raise KeyboardInterrupt


def _raise(*_: object) -> None:
    _pressed.set()
    raise KeyboardInterrupt


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
