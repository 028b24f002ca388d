"""Types that can't be said more exactly, each with the reason."""

from __future__ import annotations

from typing import Any, TypeAlias

Tree: TypeAlias = Any  # a pytree of any structure, a lone array too
Structure: TypeAlias = Any  # a `jax.tree_util.PyTreeDef`, which is a variable to type checkers
Device: TypeAlias = Any  # a `jax.Device`, which is one too
Leaf: TypeAlias = Any  # of an implicit array: a dense or implicit one, or whatever JAX puts into a tree in between
Value: TypeAlias = Any  # an operand or result: implicit or dense array, tracer, number
Annotation: TypeAlias = Any  # a class, a union, `Any` itself
Node: TypeAlias = Any  # a container, or an element of one
