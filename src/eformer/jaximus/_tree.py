"""Tree functions that see implicit arrays as leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import tree_util as jtu

from ._array import is_implicit


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
