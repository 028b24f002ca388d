"""Write a checkpoint on disk again, one array at a time: in other formats, or as another kind of file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from eformer._src.atomic_files import Target, is_sealed, reading
from eformer._src.checkpoint.arrays import ArrayToWrite, Entry, Value
from eformer._src.checkpoint.file import CheckpointError, StrPath
from eformer._src.checkpoint.gguf.read import text_metadata, typed_metadata
from eformer._src.checkpoint.gguf.write import TypeFor, write_gguf
from eformer._src.checkpoint.header import narrowed
from eformer._src.checkpoint.open import Checkpoint, open_checkpoint
from eformer._src.checkpoint.paths import INDEX_SUFFIX, SUFFIXES
from eformer._src.checkpoint.placement import aligned_copy
from eformer._src.checkpoint.prequantized.foreign import OTHER_WEIGHTS
from eformer._src.checkpoint.prequantized.quantization_config import CONFIG, FILES, read_json, without_quantization
from eformer._src.model.calibration.statistics import Statistic
from eformer._src.model.quantize import asked_rules
from eformer._src.model.rules import Rule, apply_rule, find_rule, warn_unused_rules
from eformer._src.progress import Progress
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.registry import is_format_name
from eformer._src.quantization.spelling import FormatLike
from eformer._src.user_warnings import warn

from .save import GGUF, KINDS, Kind, kind_of, with_config, write_safetensors

# Endings of weights, which are not copied along, and the size of the largest file that is.
WEIGHTS = {*SUFFIXES, *OTHER_WEIGHTS, ".tmp"}
MAX_COPIED = 100_000_000


class NotRunnableWarning(UserWarning):
    """A model is written as a GGUF file that programs which run models do not take."""


def quantize_checkpoint(
    source: StrPath,
    target: StrPath,
    rules: FormatLike | Sequence[Rule] | None = None,
    *,
    format: FormatLike | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    statistics: Mapping[str, Statistic] | None = None,
    **options: object,
) -> Path:
    """Write `source` again with its weights in 4 bits, in another format, or as `rules` say; returns what `save` does.

    A format with options, such as `"int4", embeddings="int8"`, goes to the matrices that `default_rules` finds by
    names and shapes. Of `rules`, the first that matches an array's name decides. An array that no rule matches is
    copied byte for byte, and so are integers and arrays that are quantized already. `source` is a file, an index of
    shards or a folder, of any kind that `open_checkpoint` reads; from folder to folder, the small files beside the
    weights (configuration, tokenizer) are copied too. The target must not be a part of `source`. `statistics` by the
    names of arrays, of `calibrate`, are what scales are fitted for, and what rules with `method="gptq"` need.

    Memory peaks at about three times the largest array, whatever the size of the model.

    >>> import os, tempfile
    >>> import jax.numpy as jnp
    >>> from eformer import load, quantize_checkpoint, save
    >>> folder = tempfile.mkdtemp()
    >>> dense = save(os.path.join(folder, "dense.safetensors"), {"w": jnp.ones((64, 128)), "b": jnp.zeros(128)})
    >>> small = quantize_checkpoint(dense, os.path.join(folder, "small.safetensors"), "nf4")
    >>> load(small)["w"]
    ArrayNF4(float32[64, 128], 4,608 bytes)
    """
    if rules is None and format is None and is_format_name(target):
        raise ValueError(
            f"`target={target!r}` is where to write, and the name of a format: write `quantize_checkpoint(source, "
            f"target, {target!r})`, or './{target}' for a folder of that name"
        )
    rules = asked_rules(rules, format, options)
    with open_checkpoint(source) as checkpoint, reading(checkpoint.files):
        entries = {name: checkpoint.entry(name) for name in checkpoint}
        # Integers are counts and indices, which have to stay exact.
        weights = {name: e.like for name, e in entries.items() if jnp.issubdtype(e.like.dtype, jnp.floating)}
        chosen = {name: find_rule(rules, name, like) for name, like in weights.items()}
        warn_unused_rules(rules, chosen)
        known = {} if statistics is None else statistics
        items = (_quantized(name, entry, chosen.get(name), known.get(name)) for name, entry in entries.items())
        written = KINDS["safetensors"](items)
        to = Target(target, overwrite, progress, *_beside(source, target))
        return write_safetensors(to, written, checkpoint.tree, text_metadata(checkpoint.metadata), max_shard_bytes)


def convert(
    source: StrPath,
    target: StrPath,
    kind: Kind | None = None,
    *,
    type: TypeFor = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint of any kind as another, one array at a time: what the suffix or `kind` says, as for `save`.

    Quantized arrays stay quantized, code for code, if the other kind can hold them. `type` is for GGUF. From folder to
    folder, the small files beside the weights are copied too. The target must not be a part of `source`.
    """
    chosen = kind_of(target, kind, type, max_shard_bytes)
    with open_checkpoint(source) as checkpoint, reading(checkpoint.files):
        to = Target(target, overwrite, progress, *_beside(source, target))
        entries = [checkpoint.entry(name) for name in checkpoint]
        items = [ArrayToWrite(entry.name, entry.like, entry.host, entry.drop) for entry in entries]
        if chosen == GGUF:
            _warn_if_not_runnable(checkpoint)
            return write_gguf(to, items, type, typed_metadata(checkpoint.metadata))
        written = KINDS[chosen](items)
        to = with_config(to, written, checkpoint.path)
        return write_safetensors(to, written, checkpoint.tree, text_metadata(checkpoint.metadata), max_shard_bytes)


