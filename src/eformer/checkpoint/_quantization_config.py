"""What the JSON files beside a model's weights say of its quantization."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from ._file import CheckpointError, open_plain
from ._header import Json, parse_json

MAX_CONFIG = 1 << 24  # bytes; the largest list every module of a model

# Files, and the key of the part that speaks of quantization; None is the whole file. The first that is there counts.
FILES: tuple[tuple[str, str | None], ...] = (
    ("config.json", "quantization_config"),
    ("config.json", "compression_config"),  # of early compressed-tensors
    ("config.json", "quantization"),  # of MLX
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


def read_json(path: Path) -> Json:
    """The JSON of a file; None if there is no such file."""
    try:
        with open_plain(path) as file:
            text = file.read(MAX_CONFIG + 1)
    except FileNotFoundError:
        return None
    if len(text) > MAX_CONFIG:
        raise CheckpointError(f"a configuration of more than {MAX_CONFIG} bytes", file=str(path))
    return parse_json(text, str(path), "the configuration")
