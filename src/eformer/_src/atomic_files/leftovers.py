"""Leftovers of killed saves: found by their journals, and settled when no process holds the journal.

A save of `model.safetensors` with the random token T has

    .model.safetensors.T.saving          its journal, JSON, locked as long as the save lives
    .model.safetensors.T.0.tmp           the file, or the index, before it takes its name
    .model.safetensors.T.1.tmp           shards, and the files beside, likewise
    model-T-00001-of-00002.safetensors   shards, with eight digits of T, once everything is written

Only files named like this, with the token of a journal, are removed, and none that an index in the folder names. The
journal also lists the shards of the index that was replaced, for the case that the kill came before their removal, and
the files beside. If these were about to be replaced, a seal with the token stands in place of the configuration: then
all of them take their names if the checkpoint is in place, and otherwise the old configuration comes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard

from .files import rename, reserve, short, to_disk
from .locks import OpenFile
from .seal import Seal, parse_seal, read_if_plain

MAX_JOURNAL = 10_000_000  # bytes
CONFIG = "config.json"
SPARE = 10**9  # no save has so many files


def lock_path(path: Path) -> Path:
    return path.with_name(f".{short(path.name)}.lock")


def journal_path(path: Path, token: str) -> Path:
    return path.with_name(f".{short(path.name)}.{token}.saving")


def temporary_path(path: Path, token: str, number: int) -> Path:
    return path.with_name(f".{short(path.name)}.{token}.{number}.tmp")


def shard_name(path: Path, token: str, number: int, count: int) -> str:
    return f"{path.stem}-{token[:8]}-{number:05}-of-{count:05}{path.suffix}"


class Journal(NamedTuple):
    """What a save is about to do, once all is written."""

    head: Path  # the file, or the index, that takes the last step
    replaces: set[Path]  # shards to remove
    beside: Mapping[Path, Path]  # temporary files of files beside, and their names
    config: Path  # the file in whose place the seal is

    def text(self) -> bytes:
        beside = {temporary.name: name.name for temporary, name in self.beside.items()}
        replaces = sorted(each.name for each in self.replaces)
        names = {"head": self.head.name, "config": self.config.name}
        return json.dumps({**names, "replaces": replaces, "beside": beside}).encode()


def parse_journal(text: bytes, heads: Sequence[Path], token: str) -> Journal | None:
    """The journal of a killed save; None if it had not come so far. It names only files that such a save may touch."""
    path = heads[0]
    shard = re.compile(re.escape(f"{path.stem}-") + r"[^/\\:\0]*" + re.escape(path.suffix))
    temporary = temporary_name(path, token)
    try:
        found = json.loads(text)
        replaces = [name for name in found["replaces"] if isinstance(name, str) and shard.fullmatch(name)]
        given = found.get("beside", {}).items()
        beside = {old: new for old, new in given if temporary.fullmatch(old) and _is_plain(new)}
        head, config = found.get("head"), found.get("config")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return Journal(
        next((each for each in heads if each.name == head), path),
        set(map(path.with_name, replaces)),
        {path.with_name(old): path.with_name(new) for old, new in beside.items()},
        path.with_name(config if _is_plain(config) else CONFIG),
    )


def temporary_name(path: Path, token: str) -> re.Pattern[str]:
    return re.compile(re.escape(f".{short(path.name)}.{token}.") + r"\d+\.tmp")


def _is_plain(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and not name.startswith(".") and re.fullmatch(r"[^/\\:\0]{1,255}", name) is not None


def remove(paths: Iterable[Path]) -> None:
    """Remove the files that can be removed; the next save tries the others again."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def settle(journal: Journal, heads: Sequence[Path], token: str) -> set[Path]:
    """End what a save had begun to put in place; the result is the shards that can go then.

    If its checkpoint is in place, the files beside follow; otherwise the configuration comes back that was there. If
    the seal is not its own, others have come since, and nothing is done.
    """
    in_place = not os.path.lexists(temporary_path(heads[0], token, 0))
    own = own_seal(journal.config, token)
    if own and in_place:
        remove(each for each in heads if each != journal.head and os.path.lexists(journal.head))
        put_beside(journal)
    if own and not (in_place and journal.config in journal.beside.values()):
        put_back(journal.config, own.before, temporary_path(heads[0], token, SPARE))
    return journal.replaces if in_place else set()


def put_beside(journal: Journal) -> None:
    """Give the files beside a checkpoint their names, the configuration last."""
    for temporary, name in sorted(journal.beside.items(), key=lambda pair: pair[1] == journal.config):
        with contextlib.suppress(FileNotFoundError):  # it was moved before
            rename(temporary, name)


def own_seal(config: Path, token: str) -> Seal | None:
    """The seal of this save in place of the configuration, if it is there."""
    found = parse_seal(read_if_plain(config) or b"")
    return found if found is not None and found.token == token else None


def put_back(config: Path, before: bytes | None, spare: Path, like: Path | None = None) -> None:
    """Put a text in place of the seal, or nothing; `spare` is a free name, and `like` as in `rename`."""
    if before is None:
        config.unlink(missing_ok=True)
        return
    remove([spare])
    reserve(spare, len(before), private=True)
    with to_disk(spare) as file:
        file.write(before)
    rename(spare, config, like)


def sweep(heads: Sequence[Path], named: Callable[[], set[Path]]) -> None:
    """Settle killed saves of a path, which is the first of `heads`, but leave shards that indexes have `named`.

    Call it under the lock of the path.
    """
    path = heads[0]
    journals = re.compile(re.escape(f".{short(path.name)}.") + r"([0-9a-f]{16})\.saving")
    for token in [found[1] for found in map(journals.fullmatch, os.listdir(path.parent)) if found]:
        with contextlib.suppress(OSError), contextlib.closing(OpenFile(journal_path(path, token))) as file:
            if not stat.S_ISREG(os.fstat(file.handle).st_mode) or not file.hold():
                continue
            names = os.listdir(path.parent)  # only now: before it was killed, the save may have made more files
            temporary = temporary_name(path, token)
            shard = re.compile(re.escape(f"{path.stem}-{token[:8]}-") + r"\d{5,}-of-\d{5,}" + re.escape(path.suffix))
            left = {path.with_name(name) for name in names if temporary.fullmatch(name) or shard.fullmatch(name)}
            journal = parse_journal(os.read(file.handle, MAX_JOURNAL), heads, token)
            if journal is not None:
                left |= settle(journal, heads, token)
            remove(left - named())
            remove([file.path])
