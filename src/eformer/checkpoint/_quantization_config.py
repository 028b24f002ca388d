"""What the JSON files beside a model's weights say of its quantization."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from eformer._saving import is_sealed, unsealed

from ._file import CheckpointError, open_plain
from ._header import Json, parse_json

MAX_CONFIG = 1 << 24  # bytes; the largest list every module of a model

Own = Mapping[str, dict[str, Json]]  # keys of files beside the weights, by the names of the files

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"

# Files, and the key of the part that speaks of quantization; None is the whole file. The first that is there counts.
FILES: tuple[tuple[str, str | None], ...] = (
    (CONFIG, "quantization_config"),
    (CONFIG, "compression_config"),  # of early compressed-tensors
    (CONFIG, "quantization"),  # of MLX
    ("quantize_config.json", None),  # of early GPTQ
    ("quant_config.json", None),  # of early AWQ
    ("hf_quant_config.json", "quantization"),  # of ModelOpt
)
BESIDE = {*(name for name, _ in FILES), ADAPTER_CONFIG}


def config_beside(path: Path | None, own: Own) -> Callable[[], Mapping[str, Json]]:
    """A function that reads, once, what is said beside the file `path`; nothing is said beside bytes."""

    @functools.cache
    def read() -> Mapping[str, Json]:
        if own or path is None:
            return _part(lambda name: own.get(name))
        return _part(functools.cache(functools.partial(_read_beside, path)))

    return read


def _read_beside(path: Path, name: str) -> Json:
    return read_json(path.with_name(name))


def _part(read: Callable[[str], Json]) -> Mapping[str, Json]:
    """The first part that speaks of quantization, of files that `read` gives by name."""
    for name, key in FILES:
        whole = read(name)
        part = whole if key is None or not isinstance(whole, dict) else whole.get(key)
        if isinstance(part, dict):
            return part
    return {}


def own_config(given: Json, path: Path | None) -> Own:
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


def quantization_in(text: bytes | None, path: Path) -> Mapping[str, Json]:
    """What the text of a config.json says of quantization; nothing if it can't be read."""
    text = None if text is None else unsealed(text)
    try:
        whole = {} if text is None else parse_json(text, str(path), "the configuration")
    except CheckpointError:
        return {}
    return _part({CONFIG: whole}.get)


def config_with(path: Path | None, said: Mapping[str, Json]) -> bytes:
    """The config.json beside the file `path`, with `said` in place of what it says of quantization."""
    given = None if path is None else read_json(path.with_name(CONFIG))
    kept = given if isinstance(given, dict) else {}
    keys = {key for name, key in FILES if name == CONFIG}
    return json.dumps({**{key: kept[key] for key in kept if key not in keys}, **said}, indent=2).encode()


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
