"""The files of a checkpoint: where it is read from, what its index names, and where it is written."""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
from pathlib import Path

from eformer._src.checkpoint.prequantized.foreign import OTHER_WEIGHTS, how_to_fetch, what_it_is
from eformer._src.checkpoint.prequantized.quantization_config import BESIDE

from .file import CheckpointError, StrPath, open_plain
from .header import MAX_HEADER, Json, parse_json

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
GGUF_SUFFIX = ".gguf"
SUFFIXES = (SUFFIX, GGUF_SUFFIX)
MAX_NEIGHBOURS = 1000  # files that a misspelt name is compared with


# --- reading ---


def find_file(path: StrPath) -> Path:
    """The file to open: `path` itself, or the one checkpoint or index in that folder."""
    given, path = os.fspath(path), Path(path)
    if not path.is_dir():
        if not os.path.lexists(path):
            more = _near(path) or how_to_fetch(given)
            raise FileNotFoundError(errno.ENOENT, f"there is no such file or folder{more}", given)
        return path
    for found in (
        [path / f"model{SUFFIX}"],
        sorted(path.glob(f"*{SUFFIX}{INDEX_SUFFIX}")),
        sorted(path.glob(f"*{SUFFIX}")),
        sorted(path.glob(f"*{GGUF_SUFFIX}")),
    ):
        files = [each for each in found if each.is_file()]
        # The first part of a GGUF model stands for all; other shards have an index that does.
        there = [each for each in files if not _is_shard(each) or _is_first_of_gguf(each)]
        if len(there) == 1:
            return there[0]
        if files and not there:
            what = f"{files[0].name!r} is one of several, and no index says which: name it to open it alone"
            raise CheckpointError(what, file=str(path))
        if there:
            names = ", ".join(each.name for each in there[:5])
            raise CheckpointError(f"there are {len(there)} checkpoints in it ({names}); name one", file=str(path))
    what = f"the folder has no {SUFFIX} file, index of such files, or {GGUF_SUFFIX} file"
    others = sorted(each for each in path.iterdir() if each.suffix.lower() in OTHER_WEIGHTS)
    kind = what_it_is(b"", others[0]) if others else None
    raise CheckpointError(f"{what}; of {others[0].name!r}, {kind}" if kind else what, file=str(path))


def state_of(path: StrPath) -> object:
    """A value that changes when a save replaces what is said beside a checkpoint, or several files of it."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    try:
        several = path.is_dir() or is_index(path)
        heads = [*folder.glob(f"*{INDEX_SUFFIX}"), *folder.glob(f"*{SUFFIX}")] if several else []
        heads += [folder / name for name in BESIDE if os.path.lexists(folder / name)]
        stats = [(head.name, head.lstat()) for head in heads]
    except FileNotFoundError:  # removed between the two lines
        return object()
    return sorted((name, found.st_ino, found.st_mtime_ns, found.st_size) for name, found in stats)


def _is_shard(path: Path) -> bool:
    """Whether a file is named like one part of a checkpoint: model-00001-of-00004.safetensors."""
    found = re.search(r"-(\d{5,})-of-(\d{5,})$", path.stem)
    return found is not None and int(found[2]) > 1


def _is_first_of_gguf(path: Path) -> bool:
    """Whether a file is named like the first part of a GGUF model, and the last is beside it."""
    found = re.search(r"-00001-of-(\d{5})$", path.stem)
    last = path.with_name(f"{path.stem[:-14]}{found[1]}-of-{found[1]}{path.suffix}") if found else path
    return path.suffix == GGUF_SUFFIX and found is not None and last.is_file()


def _near(path: Path) -> str:
    try:
        with os.scandir(path.parent) as files:
            names = [file.name for file in itertools.islice(files, MAX_NEIGHBOURS)]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""


# --- the index of shards ---


def is_index(path: Path) -> bool:
    return path.name.endswith(INDEX_SUFFIX)


def read_index(path: Path) -> tuple[dict[str, Json], dict[str, str]]:
    """The metadata of an index, and for each tensor the name of its shard, a file in the folder of the index."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        return parse_index(file.read(min(size, MAX_HEADER + 1)), path)


def parse_index(text: bytes, path: Path) -> tuple[dict[str, Json], dict[str, str]]:
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"an index of more than {MAX_HEADER} bytes", file=str(path))
    index = parse_json(text, str(path), "the index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    metadata = index.get("metadata", {}) if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise CheckpointError("an index is an object with a `weight_map`", file=str(path))
    shards: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_file_name(name):
            what = f"its shard {str(name)[:100]!r} must be the name of a {SUFFIX} file in the folder of the index"
            raise CheckpointError(what, file=str(path), tensor=tensor)
        shards[tensor] = name
    return metadata, shards


def _is_file_name(name: str) -> bool:
    return name.endswith(SUFFIX) and len(name) < 256 and not any(c in name for c in "/\\\0:") and name.isprintable()


def check_inside(index: Path, shard: Path) -> None:
    """Raise a CheckpointError if a shard links out of the folder; it may link to where the index itself links."""
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
        return {index.with_name(shard) for shard in set(read_index(index)[1].values())}
    except (CheckpointError, OSError):
        return set()


# --- writing ---


def check_suffix(path: StrPath, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    """Raise a ValueError if `path` ends like a file, but in none of `suffixes`; an existing folder may end in anything.

    >>> from eformer._src.checkpoint.paths import check_suffix
    >>> check_suffix("llama-3.1-8b")
    >>> check_suffix("model.saftensors")
    Traceback (most recent call last):
        ...
    ValueError: 'model.saftensors' must end in .safetensors or .gguf, or be a folder: did you mean 'model.safetensors'?
    """
    text = os.fspath(path)
    suffix = Path(text).suffix
    is_folder = text.endswith(("/", os.sep)) or os.path.isdir(text)
    if not suffix or suffix in suffixes or is_folder:
        return
    near = difflib.get_close_matches(suffix.lower(), SUFFIXES, 1, 0.7)
    if not near and suffix not in OTHER_WEIGHTS and not re.fullmatch(r"\.[A-Za-z_]+", suffix):
        return  # no ending: the version of a model has digits
    if near and near[0] in suffixes:
        why = f"did you mean {text.removesuffix(suffix) + near[0]!r}?"
    elif suffix in SUFFIXES:
        why = f"{suffix} is the ending of another kind"
    else:
        why = f"{suffix} files are not written here; with a slash at the end it is a folder"
    raise ValueError(f"{text!r} must end in {' or '.join(suffixes)}, or be a folder: {why}")


def target_file(path: StrPath, suffix: str) -> Path:
    """The file to write: `path` itself if it ends in `suffix`, else "model" with that ending in the folder `path`."""
    check_suffix(path, (suffix,))
    return Path(path) if Path(path).suffix == suffix else Path(path) / f"model{suffix}"
