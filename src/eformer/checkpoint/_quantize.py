"""Quantize a checkpoint on disk, one array at a time: memory for the largest array, not for the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eformer._warnings import warn
from eformer.model import Rule, UnusedRuleWarning, apply_rule, find_rule
from eformer.ops.quantization import QuantizedArray

from ._dtypes import narrowed
from ._entries import Entry
from ._error import CheckpointError
from ._open import Checkpoint, open_checkpoint
from ._place import aligned_copy
from ._progress import Progress
from ._records import Item
from ._save import write_items
from ._sources import GGUF_SUFFIX, INDEX_SUFFIX, SUFFIX, check_inside

# Weights by their suffix, which are not copied along, and how large what is copied may be.
WEIGHTS = {SUFFIX, GGUF_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".tmp"}
MAX_COPIED = 100_000_000


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rules: Sequence[Rule],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write `source` again with its floating point arrays in the formats that `rules` say; the result is as `save`'s.

    The first rule that matches an array's name decides; what none matches is copied byte for byte, and so are integers
    and what is quantized already. `source` is a file, an index of shards or a folder, of any kind that
    `open_checkpoint` reads; from folder to folder, the small files beside the weights (configuration, tokenizer) are
    copied too. What would be replaced must not be a part of `source`.

    Memory peaks at about three times the largest array, however large the model is.

    >>> import os, tempfile
    >>> import jax.numpy as jnp
    >>> from eformer.checkpoint import load, quantize_checkpoint, save
    >>> from eformer.model import Rule
    >>> folder = tempfile.mkdtemp()
    >>> dense = save(os.path.join(folder, "dense.safetensors"), {"w": jnp.ones((64, 128)), "b": jnp.zeros(128)})
    >>> small = quantize_checkpoint(dense, os.path.join(folder, "small.safetensors"), [Rule("w", "nf4")])
    >>> load(small)["w"]
    ArrayNF4(float32[64, 128], 4,608 bytes)
    """
    if isinstance(rules, (Rule, str)) or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(f"`rules` must be a sequence of `Rule`s, got {rules!r}; `parse_rule` reads strings")
    with open_checkpoint(source) as checkpoint:
        entries = {name: checkpoint.entry(name) for name in checkpoint}
        # Integers are counts and indices, which have to stay exact.
        weights = {name: e.like for name, e in entries.items() if jnp.issubdtype(e.like.dtype, jnp.floating)}
        chosen = {name: find_rule(rules, name, like) for name, like in weights.items()}
        _warn_unused(rules, chosen)
        return write_items(
            target,
            [_item(name, entry, chosen.get(name)) for name, entry in entries.items()],
            tree=checkpoint.tree,
            metadata=text_metadata(checkpoint),
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
            progress=progress,
            sources=files_of(checkpoint),
            beside=small_files(source, target),
        )


def _item(name: str, entry: Entry, rule: Rule | None) -> Item:
    if rule is None or rule.format is None or isinstance(entry.like, QuantizedArray):
        return stored_item(name, entry)
    dtype = jax.dtypes.canonicalize_dtype(entry.like.dtype)
    dense = jax.ShapeDtypeStruct(entry.like.shape, dtype)

    def make() -> Any:
        copy = aligned_copy(narrowed(name, entry.host(), dtype) if dtype != entry.like.dtype else entry.host())
        entry.drop()
        return jax.block_until_ready(apply_rule(rule, name, jax.device_put(copy)))

    return Item(name, jax.eval_shape(lambda x: apply_rule(rule, name, x), dense), make)


def stored_item(name: str, entry: Entry) -> Item:
    """An array of a checkpoint as it is, to be written into another."""
    return Item(name, entry.like, entry.host, entry.drop)


def _warn_unused(rules: Sequence[Rule], weights: dict[str, Rule | None]) -> None:
    used = {id(rule) for rule in weights.values()}
    unused = [str(rule) for rule in rules if id(rule) not in used and not rule.optional]
    if unused:
        some = ", ".join(map(repr, list(weights)[:3])) or "there is none"
        warn(
            f"no floating point array is left for {', '.join(unused)}; names look like this: {some}",
            UnusedRuleWarning,
        )


def text_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """What safetensors can hold of the metadata: text, and numbers as text; not lists (vocabularies of GGUF)."""
    kept = {name: value for name, value in checkpoint.metadata.items() if isinstance(value, (str, int, float))}
    return {name: str(value) for name, value in kept.items() if name != "total_size"}


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """The files that a checkpoint is read from."""
    parts = {tensor.file.path for name in checkpoint for tensor in checkpoint.entry(name).tensors}
    return sorted({each for each in (checkpoint.path, *parts) if each is not None})


def small_files(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Path]:
    """What lies beside the weights in a folder, and goes with them to another; nothing unless both are folders."""
    source, target = Path(source), Path(target)
    if not source.is_dir() or target.suffix in (SUFFIX, GGUF_SUFFIX) or source.resolve() == target.resolve():
        return []
    return [file for file in sorted(source.iterdir()) if _goes_along(file)]


def _goes_along(file: Path) -> bool:
    weights = file.suffix in WEIGHTS or file.name.endswith(INDEX_SUFFIX)
    if weights or file.name.startswith(".") or not file.is_file() or file.stat().st_size > MAX_COPIED:
        return False
    try:
        check_inside(file.with_name("index"), file)
    except CheckpointError:  # a link out of the folder: not a part of the checkpoint
        return False
    return True
