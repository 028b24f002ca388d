"""The leaves of a model: their paths, what kind of array each one is, and the bytes it takes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer._src.quantization.base import QuantizedArray


class Typed(Protocol):
    """An array with or without values: dense, quantized, or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


def is_quantized(x: object) -> TypeGuard[QuantizedArray]:
    return isinstance(x, QuantizedArray)


def is_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray | QuantizedArray]:
    """Whether `leaf` has values: a tree also holds functions, strings and Python's numbers."""
    return isinstance(leaf, (jax.Array, np.ndarray, QuantizedArray))


def is_abstract(leaf: object) -> bool:
    """Whether `leaf` is an array without values, as `jax.eval_shape` gives them; a quantized one if its parts are."""
    return any(isinstance(part, jax.ShapeDtypeStruct) for part in jtu.tree_leaves(leaf))


def is_weight(leaf: object) -> TypeGuard[Typed]:
    """Whether `leaf` is a floating point array, with or without values: integers must stay exact."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and (is_array(leaf) or is_abstract(leaf))


def check_tree(tree: object) -> None:
    """A TypeError for the path of a file, which is a tree to JAX, and has no arrays."""
    if isinstance(tree, (str, os.PathLike)):
        raise TypeError(f"expected a tree of arrays, got {str(tree)!r}: `load` reads the arrays of a file")


def stored_bytes(tree: object) -> int:
    """The bytes that the arrays in `tree` take, or will take if it is abstract; an array that occurs twice counts once.

    >>> import jax.numpy as jnp
    >>> from eformer.model import quantize_model, stored_bytes
    >>> tree = {"kernel": jnp.ones((256, 512))}
    >>> stored_bytes(tree), stored_bytes(quantize_model(tree))
    (524288, 75776)
    """
    check_tree(tree)
    arrays = {id(leaf): leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf) or is_abstract(leaf)}
    return sum(map(nbytes, arrays.values()))


def nbytes(leaf: Typed) -> int:
    """The bytes of an array; a `jax.ShapeDtypeStruct` does not tell them itself."""
    return leaf.nbytes if is_array(leaf) else math.prod(leaf.shape) * leaf.dtype.itemsize


def named_leaves(tree: object, is_leaf: Callable[[object], bool] = is_quantized) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves with their paths, and the structure from which `jax.tree.unflatten` makes the tree again.

    A path joins keys, indices and attribute names by ".": "layers.0.mlp.kernel". A box around a single array, such as
    a variable of Flax, is not named: its attribute `value` is left out. A quantized array is one leaf.

    >>> from eformer.model import named_leaves
    >>> named_leaves({"layers": [{"w": 1.0}, {"w": 2.0}]})[0]
    [('layers.0.w', 1.0), ('layers.1.w', 2.0)]
    """
    check_tree(tree)
    leaves, structure = jtu.tree_flatten_with_path(tree, is_leaf)
    children = Counter(key_path[:-1] for key_path, _ in leaves)

    def name(key_path: jtu.KeyPath) -> str:
        boxed = key_path[-1:] == (jtu.GetAttrKey("value"),) and len(key_path) > 1 and children[key_path[:-1]] == 1
        return jtu.keystr(key_path[:-1] if boxed else key_path, simple=True, separator=".")

    return [(name(key_path), leaf) for key_path, leaf in leaves], structure
