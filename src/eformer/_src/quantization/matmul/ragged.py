"""`ragged_dot` with quantized matrices: each group of rows is multiplied by its own matrix (mixture of experts).

The rows of a group are contiguous, so the work is cut into steps of one block of rows and one matrix: at most as many
as there are blocks and groups together. A step reads the codes of its matrix only. All steps are one primitive.
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
from jax.interpreters import mlir
from jax.typing import DTypeLike

from eformer._src.jaximus.rules import register
from eformer._src.quantization.elementwise_layout import LeafwiseArray, transpose
from eformer._src.quantization.sharding import asked_of

from .dot_general import as_stack, contract, contraction_of, result_dtype, with_count
from .primitive import Precision, Static, matmul_primitive, varying_alike

BLOCK_ROWS = 64  # rows in a step: with fewer, codes are read more often; with more, more rows are of other groups


@register("ragged_dot_general")
def ragged_dot_general(
    primitive: Primitive,
    lhs: jax.Array,
    rhs: LeafwiseArray,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: Precision,
    preferred_element_type: DTypeLike | None,
    **params: Any,
) -> Any:
    del primitive
    dimensions = ragged_dot_dimension_numbers
    (l_summed, r_summed), (l_batch, _) = dimensions.dot_dimension_numbers
    (ragged,), (group,) = dimensions.lhs_ragged_dimensions, dimensions.rhs_group_dimensions or (0,)
    if l_batch or ragged in l_summed or asked_of(params) or not (rhs.use_kernel and lhs.size and rhs.size):
        return NotImplemented
    order = (group, *(axis for axis in range(rhs.ndim) if axis != group))
    matrices = transpose(lax.transpose_p, rhs, permutation=order) if group else rhs
    summed = (tuple(l_summed), tuple(order.index(axis) for axis in r_summed))
    contraction = contraction_of((summed, ((), (0,))), lhs.ndim, rhs.ndim)
    stack = as_stack(matrices, contraction)
    if stack is None:  # blocks of codes run across matrices, or along several axes
        return NotImplemented
    leaves, treedef = jtu.tree_flatten(with_count(stack[0]))
    free = contraction.x_free
    x = lax.transpose(lhs, [ragged, *(axis for axis in free if axis != ragged), *contraction.x_summed])
    x = lax.collapse(x, len(free))
    dtype = jnp.dtype(preferred_element_type or result_dtype(lhs.dtype, rhs.dtype, precision))
    static = Static(treedef, stack[1], dtype, precision)
    _step_type(x, min(len(x), BLOCK_ROWS), leaves, static)  # notes what a step makes dense, which the lowering can't
    operands = varying_alike([x, group_sizes.astype(jnp.int32), *leaves])
    out = grouped_matmul_p.bind(*operands, static=static)
    columns = [matrices.shape[axis] for axis in contraction.q_free]
    return jnp.moveaxis(lax.reshape(out, (*out.shape[:-1], *columns)), 0, free.index(ragged))


def _step_type(x: jax.Array, rows: int, leaves: Sequence[jax.Array], static: Static) -> jax.ShapeDtypeStruct:
    rows_of_x = jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    return jax.eval_shape(functools.partial(_step, static=static), rows_of_x, *leaves, which=jnp.int32(0))


def _step(rows: jax.Array, *leaves: jax.Array, which: jax.Array, static: Static) -> jax.Array:
    """(rows, ..., n): the rows times matrix `which`."""
    matrix = static.array([lax.dynamic_slice_in_dim(leaf, which, 1, 0) for leaf in leaves])
    numbers = (((rows.ndim,), (1 + static.contracted_axis,)), ((0,), (0,)))
    return lax.squeeze(contract(lax.expand_dims(rows, (0,)), matrix, numbers, static.dtype, static.precision), (0,))


def _in_steps(x: jax.Array, sizes: jax.Array, *leaves: jax.Array, static: Static) -> jax.Array:
    """x (rows, ..., k): its first `sizes[0]` rows times matrix 0, the next `sizes[1]` times matrix 1 and so on.

    Rows of no group give zero.
    """
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
        made = _step(lax.dynamic_slice_in_dim(x, start, block, 0), *leaves, which=which, static=static)
        rows = start + jnp.arange(block, dtype=jnp.int32)
        mine = lax.broadcast_in_dim((rows >= starts[which]) & (rows < ends[which]), made.shape, (0,))
        kept = jnp.where(mine, made, lax.dynamic_slice_in_dim(out, start, block, 0))
        return lax.dynamic_update_slice_in_dim(out, kept, start, 0)

    def step(out: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return lax.cond(number < done[-1], write, lambda out, _: out, out, number), None

    made = _step_type(x, block, leaves, static)
    zeros, *_ = varying_alike([jnp.zeros((blocks * block, *made.shape[1:]), made.dtype), x, ends, *leaves])
    numbers, *_ = varying_alike([jnp.arange(blocks + min(groups, count), dtype=jnp.int32), zeros])
    out, _ = lax.scan(step, zeros, numbers)
    return lax.slice_in_dim(out, 0, count)


def _one_by_one(operands: Sequence[jax.Array], axes: Sequence[int | None], static: Static) -> jax.Array:
    return jax.vmap(functools.partial(_in_steps, static=static), tuple(axes))(*operands)


grouped_matmul_p = matmul_primitive("grouped_matmul", _in_steps, _one_by_one)
mlir.register_lowering(grouped_matmul_p, mlir.lower_fun(_in_steps, multiple_results=False))
