"""A save: files under names of their own, which take their places together, or are removed.

Writers may be many, as threads or processes, and each may be killed at any moment. What is found under a path is the
checkpoint of one of them, whole, or the one that was there before.

1. All room is reserved, in files with a random token in their names. A lock holds a journal with the same token.
2. The files are written and brought to the disk.
3. Under the lock of the path, the shards take their names, which no other save has; then the file, or the index,
   replaces the old one in one step; then the shards that the old index named are removed.
"""

from __future__ import annotations

import contextlib
import filecmp
import io
import json
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from eformer._files import check_free, make_folder, reserve, room_for, sync_folder, unmake_folders
from eformer._progress import Progress

from ._file import StrPath
from ._leftovers import index_path, journal_path, lock_path, named_by_indexes, remove, shard_name, sweep, temporary_path
from ._locks import OpenFile, locked
from ._paths import SUFFIX, shards_of

PATIENCE = 0.2  # seconds that the end of a process waits for a save to put its files in place
_living: weakref.WeakSet[Saving] = weakref.WeakSet()


@dataclass(frozen=True)
class Target:
    """Where a checkpoint is written, whether it may replace another one, and who is told of the progress."""

    path: StrPath
    overwrite: bool = False
    progress: Progress | None = None
    sources: Sequence[Path] = ()  # must not be replaced
    beside: Sequence[Path] = ()  # are copied into the same folder
    texts: Mapping[str, bytes] = field(default_factory=dict)  # are written there, by the names of their files


