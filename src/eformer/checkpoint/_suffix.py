"""Where a checkpoint is written: to a file by its ending, or else into a folder; a misspelt ending is neither."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from ._sources import GGUF_SUFFIX, SUFFIX

SUFFIXES = (SUFFIX, GGUF_SUFFIX)
# Files that are not written here; letters alone, which no version number is, are taken for the ending of a file too.
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".npy", ".json", ".html", ".txt", ".zip")


def check_suffix(path: str | os.PathLike[str], suffixes: tuple[str, ...] = SUFFIXES) -> None:
    """A ValueError if `path` ends like a file, but in none of `suffixes`; a folder that is there may end in anything.

    >>> from eformer.checkpoint import check_suffix
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
    if not near and suffix not in OTHERS and not re.fullmatch(r"\.[A-Za-z_]+", suffix):
        return
    if near and near[0] in suffixes:
        why = f"did you mean {text.removesuffix(suffix) + near[0]!r}?"
    else:
        why = f"{suffix} files are not written here; with a slash at the end it is a folder"
    raise ValueError(f"{text!r} must end in {' or '.join(suffixes)}, or be a folder: {why}")


def target_file(path: str | os.PathLike[str], suffix: str) -> Path:
    """The file to write: `path` itself if it ends in `suffix`, else "model" with that ending in the folder `path`."""
    check_suffix(path, (suffix,))
    return Path(path) if Path(path).suffix == suffix else Path(path) / f"model{suffix}"
