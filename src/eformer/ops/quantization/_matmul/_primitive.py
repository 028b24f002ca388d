"""The primitive `quantized_matmul`: x (count, ..., k) times a stack q of quantized matrices, as one operation.

As a primitive it has a derivative that runs the same kernels on the transposed matrices, `vmap` makes longer stacks,
and `_lowering` chooses the kernel once the devices are known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from eformer.jaximus import note_materialized

from ._operand import MatmulOperand

TreeDef: TypeAlias = Any  # `jax.tree_util.PyTreeDef`, which is not typed as a class
Operand: TypeAlias = jax.Array | ad.Zero
Operands: TypeAlias = Sequence[Operand]

matmul_p = Primitive("quantized_matmul")
PARTLY_MANUAL = "`shard_map` over some axes of the mesh leaves the others to XLA, which can't divide a kernel"


@functools.singledispatch
def matmul_in_xla(q: MatmulOperand, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    """What `matmul_stacks` computes, in XLA's own operations, in its accumulator's dtype: at least 32 bits.

    A format registers its own. Without `in_tiles` it may not loop over parts of `q`.
    """
    del x, contracted_axis, in_tiles
    raise TypeError(f"{type(q).__name__} has no matmul in XLA's operations")


def matmul_stacks(x: jax.Array, q: MatmulOperand, contracted_axis: int, dtype: np.dtype) -> jax.Array:
    """x (count, ..., k) @ q (count, k, n), or @ q.mT of q (count, n, k) for `contracted_axis=1`: (count, ..., n).

    Every leaf of `q` has the axis `count`. Kernels sum in float32; devices add up partial sums of `dtype`.
    """
    leaves, treedef = jtu.tree_flatten(q)
    x, *leaves = varying_alike([x, *leaves])
    return matmul_p.bind(x, *leaves, treedef=treedef, contracted_axis=contracted_axis, dtype=dtype)


def varying_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, in `shard_map` all typed as varying along every mesh axis along which one of them varies."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return [*operands]
    varying = [jax.typeof(operand).mat.varying for operand in operands]
    every = frozenset().union(*varying)
    pairs = zip(operands, varying, strict=True)
    return [lax.pcast(operand, tuple(sorted(every - own)), to="varying") for operand, own in pairs]


def note_partly_manual(q: MatmulOperand) -> None:
    """Note the dense copy of `q` inside a `shard_map` over some mesh axes only: `Partitioner.UNKNOWN`, when lowered."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and any(size > 1 and name not in mesh.manual_axes for name, size in mesh.shape.items()):
        note_materialized(q, PARTLY_MANUAL)


def leaves_in_xla(
    x: jax.Array, *leaves: jax.Array, treedef: TreeDef, contracted_axis: int, dtype: np.dtype
) -> jax.Array:
    """`matmul_in_xla` of the primitive's operands."""
    return matmul_in_xla(jtu.tree_unflatten(treedef, leaves), x, contracted_axis).astype(dtype)


@functools.partial(jax.jit, static_argnames=("treedef", "contracted_axis", "dtype"))
def _compiled(*operands: jax.Array, **params: object) -> jax.Array:
    return matmul_p.bind(*operands, **params)


@matmul_p.def_impl
def _run(*operands: jax.Array, **params: object) -> jax.Array:
    with jax.disable_jit(False):  # a primitive has to be compiled to run at all
        return _compiled(*operands, **params)


@matmul_p.def_abstract_eval
def _abstract_eval(
    x: ShapedArray, *leaves: ShapedArray, treedef: TreeDef, contracted_axis: int, dtype: np.dtype
) -> ShapedArray:
    shape = jtu.tree_unflatten(treedef, leaves).shape
    return x.update(shape=(*x.shape[:-1], shape[2 - contracted_axis]), dtype=dtype, weak_type=False)


def define_derivative(primitive: Primitive, in_xla: Callable[..., jax.Array]) -> None:
    """The derivative of a matmul primitive of operands (x, *rest); `in_xla` computes it in XLA's own operations."""

    def jvp(primals: Operands, tangents: Operands, **params: object) -> tuple[jax.Array, jax.Array]:
        (x, *rest), (dx, *drest) = primals, tangents
        terms = [] if isinstance(dx, ad.Zero) else [primitive.bind(dx, *rest, **params)]
        if not all(isinstance(d, ad.Zero) for d in drest):  # scales have derivatives too
            of_rest = functools.partial(in_xla, x, **params)
            terms.append(jax.jvp(of_rest, rest, [ad.instantiate_zeros(d) for d in drest])[1])
        return primitive.bind(*primals, **params), functools.reduce(lax.add, terms)  # JAX asks for one at least

    def transpose(
        ct: Operand, x: ad.UndefinedPrimal, *rest: jax.Array, contracted_axis: int, dtype: np.dtype, **params: object
    ) -> list[Operand | None]:
        del dtype
        params |= {"contracted_axis": 1 - contracted_axis, "dtype": x.aval.dtype}
        dx = ad.Zero(x.aval) if isinstance(ct, ad.Zero) else primitive.bind(ct, *rest, **params)
        return [dx, *[None] * len(rest)]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def _batch(operands: Sequence[jax.Array], axes: Sequence[int | None], **params: object) -> tuple[jax.Array, int]:
    (x, *leaves), (x_axis, *leaf_axes) = operands, axes
    if all(axis is None for axis in leaf_axes):  # more rows of x
        assert x_axis is not None
        return matmul_p.bind(jnp.moveaxis(x, x_axis, 1), *leaves, **params), 1
    size = next(o.shape[a] for o, a in zip(operands, axes, strict=True) if a is not None)

    def stack(operand: jax.Array, axis: int | None) -> jax.Array:
        whole = jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    out = matmul_p.bind(*map(stack, operands, axes), **params)
    return out.reshape(size, out.shape[0] // size, *out.shape[1:]), 0


define_derivative(matmul_p, leaves_in_xla)
batching.primitive_batchers[matmul_p] = _batch
