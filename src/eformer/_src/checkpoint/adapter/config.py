"""`adapter_config.json` of an adapter: what it must say, and the rank and factor of each module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.header import Json
from eformer._src.checkpoint.open import Checkpoint
from eformer._src.checkpoint.prequantized.quantization_config import ADAPTER_CONFIG as CONFIG
from eformer._src.checkpoint.prequantized.quantization_config import read_json

# What says, with the matrices, which update is meant; the weights' file has it too.
DECISIVE = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out")


@dataclass(frozen=True)
class Wrong:
    """Makes the error about a module of a file."""

    file: str
    module: str

    def __call__(self, what: str) -> CheckpointError:
        return CheckpointError(what, file=self.file, tensor=self.module)


def read_config(folder: Path, weights: Checkpoint) -> Mapping[str, Json]:
    """The configuration of an adapter; a CheckpointError if there is none, or if it is no plain LoRA.

    What the weights' file itself says goes before the file beside it, which a save may be replacing.
    """
    file = str(folder / CONFIG)
    config, own = read_json(folder / CONFIG), weights._own.get(CONFIG, {})
    if own and (config is None or isinstance(config, dict)):
        config = {**(config or {}), **own}
    if not isinstance(config, dict):
        raise CheckpointError("there is no configuration of an adapter", file=file)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"its `peft_type` is {str(config.get('peft_type'))[:50]!r}, not 'LORA'", file=file)
    for option in ("use_dora", "use_qalora", "lora_bias", "modules_to_save", "layer_replication"):
        if config.get(option):
            raise CheckpointError(f"`{option}` changes more than updates of low rank do, and is not read", file=file)
    return config


def adapter_facts(checkpoint: Checkpoint) -> dict[str, str]:
    """What the configuration of an adapter says, in a few words; nothing for any other checkpoint."""
    path = checkpoint.path
    if path is None or not path.with_name(CONFIG).is_file():
        return {}
    config = read_config(path.parent, checkpoint)
    others = config.get("rank_pattern")
    more = f", and others for {len(others)} modules" if isinstance(others, dict) and others else ""
    facts = {
        "adapter": "LoRA" + (", rank-stabilized" if config.get("use_rslora") else ""),
        "rank": f"{config.get('r')}{more}",
        "alpha": f"{config.get('lora_alpha')}",
        "base model": f"{config.get('base_model_name_or_path')}",
    }
    return {name: value for name, value in facts.items() if value != "None"}


def config_of(ranks: Mapping[str, int], alphas: Mapping[str, float], base_model: str | None) -> dict[str, Json]:
    """The configuration for modules of these ranks, whose updates are scaled by alpha / rank."""
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(ranks),
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {module: a for module, a in alphas.items() if a != alpha},
        "use_rslora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "task_type": None,
    }


def factor_of(config: Mapping[str, Json], rank: int, wrong: Wrong) -> float:
    """What the update of the module, of this rank, is multiplied by; an error if the configuration has another rank."""
    expected = _number(_of_module(config, "rank_pattern", wrong), config.get("r"), "r", wrong)
    if expected != rank:
        raise wrong(f"its matrices have rank {rank}, and the configuration says {expected:g}")
    if rank < 1:
        raise wrong("its matrices have rank 0, and an update has at least 1")
    alpha = _number(_of_module(config, "alpha_pattern", wrong), config.get("lora_alpha"), "lora_alpha", wrong)
    factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if abs(factor) > float(np.finfo(np.float32).max):
        raise wrong(f"the configuration has lora_alpha = {alpha:g}, and float32 can't hold {factor:g}")
    return factor


def _of_module(config: Mapping[str, Json], key: str, wrong: Wrong) -> Json:
    """The entry for this module: PEFT matches keys against the end of its name.

    A key may be a regular expression there. It is a stranger's, and may take forever, so only plain names are read.
    """
    patterns = config.get(key)
    entries = patterns.items() if isinstance(patterns, dict) else ()
    for pattern, value in entries:
        if not re.fullmatch(r"[\w.-]+", pattern):
            raise wrong(f"`{key}` has {pattern[:50]!r}, a regular expression; only names of modules are read")
        if f".{wrong.module}".endswith(f".{pattern}"):
            return value
    return None


def _number(own: Json, general: Json, what: str, wrong: Wrong) -> float:
    value = general if own is None else own
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise wrong(f"the configuration has {what} = {str(value)[:50]!r}, which is no number")
    return float(value)
