"""Scales that are trained: quantization with given scales, and the gradient of learned step sizes (LSQ)."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._src.jaximus.ste import ste
from eformer._src.kernels import grouped, reference
from eformer._src.quantization.formats.grouped import ArrayGrouped, scale_levels
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.ternary import Array1B

from .base import Leaves, QuantizedArray
from .registry import find_format

BITS = {**{f"int{bits}": bits for bits in (2, 3, 4, 5, 6)}, "int8_grouped": 8}
# The least and the largest code of the formats whose values are `code * scale` with integer codes.
RANGES = {
    "int8": (-127, 127),
    "ternary": (-1, 1),
    **{name: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for name, bits in BITS.items()},
}
HOW = (
    "formats with learned scales are 'int8', 'ternary' with a `scale`, and int2 to int8_grouped with `symmetric=True` "
    "and blocks of 32 or more, or `double_quantization=False`"
)


def has_learned_scale(format: str, /, **options: Any) -> bool:
    """Whether the scale of this format can be trained: a value must be an integer code times a scale, and no offset."""
    if format not in RANGES:
        return False
    form = find_format(format)
    options = {**form.options, **options}
    if form.array_type is ArrayGrouped:
        how = [options[name] for name in ("block_size", "symmetric", "double_quantization")]
        levels = scale_levels(BITS[form.name], *how)
        return levels.symmetric and not levels.two
    return options.get("scale", "") is not None


def initial_scale(array: jax.Array, format: str, /, **options: Any) -> jax.Array:
    """The scale that `quantize` finds for `array`, in float32, as a parameter to train.

    >>> import jax.numpy as jnp
    >>> from eformer._src.quantization.learned_scales import initial_scale
    >>> initial_scale(jnp.ones((64, 32)), "int8", axis=-2).shape
    (1, 32)
    """
    _check(format, options)
    made: Any = find_format(format).encode(array, **options)
    return made.scale.astype(jnp.float32)


def quantize_with_scale(array: jax.Array, scale: jax.Array, format: str, /, **options: Any) -> QuantizedArray:
    """`array` in `format` with this `scale`, rounded to the dtype that the format stores, and the nearest codes.

    What lies beyond the last code is clipped. A NaN or an infinity makes the scale of its slice or block NaN.
    """
    q = _like(array, scale, format, options)
    stored = _stored(q, scale)
    x = array.astype(jnp.float32)
    spread = functools.partial(_spread, q)
    off = jax.linear_transpose(spread, stored)(x - x)[0]  # a sum of zeros, or NaN
    stored = jnp.where(jnp.isnan(off), jnp.nan, stored)
    codes = jnp.clip(jnp.round(_in_steps(x, spread(stored))), *map(float, RANGES[format]))
    codes = jnp.where(jnp.isnan(codes), 0, codes)
    return q._replaced(**_packed(q, codes), scale=stored.astype(q.scale.dtype))


def straight_through_with_scale(array: jax.Array, scale: jax.Array, format: str, /, **options: Any) -> jax.Array:
    """`quantize_with_scale(...).materialize()`, bit for bit, with the gradients of LSQ (arXiv 1902.08153).

    The gradient passes to elements within the range of the codes, and is 0 for clipped elements. An element
    within the range has the derivative `code - array / scale` with respect to its scale, one that is clipped has its
    code. The gradient of a scale is divided by the square root of its elements times the largest code.
    """
    constants = lax.stop_gradient((array, scale))
    q: Any = quantize_with_scale(*constants, format, **options)
    size = array.size / max(scale.size, 1)
    step = _spread(q, ste(lambda scale: _stored(q, scale))(scale))
    least, most = RANGES[format]
    factor = 1 / math.sqrt(max(size, 1) * most)
    return _with_gradients(q.materialize(), array, step, (float(least), float(most), factor))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _with_gradients(value: jax.Array, x: jax.Array, step: jax.Array, limits: tuple[float, float, float]) -> jax.Array:
    del x, step, limits
    return value


@_with_gradients.defjvp
def _(limits: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (value, x, step), (_, dx, dstep) = primals, tangents
    least, most, factor = limits
    unit = _in_steps(x.astype(step.dtype), step)
    inside = (unit >= least) & (unit <= most)
    slope = jnp.where(inside, jnp.round(unit) - unit, jnp.clip(unit, least, most)) * factor
    passed = jnp.where(inside, dx, jnp.zeros_like(dx)).astype(step.dtype)
    return value, (passed + slope * dstep).astype(value.dtype)


def _check(format: str, options: dict[str, Any]) -> None:
    find_format(format)
    if not has_learned_scale(format, **options):
        raise ValueError(f"the scales of {format!r} with {options or 'no options'} can't be learned: {HOW}")


def _like(array: jax.Array, scale: jax.Array, format: str, options: dict[str, Any]) -> Any:
    """The quantized array without values; an error if `scale` has another shape than its own."""
    _check(format, options)
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype)
    q: Any = jax.eval_shape(functools.partial(find_format(format).encode, **options), struct)
    if scale.shape != q.scale.shape:
        raise ValueError(
            f"`scale` {scale.shape} is none of {array.dtype}{list(array.shape)} in {format!r}, which has "
            f"{q.scale.shape}"
        )
    return q


def _stored(q: Any, scale: jax.Array) -> jax.Array:
    return grouped.round_scales(scale.astype(jnp.float32), q.scale.dtype)


def _in_steps(x: jax.Array, step: jax.Array) -> jax.Array:
    return reference.divide(x, jnp.where(step == 0, 1, step))


def _spread(q: Any, scale: jax.Array) -> jax.Array:
    """The scale of each element."""
    blocks = {q.axis % q.ndim: q.block_size} if isinstance(q, ArrayGrouped) else {}
    return jnp.broadcast_to(reference.repeat_blocks(scale, blocks, q.shape), q.shape)


@functools.singledispatch
def _packed(q: QuantizedArray, codes: jax.Array) -> Leaves:
    del codes
    raise TypeError(f"{type(q).__name__} has no learned scales")


@_packed.register
def _(q: Array8B, codes: jax.Array) -> Leaves:
    del q
    return {"weight": codes.astype(jnp.int8)}


@_packed.register
def _(q: Array1B, codes: jax.Array) -> Leaves:
    return {"weight": reference.pack_ternary(codes, q.axis)}


@_packed.register
def _(q: ArrayGrouped, codes: jax.Array) -> Leaves:
    planes = grouped.pack_codes((codes + 2 ** (q.bits - 1)).astype(jnp.uint8), q.bits, q.axis)
    return dict(zip(q._code_fields, planes, strict=False))
