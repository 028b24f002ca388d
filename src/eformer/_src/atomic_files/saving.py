"""A save: files under names of their own, which take their places together, or are removed.

Writers may be many, as threads or processes, and each may be killed at any moment. What is found under a path is the
checkpoint of one of them, whole, or the one that was there before.

1. All room is reserved, in files with a random token in their names. A lock holds a journal with the same token.
2. The files are written and brought to the disk.
3. Under the lock of the path, a seal takes the place of the configuration, if files beside are to be replaced. Then the
   shards take their names, which no other save has; then the file, or the index, replaces the old one in one step; then
   the files beside take their names, the configuration last; then the shards that the old index named are removed.

A killed save is settled before the next one begins, and before it puts its own files in place.
"""

from __future__ import annotations

import contextlib
import contextvars
import filecmp
import io
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from eformer._src.progress import Progress

from .files import check_free, make_folder, rename, reserve, room_for, same_files, sync_folder, to_disk, unmake_folders
from .leftovers import (
    CONFIG,
    SPARE,
    Journal,
    journal_path,
    lock_path,
    own_seal,
    put_back,
    put_beside,
    remove,
    settle,
    shard_name,
    sweep,
    temporary_path,
)
from .locks import OpenFile, locked
from .seal import read_if_plain, sealed, unsealed

PATIENCE = 0.2  # seconds that the end of a process waits for a save to put its files in place
_sources: contextvars.ContextVar[tuple[Path, ...]] = contextvars.ContextVar("sources", default=())
_living: weakref.WeakSet[Saving] = weakref.WeakSet()


@contextlib.contextmanager
def reading(sources: Iterable[Path]) -> Iterator[None]:
    """A block whose saves don't replace these files, under any name: they are what is written again."""
    before = _sources.set((*_sources.get(), *sources))
    try:
        yield
    finally:
        _sources.reset(before)


@dataclass(frozen=True)
class Target:
    """Where a checkpoint is written, whether it may replace another one, and who is told of the progress."""

    path: str | os.PathLike[str]
    overwrite: bool = False
    progress: Progress | None = None
    beside: Sequence[Path] = ()  # are copied into the same folder
    texts: Mapping[str, bytes] = field(default_factory=dict)  # are written there, by the names of their files
    config: str = CONFIG  # the one of them that says how to read the others


