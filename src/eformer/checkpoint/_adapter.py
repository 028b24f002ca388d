"""Adapters of LoRA alone, in a folder as the package PEFT writes and reads it.

`adapter_model.safetensors` has `lora_A` (rank, in) and `lora_B` (out, rank) for each module, and `adapter_config.json`
says by which factor `lora_B @ lora_A` is scaled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from eformer.model import LoraArray, contracted_axis, named_leaves
from eformer.ops.quantization import QuantizedArray

from ._file import CheckpointError, StrPath
from ._header import Json
from ._open import Checkpoint, open_checkpoint
from ._quantization_config import read_json
from ._saving import atomic_file
from ._write import save

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = (".weight", ".kernel", ".embedding", "")  # of the leaf that holds the weight of a module

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class _Names:
    """How the two matrices of a module are called, and whether its weight has the inputs first."""

    first: str
    second: str
    inputs_first: bool


LINEAR = _Names("lora_A.weight", "lora_B.weight", inputs_first=False)
EMBEDDING = _Names("lora_embedding_A", "lora_embedding_B", inputs_first=True)


def save_adapter(path: StrPath, tree: object, *, base_model: str | None = None, overwrite: bool = False) -> Path:
    """Write `a` and `b` of all LoRA arrays of `tree` to the folder `path`, for PEFT and for `load_adapter`.

    A leaf "layers.0.attn.weight" is the module "layers.0.attn". `base_model` is the name or path of the model that is
    adapted, for PEFT. Stacks of matrices, which PEFT does not have, raise a ValueError; `save` keeps those.
    """
    adapted = [(name, leaf) for name, leaf in named_leaves(tree, _is_whole)[0] if isinstance(leaf, LoraArray)]
    if not adapted:
        raise ValueError("the tree has no LoRA array; `eformer.model.add_lora` adds them")
    tensors: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, q in adapted:
        if q.ndim != 2:
            raise ValueError(f"{name!r} is a stack of matrices, {q.shape}, and PEFT adapts single ones: use `save`")
        module = next(name.removesuffix(end) for end in ENDS if name.endswith(end))
        names = EMBEDDING if name.endswith(".embedding") else LINEAR
        transposed = contracted_axis(name, q.shape) != -1 and names is LINEAR
        second, first = (q.b.T, q.a.T) if transposed or names is EMBEDDING else (q.a, q.b)
        tensors |= {f"{PREFIX}{module}.{names.first}": first, f"{PREFIX}{module}.{names.second}": second}
        ranks[module], alphas[module] = q.rank, float(q.scaling) * q.rank
    folder = Path(path)
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    config = {
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
    written = save(folder / WEIGHTS, tensors, metadata={"format": "pt"}, overwrite=overwrite)
    with atomic_file(folder / CONFIG, overwrite=overwrite) as file:
        file.write(json.dumps(config, indent=2).encode())
    return written.parent


def load_adapter(path: StrPath, tree: Tree) -> Tree:
    """`tree`, the model that was adapted, with the LoRA arrays of the folder `path`, written by us or by PEFT.

    The module "layers.0.attn" is the leaf "layers.0.attn.weight", or ".kernel", dense or quantized. An adapter that
    names a module which the tree does not have, or has in another shape, raises a CheckpointError.
    """
    folder = Path(path)
    config = read_config(folder)
    named, structure = named_leaves(tree, _is_whole)
    places = {name: i for i, (name, _) in enumerate(named)}
    leaves = [leaf for _, leaf in named]
    with open_checkpoint(folder / WEIGHTS) as checkpoint:
        for module, names in _modules(checkpoint).items():
            wrong = _Wrong(str(folder / WEIGHTS), module)
            at = next((places[module + end] for end in ENDS if module + end in places), None)
            if at is None:
                some = ", ".join(repr(name) for name in list(places)[:3])
                raise wrong(f"the model has no such module: it is an adapter for another one; here are {some}, ...")
            leaves[at] = _adapted(named[at][0], leaves[at], module, names, checkpoint, config, wrong)
    return jax.tree.unflatten(structure, leaves)


@dataclass(frozen=True)
class _Wrong:
    file: str
    module: str

    def __call__(self, what: str) -> CheckpointError:
        return CheckpointError(what, file=self.file, tensor=self.module)


def read_config(folder: Path) -> Mapping[str, Json]:
    """The configuration of an adapter; a CheckpointError if there is none, or if it is no plain LoRA."""
    file = str(folder / CONFIG)
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError("there is no configuration of an adapter", file=file)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"its `peft_type` is {str(config.get('peft_type'))[:50]!r}, not 'LORA'", file=file)
    for option in ("use_dora", "use_qalora", "lora_bias", "modules_to_save", "layer_replication"):
        if config.get(option):
            raise CheckpointError(f"`{option}` changes more than updates of low rank do, and is not read", file=file)
    return config


def _modules(checkpoint: Checkpoint) -> dict[str, _Names]:
    """The modules that the tensors belong to, in order."""
    found: dict[str, _Names] = {}
    for name in checkpoint:
        names = next((each for each in (LINEAR, EMBEDDING) if name.endswith((each.first, each.second))), None)
        if names is None:
            what = "it is neither `lora_A` nor `lora_B` of a module"
            raise CheckpointError(what, file=str(checkpoint.path), tensor=name)
        end = names.first if name.endswith(names.first) else names.second
        found[name.removesuffix(end).removesuffix(".").removeprefix(PREFIX)] = names
    return found


def _adapted(
    name: str,
    base: Any,
    module: str,
    names: _Names,
    checkpoint: Checkpoint,
    config: Mapping[str, Json],
    wrong: _Wrong,
) -> LoraArray:
    prefix = PREFIX if f"{PREFIX}{module}.{names.first}" in checkpoint else ""
    parts = [f"{prefix}{module}.{end}" for end in (names.first, names.second)]
    missing = next((part for part in parts if part not in checkpoint), None)
    if missing is not None:
        raise wrong(f"{missing!r} is missing")
    if isinstance(base, LoraArray):
        raise wrong("the model has an update of low rank there already; `eformer.model.drop_lora` removes it")
    first, second = (checkpoint.read(part) for part in parts)
    inputs_first = names.inputs_first or contracted_axis(name, base.shape) != -1
    a, b = (first.T, second.T) if inputs_first else (second, first)
    rank = first.shape[0] if first.ndim == 2 else 0
    shapes = tuple(getattr(base, "shape", ()))
    if first.ndim != 2 or second.ndim != 2 or (a.shape, b.shape) != ((*shapes[:1], rank), (rank, *shapes[1:])):
        raise wrong(
            f"{first.shape} and {second.shape} do not fit the weight {shapes}: it is an adapter for another one"
        )
    expected = _number(_of_module(config, "rank_pattern", wrong), config.get("r"), "r", wrong)
    if expected != rank:
        raise wrong(f"its matrices have rank {rank}, and the configuration says {expected:g}")
    alpha = _number(_of_module(config, "alpha_pattern", wrong), config.get("lora_alpha"), "lora_alpha", wrong)
    factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraArray(base, jnp.asarray(a), jnp.asarray(b), jnp.float32(factor))


def _of_module(config: Mapping[str, Json], key: str, wrong: _Wrong) -> Json:
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


def _number(own: Json, general: Json, what: str, wrong: _Wrong) -> float:
    value = general if own is None else own
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise wrong(f"the configuration has {what} = {str(value)[:50]!r}, which is no number")
    return float(value)


def _is_whole(x: object) -> bool:
    return isinstance(x, (QuantizedArray, LoraArray))
