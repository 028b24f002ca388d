"""Saves of checkpoints, which may have an index of shards, and a config.json that others in the folder need."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from eformer._src.atomic_files import Saving, read_if_plain
from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.open import open_checkpoint
from eformer._src.checkpoint.paths import INDEX_SUFFIX, SUFFIX, shards_of
from eformer._src.checkpoint.prequantized.layout import PrequantizedEntry
from eformer._src.checkpoint.prequantized.quantization_config import CONFIG, quantization_in


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
