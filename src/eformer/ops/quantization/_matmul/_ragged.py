"""`ragged_dot` with quantized matrices: each group of rows is matmul by a matrix of its own (mixture of experts).

The rows of a group follow each other, so the work is cut into steps of one block of rows and one matrix: as many as
there are blocks and groups together, at most. A step reads the codes of its matrix and no others. All steps together
are one operation that JAX sees, so that its derivative has the same steps with the transposed matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax import tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from eformer.jaximus import register
from eformer.ops.quantization._base import asked_of
from eformer.ops.quantization._leafwise import LeafwiseArray, transpose

from ._rule import as_tuples, matmul, result_dtype, stacked
from ._tiles import Contraction, varying_alike

BLOCK_ROWS = 64  # rows in a step: fewer read the codes more often, more multiply rows of other groups in vain

grouped_matmul_p = Primitive("grouped_matmul")


@register("ragged_dot_general")
def ragged_dot_general(
    primitive: Any,
    lhs: jax.Array,
    rhs: LeafwiseArray,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    **params: Any,
) -> Any:
    del primitive
    (l_summed, r_summed), (l_batch, _) = as_tuples(ragged_dot_dimension_numbers.dot_dimension_numbers)
    (ragged,) = ragged_dot_dimension_numbers.lhs_ragged_dimensions
    if l_batch or ragged in l_summed or asked_of(params) or not (rhs.use_kernel and lhs.size and rhs.size):
        return NotImplemented
    (group,) = ragged_dot_dimension_numbers.rhs_group_dimensions
    order = (group, *(axis for axis in range(rhs.ndim) if axis != group))
    matrices = transpose(lax.transpose_p, rhs, permutation=order) if group else rhs
    contraction = Contraction(l_summed, tuple(order.index(axis) for axis in r_summed), (), (0,))
    stack = stacked(matrices, contraction)
    if stack is None:  # the codes of a matrix can't be told from those of the next, or blocks run along several axes
        return NotImplemented
    free = contraction.x_free(lhs.ndim)
    rest = [axis for axis in free if axis != ragged]
    x = lax.transpose(lhs, [ragged, *rest, *contraction.x_summed_in_order])
    x = lax.collapse(x, len(free))
    dtype = jnp.dtype(preferred_element_type or result_dtype(lhs.dtype, rhs.dtype, precision))
    out = grouped_matmul(x, group_sizes, *stack, dtype, precision)
    columns = [matrices.shape[axis] for axis in contraction.q_free(matrices.ndim)]
    return jnp.moveaxis(lax.reshape(out, (*out.shape[:-1], *columns)), 0, free.index(ragged))


def grouped_matmul(
    x: jax.Array, sizes: jax.Array, q: LeafwiseArray, contracted_axis: int, dtype: Any, precision: Any
) -> jax.Array:
    """Of x (rows, ..., k) the first `sizes[0]` rows times `q[0]`, the next times `q[1]`; zero what no group has.

    `q` has 3 axes, and every leaf the first; for `contracted_axis=1` its matrices are transposed.
    """
    leaves, treedef = jtu.tree_flatten(q)
    operands = varying_alike([x, sizes.astype(jnp.int32), *leaves])
    params = {"treedef": treedef, "contracted_axis": contracted_axis, "dtype": dtype, "precision": precision}
    # Here it is known who asks; when the steps are lowered it is not. So what one makes dense is noted now.
    jax.eval_shape(functools.partial(_step, **params), _struct(x, min(len(x), BLOCK_ROWS)), *leaves, which=jnp.int32(0))
    return grouped_matmul_p.bind(*operands, **params)


def _struct(x: jax.Array, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _step(
    rows: jax.Array, *leaves: Any, which: jax.Array, treedef: Any, contracted_axis: int, dtype: Any, precision: Any
) -> jax.Array:
    taken = [lax.dynamic_slice_in_dim(leaf, which, 1, 0) for leaf in leaves]
    numbers = (((rows.ndim,), (1 + contracted_axis,)), ((0,), (0,)))
    made = matmul(lax.expand_dims(rows, (0,)), jtu.tree_unflatten(treedef, taken), numbers, dtype, precision)
    return lax.squeeze(made, (0,))


def _in_steps(x: jax.Array, sizes: jax.Array, *leaves: Any, **params: Any) -> jax.Array:
    count, groups = x.shape[0], sizes.shape[0]
    block = min(count, BLOCK_ROWS)
    blocks = -(-count // block)
    x = jnp.pad(x, [(0, blocks * block - count), *[(0, 0)] * (x.ndim - 1)])
    ends = jnp.minimum(jnp.cumsum(sizes), count)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    # A group touches the blocks from the one of its first row to the one of its last.
    firsts = starts // block
    steps = jnp.where(ends > starts, (ends - 1) // block + 1 - firsts, 0)
    done = jnp.cumsum(steps)

    def write(out: jax.Array, number: jax.Array) -> jax.Array:
        which = jnp.minimum(jnp.searchsorted(done, number, side="right"), groups - 1).astype(jnp.int32)
        start = block * (firsts[which] + number - (done[which] - steps[which]))
        made = _step(lax.dynamic_slice_in_dim(x, start, block, 0), *leaves, which=which, **params)
        rows = start + jnp.arange(block, dtype=jnp.int32)
        mine = lax.broadcast_in_dim((rows >= starts[which]) & (rows < ends[which]), made.shape, (0,))
        kept = jnp.where(mine, made, lax.dynamic_slice_in_dim(out, start, block, 0))
        return lax.dynamic_update_slice_in_dim(out, kept, start, 0)

    def step(out: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return lax.cond(number < done[-1], write, lambda out, _: out, out, number), None

    made = jax.eval_shape(functools.partial(_step, **params), _struct(x, block), *leaves, which=jnp.int32(0))
    zeros, *_ = varying_alike([jnp.zeros((blocks * block, *made.shape[1:]), made.dtype), x, ends, *leaves])
    numbers, *_ = varying_alike([jnp.arange(blocks + min(groups, count), dtype=jnp.int32), zeros])
    out, _ = lax.scan(step, zeros, numbers)
    return lax.slice_in_dim(out, 0, count)


@functools.partial(jax.jit, static_argnames=("treedef", "contracted_axis", "dtype", "precision"))
def _run(*operands: Any, **params: Any) -> jax.Array:
    return grouped_matmul_p.bind(*operands, **params)


def _abstract_eval(x: Any, sizes: Any, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any, **_: Any) -> Any:
    del sizes
    columns = jtu.tree_unflatten(treedef, leaves).shape[2 - contracted_axis]
    return x.update(shape=(*x.shape[:-1], columns), dtype=dtype, weak_type=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, sizes, *leaves), (dx, _, *dleaves) = primals, tangents
    parts = []
    if not isinstance(dx, ad.Zero):
        parts.append(grouped_matmul_p.bind(dx, sizes, *leaves, **params))
    if not all(isinstance(d, ad.Zero) for d in dleaves):  # scales are numbers too
        of_leaves = functools.partial(_in_steps, x, sizes, **params)
        parts.append(jax.jvp(of_leaves, leaves, [ad.instantiate_zeros(d) for d in dleaves])[1])
    return grouped_matmul_p.bind(*primals, **params), sum(parts[1:], parts[0])


def _transpose(ct: Any, x: Any, sizes: Any, *leaves: Any, contracted_axis: int, dtype: Any, **params: Any) -> Any:
    del dtype
    rest = [None] * (1 + len(leaves))
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *rest]
    params |= {"contracted_axis": 1 - contracted_axis, "dtype": x.aval.dtype}
    return [grouped_matmul_p.bind(ct, sizes, *leaves, **params), *rest]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    if all(axis is None for axis in axes[1:]):  # more columns of the same rows
        x, *rest = operands
        return grouped_matmul_p.bind(jnp.moveaxis(x, axes[0], 1), *rest, **params), 1
    return jax.vmap(functools.partial(_in_steps, **params), tuple(axes))(*operands), 0


grouped_matmul_p.def_impl(_run)
grouped_matmul_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[grouped_matmul_p] = _jvp
ad.primitive_transposes[grouped_matmul_p] = _transpose
batching.primitive_batchers[grouped_matmul_p] = _batch
mlir.register_lowering(grouped_matmul_p, mlir.lower_fun(_in_steps, multiple_results=False))
