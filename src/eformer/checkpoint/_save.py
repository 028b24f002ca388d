"""`save` and `save_bitsandbytes`: a tree, with quantized arrays in it, as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ._bitsandbytes_codecs import bitsandbytes_record
from ._file import StrPath
from ._progress import Progress
from ._records import items_of, record_of
from ._saving import Target
from ._tree import flattened
from ._write import write_safetensors


def save(
    path: StrPath,
    tree: object,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a tree of arrays, dense and quantized, as safetensors; the result is the file, or the index of its shards.

    A path that ends in ".safetensors" is the file; any other is a folder, which gets a "model.safetensors". With
    `max_shard_bytes`, a larger checkpoint is split into "model-1f0a93c2-00001-of-00003.safetensors" and so on, with
    eight digits that no other save has, and an index beside them; an array stays whole. Any program that reads
    safetensors reads the file; a quantized array is there as its leaves, `NAME.packed` and so on.

    The file appears when it is complete and on the disk. A kill at any moment leaves the old one as it was, and the
    next save removes the leftovers. Others may save to the same path at once: the checkpoint of one of them remains,
    whole. `progress` is called with a name, the bytes done and the total bytes.

    Sharded arrays are written shard by shard. If there are several processes (`jax.distributed.initialize`), all of
    them call this, each writes the shards of its devices, and the folder is one that all of them see.

    >>> import os, tempfile
    >>> import jax.numpy as jnp
    >>> from eformer.checkpoint import load, save
    >>> from eformer.ops.quantization import quantize
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = save(path, {"w": quantize(jnp.ones((64, 128)), dtype="nf4"), "b": jnp.zeros(128)})
    >>> load(path)["w"]
    ArrayNF4(float32[64, 128], 4,608 bytes)
    """
    named, structure = flattened(tree)
    records = [record_of(item) for item in items_of(named, spread=True)]
    return write_safetensors(Target(path, overwrite, progress), records, structure, metadata, max_shard_bytes)


def save_bitsandbytes(
    path: StrPath,
    tree: object,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """`save` with the names and layouts of bitsandbytes, which loads the file; codes and scales stay as they are.

    NF4 needs blocks along the last axis of 32, 64, ... or 4096 that end where rows end, as torch's (out, in) weights
    have them: `q.T` brings blocks along K of a (K, N) weight there. INT8 needs two axes, a scale per row, and a name
    that ends in "weight"; the file does not hold its dtype, and it reads as float32. Formats without a codec raise a
    ValueError: dequantize them first. Dense arrays are written as they are.
    """
    named, structure = flattened(tree)
    records = [bitsandbytes_record(item) for item in items_of(named)]
    return write_safetensors(Target(path, overwrite, progress), records, structure, metadata, max_shard_bytes)
