"""Files and folders that are on the disk before anyone relies on them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_NAME = 150  # bytes of a name that others are built from; file systems allow 255
NO_ROOM = (errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else []))
CANT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise a FileExistsError unless the name is free, or has a file or link that may be replaced."""
    try:
        mode = os.lstat(path).st_mode  # one call: another save may remove the file at any moment
    except OSError:  # there is none, or there can be none: the name may be too long
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists; `overwrite=True` replaces it")
    if not stat.S_ISLNK(mode) and not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is a folder, or a device: only files are replaced")


def short(name: str) -> str:
    """A name to build others from: itself, or its beginning and a digest if it is long."""
    data = os.fsencode(name)
    if len(data) <= MAX_NAME:
        return name
    return f"{data[: MAX_NAME - 20].decode(errors='ignore')}~{hashlib.sha256(data).hexdigest()[:16]}"


def reserve(path: Path, size: int) -> None:
    """Make a file whose `size` bytes are reserved on the disk: filling it can't fail for lack of room."""
    with open(path, "xb") as file:
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError as error:
                if error.errno not in CANT_RESERVE:
                    raise
        file.truncate(size)


@contextlib.contextmanager
def room_for(path: Path, size: int) -> Iterator[None]:
    """A block in which an error for lack of room names the path, the bytes needed and the bytes missing."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        free = shutil.disk_usage(next(each for each in path.absolute().parents if each.is_dir())).free
        if error.errno == errno.ENOSPC:
            lacking = f"{size} bytes are needed and {free} are free, so {max(size - free, 1)} are missing"
        else:
            lacking = f"{size} bytes are needed, and there is a limit below that"
        raise OSError(error.errno, f"{os.strerror(error.errno)}: {lacking}", str(path)) from error


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents, each brought to the disk; the result is the folders that were missing."""
    made: list[Path] = []
    missing = list(itertools.takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    try:
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process made it, or it is a file, which fails later
                each.mkdir()
                made.append(each)
                sync_folder(each.parent)
    except BaseException:
        unmake_folders(made)
        raise
    return made


def unmake_folders(made: list[Path]) -> None:
    """Remove folders that `make_folder` made, unless they have contents."""
    for each in reversed(made):
        with contextlib.suppress(OSError):
            each.rmdir()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, if the system can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows renames durably by itself
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
