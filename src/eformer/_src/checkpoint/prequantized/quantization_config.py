"""What the JSON files beside a model's weights say of its quantization."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from eformer._src.atomic_files import is_sealed, unsealed
from eformer._src.checkpoint.file import CheckpointError, open_plain
from eformer._src.checkpoint.header import Json, parse_json

MAX_CONFIG = 1 << 24  # bytes; the largest list every module of a model

OwnConfig = Mapping[str, dict[str, Json]]  # keys of files beside the weights, by the names of the files

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
KEYS = (
    "quantization_config",
    "compression_config",  # of early compressed-tensors
    "quantization",  # of MLX
)
# Other files, and the key of the part that speaks of quantization; None is the whole file. They count, the first that
# is there, if config.json says nothing.
FILES: tuple[tuple[str, str | None], ...] = (
    ("quantize_config.json", None),  # of early GPTQ
    ("quant_config.json", None),  # of early AWQ
    ("quantization_config.json", None),  # of auto-round
    ("hf_quant_config.json", "quantization"),  # of ModelOpt
    ("quanto_qmap.json", None),
)
BESIDE = {CONFIG, ADAPTER_CONFIG, *(name for name, _ in FILES)}


class ConfigEntry(NamedTuple):
    """What a file says of quantization: the entry `key` of it, or the whole file."""

    file: str
    key: str | None
    what: Json


class Configuration:
    """What is said of the weights in the file `path`, read once and when it is asked for.

    It is what they say themselves, `own`; if that is nothing, what the files beside say. Nothing is beside bytes.
    """

    def __init__(self, path: Path | None, own: OwnConfig) -> None:
        self._path, self._own = path, own

    @functools.cached_property
    def _read(self) -> tuple[list[ConfigEntry], CheckpointError | None]:
        if not self._own and self._path is not None:
            return _config_entries(functools.partial(_read_beside, self._path))
        said, error = _config_entries(self._own.get)
        return [*said, *(each for each in self._more() if each not in said)], error

    def _more(self) -> list[ConfigEntry]:
        """What config.json says beyond what the weights say of it: nothing is read by that, but it may be refused."""
        config = None if self._path is None or CONFIG not in self._own else self._path.with_name(CONFIG)
        if config is None or is_sealed(config):
            return []
        return _config_entries({CONFIG: read_json(config)}.get)[0]

    @property
    def said(self) -> list[ConfigEntry]:
        """All of it: first of the model, then of its parts (`text_config`). A config.json that is none says nothing."""
        said, error = self._read
        if error is not None and self._path is not None and _speaks_of_quantization(self._path.with_name(CONFIG)):
            raise error
        return said

    def __call__(self) -> Mapping[str, Json]:
        """The first that is an object; empty if there is none."""
        said, error = self._read
        if error is not None:
            raise error
        return next((each.what for each in said if isinstance(each.what, dict)), {})


def _speaks_of_quantization(path: Path) -> bool:
    """Whether a file that can't be parsed has the word; one that can't be read, or is elsewhere, may have it."""
    try:
        with open_plain(path) as file:
            text = unsealed(file.read(MAX_CONFIG + 1)) or b""
    except (OSError, CheckpointError):
        return True
    return len(text) > MAX_CONFIG or any(word in text for word in (b"git-lfs", *(key.encode() for key in KEYS)))


def _parts(value: Json, depth: int = 0) -> Iterator[tuple[int, str, Json]]:
    """What the entries of a config.json say, with their depth. A part's `quantization` may mean another thing."""
    inner = value.items() if isinstance(value, dict) else ()
    for key in KEYS:
        what = value.get(key) if isinstance(value, dict) else None
        if what and (depth == 0 or key != KEYS[2] or _is_of_mlx(what)):
            yield depth, key, what
    for key, each in inner:
        if key not in KEYS:
            yield from _parts(each, depth + 1)


def _is_of_mlx(what: Json) -> bool:
    return isinstance(what, dict) and bool(what.keys() & {"bits", "group_size", "quant_method"})


def entries_of(value: Json) -> Iterator[tuple[str, Json]]:
    """The entries of objects and of all objects inside."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _read_beside(path: Path, name: str) -> Json:
    return read_json(path.with_name(name))


def _config_entries(read: Callable[[str], Json]) -> tuple[list[ConfigEntry], CheckpointError | None]:
    """All that is said in files that `read` gives by name, and why config.json can't be read."""
    try:
        whole, error = read(CONFIG), None
    except CheckpointError as found:
        whole, error = None, found
    parts = sorted(_parts(whole), key=lambda part: part[0])
    said = [ConfigEntry(CONFIG, key, what) for _, key, what in parts]
    for name, key in FILES:
        whole = None if said else read(name)
        part = whole if key is None or not isinstance(whole, dict) else whole.get(key)
        if isinstance(part, dict) and part:
            said.append(ConfigEntry(name, key, part))
    return said, error


def own_config(given: Json, path: Path | None) -> OwnConfig:
    """What a file itself says of those beside it; a CheckpointError if these say otherwise.

    A file that is missing, or under the seal of a save that was interrupted, says nothing.
    """
    files = given.items() if isinstance(given, dict) else ()
    own = {name: keys for name, keys in files if name in BESIDE and isinstance(keys, dict)}
    for name, keys in own.items():
        if path is not None:
            _check_same(path, path.with_name(name), keys)
    return own


def _check_same(path: Path, beside: Path, keys: Mapping[str, Json]) -> None:
    said = None if is_sealed(beside) else read_json(beside)
    other = [key for key in keys if not isinstance(said, dict) or said.get(key) != keys[key]]
    if said is not None and other:
        what = f"`{other[0]}` is not what it was when {path.name} was written: it was changed, or is of other weights"
        raise CheckpointError(f"{what}; write both again", file=str(beside))


def quantization_in(text: bytes | None, path: Path) -> list[ConfigEntry]:
    """What the text of a config.json says of quantization; nothing if it can't be read."""
    text = None if text is None else unsealed(text)
    try:
        whole = {} if text is None else parse_json(text, str(path), "the configuration")
    except CheckpointError:
        return []
    return _config_entries({CONFIG: whole}.get)[0]


def config_with(path: Path | None, said: Mapping[str, Json]) -> bytes:
    """The config.json beside the file `path`, with `said` in place of what it says of quantization."""
    given = None if path is None else read_json(path.with_name(CONFIG))
    kept = without_quantization(given)
    return json.dumps({**(kept if isinstance(kept, dict) else {}), **said}, indent=2).encode()


def without_quantization(value: Json, depth: int = 0) -> Json:
    """A config.json without what it says of quantization, of the model and of its parts."""
    if not isinstance(value, dict):
        return value
    gone = {key for key in KEYS if key in value and (depth == 0 or key != KEYS[2] or _is_of_mlx(value[key]))}
    return {key: without_quantization(each, depth + 1) for key, each in value.items() if key not in gone}


def read_json(path: Path) -> Json:
    """The JSON of a file; None if there is no such file."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            text = file.read(min(size, MAX_CONFIG) + 1)  # which is also the memory it takes
    except FileNotFoundError:
        return None
    except OSError as error:  # no permission, a link to itself
        raise CheckpointError(f"it can't be read: {error.strerror}", file=str(path)) from error
    if len(text) > MAX_CONFIG:
        raise CheckpointError(f"a configuration of more than {MAX_CONFIG} bytes", file=str(path))
    text = unsealed(text)
    return None if text is None else parse_json(text, str(path), "the configuration")
