"""Multiplication, division and negation of a quantized array: its scales take them over, and its codes stay.

`decode()` is linear in the scales, so `(code * scale) * x == code * (scale * x)` but for rounding. They differ by at
most two epsilons in float32, and by three halves of one in half precision, where this side rounds once. Infinities,
NaN and division by zero come out alike. At the ends of float32's range they do differ: a `scale * x` below the smallest
normal number may be flushed to zero, and where it overflows, so does all that it scales.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from eformer._src.jaximus.rules import register
from eformer._src.quantization.elementwise_layout import LeafwiseArray, Moved
from eformer._src.quantization.sharding import bind_alike

from .movement import broadcast_in_dim, holds


@register("mul")
@register("div")
def scale_by(primitive: Primitive, q: LeafwiseArray, x: jax.Array, **params: object) -> Moved:
    """Scale by a number, or by an array that is constant along the axes where scales have blocks."""
    shape = np.broadcast_shapes(q.shape, x.shape)
    if shape != q.shape and q.ndim == len(shape):
        axes = {"broadcast_dimensions": tuple(range(q.ndim)), "sharding": None}
        q = broadcast_in_dim(lax.broadcast_in_dim_p, q, shape=shape, **axes)
    if q is NotImplemented or shape != q.shape:
        return NotImplemented
    varies = [axis for axis, size in enumerate(x.shape) if size != 1]
    return _with_scales(q, varies, x.dtype, lambda leaf: bind_alike(primitive, leaf, x.astype(leaf.dtype), **params))


@register("neg")
def negate(primitive: Primitive, q: LeafwiseArray, **params: object) -> Moved:
    return _with_scales(q, [], q.dtype, lambda leaf: primitive.bind(leaf, **params))


def _with_scales(
    q: LeafwiseArray, axes: list[int], dtype: DTypeLike, function: Callable[[jax.Array], jax.Array]
) -> Moved:
    """`q` with `function` applied to its scales, repeated along `axes` before; it computes with numbers of `dtype`."""
    q = q._single()._with_scale()
    scales = [name for name in q._scale_fields if name in q._named_leaves()]
    blocks = any(q._grain(name, axis) > 1 for name in scales for axis in axes)
    leaves = q._spread(dict.fromkeys(scales, axes))
    if not scales or blocks or leaves is None or not jnp.issubdtype(q.dtype, jnp.floating):
        return NotImplemented
    if not all(holds(leaves[name].dtype, dtype) for name in scales):
        return NotImplemented
    scaled = {name: function(leaves[name]) for name in scales}
    return q._rebuilt({**leaves, **scaled}, q.shape)
