"""Split a model into trained leaves and frozen leaves, and join the two again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from eformer._src.model.paths import is_abstract, is_array, is_quantized, named_leaves

from .lora import adapter_leaves

Tree = TypeVar("Tree")


def partition(tree: Tree, trainable: Callable[[str, Any], bool] | None = None) -> tuple[Tree, Tree]:
    """Two trees like `tree`, trained and frozen, each with None where the other has a leaf.

    Dense floating point arrays are trained; with `trainable`, those for which `trainable(path, leaf)` is true. In a
    tree with updates of low rank (`add_lora`) these alone are trained, unless `trainable` is given. Quantized arrays,
    integers, and whatever is no array are frozen. JAX and optax see the trained tree alone; `combine` joins the two
    again:

    >>> import jax, jax.numpy as jnp
    >>> from eformer.jaximus import implicit
    >>> from eformer.model import combine, partition, quantize_model
    >>> params = quantize_model({"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)})
    >>> trained, frozen = partition(params)
    >>> loss = lambda params, x: jnp.mean((x @ params["kernel"] + params["bias"]) ** 2)
    >>> gradients = jax.grad(implicit(lambda t, f, x: loss(combine(t, f), x)))(trained, frozen, jnp.ones((2, 256)))
    >>> jax.tree.map(jnp.shape, gradients)
    {'bias': (512,), 'kernel': None}
    """
    if trainable is not None and not callable(trainable):
        raise TypeError(f"`trainable` must be a function of path and leaf, got {trainable!r}: `lambda path, _: ...`")
    named, structure = named_leaves(tree)
    adapters = adapter_leaves(tree)
    if adapters and trainable is None:
        trainable = lambda _, leaf: id(leaf) in adapters  # noqa: E731
    chosen = [_can_train(leaf) and (trainable is None or bool(trainable(path, leaf))) for path, leaf in named]
    trained = [leaf if train else None for train, (_, leaf) in zip(chosen, named, strict=True)]
    frozen = [None if train else leaf for train, (_, leaf) in zip(chosen, named, strict=True)]
    return jax.tree.unflatten(structure, trained), jax.tree.unflatten(structure, frozen)


def _can_train(leaf: Any) -> bool:
    return not is_quantized(leaf) and (is_array(leaf) or is_abstract(leaf)) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def combine(trained: Tree, frozen: Tree) -> Tree:
    """The tree that `partition` split; the halves may hold gradients, updates or tracers instead."""
    (ours, structure), (theirs, other) = (
        named_leaves(half, lambda x: x is None or is_quantized(x)) for half in (trained, frozen)
    )
    if structure != other:
        only = {"trained": sorted(dict(ours).keys() - dict(theirs)), "frozen": sorted(dict(theirs).keys() - dict(ours))}
        differing = [f"only the {half} one has {', '.join(map(repr, some[:3]))}" for half, some in only.items() if some]
        same = f"{type(trained).__name__} and {type(frozen).__name__} of the same paths"
        raise ValueError(
            f"the halves are of different trees: {', '.join(differing) or same}; give the two that `partition` returned"
        )
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        if a is not None and b is not None:
            raise ValueError(f"both halves have a leaf {path!r}: give the two that `partition` returned for one tree")
    return jax.tree.unflatten(structure, [b if a is None else a for (_, a), (_, b) in zip(ours, theirs, strict=True)])
