"""The matmul of a stack of dense and a stack of quantized matrices, as one primitive.

As a primitive its derivative runs the same kernels on the transposed matrices, `vmap` makes longer stacks, and
`_lowering` chooses the kernel, when it is known on which and on how many devices it will run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from eformer.jaximus import note_materialized
from eformer.ops.quantization._leafwise import LeafwiseArray

from ._operand import MatmulOperand
from ._tiles import Contraction, matmul_in_tiles, varying_alike

matmul_p = Primitive("quantized_matmul")
_PARTLY_MANUAL = "`shard_map` over some axes of the mesh leaves the others to XLA, which can't divide a kernel"


@functools.singledispatch
def matmul_in_xla(q: Any, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    """What `matmul` gives, in JAX's own operations, of a float dtype of at least 32 bits or an integer one.

    Without `in_tiles` there is no loop over parts of `q`.
    """
    del x, contracted_axis, in_tiles
    raise TypeError(f"{type(q).__name__} has no matmul of stacks")


@matmul_in_xla.register
def _(q: LeafwiseArray, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    contraction = Contraction((x.ndim - 1,), (contracted_axis + 1,), (0,), (0,))
    if in_tiles:
        return matmul_in_tiles(x, q, contraction)
    return matmul_in_tiles(x, q, contraction, in_tiles=False, why=_PARTLY_MANUAL)


def matmul(x: jax.Array, q: MatmulOperand, contracted_axis: int, dtype: Any) -> jax.Array:
    """`x @ q`, or `x @ q.mT` for `contracted_axis=1`, as `dtype` (count, ..., n): of x (count, ..., k) and q of 3 axes.

    Every leaf of `q` has the stack's axis first. Sums are float32; what devices add up among them is of `dtype`.
    """
    if _partly_manual(jax.sharding.get_abstract_mesh()):
        note_materialized(q, _PARTLY_MANUAL)
    leaves, treedef = jtu.tree_flatten(q)
    x, *leaves = varying_alike([x, *leaves])
    dtype = jnp.dtype(dtype)
    return matmul_p.bind(x, *leaves, treedef=treedef, contracted_axis=contracted_axis, dtype=dtype)


def _partly_manual(mesh: Any) -> bool:
    """Whether this is inside a `shard_map` over some axes of the mesh only; the lowering sees `Partitioner.UNKNOWN`."""
    manual = set(mesh.manual_axes)
    return bool(manual) and any(size > 1 and name not in manual for name, size in mesh.shape.items())


def in_xla(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> jax.Array:
    return matmul_in_xla(jtu.tree_unflatten(treedef, leaves), x, contracted_axis).astype(dtype)


@functools.partial(jax.jit, static_argnames=("treedef", "contracted_axis", "dtype"))
def _compiled(*operands: Any, **params: Any) -> jax.Array:
    return matmul_p.bind(*operands, **params)


def _run(*operands: Any, **params: Any) -> jax.Array:
    with jax.disable_jit(False):  # one operation has to be compiled to run at all
        return _compiled(*operands, **params)


def _abstract_eval(x: Any, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> Any:
    shape = jtu.tree_unflatten(treedef, leaves).shape
    return x.update(shape=(*x.shape[:-1], shape[2 - contracted_axis]), dtype=dtype, weak_type=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, *leaves), (dx, *dleaves) = primals, tangents
    parts = []
    if not isinstance(dx, ad.Zero):
        parts.append(matmul_p.bind(dx, *leaves, **params))
    if not all(isinstance(d, ad.Zero) for d in dleaves):  # scales are numbers too
        of_leaves = functools.partial(in_xla, x, **params)
        parts.append(jax.jvp(of_leaves, leaves, [ad.instantiate_zeros(d) for d in dleaves])[1])
    return matmul_p.bind(*primals, **params), sum(parts[1:], parts[0])  # one at least: else JAX does not ask


def _transpose(ct: Any, x: Any, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> Any:
    del dtype
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *[None] * len(leaves)]
    params = {"treedef": treedef, "contracted_axis": 1 - contracted_axis, "dtype": x.aval.dtype}
    return [matmul_p.bind(ct, *leaves, **params), *[None] * len(leaves)]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    size = next(o.shape[a] for o, a in zip(operands, axes, strict=True) if a is not None)
    (x, *leaves), (x_axis, *leaf_axes) = operands, axes
    if all(axis is None for axis in leaf_axes):  # more rows of x
        return matmul_p.bind(jnp.moveaxis(x, x_axis, 1), *leaves, **params), 1

    def stack(operand: Any, axis: Any) -> Any:
        whole = jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    out = matmul_p.bind(*map(stack, operands, axes), **params)
    return out.reshape(size, out.shape[0] // size, *out.shape[1:]), 0


matmul_p.def_impl(_run)
matmul_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[matmul_p] = _jvp
ad.primitive_transposes[matmul_p] = _transpose
batching.primitive_batchers[matmul_p] = _batch
