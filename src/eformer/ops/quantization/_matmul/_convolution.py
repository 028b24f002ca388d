"""Convolutions with a quantized kernel, as matmuls: one over patches, or one for each position in the window."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from eformer.jaximus import register
from eformer.ops.quantization._leafwise import LeafwiseArray
from eformer.ops.quantization._sharding import asked_of

from ._primitive import Precision
from ._rule import has_explicit_sharding, matmul

# Patches overlap, so all of them together are larger than the input. If they are larger than the kernel and than this
# many times the input, a matmul for each position in the window takes less memory.
MAX_GROWTH = 4
MAX_POSITIONS = 64  # each of them is a matmul in the program


@register("conv_general_dilated")
def conv_general_dilated(
    primitive: Primitive,
    lhs: jax.Array,
    rhs: LeafwiseArray,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    precision: Precision,
    preferred_element_type: DTypeLike | None,
    **params: Any,
) -> Any:
    del primitive
    grouped = feature_group_count != 1 or batch_group_count != 1
    if grouped or asked_of(params) or has_explicit_sharding(lhs, rhs) or lhs.dtype != rhs.dtype or not rhs.use_kernel:
        return NotImplemented
    _, features, *spatial = dimension_numbers.lhs_spec
    _, rhs_features, *window_axes = dimension_numbers.rhs_spec
    window = [rhs.shape[axis] for axis in window_axes]
    edges = [(0, 0, 0)] * lhs.ndim
    for axis, (low, high), dilation in zip(spatial, padding, lhs_dilation, strict=True):
        edges[axis] = (low, high, dilation - 1)
    x = lax.pad(lhs, jnp.zeros((), lhs.dtype), edges)
    reach = [(n - 1) * dilation + 1 for n, dilation in zip(window, rhs_dilation, strict=True)]
    sizes = [(x.shape[a] - r) // stride + 1 for a, r, stride in zip(spatial, reach, window_strides, strict=True)]
    if 0 in (*lhs.shape, *rhs.shape) or min(sizes, default=1) <= 0:
        return NotImplemented

    def at(position: Sequence[int]) -> jax.Array:
        """The elements of x under one position of the window, with an axis of length 1 for each axis of the window."""
        starts, limits, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
        for axis, offset, dilation, size, stride in zip(
            spatial, position, rhs_dilation, sizes, window_strides, strict=True
        ):
            starts[axis], strides[axis] = offset * dilation, stride
            limits[axis] = starts[axis] + (size - 1) * stride + 1
        return lax.expand_dims(lax.slice(x, starts, limits, strides), range(x.ndim, x.ndim + len(window)))

    positions = list(itertools.product(*map(range, window)))
    # Sizes per element of the batch, whose length may be symbolic.
    image = math.prod(lhs.shape[a] for a in (features, *spatial))
    patches = math.prod((*sizes, *window)) * lhs.shape[features]
    dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    summed = ((features, *range(x.ndim, x.ndim + len(window))), (rhs_features, *window_axes))
    contract = functools.partial(matmul, numbers=(summed, ((), ())), precision=precision)
    if patches <= max(MAX_GROWTH * image, rhs.size):
        pieces = lax.concatenate([at(position) for position in positions], x.ndim)
        out = contract(lax.reshape(pieces, (*pieces.shape[: x.ndim], *window)), rhs, dtype=dtype)
    elif len(positions) > MAX_POSITIONS or any(rhs._alignment(axis) > 1 for axis in window_axes):
        return NotImplemented
    else:
        single = rhs._single()
        sums = jnp.dtype(jnp.float32) if dtype in (jnp.bfloat16, jnp.float16) else dtype

        def term(position: Sequence[int]) -> jax.Array:
            part = single
            for axis, offset in zip(window_axes, position, strict=True):
                part = part._sliced(offset, 1, axis)
            return contract(at(position), part, dtype=sums)

        out = functools.reduce(lax.add, map(term, positions)).astype(dtype)
    return lax.transpose(out, _order(dimension_numbers, x.ndim))


def _order(numbers: lax.ConvDimensionNumbers, ndim: int) -> list[int]:
    """Where each axis of the result is in the matmul's: the input's axes without its features, then the features."""
    left = [axis for axis in range(ndim) if axis != numbers.lhs_spec[1]]
    came_from = dict(zip(numbers.out_spec, numbers.lhs_spec, strict=True))
    return [ndim - 1 if axis == numbers.out_spec[1] else left.index(came_from[axis]) for axis in range(ndim)]
