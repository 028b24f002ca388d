"""Files that are there whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_file(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when the block ends, and is removed if it raises.

    It is written under a name of its own in the same folder, brought to the disk and renamed. A process that is killed
    leaves at most that other file, which begins with a dot and ends in ".tmp".
    """
    temporary = started(path, overwrite=overwrite)
    try:
        with open(temporary, "r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path, overwrite=overwrite)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def started(path: Path, *, size: int = 0, overwrite: bool) -> Path:
    """An empty file of `size` bytes that is to become `path`."""
    check_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    with open(temporary, "xb") as file:
        file.truncate(size)
    return temporary


def publish(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Give a file that is on the disk its name."""
    check_free(path, overwrite=overwrite)
    os.replace(temporary, path)
    sync_folder(path.parent)


def check_free(path: Path, *, overwrite: bool) -> None:
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(f"{path} exists; `overwrite=True` replaces it")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows renames durably by itself
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
