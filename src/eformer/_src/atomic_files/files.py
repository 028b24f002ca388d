"""Files and folders that are on the disk before anyone relies on them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

MAX_NAME = 150  # bytes of a name that others are built from; file systems allow 255
NO_ROOM = (errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else []))
CANT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise a FileExistsError unless the name is free, or has a file that may be replaced."""
    try:
        mode = os.lstat(path).st_mode  # one call: another save may remove the file at any moment
    except OSError:  # there is none, or there can be none: the name may be too long
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists; `overwrite=True` replaces it")
    if stat.S_ISLNK(mode):
        raise FileExistsError(f"{path} is a link to {os.path.realpath(path)}: write there, or remove the link first")
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is a folder, or a device: only files are replaced")


def short(name: str) -> str:
    """A name to build others from: itself, or its beginning and a digest if it is long."""
    data = os.fsencode(name)
    if len(data) <= MAX_NAME:
        return name
    return f"{data[: MAX_NAME - 20].decode(errors='ignore')}~{hashlib.sha256(data).hexdigest()[:16]}"


def same_files(paths: Iterable[Path], others: Iterable[Path]) -> set[Path]:
    """Those of `paths` that are, under any name, a file of `others`."""
    read = set(filter(None, map(_identity, others)))
    return {path for path in paths if _identity(path) in read}


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # there is none, or another save removes it now
        return None
    return found.st_dev, found.st_ino


def rename(temporary: Path, path: Path, like: Path | None = None) -> None:
    """Give a file its name, with owner and permissions of the file `like`: by default the one that it replaces."""
    with contextlib.suppress(FileNotFoundError):
        old, new = os.lstat(like or path), os.lstat(temporary)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            with contextlib.suppress(OSError):  # only root gives files away
                os.chown(temporary, old.st_uid, old.st_gid)
        if old.st_mode != new.st_mode:
            os.chmod(temporary, stat.S_IMODE(old.st_mode))
    os.replace(temporary, path)


def make_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def reserve(path: Path, size: int, *, private: bool) -> None:
    """Make a file whose `size` bytes are reserved on the disk: filling it can't fail for lack of room.

    A private one is for this user only until `rename` gives it the permissions of the file that it replaces.
    """
    with open(path, "xb", opener=make_private if private else None) as file:
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError as error:
                if error.errno not in CANT_RESERVE:
                    raise
        file.truncate(size)


@contextlib.contextmanager
def to_disk(path: Path) -> Iterator[BinaryIO]:
    """A file that was reserved, to write; it is on the disk when the block ends."""
    with open(path, "r+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def room_for(path: Path, size: int) -> Iterator[None]:
    """A block in which an error for lack of room names the path, and the bytes needed and missing if `size` says so."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        free = shutil.disk_usage(next(each for each in path.absolute().parents if each.is_dir())).free
        if not size:
            lacking = f"{free} bytes are free"
        elif error.errno == errno.ENOSPC:
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
