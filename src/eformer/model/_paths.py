"""The names of a tree's leaves."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer.ops.quantization import QuantizedArray


def is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedArray)


def is_array(leaf: Any) -> bool:
    """Whether `leaf` has values: a tree also holds functions, strings and Python's numbers."""
    return isinstance(leaf, (jax.Array, np.ndarray, QuantizedArray))


def is_abstract(leaf: Any) -> bool:
    """Whether `leaf` is an array without values, as of `jax.eval_shape`; a quantized one if its parts are."""
    return any(isinstance(part, jax.ShapeDtypeStruct) for part in jtu.tree_leaves(leaf))


def is_weight(leaf: Any) -> bool:
    """Whether `leaf` is an array, with values or without, that may be quantized or was: integers must stay exact."""
    return (is_array(leaf) or is_abstract(leaf)) and jnp.issubdtype(leaf.dtype, jnp.floating)


def stored_bytes(tree: Any) -> int:
    """Bytes of all arrays in `tree`, as they are stored, or will be if it is abstract; one that occurs twice, once.

    >>> import jax.numpy as jnp
    >>> from eformer.model import quantize_model, stored_bytes
    >>> tree = {"kernel": jnp.ones((256, 512))}
    >>> stored_bytes(tree), stored_bytes(quantize_model(tree))
    (524288, 73728)
    """
    arrays = {id(leaf): leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf) or is_abstract(leaf)}
    return sum(map(nbytes, arrays.values()))


def nbytes(leaf: Any) -> int:
    """Also of an abstract array."""
    return leaf.nbytes if hasattr(leaf, "nbytes") else math.prod(leaf.shape) * leaf.dtype.itemsize


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves with their paths, and the structure that `jax.tree.unflatten` makes the tree of again.

    A path is the keys, indices and attribute names joined by ".": "layers.0.mlp.kernel". A box around a single array,
    such as a variable of Flax, is not named: its attribute `value` is left out. A quantized array is one leaf.

    >>> from eformer.model import named_leaves
    >>> named_leaves({"layers": [{"w": 1.0}, {"w": 2.0}]})[0]
    [('layers.0.w', 1.0), ('layers.1.w', 2.0)]
    """
    leaves, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_quantized)
    children = Counter(key_path[:-1] for key_path, _ in leaves)

    def name(key_path: tuple[Any, ...]) -> str:
        boxed = key_path[-1:] == (jtu.GetAttrKey("value"),) and len(key_path) > 1 and children[key_path[:-1]] == 1
        return jtu.keystr(key_path[:-1] if boxed else key_path, simple=True, separator=".")

    return [(name(key_path), leaf) for key_path, leaf in leaves], structure
