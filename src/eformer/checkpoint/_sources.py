"""Which files a checkpoint consists of; an index from elsewhere may name files of its own folder only."""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
from pathlib import Path
from typing import Any

from ._error import CheckpointError
from ._file import open_plain
from ._header import MAX_HEADER, parse_json

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
GGUF_SUFFIX = ".gguf"
MAX_NEIGHBOURS = 1000  # files that a misspelt name is compared with


def find_file(path: str | os.PathLike[str]) -> Path:
    """The file to open: `path` itself, or the one file or index of a checkpoint in that folder."""
    path = Path(path)
    if not path.is_dir():
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, f"there is no such file or folder{_near(path)}", str(path))
        return path
    for found in (
        [path / f"model{SUFFIX}"],
        sorted(path.glob(f"*{SUFFIX}{INDEX_SUFFIX}")),
        sorted(path.glob(f"*{SUFFIX}")),
        sorted(path.glob(f"*{GGUF_SUFFIX}")),
    ):
        files = [each for each in found if each.is_file()]
        there = [each for each in files if not _is_one_of_several(each)]
        if len(there) == 1:
            return there[0]
        if files and not there:
            raise CheckpointError(
                f"{files[0].name!r} is one of several, and no index says which: name it to open it alone",
                file=str(path),
            )
        if there:
            names = ", ".join(each.name for each in there[:5])
            raise CheckpointError(f"there are {len(there)} checkpoints in it ({names}); name one", file=str(path))
    raise CheckpointError(
        f"the folder has no {SUFFIX} file, index of such files, or {GGUF_SUFFIX} file", file=str(path)
    )


def state_of(path: str | os.PathLike[str]) -> object:
    """What is equal as long as no save puts another checkpoint in that place; a file alone is never half replaced."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent if is_index(path) else None
    if folder is None:
        return None
    try:
        heads = [*folder.glob(f"*{INDEX_SUFFIX}"), *folder.glob(f"*{SUFFIX}")]
        stats = [(head.name, head.lstat()) for head in heads]
    except FileNotFoundError:  # between the two lines
        return object()
    return sorted((name, found.st_ino, found.st_mtime_ns, found.st_size) for name, found in stats)


def _is_one_of_several(path: Path) -> bool:
    """Whether a file is named as one part of a checkpoint is: model-00001-of-00004.safetensors."""
    found = re.search(r"-(\d{5,})-of-(\d{5,})$", path.stem)
    return found is not None and int(found[2]) > 1


def _near(path: Path) -> str:
    try:
        with os.scandir(path.parent) as files:
            names = [file.name for file in itertools.islice(files, MAX_NEIGHBOURS)]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def is_index(path: Path) -> bool:
    return path.name.endswith(INDEX_SUFFIX)


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """The metadata of an index, and the shard of each tensor."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_HEADER:
            raise CheckpointError(f"an index of more than {MAX_HEADER} bytes", file=str(path))
        text = file.read(size)
    return parse_index(text, path)


def parse_index(text: bytes, path: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    index = parse_json(text, str(path), "the index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    metadata = index.get("metadata", {}) if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise CheckpointError("an index is an object with a `weight_map`", file=str(path))
    shards: dict[Any, Path] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_file_name(name):
            raise CheckpointError(
                f"its shard {str(name)[:100]!r} must be the name of a {SUFFIX} file in the folder of the index",
                file=str(path),
                tensor=tensor,
            )
        shards.setdefault(name, path.with_name(name))
    return metadata, {tensor: shards[name] for tensor, name in weight_map.items()}


def _is_file_name(name: str) -> bool:
    return name.endswith(SUFFIX) and len(name) < 256 and not any(c in name for c in "/\\\0:") and name.isprintable()


def check_inside(index: Path, shard: Path) -> None:
    """A CheckpointError if a shard is a link out of the folder, but for where the index itself is linked to."""
    try:
        folders = {index.parent.resolve(), index.resolve().parent}
        inside = shard.resolve(strict=True).parent in folders
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"its shard {shard.name!r} can't be read: {error}", file=str(index)) from None
    if not inside:
        raise CheckpointError(f"its shard {shard.name!r} is a link to another folder", file=str(index))


def shards_of(index: Path) -> set[Path]:
    """The shards that an index on disk names; none if it can't be read."""
    try:
        return set(read_index(index)[1].values())
    except (CheckpointError, OSError):
        return set()
