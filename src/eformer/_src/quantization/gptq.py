"""GPTQ (arXiv 2210.17323): codes chosen one channel after the other, each making up for the rounding of those before.

It needs of a format only what its codes stand for in each block: scales are found first, and stay. So it takes any
format, and channels in any order without a permutation that matmuls would have to know.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .elementwise_layout import LeafwiseArray

DAMPING = 0.01  # of the mean square of all channels, added to each: the inverse stays exact enough in float32
GROUP = 64  # channels whose errors are passed on at a time
FEW = 32  # values of a code that are compared one by one


def gptq(
    q: LeafwiseArray,
    array: jax.Array,
    moment: jax.Array,
    axes: Sequence[int],
    *,
    damping: float = DAMPING,
    by_activation: bool = True,
) -> Any:
    """`q`, quantized from `array`, with codes for which the error of its matmuls is smaller; the scales stay.

    `moment` is the mean of x xᵀ over the inputs x that the `axes` of the array are contracted with, of n channels:
    (..., n, n), with the other axes of the array in front, of length 1 where the matrix is the same for all. Channels
    are taken in the order of their mean square, the largest first, unless `by_activation` is False.
    """
    if not isinstance(q, LeafwiseArray) or not q._code_fields:
        raise TypeError(f"GPTQ chooses codes, and {type(q).__name__} has none for each element")
    axes = tuple(axis % q.ndim for axis in axes)
    return _chosen(q, array, moment, axes, damping, by_activation)


@functools.partial(jax.jit, static_argnames=("axes", "by_activation"))
def _chosen(
    q: Any, array: jax.Array, moment: jax.Array, axes: tuple[int, ...], damping: float, by_activation: bool
) -> Any:
    others = [axis for axis in range(q.ndim) if axis not in axes]
    stack = [axis for i, axis in enumerate(others) if moment.shape[i] > 1]
    free = [axis for axis in others if axis not in stack]
    order, length = (*stack, *axes, *free), math.prod(q.shape[axis] for axis in axes)
    count = math.prod(q.shape[axis] for axis in stack)

    def as_matrices(x: jax.Array) -> jax.Array:
        """(..., the array's axes) as (..., stack, channels, free)."""
        before = x.ndim - q.ndim
        x = x.transpose(*range(before), *(before + axis for axis in order))
        return x.reshape(*x.shape[:before], count, length, -1)

    values, codes = _sorted_values(q)  # (codes, the array's axes; one axis may be shorter)
    along, grain = _blocks(q)
    width = [values.shape[1 + axis] if axis == along else size for axis, size in enumerate(q.shape)]
    place = np.arange(math.prod(width[axis] for axis in axes)).reshape([width[axis] for axis in axes])
    for i, axis in enumerate(axes):
        if axis == along:
            place = np.repeat(place, grain, axis=i)[(slice(None),) * i + (slice(q.shape[axis]),)]
    if along in axes:
        parts = [_as_parts(x, width, order, count, len(free)) for x in (values, codes)]
    else:
        parts = [_repeated(x, along, grain, q.shape, as_matrices) for x in (values, codes)]
    channel = jnp.asarray(place.ravel() if along in axes else np.arange(length))

    def one(each: Sequence[jax.Array]) -> jax.Array:
        w, moment, values, codes = each
        found = _solve(w, moment, values, channel, damping, by_activation)
        return jnp.take_along_axis(codes[:, channel], found[None], axis=0)[0]

    wide = as_matrices(array.astype(jnp.float32))
    moments = moment.reshape(-1, length, length)
    operands = (wide, moments, *(jnp.moveaxis(x, 1, 0) for x in parts))
    found = lax.map(one, operands) if count > 1 else one([x[0] for x in operands])[None]
    shape = [q.shape[axis] for axis in order]
    return q._coded(found.reshape(shape).transpose(np.argsort(order)))


def _as_parts(x: jax.Array, width: Sequence[int], order: Sequence[int], count: int, free: int) -> jax.Array:
    x = x.reshape(len(x), *width).transpose(0, *(1 + axis for axis in order))
    rows = math.prod(x.shape[x.ndim - free :]) if free else 1
    return x.reshape(len(x), count, -1, rows)


def _repeated(x: jax.Array, along: int, grain: int, shape: Sequence[int], as_matrices: Any) -> jax.Array:
    if along >= 0:
        x = jnp.repeat(x, grain, axis=1 + along)
        x = lax.slice_in_dim(x, 0, shape[along], axis=1 + along)
    return as_matrices(x)


def _blocks(q: LeafwiseArray) -> tuple[int, int]:
    """The axis along which most elements share their scales, and how many of them; -1 and 1 if none do."""
    found = (-1, 1)
    for axis, size in enumerate(q.shape):
        leaves = {name: leaf for name, leaf in q._named_leaves().items() if name not in q._code_fields}
        grains = [size if leaf.shape[axis] == 1 else q._grain(name, axis) or size for name, leaf in leaves.items()]
        grain = math.gcd(*grains) if grains else size
        found = max(found, (axis, grain), key=lambda each: each[1])
    return found


def _sorted_values(q: LeafwiseArray) -> tuple[jax.Array, jax.Array]:
    """What each code stands for in each block, the least first, and the codes in this order."""
    along, grain = _blocks(q)
    (codes, *_) = (getattr(q, name) for name in q._code_fields)

    def values_of(code: jax.Array) -> jax.Array:
        dense = q._coded(jnp.full(q.shape, code, jnp.uint8)).decode().astype(jnp.float32)
        return dense if along < 0 else lax.slice_in_dim(dense, 0, None, stride=grain, axis=along)

    values = lax.map(values_of, jnp.arange(2 ** q._code_bits(), dtype=jnp.uint8))
    if codes.dtype == jnp.int8:
        values = values.at[128].set(jnp.inf)  # -128, which has no counterpart
    values = jnp.where(jnp.isfinite(values), values, jnp.inf)
    order = jnp.argsort(values, axis=0)
    return jnp.take_along_axis(values, order, axis=0), order.astype(jnp.uint8)


def _solve(
    w: jax.Array, moment: jax.Array, values: jax.Array, channel: jax.Array, damping: float, by_activation: bool
) -> jax.Array:
    """Which of the sorted `values` (codes, blocks, n) the weights (k, n) take; `channel` (k,) has each one's block."""
    length = len(w)
    squares = jnp.diagonal(moment)
    dead = squares <= 0
    order = jnp.argsort(-squares) if by_activation else jnp.arange(length)
    size = -(-length // GROUP) * GROUP
    extra = size - length
    factor = _factor(moment[order][:, order] + jnp.diag(dead[order].astype(w.dtype)), damping)
    factor = jnp.pad(factor, ((0, extra), (0, extra))) + jnp.diag((jnp.arange(size) >= length).astype(w.dtype))
    rows = jnp.pad(w[order], ((0, extra), (0, 0)))
    blocks = jnp.pad(channel[order], (0, extra))
    middles = (values[:-1] + values[1:]) / 2

    def nearest(x: jax.Array, block: jax.Array) -> jax.Array:
        own = middles[:, block]
        if len(own) < FEW:
            return jnp.sum(x[None] > own, axis=0, dtype=jnp.int32)
        return jax.vmap(lambda each, x: jnp.searchsorted(each, x), in_axes=(1, 0))(own, x).astype(jnp.int32)

    def group(number: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, found = state
        first = number * GROUP
        own = lax.dynamic_slice_in_dim(rows, first, GROUP)
        passed = lax.dynamic_slice(factor, (first, 0), (GROUP, size))
        inside = lax.dynamic_slice(passed, (0, first), (GROUP, GROUP))

        def row(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            own, errors, codes = state
            block = blocks[first + i]
            code = nearest(own[i], block)
            value = jnp.take_along_axis(values[:, block], code[None], axis=0)[0]
            error = (own[i] - value) / inside[i, i]
            error = jnp.where(jnp.isfinite(error), error, 0)  # a NaN of the weight stays in its own block
            later = jnp.where(jnp.arange(GROUP) > i, inside[i], 0)
            own = own - later[:, None] * error[None]
            return own, errors.at[i].set(error), codes.at[i].set(code)

        begun = own, jnp.zeros_like(own), jnp.zeros(own.shape, jnp.int32)
        _, errors, codes = lax.fori_loop(0, GROUP, row, begun)
        later = jnp.where(jnp.arange(size)[None] >= first + GROUP, passed, 0)
        rows = rows - jnp.einsum("gk,gn->kn", later, errors)
        return rows, lax.dynamic_update_slice_in_dim(found, codes, first, 0)

    _, found = lax.fori_loop(0, size // GROUP, group, (rows, jnp.zeros(rows.shape, jnp.int32)))
    return jnp.zeros_like(found[:length]).at[order].set(found[:length])


def _factor(moment: jax.Array, damping: float) -> jax.Array:
    """The upper triangular U with UᵀU the inverse of the moment.

    For `moment = R Rᵀ` with an upper triangular R, it is the inverse of R.
    """
    mean = jnp.mean(jnp.diagonal(moment))
    damped = moment + jnp.diag(jnp.full(len(moment), damping * mean, moment.dtype))
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(upper, jnp.eye(len(moment), dtype=moment.dtype), lower=False)
