"""Rounding to 4-bit floating point, E2M1, in blocks with scales of 8 bits; `grouped` decodes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax

from . import fitting, reference
from .reference import divide

# Between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, which have the codes 0 to 7.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LARGEST = 6.0
LARGEST_SCALE = 448.0  # of E4M3
E2M1, E4M3 = ml_dtypes.finfo(ml_dtypes.float4_e2m1fn), ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
NVFP4_STARTS = (1.5,)  # of the scale with which the largest element has the code of 6: with this one that of 4


def nearest_e2m1(x: jax.Array) -> jax.Array:
    """The uint8 codes of the nearest values, the last bit 0 if two are as near; 6 for what is larger, 0 for NaN."""
    size = jnp.abs(x)
    above = [size >= middle if code % 2 else size > middle for code, middle in enumerate(_MIDDLES)]
    code = functools.reduce(jnp.add, [each.astype(jnp.uint8) for each in above])
    return code | jnp.signbit(x).astype(jnp.uint8) << 3


def _nearest(x: jax.Array, scale: jax.Array, _: jax.Array | None = None) -> jax.Array:
    """What the nearest codes stand for."""
    return reference.round_to_float(x / jnp.where(scale == 0, jnp.inf, scale), E2M1) * scale


def encode_mxfp4(
    x: jax.Array, block_size: int, axis: int, fit: bool = False, importance: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Codes, two a byte along `axis`, and a scale for each block, as float8_e8m0fnu: 2 ** (floor(log2(peak)) - 2).

    With `fit` it may be the next power of two, above or below, if the squared error is smaller. A block with a NaN or
    an infinity has scale NaN, and decodes to NaN.
    """
    x, axis = reference.without_tiny(x.astype(jnp.float32)), axis % x.ndim
    blocks = reference.in_blocks(x, axis, block_size)
    peak = reference.absmax(blocks, (axis + 1,))
    exponent = lax.bitcast_convert_type(peak, jnp.int32) >> 23  # of the largest, + 127
    scale = jnp.where(exponent == 255, 255, jnp.maximum(exponent - 2, 0))
    if fit:
        plain = lax.bitcast_convert_type(scale << 23, jnp.float32)
        starts = [(plain * 2, None), (plain / 2, None)]
        options = {"weight": _weight(importance, x.shape, block_size, axis), "moves": 0}
        found, _ = fitting.fitted(blocks, (axis + 1,), (plain, None), starts, _nearest, peak=peak, **options)
        scale = lax.bitcast_convert_type(found, jnp.int32) >> 23
    inverse = lax.bitcast_convert_type((254 - jnp.minimum(scale, 253)) << 23, jnp.float32)
    codes = nearest_e2m1(blocks * inverse)
    scale = lax.bitcast_convert_type(jnp.squeeze(scale, axis + 1).astype(jnp.uint8), jnp.float8_e8m0fnu)
    return _packed(codes, axis, x.shape[axis]), scale


def encode_nvfp4(
    x: jax.Array, block_size: int, axis: int, fit: bool = False, importance: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, two a byte along `axis`; a scale for each block, as float8_e4m3fn; and its float32 scale for each matrix.

    With `fit` the scale of a block is the one with the smallest squared error that is found. A block with a NaN or an
    infinity has scale NaN, and decodes to NaN; the others of its matrix do not mind.
    """
    x, axis = reference.without_tiny(x.astype(jnp.float32)), axis % x.ndim
    blocks = reference.in_blocks(x, axis, block_size)
    peak = reference.absmax(blocks, (axis + 1,))
    finite = jnp.squeeze(jnp.where(jnp.isinf(peak), 0, peak), axis + 1)
    largest = jnp.max(finite, axis=tuple(range(x.ndim))[-2:], keepdims=True, initial=0)
    factor = divide(largest, jnp.full_like(largest, LARGEST * LARGEST_SCALE))
    factor = jnp.where(largest == 0, 1, jnp.maximum(factor, jnp.finfo(jnp.float32).tiny))
    steps = jnp.minimum(divide(divide(finite, jnp.full_like(finite, LARGEST)), factor), LARGEST_SCALE)
    steps = jnp.where(jnp.isinf(jnp.squeeze(peak, axis + 1)), jnp.nan, steps)
    if fit:
        steps = _fitted_steps(blocks, axis, steps, factor, peak, _weight(importance, x.shape, block_size, axis))
    scale = lax.optimization_barrier(steps.astype(jnp.float8_e4m3fn))  # else XLA may drop the cast and the one back
    whole = jnp.expand_dims(scale.astype(jnp.float32) * factor, axis + 1)
    codes = nearest_e2m1(divide(blocks, jnp.where(whole == 0, jnp.inf, whole)))
    return _packed(codes, axis, x.shape[axis]), scale, factor


def _weight(importance: jax.Array | None, shape: Sequence[int], block_size: int, axis: int) -> jax.Array | None:
    return None if importance is None else reference.in_blocks(fitting.weights(importance, shape), axis, block_size)


def _fitted_steps(
    blocks: jax.Array,
    axis: int,
    steps: jax.Array,
    factor: jax.Array,
    peak: jax.Array,
    weight: jax.Array | None,
) -> jax.Array:
    """Better scales of blocks than `steps`, also by their `factor`, where there are such."""
    steps, factor = jnp.expand_dims(steps, axis + 1), jnp.expand_dims(factor, axis + 1)

    def stored(scale: jax.Array) -> jax.Array:
        return reference.round_to_float(scale / factor, E4M3) * factor

    plain = stored(steps * factor)
    starts = [(stored(plain * part), None) for part in NVFP4_STARTS]
    options = {"peak": peak, "stored": stored, "weight": weight}
    found, _ = fitting.fitted(blocks, (axis + 1,), (plain, None), starts, _nearest, **options)
    return jnp.squeeze(found / factor, axis + 1)


def _packed(codes: jax.Array, axis: int, length: int) -> jax.Array:
    return reference.pack(reference.merge(codes, axis, length), 2, axis)
