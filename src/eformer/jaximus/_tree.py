"""Tree functions that see implicit arrays as leaves, and those that people most often want to apply to a model."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ._array import ImplicitArray, is_implicit, materialize


def tree_leaves_with_implicit(tree: Any) -> list[Any]:
    return jtu.tree_leaves(tree, is_leaf=is_implicit)


def tree_structure_with_implicit(tree: Any) -> Any:
    return jtu.tree_structure(tree, is_leaf=is_implicit)


def tree_flatten_with_implicit(tree: Any) -> tuple[list[Any], Any]:
    return jtu.tree_flatten(tree, is_leaf=is_implicit)


def tree_flatten_with_path_with_implicit(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jtu.tree_flatten_with_path(tree, is_leaf=is_implicit)


def tree_map_with_implicit(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    return jtu.tree_map(function, tree, *rest, is_leaf=is_implicit)


def tree_map_with_path_with_implicit(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`function` is called with the key path first."""
    return jtu.tree_map_with_path(function, tree, *rest, is_leaf=is_implicit)


def tree_cast(tree: Any, dtype: Any) -> Any:
    """`tree` with its floating point arrays in `dtype`, implicit ones too; integers and all else stay.

    >>> import jax.numpy as jnp
    >>> from eformer.jaximus import tree_cast
    >>> from eformer.ops.quantization import quantize
    >>> tree_cast({"w": quantize(jnp.ones((64, 64)), dtype="nf4"), "step": jnp.int32(3)}, jnp.bfloat16)["w"]
    ArrayNF4(bfloat16[64, 64], 2,304 bytes)
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`tree_cast` takes a floating point dtype, got {jnp.dtype(dtype)}")
    return tree_map_with_implicit(lambda leaf: leaf.astype(dtype) if _is_floating(leaf) else leaf, tree)


def tree_norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all floating point arrays of `tree` together, summed in float32 or more.

    Implicit arrays count with the values they stand for, one after the other.
    """
    squares = [_sum_of_squares(materialize(leaf)) for leaf in tree_leaves_with_implicit(tree) if _is_floating(leaf)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def tree_average(trees: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """The average of trees of one structure, or with `weights`, which are divided by their sum.

    Floating point arrays are averaged in float32 or more, and have the dtype of the first tree's. Implicit arrays count
    with the values they stand for, and their average is a dense array. All else is taken from the first tree.
    """
    trees = list(trees)
    if not trees:
        raise ValueError("`tree_average` needs at least one tree")
    shares = np.ones(len(trees)) if weights is None else np.asarray(weights, np.float64)
    if shares.shape != (len(trees),) or not np.sum(shares):
        raise ValueError(f"`weights` must be {len(trees)} numbers with a sum that is not 0, got {weights!r}")
    shares = shares / np.sum(shares)

    def average(first: Any, *others: Any) -> Any:
        if not _is_floating(first):
            return first
        dtype = _wide(first.dtype)
        arrays = [materialize(each).astype(dtype) for each in (first, *others)]
        terms = [array * jnp.asarray(share, dtype) for array, share in zip(arrays, shares, strict=True)]
        return functools.reduce(operator.add, terms).astype(first.dtype)

    return tree_map_with_implicit(average, *trees)


def tree_size(tree: Any) -> int:
    """How many elements the arrays of `tree` have: the number of parameters of a model, however they are stored.

    >>> import jax.numpy as jnp
    >>> from eformer.jaximus import tree_size
    >>> from eformer.ops.quantization import quantize
    >>> tree_size({"w": quantize(jnp.ones((64, 64)), dtype="nf4"), "b": jnp.zeros(64)})
    4160
    """
    return sum(leaf.size for leaf in tree_leaves_with_implicit(tree) if isinstance(leaf, _ARRAYS))


_ARRAYS = (ImplicitArray, jax.Array, np.ndarray)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _sum_of_squares(array: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(array.astype(_wide(array.dtype))))


def _wide(dtype: Any) -> Any:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