class Saving:
    """Files of `sizes` bytes that become `path`, the file of a target, or its shards if there are several.

    The caller fills `temporaries`; `commit` puts them in place, and `abandon` removes them.
    """

    def __init__(self, target: Target, path: Path, sizes: Sequence[int]) -> None:
        self.path, self.overwrite, self.config = path, target.overwrite, path.with_name(target.config)
        copies: dict[str, Path | bytes] = {**{each.name: each for each in target.beside}, **target.texts}
        self.beside = {path.with_name(name): each for name, each in copies.items()}
        self._sources, self._mutex, self._journal = _sources.get(), threading.RLock(), None
        self._placing, self._ended = False, False
        self.token, self.names, self.temporaries, self._copies = "", [], [], dict[Path, Path]()
        besides = list(map(_size, self.beside.values()))
        self.total = sum(sizes) + sum(besides)
        self._made = make_folder(path.parent)
        with room_for(path, self.total):
            try:
                self._begin(len(sizes))
                _living.add(self)
                for temporary, size in zip(self.temporaries, sizes, strict=True):
                    self._reserve(temporary, size)
                for temporary, size in zip(self._copies, besides, strict=True):
                    name = self._copies[temporary]
                    reserve(temporary, size, private=os.path.lexists(name) or _is_private(self.beside[name]))
            except BaseException:
                self.abandon()
                raise

    # What a save of several files adds.

    def heads(self) -> list[Path]:
        """Candidates for the first file of a checkpoint at that path: the path itself, then others. One is there."""
        return [self.path]

    def old_shards(self) -> set[Path]:
        """Shards on the disk that only the checkpoint needs which is replaced."""
        return set()

    def named(self) -> set[Path]:
        """Shards in the folder that checkpoints need."""
        return set()

    def check(self) -> None:
        """Raise an error if something would be replaced that must not be."""
        for each in self.heads():
            check_free(each, overwrite=self.overwrite)
        for each, content in self.beside.items():
            if not _is_there(each, content):
                check_free(each, overwrite=self.overwrite)
        replaced = {*self.heads(), *self.old_shards(), *self.beside}
        for each in sorted(same_files(replaced, self._sources)):
            raise ValueError(f"{each} is read, and would be replaced: write to another place, and move it then")

    # ---

    def _begin(self, count: int) -> None:
        with locked(lock_path(self.path)) as alone:
            if alone:
                sweep(self.heads(), self.named)
            self.check()
            while not self.names or any(os.path.lexists(self.path.with_name(name)) for name in self.names):
                self.token = secrets.token_hex(8)
                self.names = [shard_name(self.path, self.token, i + 1, count) for i in range(count)]
            self._journal = OpenFile(journal_path(self.path, self.token), os.O_CREAT | os.O_EXCL)
            self._journal.hold()
        first = 0 if count == 1 else 1  # 0 is the file that takes the last step
        self.temporaries = [temporary_path(self.path, self.token, first + i) for i in range(count)]
        numbered = enumerate(self.beside, count + 1)
        self._copies = {temporary_path(self.path, self.token, i): each for i, each in numbered}

    def _reserve(self, temporary: Path, size: int) -> None:
        reserve(temporary, size, private=any(map(os.path.lexists, self.heads())))

    def commit(self, index: bytes | None = None) -> Path:
        """Put the files in place, with the text of their index if there are several."""
        with self._mutex:
            final = self.path if index is None else self.heads()[1]
            self._write_rest(index)
            with locked(lock_path(self.path)) as alone, room_for(self.path, 0):
                if alone:
                    sweep(self.heads(), self.named)
                self.check()
                changed = {each: name for each, name in self._copies.items() if not _is_there(name, each)}
                journal = Journal(final, self.old_shards(), changed, self.config)
                assert self._journal is not None
                os.write(self._journal.handle, journal.text())
                os.fsync(self._journal.handle)
                try:
                    self._place(journal, several=index is not None)
                except BaseException:
                    settle(journal, self.heads(), self.token)
                    raise
                remove([*journal.replaces, *self._copies, journal_path(self.path, self.token)])
                sync_folder(self.path.parent)
            self._end()
            return final

    def _place(self, journal: Journal, *, several: bool) -> None:
        """The steps that readers see, in the order in which each of them finds a whole checkpoint."""
        old = next((each for each in self.heads() if os.path.lexists(each)), None)
        before = self._seal(journal) if journal.beside else None
        if several:
            for name, temporary in zip(self.names, self.temporaries, strict=True):
                rename(temporary, self.path.with_name(name), old)
            sync_folder(self.path.parent)
        self._placing = True
        rename(temporary_path(self.path, self.token, 0), journal.head, old)
        sync_folder(self.path.parent)
        # The index goes before its shards, so that no index is left without them, and before its configuration.
        for each in self.heads():
            if each != journal.head and os.path.lexists(each):
                each.unlink(missing_ok=True)
        if journal.beside:
            put_beside(journal)
            if self.config not in journal.beside.values():
                put_back(self.config, before, temporary_path(self.path, self.token, SPARE))

    def _seal(self, journal: Journal) -> bytes | None:
        """Put a seal in place of the configuration, whose text is the result; None if there is none."""
        text = read_if_plain(self.config)
        before = None if text is None else unsealed(text)
        new = next((temporary for temporary, name in journal.beside.items() if name == self.config), None)
        like = self.config if text is not None else new  # the configuration that follows takes its permissions
        put_back(self.config, sealed(self.token, before), temporary_path(self.path, self.token, SPARE), like)
        sync_folder(self.path.parent)
        return before

    def _write_rest(self, index: bytes | None) -> None:
        """Bring the index and the files beside to the disk."""
        if index is not None:
            with room_for(self.path, len(index)):
                self._reserve(head := temporary_path(self.path, self.token, 0), len(index))
                with to_disk(head) as file:
                    file.write(index)
        with room_for(self.path, self.total):
            for temporary, name in self._copies.items():
                with _opened(self.beside[name]) as source, to_disk(temporary) as file:
                    shutil.copyfileobj(source, file)
                    file.truncate()

    def abandon(self) -> None:
        """Remove what was written, unless it is in place. The disk tells: an interrupt may come at any moment."""
        with self._mutex:
            if self._ended:
                return
            last = len(self.names) + len(self.beside)
            left = [temporary_path(self.path, self.token, number) for number in (*range(last + 1), SPARE)]
            placed = self._placing and not os.path.lexists(left[0])
            if not placed and not own_seal(self.config, self.token):  # there was no room to take it away: a sweep will
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


def _is_private(content: Path | bytes) -> bool:
    return isinstance(content, Path) and not content.stat().st_mode & 0o077


def _opened(content: Path | bytes) -> BinaryIO:
    return io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb")


def _is_there(path: Path, content: Path | bytes) -> bool:
    """Whether a file has this content already."""
    if path.is_symlink() or not path.is_file():
        return False
    if isinstance(content, Path):
        return filecmp.cmp(content, path, False)
    return path.stat().st_size == len(content) and path.read_bytes() == content


def abandon_saves() -> None:
    """Remove what the running saves of this process have written: it is about to end."""
    for saving in list(_living):
        if saving._mutex.acquire(timeout=PATIENCE):  # else it is putting its files in place
            saving.abandon()
            saving._mutex.release()


def atomic_file(path: Path, *, overwrite: bool) -> contextlib.AbstractContextManager[BinaryIO]:
    """A file to write, which takes the name `path` when the block ends, and is removed if the block raises."""
    return filling(Saving(Target(path, overwrite), path, [0]))


def write_file(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a whole file, which takes the name `path` when it is on the disk."""
    with filling(Saving(Target(path, overwrite), path, [len(data)])) as file:
        file.write(data)


@contextlib.contextmanager
def filling(saving: Saving) -> Iterator[BinaryIO]:
    """The one file of a save, to write; the save is committed when the block ends, and abandoned if it raises."""
    try:
        with room_for(saving.path, saving.total), to_disk(saving.temporaries[0]) as file:
            yield file
        saving.commit()
    except BaseException:
        saving.abandon()
        raise
