"""`save`: a tree, with quantized arrays in it, as safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax import tree_util as jtu

from eformer.ops.quantization import QuantizedArray

from ._describe import check_decoding, describe
from ._dtypes import dtype_name
from ._error import CheckpointError
from ._progress import Progress
from ._records import Item, Part, Record, items_of
from ._tree import flattened
from ._write import write_safetensors


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a tree of arrays, dense and quantized, as safetensors; the result is the file, or the index of its shards.

    A path that ends in ".safetensors" is the file; any other is a folder, for a "model.safetensors" in it. With
    `max_shard_bytes`, what is larger is split into "model-1f0a93c2-00001-of-00003.safetensors" and so on, with eight
    digits that no other save has, and an index beside them; an array stays whole. Any program that reads safetensors
    reads the file; a quantized array is there as its leaves, `NAME.packed` and so on.

    The file appears when it is complete and on the disk. A kill at any moment leaves the old one as it was, and the
    next save removes what was left. Others may save to the same path at once: what remains is what one of them saved,
    whole. `progress` is called with a name, the bytes done and the bytes in all.

    Arrays that devices have in parts are written part by part. Where there are several processes
    (`jax.distributed.initialize`), all of them call this, each writes the parts that its devices have, and the folder
    is one that all of them see.

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
    return write_items(
        path,
        items_of(named, spread=True),
        tree=structure,
        metadata=metadata,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        progress=progress,
    )


def write_items(path: str | os.PathLike[str], items: Sequence[Item], **how: Any) -> Path:
    """Write arrays in this package's own way; `how` as `write_safetensors` has it."""
    return write_safetensors(path, [record_of(item) for item in items], **how)


def record_of(item: Item) -> Record:
    """The tensors of an array, and how to put them together again."""
    like = item.like
    if not isinstance(like, QuantizedArray):
        return Record(item.name, [part_of(item.name, like)], lambda: [item.make()], done=item.done)
    described, names = describe(item.name, like)
    try:
        check_decoding(like)
    except CheckpointError as error:
        raise ValueError(f"{item.name!r} can't be saved: {error.what}") from None
    parts = [part_of(name, leaf) for name, leaf in zip(names, jtu.tree_leaves(like), strict=True)]
    return Record(item.name, parts, lambda: jtu.tree_leaves(item.make()), described, item.done)


def part_of(name: str, like: Any) -> Part:
    dtype_name(like.dtype, name)  # raises if there is none
    return Part(name, np.dtype(like.dtype), tuple(like.shape))
