"""`load`: a whole checkpoint as a tree."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from eformer._src.model.paths import named_leaves
from eformer._src.progress import Meter, Progress

from .arrays import Value
from .file import CheckpointError, StrPath
from .open import Checkpoint, open_checkpoint
from .placement import ShardingFor
from .tree import SCALAR, as_key, is_function, is_key, rebuilt, stored_shape


def load(
    source: StrPath | bytes,
    *,
    like: object = None,
    sharding: ShardingFor = None,
    flat: bool = False,
    copy: bool = False,
    raw: bool = False,
    progress: Progress | None = None,
) -> Any:  # the tree that was saved, or `like`
    """The arrays of a checkpoint: nested dicts and lists as they were saved; a flat dict if the file has no tree.

    `like` is any pytree (a Flax or Equinox model, shapes from `jax.eval_shape`). Its leaves are filled with the arrays
    of the same names ("layers.0.mlp.kernel"), which must have its shapes; dtypes and formats are the file's. A number
    in it is filled with a number, and a random key with a key; functions in it stay. Arrays that `like` does not name
    are not read. `flat` always gives a dict of names.

    `sharding` is one for all arrays, a dict by name, or a function of name and shape; it names the axes of the array,
    whatever its format. Without it, a NamedSharding of a leaf of `like` is used. Each device reads its shard from the
    file.

    Files are memory-mapped: if another program truncates one meanwhile, the system ends the process. `copy` reads the
    whole files first, and raises in that case; it takes their size in memory besides.

    A checkpoint that is quantized in a way that is not read raises a CheckpointError with the name of the method. `raw`
    gives its tensors all the same, as they are in the file: a flat dict of codes, scales and whatever there is.

    64-bit arrays stay NumPy arrays, unless JAX has 64-bit types enabled.
    """
    if flat and like is not None:
        raise ValueError("`flat` and `like` ask for two different trees; give one")
    with open_checkpoint(source, copy=copy, raw=raw) as checkpoint:
        if like is not None:
            return _filled(checkpoint, like, sharding, progress)
        names = list(checkpoint)
        meter = Meter(progress, sum(checkpoint.info(name).nbytes for name in names))

        @functools.cache  # a tree that names an array in two places has the same one there
        def read(name: str) -> Value:
            made = checkpoint.read(name, sharding)
            meter.add(name, checkpoint.info(name).nbytes)
            return made

        if flat or checkpoint.tree is None:
            return {name: read(name) for name in names}
        _check_tree(checkpoint)
        return rebuilt(checkpoint.tree, read)


def _check_tree(checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError, before anything is read, unless the tree is one and names arrays that are there."""

    def check(name: str) -> None:
        if name not in checkpoint:
            raise CheckpointError("the tree names it, and it is not there", tensor=name)

    try:
        rebuilt(checkpoint.tree, check)
    except CheckpointError as error:
        raise CheckpointError(error.what, file=str(checkpoint.path or "<bytes>"), tensor=error.tensor) from None


def _filled(checkpoint: Checkpoint, like: object, sharding: ShardingFor, progress: Progress | None) -> object:
    named, structure = named_leaves(like)
    named = [(name or SCALAR, leaf) for name, leaf in named]
    wrong = functools.partial(CheckpointError, file=str(checkpoint.path))
    arrays = [(name, leaf) for name, leaf in named if not is_function(leaf)]
    missing = [name for name, _ in arrays if name not in checkpoint]
    if missing:
        there = ", ".join(map(repr, list(checkpoint)[:3]))
        what = f"{len(missing)} of {len(arrays)} leaves of `like` are not in the checkpoint, which has {there}, ..."
        raise wrong(what, tensor=missing[0])
    for name, leaf in arrays:
        shape, found = stored_shape(leaf), checkpoint.info(name).shape
        if shape != found:
            raise wrong(f"its shape is {found}, and `like` has {shape}", tensor=name)
    meter = Meter(progress, sum(checkpoint.info(name).nbytes for name, _ in arrays))
    leaves = []
    for name, leaf in named:
        if is_function(leaf):
            leaves.append(leaf)
            continue
        own = getattr(leaf, "sharding", None)
        wanted = own if sharding is None and isinstance(own, NamedSharding) else sharding
        made = as_key(checkpoint.read(name), leaf) if is_key(leaf) else checkpoint.read(name, wanted)
        leaves.append(type(leaf)(made.item()) if isinstance(leaf, (bool, int, float)) else made)
        meter.add(name, checkpoint.info(name).nbytes)
    return jax.tree.unflatten(structure, leaves)
