"""The rule for matmuls with quantized arrays: which of them the kernels take, and the rest."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer.jaximus import materialize, note_materialized, register, unobserved
from eformer.kernels import cpu
from eformer.ops.quantization._base import asked_of, is_explicit, sharding_of, typed_as
from eformer.ops.quantization._leafwise import LeafwiseArray, reshaped

from ._primitive import matmul as matmul_stacks
from ._tiles import AsDense, Contraction, Numbers, in_pieces, matmul_in_tiles

_use_kernel = jax.make_user_context(default_value=True)


def nf4_use_kernel(value: bool) -> AbstractContextManager[None]:
    """In `with nf4_use_kernel(False):` matmuls decode the whole array first. Cached traces do not hide it."""
    if not isinstance(value, bool):
        raise TypeError(f"nf4_use_kernel takes True or False, got {value!r}")
    return _use_kernel(value)


def is_kernel_available() -> bool:
    """Whether matmuls on the default device have a path that never holds the decoded array.

    On CPU that is the native core, or a loop over tiles; on TPU and GPU, a Pallas kernel.
    """
    return jax.default_backend() in ("cpu", "tpu", "gpu")


@register("dot_general")
def dot_general(
    primitive: Any,
    lhs: jax.Array | LeafwiseArray,
    rhs: jax.Array | LeafwiseArray,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any,
    precision: Any = None,
    **params: Any,
) -> Any:
    asked = asked_of(params)
    if asked - {"out_sharding"}:  # what this version of JAX does not have
        return NotImplemented
    dense_params = {
        "dimension_numbers": dimension_numbers,
        "preferred_element_type": preferred_element_type,
        "precision": precision,
        **params,
    }
    dtype = preferred_element_type or result_dtype(lhs.dtype, rhs.dtype, precision)
    times = functools.partial(matmul, numbers=as_tuples(dimension_numbers), dtype=jnp.dtype(dtype), precision=precision)
    if asked or any(is_explicit(sharding_of(leaf)) for leaf in jax.tree.leaves((lhs, rhs))):
        return typed_as(lambda lhs, rhs: primitive.bind(*materialize([lhs, rhs]), **dense_params), times)(lhs, rhs)
    return times(lhs, rhs)


def result_dtype(lhs: Any, rhs: Any, precision: Any = None) -> Any:
    """What `lax.dot_general` gives for operands of these dtypes, where none is asked for: JAX has a rule of its own."""
    if lhs == rhs and (precision is None or isinstance(precision, tuple)):
        return lhs
    numbers: Any = (((), ()), ((), ()))
    structs = [jax.ShapeDtypeStruct((), dtype) for dtype in (lhs, rhs)]
    return jax.eval_shape(lambda x, y: lax.dot_general(x, y, numbers, precision), *structs).dtype


def as_tuples(numbers: Any) -> Numbers:
    (l_summed, r_summed), (l_batch, r_batch) = ((tuple(map(int, a)), tuple(map(int, b))) for a, b in numbers)
    return (l_summed, r_summed), (l_batch, r_batch)


def matmul(lhs: Any, rhs: Any, numbers: Numbers, dtype: Any, precision: Any) -> jax.Array:
    """`lax.dot_general` of operands one of which is quantized, or both: by a kernel, else in tiles, as `dtype`."""
    (l_summed, r_summed), (l_batch, r_batch) = numbers
    if isinstance(lhs, LeafwiseArray) and isinstance(rhs, LeafwiseArray):
        return _matmul_of_two(lhs, rhs, numbers, dtype, precision)
    if isinstance(rhs, LeafwiseArray):
        return _matmul_with_dense(lhs, rhs, Contraction(l_summed, r_summed, l_batch, r_batch), dtype, precision)
    contraction = Contraction(r_summed, l_summed, r_batch, l_batch)
    out = _matmul_with_dense(rhs, lhs, contraction, dtype, _swapped(precision))
    batch, free = len(r_batch), len(contraction.x_free(rhs.ndim))
    return jnp.moveaxis(out, range(batch, batch + free), range(out.ndim - free, out.ndim))


def _swapped(precision: Any) -> Any:
    return precision[::-1] if isinstance(precision, tuple) else precision


def _matmul_of_two(lhs: Any, rhs: Any, numbers: Numbers, dtype: Any, precision: Any) -> jax.Array:
    """Of two quantized arrays: tiles of one are decoded, and each matmul by the other as it is."""
    (l_summed, r_summed), (l_batch, r_batch) = numbers
    free = Contraction(r_summed, l_summed, r_batch, l_batch).q_free(lhs.ndim)
    axis = next((axis for axis in free if lhs.shape[axis] > lhs.alignment(axis)), None)
    if axis is None or not (lhs.use_kernel and lhs.size):
        note_materialized(lhs, "it has no axis that can be cut into tiles, and the other operand is quantized too")
        return matmul(lhs.decoded(), rhs, numbers, dtype, precision)
    out_axis = len(l_batch) + free.index(axis)
    times = functools.partial(matmul, numbers=numbers, dtype=dtype, precision=precision)
    return in_pieces(lhs, axis, lambda piece: times(piece.decoded(), rhs), out_axis)


def _matmul_with_dense(x: Any, q: LeafwiseArray, contraction: Contraction, dtype: Any, precision: Any) -> jax.Array:
    if q.moved_from is not None:  # `x @ q.T` reads the codes as they lie, and nothing is moved
        origin, permutation = q.moved_from
        summed, batch = (tuple(permutation[a] for a in axes) for axes in (contraction.q_summed, contraction.q_batch))
        moved = Contraction(contraction.x_summed, summed, contraction.x_batch, batch)
        if _free_in_order(origin, moved, [permutation[a] for a in contraction.q_free(q.ndim)]):
            q, contraction = origin, moved
    as_dense = AsDense(dtype, precision)
    if not _sums_in_float32(x.dtype, q.dtype, dtype) or not _is_single(precision):
        return _in_jax(x, q, contraction, as_dense).astype(dtype)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)  # as the dense matmul does
    if not (q.use_kernel and _use_kernel.value):
        return _in_jax(x, q, contraction).astype(dtype)
    if not _exceeds_default(precision):
        return _by_kernel(x, q, contraction, dtype)
    if jax.default_backend() != "cpu":  # whose kernels times in bfloat16 or TF32
        note_materialized(q, f"the kernels of this device times in less than the precision asked for, {precision}")
        return matmul_in_tiles(x, q, contraction, as_dense, in_tiles=False).astype(dtype)

    def elsewhere(x: jax.Array, q: LeafwiseArray) -> jax.Array:
        with unobserved():
            return matmul_in_tiles(x, q, contraction, as_dense, in_tiles=False).astype(dtype)

    exact = q.with_activation_dtype(None) if q.activation_dtype else q
    on_cpu = functools.partial(_by_kernel, contraction=contraction, dtype=dtype)
    return lax.platform_dependent(x, exact, cpu=on_cpu, default=elsewhere)


def _in_jax(x: jax.Array, q: LeafwiseArray, contraction: Contraction, as_dense: AsDense | None = None) -> jax.Array:
    if q.use_kernel and _use_kernel.value:
        return matmul_in_tiles(x, q, contraction, as_dense)
    switch = "`use_kernel=False`" if not q.use_kernel else "`nf4_use_kernel(False)`"
    return matmul_in_tiles(x, q, contraction, as_dense, in_tiles=False, why=f"{switch} asks for it")


_HALF_OR_SINGLE = frozenset(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def _sums_in_float32(x: Any, q: Any, out: Any) -> bool:
    """Whether the dense matmul of these dtypes sums in float32 or less, so that the kernels are as exact.

    The dense matmul converts integers and bools in `x` to the dtype of the result.
    """
    return q in _HALF_OR_SINGLE and out in _HALF_OR_SINGLE and (x in _HALF_OR_SINGLE or x.kind in "iub")


_PRESETS = lax.DotAlgorithmPreset


def _is_single(precision: Any) -> bool:
    """Whether sums in float32 meet the precision: all but some of the algorithms that can be asked for by name."""
    return precision is None or isinstance(precision, tuple) or precision in (_PRESETS.DEFAULT, _PRESETS.F32_F32_F32)


def _exceeds_default(precision: Any) -> bool:
    if isinstance(precision, tuple):
        return any(each not in (None, lax.Precision.DEFAULT) for each in precision)
    return precision is _PRESETS.F32_F32_F32


def _by_kernel(x: jax.Array, q: LeafwiseArray, contraction: Contraction, dtype: Any) -> jax.Array:
    stack = stacked(q, contraction) if jax.default_backend() != "cpu" or cpu.is_available() else None
    if stack is None or stack[0].stored_matrix() is None:
        return matmul_in_tiles(x, q, contraction).astype(dtype)
    matrices, contracted_axis = stack
    batch = [x.shape[a] for a in contraction.x_batch]
    rows = contraction.x_free(x.ndim)
    summed = contraction.x_summed_in_order
    shape = [math.prod(batch), *(x.shape[a] for a in rows), math.prod(x.shape[a] for a in summed)]
    out_shape = [*batch, *(x.shape[a] for a in rows), *(q.shape[a] for a in contraction.q_free(q.ndim))]
    # `lax` rather than `jnp`, and only where something changes: this is traced for every product of a model.
    order = [*contraction.x_batch, *rows, *summed]
    x = x if order == list(range(x.ndim)) else lax.transpose(x, order)
    out = matmul_stacks(x if x.shape == tuple(shape) else lax.reshape(x, shape), matrices, contracted_axis, dtype)
    return lax.reshape(out, out_shape)


def _free_in_order(origin: LeafwiseArray, contraction: Contraction, free: list[int]) -> bool:
    """Whether the axes of the result come in the order that the moved array would give them."""
    return contraction.q_free(origin.ndim) == free


def stacked(q: LeafwiseArray, contraction: Contraction) -> tuple[LeafwiseArray, int] | None:
    """`q` as (count, rows, cols), and which of the last two axes is summed over; None if that would move its codes."""
    batch, summed, free = list(contraction.q_batch), sorted(contraction.q_summed), contraction.q_free(q.ndim)
    if not summed or not free or 0 in q.shape or batch != list(range(len(batch))):
        return None
    if batch + summed + free == list(range(q.ndim)):
        contracted_axis, axes = 0, (batch, summed, free)
    elif batch + free + summed == list(range(q.ndim)):
        contracted_axis, axes = 1, (batch, free, summed)
    else:
        return None
    if any(q.alignment(axis) > 1 for axis in batch):
        return None
    shape = tuple(math.prod(q.shape[a] for a in group) for group in axes)
    if q.ndim == 2:
        return jax.tree.map(lambda leaf: lax.expand_dims(leaf, (0,)), q), contracted_axis
    q = q if q.shape == shape else reshaped(q, shape)
    if q is NotImplemented:
        return None
    return jax.tree.map(lambda leaf: _with_count(leaf, shape[0]), q), contracted_axis


def _with_count(leaf: jax.Array, count: int) -> jax.Array:
    return jnp.broadcast_to(leaf, (count, *leaf.shape[1:])) if leaf.shape[0] != count else leaf
