"""The structure of a tree as JSON: nested dicts and lists, with the names of arrays at the leaves.

A leaf is a string, None is null, and the rest is `{"dict": {key: node}}`, `{"items": [[key, node], ...]}` for a dict
with integers among its keys, or `{"list": [node, ...]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax import tree_util as jtu

from eformer.model import named_leaves
from eformer.ops.quantization import QuantizedArray

from ._error import CheckpointError

MAX_DEPTH = 100
SCALAR = "value"  # the name of an array that is the whole tree


def flattened(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The named leaves of a tree, and its structure as JSON."""
    named = [(name or SCALAR, leaf) for name, leaf in named_leaves(tree)[0]]
    names = iter([name for name, _ in named])
    return named, _node(tree, names)


def _node(tree: Any, names: Iterator[str]) -> Any:
    if tree is None:
        return None
    children, _ = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree or isinstance(x, QuantizedArray))
    if len(children) == 1 and not children[0][0]:  # no key: a leaf
        return next(names)
    nodes = [(_key(path[0]), _node(child, names)) for path, child in children]
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return {"list": [node for _, node in nodes]}
    if not isinstance(tree, dict) and [key for key, _ in nodes] == ["value"] and isinstance(nodes[0][1], str):
        return nodes[0][1]  # a box around an array, which `named_leaves` does not name either
    if all(isinstance(key, str) for key, _ in nodes):
        return {"dict": dict(nodes)}
    return {"items": [list(node) for node in nodes]}


def _key(key: Any) -> str | int:
    inner = getattr(key, "key", None)
    return inner if isinstance(inner, (int, str)) else jtu.keystr((key,), simple=True)


def rebuilt(node: Any, leaf: Callable[[str], Any], depth: int = 0) -> Any:
    """The tree that `node` describes, of `leaf(name)` for each name."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"the tree is more than {MAX_DEPTH} levels deep")
    if node is None:
        return None
    if isinstance(node, str):
        return leaf(node)
    kind, content = next(iter(node.items())) if isinstance(node, dict) and len(node) == 1 else ("", None)
    if kind == "dict" and isinstance(content, dict):
        return {key: rebuilt(child, leaf, depth + 1) for key, child in content.items()}
    if kind == "list" and isinstance(content, list):
        return [rebuilt(child, leaf, depth + 1) for child in content]
    if kind == "items" and isinstance(content, list) and all(_is_pair(pair) for pair in content):
        return {key: rebuilt(child, leaf, depth + 1) for key, child in content}
    raise CheckpointError(f"the tree has a node {str(node)[:100]}, which is no dict, list or name")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str)
