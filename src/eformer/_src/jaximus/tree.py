"""Tree functions that take implicit arrays as leaves, and functions of whole models: cast, norm, average, size."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu
from jax.typing import DTypeLike

from .array import ImplicitArray, is_implicit, materialize
from .types import Leaf, Tree

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")  # a tree


def _with_implicit(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kwargs["is_leaf"] = is_implicit
        return function(*args, **kwargs)

    call.__doc__ = f"As `jax.tree_util.{function.__name__}`, with implicit arrays as leaves."
    return call


tree_leaves_with_implicit = _with_implicit(jtu.tree_leaves)
tree_structure_with_implicit = _with_implicit(jtu.tree_structure)
tree_flatten_with_implicit = _with_implicit(jtu.tree_flatten)
tree_flatten_with_path_with_implicit = _with_implicit(jtu.tree_flatten_with_path)
tree_map_with_implicit = _with_implicit(jtu.tree_map)
tree_map_with_path_with_implicit = _with_implicit(jtu.tree_map_with_path)


def tree_cast(tree: T, dtype: DTypeLike) -> T:
    """`tree` with its floating point arrays in `dtype`, implicit ones too; integers and all else stay.

    >>> import jax.numpy as jnp
    >>> from eformer.jaximus import tree_cast
    >>> from eformer.ops.quantization import quantize
    >>> tree_cast({"w": quantize(jnp.ones((64, 64)), "nf4"), "step": jnp.int32(3)}, jnp.bfloat16)["w"]
    ArrayNF4(bfloat16[64, 64], 2,304 bytes)
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`tree_cast` takes a floating point dtype, got {jnp.dtype(dtype)}")
    return tree_map_with_implicit(lambda leaf: leaf.astype(dtype) if _is_floating(leaf) else leaf, tree)


def tree_norm(tree: Tree) -> jax.Array:
    """The Euclidean norm of all floating point arrays of `tree` together, implicit ones too, in float32 or more."""
    arrays = [leaf for leaf in tree_leaves_with_implicit(tree) if _is_floating(leaf)]
    squares = [jnp.sum(jnp.square(materialize(array).astype(_wide(array.dtype)))) for array in arrays]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def tree_average(trees: Sequence[T], weights: Sequence[float] | None = None) -> T:
    """The average of trees of one structure; `weights` are divided by their sum.

    Floating point arrays are averaged in float32 or more, and cast to the dtype of the first tree's. Implicit arrays
    count with the values they stand for, and their average is a dense array. All else is taken from the first tree.
    """
    trees = list(trees)
    if not trees:
        raise ValueError("`tree_average` needs at least one tree")
    shares = np.ones(len(trees)) if weights is None else np.asarray(weights, np.float64)
    if shares.shape != (len(trees),) or not np.sum(shares):
        raise ValueError(f"`weights` must be {len(trees)} numbers with a sum that is not 0, got {weights!r}")
    shares = shares / np.sum(shares)

    def average(first: Leaf, *others: Leaf) -> Leaf:
        if not _is_floating(first):
            return first
        dtype = _wide(first.dtype)
        arrays = [materialize(each).astype(dtype) for each in (first, *others)]
        terms = [array * jnp.asarray(share, dtype) for array, share in zip(arrays, shares, strict=True)]
        return functools.reduce(operator.add, terms).astype(first.dtype)

    return tree_map_with_implicit(average, *trees)


def tree_size(tree: Tree) -> int:
    """The number of elements of all arrays of `tree`: the parameters of a model, however they are stored.

    >>> import jax.numpy as jnp
    >>> from eformer.jaximus import tree_size
    >>> from eformer.ops.quantization import quantize
    >>> tree_size({"w": quantize(jnp.ones((64, 64)), "nf4"), "b": jnp.zeros(64)})
    4160
    """
    return sum(leaf.size for leaf in tree_leaves_with_implicit(tree) if isinstance(leaf, _ARRAYS))


_ARRAYS = (ImplicitArray, jax.Array, np.ndarray)


def _is_floating(leaf: Leaf) -> bool:
    return isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _wide(dtype: DTypeLike) -> DTypeLike:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