class Saving:
    """Files of `sizes` bytes that become `path`, the file of a target, or its shards if there are several.

    The caller fills `temporaries`; `commit` puts them in place, and `abandon` removes them.
    """

    def __init__(self, target: Target, path: Path, sizes: Sequence[int]) -> None:
        self.path, self.index, self.overwrite = path, index_path(path), target.overwrite
        self._heads = [path, self.index] if path.suffix == SUFFIX else [path]  # one of them is there
        copies: dict[str, Path | bytes] = {**{each.name: each for each in target.beside}, **target.texts}
        placed = {path.with_name(name): each for name, each in copies.items()}
        self.beside = {to: each for to, each in placed.items() if not _is_there(to, each)}
        self._check(target.sources)
        self._mutex, self._journal, self._made = threading.RLock(), None, make_folder(path.parent)
        self._placing, self._ended = False, False
        self.token, self.names, self.temporaries = "", [], []
        self.total = sum(sizes) + sum(map(_size, self.beside.values()))
        with room_for(path, self.total):
            try:
                self._begin(len(sizes))
                _living.add(self)
                for temporary, size in zip(self.temporaries, sizes, strict=True):
                    reserve(temporary, size)
            except BaseException:
                self.abandon()
                raise

    def _check(self, sources: Iterable[Path]) -> None:
        """Raise an error if something would be replaced that must not be."""
        for each in (*self._heads, *self.beside):
            check_free(each, overwrite=self.overwrite)
        if os.path.lexists(self.path) and self.path in named_by_indexes(self.path.parent, but=self.index):
            raise ValueError(f"{self.path} is a shard of another checkpoint in its folder; write to another place")
        replaced = {*self._heads, *self._old_shards(), *self.beside}
        inputs = {(found.st_dev, found.st_ino) for found in map(os.stat, sources)}
        for each in sorted(replaced):
            with contextlib.suppress(OSError):  # there is none, or another save removes it now
                found = os.stat(each)
                if (found.st_dev, found.st_ino) in inputs:
                    raise ValueError(f"{each} is read, and would be replaced: write to another place, and move it then")

    def _old_shards(self) -> set[Path]:
        """The shards that the index on disk names, and no other index does."""
        named = shards_of(self.index) if self.index in self._heads else set[Path]()
        return named - named_by_indexes(self.path.parent, but=self.index) if named else named

    def _begin(self, count: int) -> None:
        with locked(lock_path(self.path)) as alone:
            if alone:
                sweep(self.path)
            while not self.names or any(os.path.lexists(self.path.with_name(name)) for name in self.names):
                self.token = secrets.token_hex(8)
                self.names = [shard_name(self.path, self.token, i + 1, count) for i in range(count)]
            self._journal = OpenFile(journal_path(self.path, self.token), os.O_CREAT | os.O_EXCL)
            self._journal.hold()
        first = 0 if count == 1 else 1  # 0 is the file that takes the last step
        self.temporaries = [temporary_path(self.path, self.token, first + i) for i in range(count)]

    def commit(self, index: bytes | None = None) -> Path:
        """Put the files in place, with the text of their index if there are several."""
        with self._mutex, room_for(self.path, len(index or b"")):
            final = self.path if index is None else self.index
            head, copies = self._prepared(index)
            with locked(lock_path(self.path)):
                for each in self._heads:
                    check_free(each, overwrite=self.overwrite)
                old = self._old_shards()
                assert self._journal is not None
                replaced = {"replaces": sorted(each.name for each in old)}
                os.write(self._journal.handle, json.dumps(replaced).encode())
                for copy, temporary in copies.items():
                    os.replace(temporary, copy)
                if index is not None:
                    for name, temporary in zip(self.names, self.temporaries, strict=True):
                        os.replace(temporary, self.path.with_name(name))
                    sync_folder(self.path.parent)
                self._placing = True
                os.replace(head, final)
                sync_folder(self.path.parent)
                # The index goes before its shards, so that no index is left without them.
                for each in (*self._heads, *old):
                    if each != final and os.path.lexists(each):
                        each.unlink(missing_ok=True)
                remove([journal_path(self.path, self.token)])
                sync_folder(self.path.parent)
            self._end()
            return final

    def _prepared(self, index: bytes | None) -> tuple[Path, dict[Path, Path]]:
        """The file that takes the last step, and a temporary file for each copy, all on the disk."""
        head = temporary_path(self.path, self.token, 0)
        if index is not None:
            with to_disk(head) as file:
                file.write(index)
        copies = {}
        for number, (copy, original) in enumerate(self.beside.items(), len(self.names) + 1):
            copies[copy] = temporary_path(self.path, self.token, number)
            with _opened(original) as source, to_disk(copies[copy]) as file:
                shutil.copyfileobj(source, file)
        return head, copies

    def abandon(self) -> None:
        """Remove what was written, unless it is in place. The disk tells: an interrupt may come at any moment."""
        with self._mutex:
            if self._ended:
                return
            last = len(self.names) + len(self.beside)
            left = [temporary_path(self.path, self.token, number) for number in range(last + 1)]
            if not self._placing or os.path.lexists(left[0]):
                left += [self.path.with_name(name) for name in self.names]
                remove([*left, journal_path(self.path, self.token)] if self.token else [])
                unmake_folders(self._made)
            self._end()

    def _end(self) -> None:
        """Release the journal. From here on, the next save removes leftovers."""
        if self._journal is not None:
            self._journal.close()
        self._ended = True
        _living.discard(self)


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _opened(content: Path | bytes) -> BinaryIO:
    return io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb")


def _is_there(path: Path, content: Path | bytes) -> bool:
    """Whether a file has this content already."""
    if not os.path.lexists(path):
        return False
    if isinstance(content, Path):
        return filecmp.cmp(content, path, False)
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def abandon_saves() -> None:
    """Remove what the running saves of this process have written: it is about to end."""
    for saving in list(_living):
        if saving._mutex.acquire(timeout=PATIENCE):  # else it is putting its files in place
            saving.abandon()
            saving._mutex.release()


def atomic_file(path: Path, *, overwrite: bool) -> contextlib.AbstractContextManager[BinaryIO]:
    """A file to write, which takes the name `path` when the block ends, and is removed if the block raises."""
    return filling(Saving(Target(path, overwrite), path, [0]))


@contextlib.contextmanager
def filling(saving: Saving) -> Iterator[BinaryIO]:
    """The one file of a save, to write; the save is committed when the block ends, and abandoned if it raises."""
    try:
        with room_for(saving.path, saving.total), to_disk(saving.temporaries[0], "r+b") as file:
            yield file
        saving.commit()
    except BaseException:
        saving.abandon()
        raise


@contextlib.contextmanager
def to_disk(path: Path, mode: Literal["r+b", "wb"] = "wb") -> Iterator[BinaryIO]:
    """A file to write, which is on the disk when the block ends."""
    with open(path, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
