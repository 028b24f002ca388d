"""Adapters of LoRA alone, in a folder as the package PEFT writes and reads it.

`adapter_model.safetensors` has `lora_A` (rank, in) and `lora_B` (out, rank) for each module, and `adapter_config.json`
says by which factor `lora_B @ lora_A` is scaled. The leaf "layers.0.attn.weight" is the module "layers.0.attn". Of a
stack "layers.attn.weight", (count, out, in), each matrix is a module: the place in the stack follows the part of the
name that says "layers", "blocks" or "experts".
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from eformer._src.atomic_files import Target
from eformer._src.checkpoint.adapter_config import CONFIG, READ, ModuleError, config_of, factor_of, read_config
from eformer._src.checkpoint.arrays import CheckpointToWrite, arrays_to_write, tensors_to_write
from eformer._src.checkpoint.file import CheckpointError, StrPath
from eformer._src.checkpoint.header import Json
from eformer._src.checkpoint.open import ATTEMPTS, Checkpoint, open_checkpoint
from eformer._src.checkpoint.paths import state_of
from eformer._src.checkpoint.saving.save import write_safetensors
from eformer._src.checkpoint.tree import flattened
from eformer._src.model.axes import contracted_axis
from eformer._src.model.training.lora import named_weights
from eformer._src.model.training.lora_array import LoraArray

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class _Names:
    """How the two matrices of a module are called, and whether its weight has the inputs first."""

    first: str
    second: str
    inputs_first: bool


LINEAR = _Names("lora_A.weight", "lora_B.weight", inputs_first=False)
EMBEDDING = _Names("lora_embedding_A", "lora_embedding_B", inputs_first=True)


class _Update(NamedTuple):
    a: jax.Array
    b: jax.Array
    factor: float


def save_adapter(path: StrPath, tree: object, *, base_model: str | None = None, overwrite: bool = False) -> Path:
    """Write `a` and `b` of all LoRA arrays of `tree` to the folder `path`, for PEFT and for `load_adapter`.

    A leaf "layers.0.attn.weight" is the module "layers.0.attn". Of a stack "layers.attn.weight" each matrix is one, and
    so are those of "experts". `base_model` is the name or path of the model that is adapted, for PEFT.
    """
    adapted = [(name, leaf) for name, leaf in named_weights(tree)[0] if isinstance(leaf, LoraArray)]
    if not adapted:
        raise ValueError("the tree has no LoRA array; `eformer.model.add_lora` adds them")
    tensors: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, q in adapted:
        names = EMBEDDING if is_embedding(name) else LINEAR
        inputs_first = names.inputs_first or contracted_axis(name, q.shape[-2:]) != -1
        scaling = np.asarray(q.scaling)
        for module, index in modules_of(name, q.shape[:-2]):
            a, b = q.a[index], q.b[index]
            first, second = (a.T, b.T) if inputs_first else (b, a)
            tensors |= {f"{PREFIX}{module}.{names.first}": first, f"{PREFIX}{module}.{names.second}": second}
            ranks[module], alphas[module] = q.rank, float(scaling[index]) * q.rank
    config = config_of(ranks, alphas, base_model)
    texts = {CONFIG: json.dumps(config, indent=2).encode()}
    target = Target(Path(path) / WEIGHTS, overwrite, texts=texts, config=CONFIG)
    named, structure = flattened(tensors)
    own = {CONFIG: {key: config[key] for key in READ}}
    written = CheckpointToWrite([tensors_to_write(item) for item in arrays_to_write(named)], own, {"format": "pt"})
    return write_safetensors(target, written, structure, None, None).parent


def load_adapter(path: StrPath, tree: Tree) -> Tree:
    """`tree`, the model that was adapted, with the LoRA arrays of the folder `path`, written by us or by PEFT.

    The module "layers.0.attn" is the leaf "layers.0.attn.weight", or ".kernel", dense or quantized; or the first matrix
    of the stack "layers.attn.weight". Matrices of a stack that the adapter does not name get an update of zero, and
    those of a smaller rank are filled up with zeros. An adapter that names a module which the tree does not have, or
    has in another shape, raises a CheckpointError.
    """
    folder = Path(path)
    named, structure = named_weights(tree)
    leaves = dict(named)
    shapes = {name: tuple(leaf.shape) for name, leaf in named if hasattr(leaf, "shape")}
    updates: dict[str, dict[Index, _Update]] = {}
    checkpoint, config = _opened(folder)
    with checkpoint:
        for module, names in _modules(checkpoint).items():
            wrong = ModuleError(str(folder / WEIGHTS), module)
            found = find_leaf(module, shapes)
            if found is None:
                some = ", ".join(repr(name) for name in list(shapes)[:3])
                raise wrong(f"the model has no such module: it is an adapter for another one; here are {some}, ...")
            name, index = found
            if isinstance(leaves[name], LoraArray):
                raise wrong("the model has an update of low rank there already; `eformer.model.drop_lora` removes it")
            if index in updates.setdefault(name, {}):
                raise wrong(f"it is the second update of {name!r}")
            update = _read(name, shapes[name][len(index) :], module, names, checkpoint, config, wrong)
            updates[name][index] = update
    for name, of_leaf in updates.items():
        leaves[name] = _adapted(leaves[name], of_leaf)
    return jax.tree.unflatten(structure, [leaves[name] for name, _ in named])


def _opened(folder: Path) -> tuple[Checkpoint, Mapping[str, Json]]:
    """The weights of an adapter, and the configuration that belongs to them, also if a save replaces both."""
    for _ in range(ATTEMPTS):
        found, checkpoint = state_of(folder), open_checkpoint(folder / WEIGHTS)
        try:
            config = read_config(folder, checkpoint)
        except BaseException:
            checkpoint.close()
            raise
        if state_of(folder) == found:
            return checkpoint, config
        checkpoint.close()
    raise CheckpointError(f"it was replaced {ATTEMPTS} times while it was opened", file=str(folder))


def _modules(checkpoint: Checkpoint) -> dict[str, _Names]:
    """The modules that the tensors belong to, in order; an error if a module has two updates."""
    found: dict[str, _Names] = {}
    prefixes: dict[str, bool] = {}
    for name in checkpoint:
        names = next((each for each in (LINEAR, EMBEDDING) if name.endswith((each.first, each.second))), None)
        if names is None:
            what = "it is neither `lora_A` nor `lora_B` of a module"
            raise CheckpointError(what, file=str(checkpoint.path), tensor=name)
        end = names.first if name.endswith(names.first) else names.second
        module = name.removesuffix(end).removesuffix(".").removeprefix(PREFIX)
        has_prefix = name.startswith(PREFIX)
        if (found.setdefault(module, names), prefixes.setdefault(module, has_prefix)) != (names, has_prefix):
            what = f"the module {module[:100]!r} has another update, with the prefix {PREFIX!r} or of an embedding"
            raise CheckpointError(what, file=str(checkpoint.path), tensor=name)
    return found


def _read(
    name: str,
    shape: tuple[int, ...],
    module: str,
    names: _Names,
    checkpoint: Checkpoint,
    config: Mapping[str, Json],
    wrong: ModuleError,
) -> _Update:
    """The update of a matrix `shape` of the leaf `name`."""
    prefix = PREFIX if f"{PREFIX}{module}.{names.first}" in checkpoint else ""
    parts = [f"{prefix}{module}.{end}" for end in (names.first, names.second)]
    missing = next((part for part in parts if part not in checkpoint), None)
    if missing is not None:
        raise wrong(f"{missing!r} is missing")
    first, second = (checkpoint.read(part) for part in parts)
    inputs_first = names.inputs_first or contracted_axis(name, shape) != -1 or bool(config.get("fan_in_fan_out"))
    a, b = (first.T, second.T) if inputs_first else (second, first)
    rank = first.shape[0] if first.ndim == 2 else 0
    if first.ndim != 2 or second.ndim != 2 or (a.shape, b.shape) != ((*shape[:1], rank), (rank, *shape[1:])):
        raise wrong(f"{first.shape} and {second.shape} do not fit the weight {shape}: it is an adapter for another one")
    if not all(jnp.issubdtype(part.dtype, jnp.floating) for part in (a, b)):
        raise wrong(f"its matrices are {a.dtype} and {b.dtype}, and must be floating point")
    return _Update(jnp.asarray(a), jnp.asarray(b), factor_of(config, rank, wrong))


def _adapted(base: Any, updates: Mapping[Index, _Update]) -> LoraArray:
    if () in updates:
        a, b, factor = updates[()]
        return LoraArray(base, a, b, jnp.float32(factor))
    *stack, rows, cols = base.shape
    rank = max(update.a.shape[1] for update in updates.values())
    dtype = jnp.result_type(*(part for update in updates.values() for part in update[:2]))
    a, b = np.zeros((*stack, rows, rank), dtype), np.zeros((*stack, rank, cols), dtype)
    scaling = np.ones(stack, np.float32)
    for index, update in updates.items():
        own = update.a.shape[1]
        a[index][:, :own], b[index][:own], scaling[index] = update.a, update.b, update.factor
    return LoraArray(base, *map(jnp.asarray, (a, b, scaling)))


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


ENDS = (".weight", ".kernel", ".embedding", "")  # of the leaf that holds the weight of a module
STACKS = ("layers", "layer", "blocks", "block", "h", "experts")  # parts of names that stacks go by
MAX_PLACES = 4  # numbers in a name that may be places in a stack
# The leaf of an embedding in Flax, or the module of one in torch, which PEFT writes with other names and transposed.
# `embed_out` and `patch_embed` are no embeddings.
EMBEDDINGS = re.compile(r"\.embedding$|(^|\.)(embed(_tokens|_positions)?|wte|wpe|\w*embeddings?)\.weight$", re.ASCII)
Index = tuple[int, ...]


def is_embedding(name: str) -> bool:
    """Whether the leaf `name` is an embedding, whose rows are looked up."""
    return EMBEDDINGS.search(name) is not None


def modules_of(name: str, stack: Sequence[int]) -> list[tuple[str, Index]]:
    """The module of each matrix of the leaf `name`, and its place in the `stack`; a ValueError if that is not clear."""
    module = next(name.removesuffix(end) for end in ENDS if name.endswith(end))
    if not stack:
        return [(module, ())]
    parts = module.split(".")
    pairs = itertools.zip_longest(parts, parts[1:], fillvalue="")
    after = [i for i, (part, following) in enumerate(pairs) if part in STACKS and not following.isdecimal()]
    if len(after) != len(stack):
        known = ", ".join(map(repr, STACKS))
        raise ValueError(
            f"{name!r} is a stack of {' x '.join(map(str, stack))} matrices, and PEFT names each of them: its path "
            f"must have one of {known} for each axis of the stack; `save` keeps any tree"
        )

    def named(index: Index) -> str:
        places = dict(zip(after, index, strict=True))
        return ".".join(f"{part}.{places[i]}" if i in places else part for i, part in enumerate(parts))

    return [(named(index), index) for index in itertools.product(*map(range, stack))]


def find_leaf(module: str, shapes: Mapping[str, Sequence[int]]) -> tuple[str, Index] | None:
    """The leaf of this module, and the place in it if it is a stack; None if the model has none."""
    for short, index in _without_places(module):
        for end in ENDS:
            shape = shapes.get(short + end)
            if shape is not None and len(shape) == 2 + len(index):
                inside = all(i < n for i, n in zip(index, shape, strict=False))
                return (short + end, index) if inside else None
    return next(((module + end, ()) for end in ENDS if module + end in shapes), None)


def _without_places(module: str) -> Iterator[tuple[str, Index]]:
    """The name without none, one or several of its numbers, and these numbers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal() and part.isascii() and len(part) < 10]
    for count in range(min(len(numbers), MAX_PLACES) + 1):
        for places in itertools.combinations(numbers[:MAX_PLACES], count):
            short = ".".join(part for i, part in enumerate(parts) if i not in places)
            yield short, tuple(int(parts[i]) for i in places)
