"""The configuration of an adapter: what PEFT's options do to a module, and which of them are read."""

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

# The options that say what an update is; all are read.
READ = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out")
# Those that matter in training, or tell which modules have matrices, which the file tells too.
IDLE = (
    *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "runtime_config"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("velora_config", "qalora_group_size"),
)
# The values of other options that change nothing; each option does something else with every other value.
NOTHING: Mapping[str, tuple[Json, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
KINDS = {"use_rslora": bool, "fan_in_fan_out": bool, "rank_pattern": dict, "alpha_pattern": dict}
# Why an option with another value is refused.
OPTIONS = {
    "bias": "adds trained biases to modules",
    "init_lora_weights": "takes the first update off the base weights",
    "use_dora": "scales each row of the weight to a length of its own",
    "lora_bias": "adds a bias to the update",
    "modules_to_save": "replaces whole modules",
    "trainable_token_indices": "replaces rows of the embedding",
    "layer_replication": "makes a model of other layers",
    "target_parameters": "updates parameters that are no weight of a module",
    "use_qalora": "pools the inputs",
    "alora_invocation_tokens": "updates only tokens after some others",
    "monteclora_config": "samples updates",
    "use_bdlora": "has matrices of blocks",
    "arrow_config": "chooses between adapters for each token",
    "kasa_config": "changes the base weights and puts singular values between A and B",
    "ensure_weight_tying": "gives tied weights one update",
}


def _does_nothing(option: str, value: Json) -> bool:
    return option in READ or option in IDLE or value in NOTHING.get(option, ())


@dataclass(frozen=True)
class ModuleError:
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
    for option, value in config.items():
        if value and not _does_nothing(option, value):
            how = OPTIONS.get(option, "is an option that is not known here")
            raise CheckpointError(f"`{option}` is {str(value)[:50]!r}: it {how}, and is not read", file=file)
    for option, kind in KINDS.items():
        if not isinstance(config.get(option), (kind, type(None))):
            raise CheckpointError(
                f"`{option}` is {str(config[option])[:50]!r}, and must be a {kind.__name__}", file=file
            )
    return config


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


def factor_of(config: Mapping[str, Json], rank: int, wrong: ModuleError) -> float:
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


def _of_module(config: Mapping[str, Json], key: str, wrong: ModuleError) -> Json:
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


def _number(own: Json, general: Json, what: str, wrong: ModuleError) -> float:
    value = general if own is None else own
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise wrong(f"the configuration has {what} = {str(value)[:50]!r}, which is no number")
    return float(value)
