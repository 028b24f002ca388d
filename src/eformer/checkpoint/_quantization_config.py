"""What the JSON files beside a model's weights say of its quantization."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ._file import CheckpointError, open_plain
from ._header import Json, parse_json

MAX_CONFIG = 1 << 24  # bytes; the largest list every module of a model

CONFIG = "config.json"

# Files, and the key of the part that speaks of quantization; None is the whole file. The first that is there counts.
FILES: tuple[tuple[str, str | None], ...] = (
    (CONFIG, "quantization_config"),
    (CONFIG, "compression_config"),  # of early compressed-tensors
    (CONFIG, "quantization"),  # of MLX
    ("quantize_config.json", None),  # of early GPTQ
    ("quant_config.json", None),  # of early AWQ
    ("hf_quant_config.json", "quantization"),  # of ModelOpt
)


def config_beside(path: Path | None) -> Callable[[], Mapping[str, Json]]:
    """A function that reads, once, what is said beside the file `path`; nothing is said beside bytes."""

    @functools.cache
    def read() -> Mapping[str, Json]:
        parsed: dict[str, Json] = {}
        if path is None:
            return {}
        for name, key in FILES:
            if name not in parsed:
                parsed[name] = read_json(path.with_name(name))
            whole = parsed[name]
            part = whole if key is None or not isinstance(whole, dict) else whole.get(key)
            if isinstance(part, dict):
                return part
        return {}

    return read


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
    return parse_json(text, str(path), "the configuration")
