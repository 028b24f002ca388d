"""LoRA over whole models: add updates of low rank by rules, drop out, and merge them into the weights."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.typing import DTypeLike

from eformer._src.jaximus.array import materialize
from eformer._src.model.defaults import EMBEDDINGS, contracted_axis
from eformer._src.model.paths import is_abstract, is_quantized, is_weight, named_leaves

from .loftq import loftq, quantized_like
from .lora_array import LoraArray

Tree = TypeVar("Tree")
Pattern = str | Callable[[str, Any], bool]  # of paths, or a function of path and leaf


def is_lora(x: object) -> TypeGuard[LoraArray]:
    return isinstance(x, LoraArray)


def is_whole(x: object) -> bool:
    """Whether `x` is one weight, though it is a tree of several arrays."""
    return is_quantized(x) or is_lora(x)


def named_weights(tree: object) -> tuple[list[tuple[str, Any]], Any]:
    """`named_leaves` with an update of low rank as one leaf, together with the weight that it adapts."""
    return named_leaves(tree, is_whole)


def add_lora(
    tree: Tree,
    rank: int = 8,
    *,
    key: jax.Array,
    rules: Sequence[Pattern] | None = None,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    dtype: DTypeLike = jnp.float32,
    original: Tree | None = None,
    steps: int = 1,
) -> Tree:
    """`tree` with a `LoraArray` in place of each weight that is adapted: the weight, frozen, plus `scaling * a @ b`.

    By default these are all quantized matrices and stacks of them but embeddings; with `rules`, all leaves of two axes
    or more that a rule matches, quantized or dense: regular expressions searched for in the path, or functions of path
    and leaf. `scaling` is `alpha / rank`, or `alpha / sqrt(rank)` if `rank_stabilized` (rsLoRA, arXiv 2312.03732);
    `alpha` is twice the rank unless given.

    The update is zero at first: the factor that activations meet first is random, and the other is zero. With
    `original`, the tree before it was quantized, the update of a quantized weight starts as the best one of this rank
    for what quantization lost, by its singular vectors (LoftQ, arXiv 2310.08659). With more `steps`, what the update
    leaves is quantized again, and then the singular vectors are taken again: the weights of the result are not those of
    `tree` then.

    `partition` then trains `a` and `b` and freezes all else:

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import add_lora, partition, quantize_model
    >>> params = quantize_model({"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)})
    >>> trained, frozen = partition(add_lora(params, rank=4, key=jax.random.key(0)))
    >>> sum(leaf.size for leaf in jax.tree.leaves(trained))
    3072
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"`rank={rank!r}` must be an int of at least 1")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1 or (steps > 1 and original is None):
        raise ValueError(f"`steps={steps!r}` must be an int of at least 1, and more than 1 only with `original`")
    if isinstance(rules, str) or callable(rules):
        raise TypeError(f"`rules` must be a sequence of patterns, got one {type(rules).__name__}: put it into a list")
    if rules is not None and not rules:
        raise ValueError("`rules` has no pattern: give one at least, or None for all quantized matrices")
    named, structure = named_weights(tree)
    before = None if original is None else dict(named_leaves(original)[0])
    used: set[Pattern] = set()
    leaves = []
    for number, (path, leaf) in enumerate(named):
        if not _is_adapted(path, leaf, rules, used):
            leaves.append(leaf)
            continue
        *stack, rows, cols = leaf.shape
        if rank > min(rows, cols):
            raise ValueError(f"`rank={rank}` does not fit {path!r} {leaf.shape}: it can be {min(rows, cols)} at most")
        factor = (2.0 * rank if alpha is None else float(alpha)) / (math.sqrt(rank) if rank_stabilized else rank)
        if before is None or not is_quantized(leaf):
            a, b = _zero_update(path, leaf, rank, jax.random.fold_in(key, number), dtype)
        else:
            leaf, a, b = loftq(_original(before, path, leaf), leaf, rank, factor, dtype, steps)
        leaves.append(LoraArray(leaf, a, b, jnp.full(stack, factor, jnp.float32)))
    _check_rules(rules, used, named, found=any(map(is_lora, leaves)))
    return jtu.tree_unflatten(structure, leaves)


def merge_lora(tree: Tree, *, requantize: bool = False) -> Tree:
    """`tree` with each `LoraArray` as the sum of its weight and its update: dense, in the weight's dtype.

    With `requantize`, the sum with a quantized weight is quantized again, in the weight's format. That rounds once
    more; `report(merge_lora(tree), merge_lora(tree, requantize=True))` tells the error it costs.
    """

    def merged(x: Any) -> Any:
        if not is_lora(x):
            return x
        dense = materialize(x)
        return quantized_like(x.base, dense) if requantize and is_quantized(x.base) else dense

    return jtu.tree_map(merged, tree, is_leaf=is_whole)


def drop_lora(tree: Tree) -> Tree:
    """`tree` without its updates: each `LoraArray` becomes the weight that it adapts."""
    return jtu.tree_map(lambda x: x.base if is_lora(x) else x, tree, is_leaf=is_whole)


def lora_dropout(tree: Tree, rate: float, key: jax.Array) -> Tree:
    """`tree` whose updates see activations with a fraction `rate` of their elements dropped, drawn from `key`.

    For use inside a loss, with a new key for each step; evaluate without it.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"`rate={rate!r}` must be at least 0 and below 1")

    def dropped(number: int, q: LoraArray) -> LoraArray:
        keys = jax.random.split(jax.random.fold_in(key, number), q.shape[:-2])
        return dataclasses.replace(q, dropout_key=keys, dropout=rate)

    leaves, structure = jtu.tree_flatten(tree, is_leaf=is_whole)
    return jtu.tree_unflatten(structure, [dropped(i, x) if is_lora(x) else x for i, x in enumerate(leaves)])


def adapter_leaves(tree: object) -> set[int]:
    """The ids of `a` and `b` of all LoRA arrays in `tree`."""
    arrays = [x for x in jtu.tree_leaves(tree, is_leaf=is_whole) if is_lora(x)]
    return {id(part) for x in arrays for part in (x.a, x.b)}


def _is_adapted(path: str, leaf: Any, rules: Sequence[Pattern] | None, used: set[Pattern]) -> bool:
    if is_lora(leaf):
        raise ValueError(f"{path!r} has an update of low rank already; `merge_lora` or `drop_lora` removes it first")
    if not is_weight(leaf) or len(leaf.shape) < 2:
        return False
    if rules is None:
        return is_quantized(leaf) and re.search(EMBEDDINGS, path) is None
    found = [rule for rule in rules if (re.search(rule, path) if isinstance(rule, str) else rule(path, leaf))]
    used.update(found)
    return bool(found)


def _check_rules(
    rules: Sequence[Pattern] | None, used: set[Pattern], named: Sequence[tuple[str, Any]], found: bool
) -> None:
    some = ", ".join(repr(path) for path, leaf in named if is_weight(leaf) and len(leaf.shape) >= 2)[:300] or "none"
    if rules is None and not found:
        raise ValueError(
            f"no matrix is quantized, but perhaps embeddings: give `rules` for the weights to adapt; "
            f"matrices are: {some}"
        )
    unused = [rule for rule in rules or () if rule not in used]
    if unused:
        raise ValueError(f"no matrix matches {', '.join(map(repr, unused))}; matrices are: {some}")


def _zero_update(path: str, leaf: Any, rank: int, key: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    *stack, rows, cols = leaf.shape
    axis = contracted_axis(path, leaf.shape)
    bound = 1 / math.sqrt(leaf.shape[axis])  # as layers are initialized: uniform, by the number of inputs
    shape = (*stack, rank, cols) if axis == -1 else (*stack, rows, rank)
    draw = jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)
    return (
        (jnp.zeros((*stack, rows, rank), dtype), draw) if axis == -1 else (draw, jnp.zeros((*stack, rank, cols), dtype))
    )


def _original(before: Mapping[str, Any], path: str, leaf: Any) -> Any:
    """The weight `path` before it was quantized; a ValueError if `before` does not have it, dense and in its shape."""
    found = before.get(path)
    if is_weight(found) and not is_quantized(found) and not is_abstract(found) and found.shape == leaf.shape:
        return found
    has = f"{type(found).__name__} {found.shape}" if is_weight(found) else "no array"
    raise ValueError(
        f"`original` must be the tree before it was quantized: {path!r} must be a dense array {leaf.shape}, "
        f"and is {has}"
    )
