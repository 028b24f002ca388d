"""The structure of a tree as JSON: nested dicts and lists, with the names of arrays at the leaves.

A leaf is a string, None is null, and the rest is `{"dict": {key: node}}`, `{"items": [[key, node], ...]}` for a dict
with keys that are not text, or `{"list": [node, ...]}`. Among items, a key is text, an integer, `{"bool": true}`,
`{"float": 1.5}` or `{"tuple": [key, ...]}`.

A random key is an array of its data, uint32; `load` makes keys of it where `like` has keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.header import Json
from eformer._src.model.paths import named_leaves
from eformer._src.quantization.base import QuantizedArray

MAX_DEPTH = 100
SCALAR = "value"  # the name of an array that is the whole tree
T = TypeVar("T")


def is_function(leaf: object) -> bool:
    """Whether the leaf is a function, as modules of Equinox hold them: no file has it, and `like` keeps its own."""
    return callable(leaf) and not hasattr(leaf, "dtype")


def flattened(tree: object) -> tuple[list[tuple[str, object]], Json]:
    """The named leaves of a tree, and its structure as JSON; functions are None there."""
    named = [(name or SCALAR, leaf) for name, leaf in named_leaves(tree)[0] if not is_function(leaf)]
    names = iter([name for name, _ in named])
    return named, _node(tree, names, 0)


def _node(tree: object, names: Iterator[str], depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise ValueError(f"the tree is more than {MAX_DEPTH} levels deep, which `load` does not read")
    if tree is None:
        return None
    children, _ = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree or isinstance(x, QuantizedArray))
    if len(children) == 1 and not children[0][0]:  # no key: a leaf
        return None if is_function(tree) else next(names)
    nodes = [(_key(path[0]), _node(child, names, depth + 1)) for path, child in children]
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return {"list": [node for _, node in nodes]}
    if not isinstance(tree, dict) and [key for key, _ in nodes] == ["value"] and isinstance(nodes[0][1], str):
        return nodes[0][1]  # a box around an array, which `named_leaves` does not name either
    texts = {key: node for key, node in nodes if isinstance(key, str)}
    return {"dict": texts} if len(texts) == len(nodes) else {"items": [list(node) for node in nodes]}


def _key(key: Any) -> Json:  # JAX's keys have no common class
    """A key of a dict as JSON; the name of the child for other nodes."""
    own = isinstance(key, (jtu.DictKey, jtu.FlattenedIndexKey))
    return _dict_key(key.key) if own else jtu.keystr((key,), simple=True)


def _dict_key(key: Hashable, depth: int = 0) -> Json:
    if depth > MAX_DEPTH:
        raise ValueError(f"a key of a dict is more than {MAX_DEPTH} levels deep")
    if isinstance(key, bool):
        return {"bool": key}
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int):
        return int(key)
    if isinstance(key, float) and math.isfinite(key):
        return {"float": float(key)}
    if type(key) is tuple:
        return {"tuple": [_dict_key(each, depth + 1) for each in key]}
    raise TypeError(
        f"a key of a dict is {key!r:.100}, a {type(key).__name__}: text, whole and finite numbers, truth values and "
        "tuples of these come back as they were; make it one of them"
    )


def rebuilt(node: Json, leaf: Callable[[str], T], depth: int = 0) -> T | list | dict | None:
    """The tree that `node` describes, with `leaf(name)` for each name."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"the tree is more than {MAX_DEPTH} levels deep")
    if node is None:
        return None
    if isinstance(node, str):
        return leaf(node)
    kind, content = _only(node)
    if kind == "dict" and isinstance(content, dict):
        return {key: rebuilt(child, leaf, depth + 1) for key, child in content.items()}
    if kind == "list" and isinstance(content, list):
        return [rebuilt(child, leaf, depth + 1) for child in content]
    if kind == "items" and isinstance(content, list):
        pairs = [pair for pair in content if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) == len(content):
            found = {_rebuilt_key(key): rebuilt(child, leaf, depth + 1) for key, child in pairs}
            if len(found) == len(content):
                return found
    raise CheckpointError(f"the tree has a node {str(node)[:100]}, which is no dict, list or name")


def _rebuilt_key(key: Json, depth: int = 0) -> Hashable:
    if isinstance(key, (int, str)) and not isinstance(key, bool):
        return key
    kind, content = _only(key)
    if (kind == "bool" and isinstance(content, bool)) or (kind == "float" and isinstance(content, float)):
        return content
    if kind == "tuple" and isinstance(content, list) and depth < MAX_DEPTH:
        return tuple(_rebuilt_key(each, depth + 1) for each in content)
    raise CheckpointError(f"the tree has a node with a key {str(key)[:100]}, which is no key that was saved")


def _only(node: Json) -> tuple[str, Json]:
    """The one entry of a dict; no kind of ours if it is something else."""
    return next(iter(node.items())) if isinstance(node, dict) and len(node) == 1 else ("", None)


def is_key(leaf: object) -> bool:
    """Whether `leaf` is an array of random keys, with or without values, as `jax.random.key` makes them."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_stored(leaf: Any) -> Any:
    """The data of a key; any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) and isinstance(leaf, jax.Array) else leaf


def stored_shape(leaf: Any) -> tuple[int, ...]:
    """The shape that a leaf has in a file."""
    return _data(leaf)[0] if is_key(leaf) else tuple(getattr(leaf, "shape", ()))


def as_key(data: Any, like: Any) -> jax.Array:
    """Keys of the generator that those of `like` are for."""
    return jax.random.wrap_key_data(jnp.asarray(data), impl=_data(like)[1])


def _data(like: Any) -> tuple[tuple[int, ...], Any]:
    """The shape of the data of keys, and their generator; keys without values are told by their type alone."""
    generators = []

    def data(keys: jax.Array) -> jax.Array:
        generators.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    return jax.eval_shape(data, like).shape, generators[0]
