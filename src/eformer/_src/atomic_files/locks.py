"""Locks between processes and threads; they end with the holder, even if it is killed."""

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

SECONDS = 60.0  # that a save waits while others put their files in place, which takes milliseconds
PAUSE = 0.002


class OpenFile:
    """A file that stays open until it is closed or garbage collected, as after an interrupt."""

    handle = -1  # when it is closed

    def __init__(self, path: Path, flags: int = 0) -> None:
        safely = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link to elsewhere, no pipe that waits
        self.path = path
        try:
            self.handle = os.open(path, os.O_RDWR | safely | flags, 0o666)
        except PermissionError:
            if flags & os.O_EXCL or not os.path.lexists(path):
                raise
            self.handle = os.open(path, os.O_RDONLY | safely)  # another user's; enough to hold its lock

    def hold(self) -> bool | None:
        """Lock the file until it is closed: False if another has it, None if the file system has no locks."""
        if fcntl is None:
            return None
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def has_its_name(self) -> bool:
        """Whether the file was neither removed nor replaced."""
        try:
            return os.path.samestat(os.fstat(self.handle), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = close


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """A block for one thread of one process at a time; False if the file system has no locks.

    The file `path` exists during the block. One that a killed process left is taken over.
    """
    file = _acquired(path)
    try:
        yield file is not None
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # another user's, in a folder where that matters
                path.unlink(missing_ok=True)  # while it is held: waiting processes find it gone, and make another
            file.close()


def _acquired(path: Path) -> OpenFile | None:
    deadline = time.monotonic() + SECONDS
    while True:
        file = OpenFile(path, os.O_CREAT)
        held = file.hold()
        if held and file.has_its_name():
            return file
        file.close()
        if held is None:
            path.unlink(missing_ok=True)
            return None
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has held {path} for {SECONDS:.0f} seconds, which takes a moment else")
        time.sleep(PAUSE)
