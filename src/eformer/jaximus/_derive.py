"""What is derived from `materialize`, for classes that do not state it: shape, dtype, and whether an array is a stack.

The formats of this package state all three. A class of a user need not: its `materialize` is traced, never run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import tree_util as jtu

from ._manners import struct
from ._observe import unobserved
from ._types import Structure

if TYPE_CHECKING:
    from ._array import ImplicitArray


def derive_struct(array: ImplicitArray) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `array.materialize()`, which may read `self.shape` only if the array keeps one."""
    return _struct(jtu.tree_structure(array), tuple(map(struct, jtu.tree_leaves(array))))


def derive_stacked(array: ImplicitArray) -> bool:
    """Whether `materialize` and `vmap(materialize)` of the leaves are the same program."""
    return _is_stacked(jtu.tree_structure(array), tuple(map(struct, jtu.tree_leaves(array))))


@functools.lru_cache(maxsize=4096)
def _struct(treedef: Structure, structs: tuple[jax.ShapeDtypeStruct, ...]) -> jax.ShapeDtypeStruct:
    def dense(leaves: Sequence[jax.Array]) -> jax.Array:
        array: ImplicitArray = jtu.tree_unflatten(treedef, leaves)
        array._keep(shapeless=array._record.given_shape is None)
        return array.materialize()

    with unobserved():
        return jax.eval_shape(dense, structs)


@functools.lru_cache(maxsize=4096)
def _is_stacked(treedef: Structure, structs: tuple[jax.ShapeDtypeStruct, ...]) -> bool:
    def dense(leaves: Sequence[jax.Array]) -> jax.Array:
        return jtu.tree_unflatten(treedef, leaves).materialize()

    lengths = {struct.shape[:1] for struct in structs}
    if len(lengths) != 1 or () in lengths:
        return False
    with unobserved():
        whole = jax.make_jaxpr(dense)(structs)
        try:
            sliced = jax.make_jaxpr(jax.vmap(dense))(structs)
        except (TypeError, ValueError, IndexError, AssertionError):  # not an array any more without that axis
            return False
    # JAX has no equality of programs but of their printed forms.
    same_consts = [np.array_equal(a, b) for a, b in zip(whole.consts, sliced.consts, strict=False)]
    return str(whole) == str(sliced) and all(same_consts)
