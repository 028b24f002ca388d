"""Saves of checkpoints, which may have an index of shards, and a config.json that others in the folder need.

Where several processes save together, the first decides, all write their shards, and the file appears at the end.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from eformer._src.atomic_files import Saving, read_if_plain
from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.open import open_checkpoint
from eformer._src.checkpoint.paths import INDEX_SUFFIX, SUFFIX, shards_of
from eformer._src.checkpoint.prequantized.layout import PrequantizedEntry
from eformer._src.checkpoint.prequantized.quantization_config import CONFIG, quantization_in

CHUNK = 1 << 24  # bytes between two calls of `progress`


def index_path(path: Path) -> Path:
    return path.with_name(path.name + INDEX_SUFFIX)


def named_by_indexes(folder: Path, *, but: Path | None = None) -> set[Path]:
    """The shards that the indexes in a folder name."""
    indexes = (each for each in folder.glob(f"*{INDEX_SUFFIX}") if each != but and each.is_file())
    return {shard for index in indexes for shard in shards_of(index)}


class CheckpointSaving(Saving):
    """A save of a checkpoint: a safetensors file may also be an index and its shards."""

    def heads(self) -> list[Path]:
        return [self.path, index_path(self.path)] if self.path.suffix == SUFFIX else [self.path]

    def old_shards(self) -> set[Path]:
        """The shards that the index on disk names, and no other index does."""
        index = index_path(self.path)
        named = shards_of(index) if index in self.heads() else set[Path]()
        return named - named_by_indexes(self.path.parent, but=index) if named else named

    def named(self) -> set[Path]:
        return named_by_indexes(self.path.parent)

    def check(self) -> None:
        super().check()
        index = index_path(self.path)
        if os.path.lexists(self.path) and self.path in named_by_indexes(self.path.parent, but=index):
            raise ValueError(f"{self.path} is a shard of another checkpoint in its folder; write to another place")
        self._check_neighbours()

    def _check_neighbours(self) -> None:
        """Raise a ValueError if another checkpoint in the folder is read by the config.json that would be replaced."""
        if self.config not in self.beside or self.config.name != CONFIG:
            return
        new = self.beside[self.config]
        texts = read_if_plain(self.config), new if isinstance(new, bytes) else read_if_plain(new)
        before, after = (quantization_in(text, self.config) for text in texts)
        for each in sorted(self._neighbours()) if before != after else ():
            if _needs_config(each):
                what = f"{each} is read by the {CONFIG} beside it, which would be replaced: write to another folder"
                raise ValueError(what)

    def _neighbours(self) -> set[Path]:
        """The other checkpoints in the folder."""
        folder = self.path.parent
        found = {*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{SUFFIX}{INDEX_SUFFIX}")}
        return found - {self.path, index_path(self.path)} - named_by_indexes(folder)


def _needs_config(path: Path) -> bool:
    """Whether others quantized a checkpoint, as one that is refused may be: what is read then is codes and scales."""
    for raw in (False, True):
        with contextlib.suppress(CheckpointError, OSError), open_checkpoint(path, raw=raw) as checkpoint:
            return raw or any(isinstance(checkpoint.entry(name), PrequantizedEntry) for name in checkpoint)
    return False  # it can't be read with the old one either


def are_several() -> bool:
    """Whether other processes call the same functions; starts no backend if this one is alone."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    return not are_several() or jax.process_index() == 0


T = TypeVar("T", bound="list[str] | None")


def from_first(make: Callable[[], T]) -> T:
    """The result of `make` in the first process, which JSON can hold; an error there is raised in all."""
    if not are_several():
        return make()
    given, error = {}, None
    if is_first():
        try:
            given = {"value": make()}
        except Exception as raised:  # noqa: BLE001  # raised below, when all know of it
            given, error = {"error": type(raised).__name__, "message": str(raised)}, raised
    told = json.loads(_broadcast(json.dumps(given).encode()))
    if error is not None:
        raise error
    if "error" in told:
        kind = getattr(builtins, told["error"], RuntimeError)
        raise kind(f"the first process failed: {told['message']}")
    return told["value"]


def _broadcast(text: bytes) -> bytes:
    from jax.experimental import multihost_utils

    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.zeros(length, np.uint8)
    data[: len(text[:length])] = np.frombuffer(text[:length], np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(data)).astype(np.uint8).tobytes()


def _all(value: bool) -> bool:
    """Whether `value` is true in every process; returns when all have answered."""
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.int32(value))))


@contextlib.contextmanager
def saved_together(start: Callable[[], Saving], index: Callable[[Sequence[str]], bytes] | None) -> Iterator[list[Path]]:
    """The files of a save that the first process starts and all fill; they get their names when all are done."""
    started: list[Saving] = []

    def begin() -> list[str]:
        started.append(start())
        return list(map(str, started[0].temporaries))

    def end() -> None:
        (saving,) = started
        if whole:
            saving.commit(None if index is None else index(saving.names))

    error, whole = None, False
    try:
        temporaries = from_first(begin)
        try:
            yield list(map(Path, temporaries))
        except BaseException as raised:  # noqa: BLE001  # raised below, when all know of it
            error = raised
        whole = error is None if not are_several() else _all(error is None)
        from_first(end)
    finally:
        for saving in started:
            saving.abandon()  # nothing, if it has ended
    if error is not None:
        raise error
    if not whole:
        raise RuntimeError("the checkpoint was not written: another process failed, and says why")
