"""The rule for products with quantized arrays: which of them the kernels take, and the rest."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from eformer.jaximus import materialize, register
from eformer.kernels import cpu

from ._base import asked_of, is_explicit, sharding_of, typed_as
from ._contraction import Contraction, product
from ._leafwise import LeafwiseArray, reshaped
from ._quantized_matmul import quantized_matmul

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
    **params: Any,
) -> jax.Array:
    if isinstance(lhs, LeafwiseArray) and isinstance(rhs, LeafwiseArray):
        lhs = lhs.materialize()  # the other stays as it is
    dense_params = {
        "dimension_numbers": dimension_numbers,
        "preferred_element_type": preferred_element_type,
        **params,
    }
    # Two dtypes without one asked for: JAX chooses the result's by its own rule.
    out_dtype = preferred_element_type or (lhs.dtype if lhs.dtype == rhs.dtype else None)
    half_or_single = out_dtype is not None and all(
        jnp.dtype(d) in (jnp.float32, jnp.bfloat16, jnp.float16) for d in (lhs.dtype, rhs.dtype, out_dtype)
    )
    asked = asked_of(params)
    if not half_or_single or asked - {"out_sharding"}:  # other dtypes, a precision asked for: as JAX does it
        return primitive.bind(*materialize([lhs, rhs]), **dense_params)
    if asked or any(is_explicit(sharding_of(leaf)) for leaf in jax.tree.leaves((lhs, rhs))):
        return typed_as(
            lambda lhs, rhs: primitive.bind(*materialize([lhs, rhs]), **dense_params),
            lambda lhs, rhs: _dot(lhs, rhs, dimension_numbers, out_dtype),
        )(lhs, rhs)
    return _dot(lhs, rhs, dimension_numbers, out_dtype)


def _dot(lhs: Any, rhs: Any, dimension_numbers: Any, out_dtype: Any) -> jax.Array:
    (l_summed, r_summed), (l_batch, r_batch) = ((tuple(map(int, a)), tuple(map(int, b))) for a, b in dimension_numbers)
    if not isinstance(lhs, LeafwiseArray):
        assert isinstance(rhs, LeafwiseArray)
        return _product(lhs, rhs, Contraction(l_summed, r_summed, l_batch, r_batch), out_dtype)
    assert not isinstance(rhs, LeafwiseArray)
    contraction = Contraction(r_summed, l_summed, r_batch, l_batch)
    out = _product(rhs, lhs, contraction, out_dtype)
    batch, free = len(r_batch), len(contraction.x_free(rhs.ndim))
    return jnp.moveaxis(out, range(batch, batch + free), range(out.ndim - free, out.ndim))


def _product(x: jax.Array, q: LeafwiseArray, contraction: Contraction, dtype: Any) -> jax.Array:
    if q.moved_from is not None:  # `x @ q.T` reads the codes as they lie, and nothing is moved
        origin, permutation = q.moved_from
        summed, batch = (tuple(permutation[a] for a in axes) for axes in (contraction.q_summed, contraction.q_batch))
        moved = Contraction(contraction.x_summed, summed, contraction.x_batch, batch)
        if _free_in_order(origin, moved, [permutation[a] for a in contraction.q_free(q.ndim)]):
            q, contraction = origin, moved
    if not (q.use_kernel and _use_kernel.value):
        return product(x, q, contraction, in_tiles=False).astype(dtype)
    stacked = _stacked(q, contraction) if jax.default_backend() != "cpu" or cpu.is_available() else None
    if stacked is None or stacked[0].stored_matrix() is None:
        return product(x, q, contraction).astype(dtype)
    matrices, contracted_axis = stacked
    batch = [x.shape[a] for a in contraction.x_batch]
    rows = contraction.x_free(x.ndim)
    summed = _summed_of_x(contraction)
    shape = [math.prod(batch), *(x.shape[a] for a in rows), math.prod(x.shape[a] for a in summed)]
    out_shape = [*batch, *(x.shape[a] for a in rows), *(q.shape[a] for a in contraction.q_free(q.ndim))]
    x = jnp.transpose(x, [*contraction.x_batch, *rows, *summed]).reshape(shape)
    return quantized_matmul(x, matrices, contracted_axis, dtype).reshape(out_shape)


def _free_in_order(origin: LeafwiseArray, contraction: Contraction, free: list[int]) -> bool:
    """Whether the axes of the result come in the order that the moved array would give them."""
    return contraction.q_free(origin.ndim) == free


def _summed_of_x(contraction: Contraction) -> list[int]:
    """The axes of x that are summed over, in the order in which the quantized array has them."""
    pairs = sorted(zip(contraction.q_summed, contraction.x_summed, strict=True))
    return [x_axis for _, x_axis in pairs]


def _stacked(q: LeafwiseArray, contraction: Contraction) -> tuple[LeafwiseArray, int] | None:
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
        return jax.tree.map(lambda leaf: leaf[None], q), contracted_axis
    q = q if q.shape == shape else reshaped(q, shape)
    if q is NotImplemented:
        return None
    return jax.tree.map(lambda leaf: _with_count(leaf, shape[0]), q), contracted_axis


def _with_count(leaf: jax.Array, count: int) -> jax.Array:
    return jnp.broadcast_to(leaf, (count, *leaf.shape[1:])) if leaf.shape[0] != count else leaf
