"""Implicit arrays that a function closes over, or that reach it as arguments of a `jit` inside `implicit`.

JAX asks such an array for `__jax_array__` and gets the output of the primitive here: its inputs are the array's leaves.
Under `implicit` the primitive turns back into the implicit array and the rules see it, however deep in inner jits,
scans or branches it was asked for; anywhere else it is the dense array.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._array import ImplicitArray
from ._observe import serving
from ._types import Leaf, Structure

implicit_array_p = Primitive("implicit_array")


def bind_implicit(array: ImplicitArray) -> jax.Array:
    leaves, treedef = jtu.tree_flatten(array)
    return implicit_array_p.bind(*leaves, treedef=treedef)


@implicit_array_p.def_impl
def _materialize(*leaves: Leaf, treedef: Structure) -> jax.Array:
    array = jtu.tree_unflatten(treedef, leaves)
    with serving(implicit_array_p, (type(array),), "materialize"):
        return array.materialize()


@implicit_array_p.def_abstract_eval
def _abstract_eval(*avals: ShapedArray, treedef: Structure) -> ShapedArray:
    return jtu.tree_unflatten(treedef, avals).aval


def _jvp(primals: Sequence[Leaf], tangents: Sequence[Leaf], *, treedef: Structure) -> tuple[jax.Array, jax.Array]:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    _, tangent = jax.jvp(lambda *leaves: _materialize(*leaves, treedef=treedef), primals, tangents)
    return implicit_array_p.bind(*primals, treedef=treedef), tangent


def _batch(leaves: Sequence[Leaf], axes: Sequence[int | None], *, treedef: Structure) -> tuple[jax.Array, int]:
    return jax.vmap(lambda *leaves: _materialize(*leaves, treedef=treedef), axes)(*leaves), 0


ad.primitive_jvps[implicit_array_p] = _jvp
batching.primitive_batchers[implicit_array_p] = _batch
mlir.register_lowering(implicit_array_p, mlir.lower_fun(_materialize, multiple_results=False))
