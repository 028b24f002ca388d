"""Leftovers of killed saves: found by their journals, and removed when no process holds the journal.

A save of `model.safetensors` with the random token T has

    .model.safetensors.T.saving          its journal, JSON, locked as long as the save lives
    .model.safetensors.T.0.tmp           the file, or the index, before it takes its name
    .model.safetensors.T.1.tmp           shards and copies, likewise
    model-T-00001-of-00002.safetensors   shards, with eight digits of T, once everything is written

Only files named like this, with the token of a journal, are removed, and none that an index in the folder names. The
journal also lists the shards of the index that was replaced, for the case that the kill came before their removal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from eformer._files import short

from ._locks import OpenFile
from ._paths import INDEX_SUFFIX, SUFFIX, shards_of

MAX_JOURNAL = 10_000_000  # bytes


def lock_path(path: Path) -> Path:
    return path.with_name(f".{short(path.name)}.lock")


def journal_path(path: Path, token: str) -> Path:
    return path.with_name(f".{short(path.name)}.{token}.saving")


def temporary_path(path: Path, token: str, number: int) -> Path:
    return path.with_name(f".{short(path.name)}.{token}.{number}.tmp")


def shard_name(path: Path, token: str, number: int, count: int) -> str:
    return f"{path.stem}-{token[:8]}-{number:05}-of-{count:05}{SUFFIX}"


def index_path(path: Path) -> Path:
    return path.with_name(path.name + INDEX_SUFFIX)


def named_by_indexes(folder: Path, *, but: Path | None = None) -> set[Path]:
    """The shards that the indexes in a folder name."""
    indexes = (each for each in folder.glob(f"*{INDEX_SUFFIX}") if each != but and each.is_file())
    return {shard for index in indexes for shard in shards_of(index)}


def remove(paths: Iterable[Path]) -> None:
    """Remove the files that can be removed; the next save tries the others again."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def sweep(path: Path) -> None:
    """Remove the leftovers of killed saves of `path`; call it under the lock of the path."""
    names = os.listdir(path.parent)
    journal = re.compile(re.escape(f".{short(path.name)}.") + r"([0-9a-f]{16})\.saving")
    for token in [found[1] for found in map(journal.fullmatch, names) if found]:
        with contextlib.suppress(OSError), contextlib.closing(OpenFile(journal_path(path, token))) as file:
            if not stat.S_ISREG(os.fstat(file.handle).st_mode) or not file.hold():
                continue
            temporary = re.compile(re.escape(f".{short(path.name)}.{token}.") + r"\d+\.tmp")
            shard = re.compile(re.escape(f"{path.stem}-{token[:8]}-") + r"\d{5,}-of-\d{5,}" + re.escape(SUFFIX))
            left = {path.with_name(name) for name in names if temporary.fullmatch(name) or shard.fullmatch(name)}
            if temporary_path(path, token, 0) not in left:  # it is in place, and what it replaced can go
                left |= _replaced(path, file.handle)
            remove(left - named_by_indexes(path.parent))
            remove([file.path])


def _replaced(path: Path, journal: int) -> set[Path]:
    """The shards that the journal of a killed save meant to remove."""
    try:
        names = list(json.loads(os.read(journal, MAX_JOURNAL))["replaces"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return set()
    own = re.compile(re.escape(f"{path.stem}-") + r"[^/\\:\0]*" + re.escape(SUFFIX))
    return {path.with_name(name) for name in names if isinstance(name, str) and own.fullmatch(name)}
