"""Memory-mapped files whose pages can be dropped again, and `CheckpointError`."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import stat
from io import BufferedReader
from pathlib import Path

import numpy as np

from eformer._src.text import printable

StrPath = str | os.PathLike[str]

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class CheckpointError(ValueError):
    """A checkpoint that contradicts itself; the message names the file, the tensor and what is wrong."""

    def __init__(self, what: str, *, file: str | None = None, tensor: str | None = None) -> None:
        # A hostile file chooses its names: they are quoted, and cut before they fill the screen. The rest is made
        # printable, because a path may hold anything too.
        place = [] if file is None else [file]
        if tensor is not None:
            place.append(f"tensor {tensor[:100]!r}")
        super().__init__(printable(": ".join([*place, what])))
        self.what, self.file, self.tensor = what, file, tensor

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(CheckpointError, self.what, file=self.file, tensor=self.tensor), ()


def check_plain(path: StrPath, mode: int | None = None) -> None:
    """Raise a CheckpointError if `path` exists and is not a plain file or a link to one: opening a pipe waits."""
    if mode is None:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"it is {kind}, and must be a plain file", file=os.fspath(path))


def open_plain(path: StrPath) -> BufferedReader:
    """Open a plain file for reading; anything else is refused without waiting, even if it replaces the file now."""
    check_plain(path)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        check_plain(path, os.stat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


class MappedFile:
    """The bytes of a file, or of a buffer, for reading. `name` is for messages.

    With `copy` the file is read into memory at once, and may change or disappear afterwards.
    """

    def __init__(self, source: StrPath | bytes, *, copy: bool = False) -> None:
        self._map: mmap.mmap | None = None
        if isinstance(source, bytes):
            self.name, self.path = "<bytes>", None
            self.data = np.frombuffer(source, np.uint8)
            return
        self.path = Path(source)
        self.name = str(self.path)
        with open_plain(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise self.wrong("the file is empty")
            if copy:
                self.data = np.empty(size, np.uint8)
                count = file.readinto(self.data.data)
                if count < size:
                    raise self.wrong(f"it had {size} bytes, and ended after {count} while it was read")
                return
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = np.frombuffer(self._map, np.uint8)

    def __len__(self) -> int:
        return self.data.size

    def wrong(self, what: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(what, file=self.name, tensor=tensor)

    def drop(self, start: int, stop: int) -> None:
        """Give the whole pages between two bytes back to the system; looking at them again reads them again."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """End reading. Arrays that still look into the file keep it mapped until they are gone."""
        self.data = np.empty(0, np.uint8)
        if self._map is not None:
            with contextlib.suppress(BufferError):  # such an array
                self._map.close()
            self._map = None


def check_path(path: object, call: str) -> None:
    """A TypeError unless `path` is one; `call` shows how the function is called."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"a path is a text or a `pathlib.Path`, got {type(path).__name__}: `{call}`")