def _quantized(name: str, entry: Entry, rule: Rule | None, statistic: Statistic | None) -> ArrayToWrite:
    like = entry.like
    if rule is None or rule.format is None or isinstance(like, QuantizedArray):
        return ArrayToWrite(name, like, entry.host, entry.drop)
    dtype = jax.dtypes.canonicalize_dtype(like.dtype)

    def make() -> Value:
        host = np.asarray(entry.host())
        copy = aligned_copy(host if host.dtype == dtype else narrowed(name, host, dtype))
        entry.drop()
        return jax.block_until_ready(apply_rule(rule, name, jax.device_put(copy), statistic))

    return ArrayToWrite(name, apply_rule(rule, name, jax.ShapeDtypeStruct(like.shape, dtype)), make)


def _warn_if_not_runnable(checkpoint: Checkpoint) -> None:
    """Say so if a model becomes a GGUF file that no program runs: its tensors would need other names, and metadata."""
    config = None if checkpoint.path is None else read_json(checkpoint.path.with_name(CONFIG))
    is_model = isinstance(config, dict) and ("model_type" in config or "architectures" in config)
    if is_model and "general.architecture" not in checkpoint.metadata:
        warn(
            "the GGUF file keeps the names of the arrays and gets no metadata of the model: `load` reads it, and no "
            "program runs it; llama.cpp's convert_hf_to_gguf.py makes one that runs, from the dense model",
            NotRunnableWarning,
        )


def _beside(source: StrPath, target: StrPath) -> tuple[list[Path], dict[str, bytes]]:
    """The files to copy along, and a config.json that does not say how the arrays were quantized before."""
    gone = {name for name, _ in FILES}
    files = [file for file in _small_files(source, target) if file.name not in gone]
    config = next((file for file in files if file.name == CONFIG), None)
    with contextlib.suppress(CheckpointError):  # it is no JSON, and copied as it is
        given = None if config is None else read_json(config)
        kept = without_quantization(given)
        if kept != given or (config is not None and is_sealed(config)):
            texts = {} if kept is None else {CONFIG: json.dumps(kept, indent=2).encode()}
            return [file for file in files if file != config], texts
    return files, {}


def _small_files(source: StrPath, target: StrPath) -> list[Path]:
    """The files beside the weights in a folder, to be copied to another; none unless both are folders."""
    source, target = Path(source), Path(target)
    if not source.is_dir() or target.suffix in SUFFIXES or source.resolve() == target.resolve():
        return []
    return [file for file in sorted(source.iterdir()) if _is_copied(file)]


def _is_copied(file: Path) -> bool:
    weights = file.suffix in WEIGHTS or file.name.endswith(INDEX_SUFFIX)
    if weights or file.name.startswith(".") or not file.is_file() or file.stat().st_size > MAX_COPIED:
        return False
    return file.resolve().parent == file.parent.resolve()  # else it is a link to what is no part of the checkpoint
