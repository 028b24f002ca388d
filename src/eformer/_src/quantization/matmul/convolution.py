"""Convolutions with a quantized kernel, as matmuls: one over patches, or one for each position in the window.

With many groups of features, as in a depthwise convolution, the kernel at one position after the other is decoded.
"""

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

from eformer._src.jaximus.rules import register
from eformer._src.jaximus.trace import implicit
from eformer._src.quantization.elementwise_layout import LeafwiseArray
from eformer._src.quantization.sharding import asked_of

from .dot_general import contract, has_explicit_sharding
from .primitive import Precision

# Patches overlap, so all of them together are larger than the input. If they are larger than the kernel and than this
# many times the input, a matmul for each position in the window takes less memory.
MAX_GROWTH = 4
MAX_POSITIONS = 64  # each of them is a matmul in the program
MAX_GROUPS = 8  # of features that have a convolution each; with more, all of them are computed for each position


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
    if (
        batch_group_count != 1
        or asked_of(params)
        or has_explicit_sharding(lhs, rhs)
        or lhs.dtype != rhs.dtype
        or not rhs.use_kernel
    ):
        return NotImplemented
    _, features, *spatial = dimension_numbers.lhs_spec
    _, rhs_features, *window_axes = dimension_numbers.rhs_spec
    window = [rhs.shape[axis] for axis in window_axes]
    sums = jnp.dtype(preferred_element_type or lhs.dtype)
    sums = jnp.dtype(jnp.float32) if sums in (jnp.bfloat16, jnp.float16) else sums
    if 1 < feature_group_count <= MAX_GROUPS:
        how = {"window_strides": window_strides, "padding": padding, "lhs_dilation": lhs_dilation}
        how |= {"rhs_dilation": rhs_dilation, "precision": precision, "preferred_element_type": preferred_element_type}
        how |= {"dimension_numbers": dimension_numbers, "batch_group_count": 1}
        return _group_by_group(lhs, rhs, feature_group_count, how | params)
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
    sum_up = functools.partial(contract, numbers=(summed, ((), ())), precision=precision)
    many, cut = len(positions) > MAX_POSITIONS, any(rhs._alignment(axis) > 1 for axis in window_axes)
    single = rhs._single()

    def under(position: Sequence[int]) -> LeafwiseArray:
        """The matrix of the kernel at one position of the window, with axes of length 1 for the window."""
        part = single
        for axis, offset in zip(window_axes, position, strict=True):
            part = part._sliced(offset, 1, axis)
        return part

    if feature_group_count != 1:
        if many or cut or len(positions) == 1:
            return NotImplemented
        how = {"dimension_numbers": dimension_numbers, "feature_group_count": feature_group_count}
        how |= {"precision": precision, "preferred_element_type": sums, "padding": [(0, 0)] * len(window)}
        terms = (
            lax.conv_general_dilated(
                lax.squeeze(at(p), range(x.ndim, x.ndim + len(window))), under(p)._decoded(), [1] * len(window), **how
            )
            for p in positions
        )
        return functools.reduce(lax.add, terms).astype(dtype)
    if patches <= max(MAX_GROWTH * image, rhs.size):
        if list(window_strides) == window and set(rhs_dilation) <= {1}:
            pieces = _cut(x, dict(zip(spatial, zip(sizes, window, strict=True), strict=True)))
        else:
            pieces = lax.concatenate([at(position) for position in positions], x.ndim)
            pieces = lax.reshape(pieces, (*pieces.shape[: x.ndim], *window))
        out = sum_up(pieces, rhs, dtype=dtype)
    elif many or cut:
        return NotImplemented
    else:
        out = functools.reduce(lax.add, (sum_up(at(p), under(p), dtype=sums) for p in positions)).astype(dtype)
    return lax.transpose(out, _order(dimension_numbers, x.ndim))


def _cut(x: jax.Array, axes: dict[int, tuple[int, int]]) -> jax.Array:
    """Patches that lie side by side: each of the `axes` as a count of patches, with their length behind all axes."""
    shape: list[int] = []
    places: dict[int, int] = {}  # of the axes of x in the new shape
    for axis, size in enumerate(x.shape):
        places[axis] = len(shape)
        shape += axes.get(axis, (size,))
    limits = [count * length for count, length in (axes.get(axis, (size, 1)) for axis, size in enumerate(x.shape))]
    parts = lax.reshape(lax.slice(x, [0] * x.ndim, limits), shape)
    return lax.transpose(parts, [*places.values(), *(places[axis] + 1 for axis in axes)])


def _group_by_group(lhs: jax.Array, rhs: LeafwiseArray, groups: int, params: dict[str, Any]) -> jax.Array:
    """A convolution for each group of features, on a part of the kernel."""
    numbers = params["dimension_numbers"]
    features, outputs = lhs.shape[numbers.lhs_spec[1]] // groups, rhs.shape[numbers.rhs_spec[0]] // groups

    def of_group(lhs: Any, rhs: Any, group: int) -> jax.Array:
        x = lax.slice_in_dim(lhs, group * features, (group + 1) * features, axis=numbers.lhs_spec[1])
        w = lax.slice_in_dim(rhs, group * outputs, (group + 1) * outputs, axis=numbers.rhs_spec[0])
        return lax.conv_general_dilated_p.bind(x, w, feature_group_count=1, **params)

    parts = [implicit(of_group)(lhs, rhs, group) for group in range(groups)]
    return lax.concatenate(parts, numbers.out_spec[1])


def _order(numbers: lax.ConvDimensionNumbers, ndim: int) -> list[int]:
    """Where each axis of the result is in the matmul's: the input's axes without its features, then the features."""
    left = [axis for axis in range(ndim) if axis != numbers.lhs_spec[1]]
    came_from = dict(zip(numbers.out_spec, numbers.lhs_spec, strict=True))
    return [ndim - 1 if axis == numbers.out_spec[1] else left.index(came_from[axis]) for axis in range(ndim)]
