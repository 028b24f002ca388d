"""Locks between processes and threads, which end with whoever holds them, also if it is killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SECONDS = 60.0  # that a save waits for others to put their files in place, which takes milliseconds
PAUSE = 0.002


def hold(handle: int) -> bool | None:
    """Lock an open file until it is closed: False if another has it, None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """A block that one thread of one process is in at a time; False where the file system has no locks.

    The file `path` is there during the block. One that a killed process left is taken over.
    """
    handle = _acquired(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            path.unlink(
                missing_ok=True
            )  # while it is held: whoever waits for it finds that it is gone, and makes another
            os.close(handle)


def _acquired(path: Path) -> int | None:
    deadline = time.monotonic() + SECONDS
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        held = hold(handle)
        if held and is_at(handle, path):
            return handle
        os.close(handle)
        if held is None:
            path.unlink(missing_ok=True)
            return None
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has held {path} for {SECONDS:.0f} seconds, which takes a moment else")
        time.sleep(PAUSE)


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(handle), there)
