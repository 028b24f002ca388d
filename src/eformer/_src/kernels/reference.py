"""Encoding and decoding of each format in plain `jnp`: the definition of every format, and the oracle of every kernel.

Arithmetic is float32 whatever the input (float64 stays so): half precision can't hold a scale and its inverse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from . import fitting

# Dettmers et al., "QLoRA" (arXiv 2305.14314), appendix E: quantiles of a normal distribution, zero among them.
_NEGATIVE = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036)
_POSITIVE = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
NF4_CODES = np.array([*_NEGATIVE, 0.0, *_POSITIVE], np.float32)
# What two bits stand for: zero bits are zero, as in every format that can choose.
TERNARY_CODES = np.array([0, -1, np.nan, 1], np.float32)


def _boundaries(codes: np.ndarray) -> np.ndarray:
    """For each pair of neighbouring codes, the largest float32 that rounds to the lower one; so do exact ties."""
    middle = (codes[1:].astype(np.float64) + codes[:-1].astype(np.float64)) / 2
    rounded = middle.astype(np.float32)
    return np.where(rounded > middle, np.nextafter(rounded, np.float32(-np.inf)), rounded)


NF4_STARTS = (1.03, 0.9)  # of the largest magnitude: where the search of a better scale begins, as measured
FLOAT8_STARTS = (1.4, 1.7)  # of the scale that brings the largest magnitude to the largest code


SMALLEST = 2.0**-96  # a scale of smaller magnitudes, times an activation, would be flushed to zero


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` as `dtype`; casts to integers round to the nearest, and those to half precision make nothing infinite."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.round(x).astype(dtype)
    if jnp.dtype(dtype).itemsize < 4 and jnp.finfo(dtype).nexp < jnp.finfo(x.dtype).nexp:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
    return x.astype(dtype)


def without_tiny(x: jax.Array) -> jax.Array:
    """`x` with zero in place of magnitudes below `SMALLEST`, unless it is float64."""
    if x.dtype == jnp.float64 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x if jnp.finfo(x.dtype).tiny > SMALLEST else jnp.where(jnp.abs(x) < SMALLEST, jnp.zeros_like(x), x)


def absmax(x: jax.Array, axis: Sequence[int]) -> jax.Array:
    """The largest magnitude over `axis`, kept with length 1; 0 for an empty axis, infinity if there is a NaN."""
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(x), axis=tuple(axis), keepdims=True, initial=0)
    # XLA:CPU's maximum drops NaN (JAX 0.10.2 and 0.12), and testing each element is slow; a sum of zeros does neither.
    zero = jnp.sum(x - x, axis=tuple(axis), keepdims=True)
    return jnp.where(jnp.isnan(zero), jnp.inf, peak).astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def divide(x: jax.Array, by: jax.Array) -> jax.Array:
    """`x / by`, rounded once. XLA multiplies by the inverse of a broadcast `by`: inexact, and 0 where `by` is huge."""
    return x / jnp.where(jnp.isnan(x), x, by)


def _finite(peak: jax.Array) -> jax.Array:
    """NaN in place of infinity: a slice with an infinity or a NaN has no scale."""
    return jnp.where(jnp.isinf(peak), jnp.nan, peak)


def _mean_of_magnitudes(x: jax.Array, axis: Sequence[int], count: jax.Array | int) -> jax.Array:
    """The sum of non-negative `x` over `axis`, kept with length 1, by `count`; the same however `x` is sharded.

    Each element is rounded to 24 bits of the largest one. Groups of these bits are summed as integers, and fit.
    """
    peak = absmax(x, axis)
    whole = jnp.round(divide(x.astype(peak.dtype), jnp.where(peak == 0, 1, peak)) * 2.0**24).astype(jnp.int32)
    bits = 30 - math.prod(x.shape[a] for a in axis).bit_length()
    total = jnp.zeros_like(peak)
    for low in range(0, 25, bits):
        digits = jnp.sum((whole >> low) & (2**bits - 1), tuple(axis), keepdims=True, dtype=jnp.int32)
        total += digits.astype(peak.dtype) * 2.0 ** (low - 24)
    return total / count * _finite(peak)


def _absmax_scale(peak: jax.Array, largest: float) -> jax.Array:
    """`peak / largest`; 1 where the peak is 0, NaN where it is infinite, and never so large that decoding overflows."""
    peak = _finite(peak)
    step = divide(peak, jnp.full_like(peak, largest))
    scale = jnp.where(peak == 0, 1, jnp.maximum(step, jnp.finfo(peak.dtype).tiny))
    # Next to the largest float, `largest` times the rounded quotient overflows.
    return jnp.where(jnp.isinf(scale * largest), jnp.nextafter(scale, jnp.zeros_like(scale)), scale)


def encode_int8(
    x: jax.Array, axis: Sequence[int], largest: int = 127, fit: bool = False, importance: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`weight`, int8 in [-largest, largest], and `scale`, with `x` within `scale / 2` of `weight * scale`.

    With `fit` the scale has the smallest squared error found, and what lies beyond `largest` scales is clipped. A slice
    of zeros has scale 1. A slice with a NaN or an infinity has scale NaN, and decodes to NaN.
    """
    x = without_tiny(x)
    peak = absmax(x, axis)
    scale = _absmax_scale(peak, largest)
    x = x.astype(scale.dtype)

    def steps(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(divide(x, scale)), -largest, largest)

    if fit:
        starts = [scale * (1 - 2 / largest)]  # 2% is gained at most, and hardly more with more of them

        def nearest(x: jax.Array, scale: jax.Array) -> jax.Array:
            return jnp.clip(jnp.round(x * (1 / scale)), -largest, largest) * scale

        weight = _weights(importance, x.shape)
        scale = _fitted_scale(x, axis, scale, starts, nearest, _finite(peak), weight=weight, moves=0)
    weight = steps(x, scale)
    return jnp.where(jnp.isnan(weight), 0, weight).astype(jnp.int8), scale


def _weights(importance: jax.Array | None, shape: Sequence[int]) -> jax.Array | None:
    return None if importance is None else fitting.weights(importance, shape)


def _fitted_scale(
    x: jax.Array,
    axis: Sequence[int],
    scale: jax.Array,
    starts: Sequence[jax.Array],
    nearest: Callable[[jax.Array, jax.Array], jax.Array],
    peak: jax.Array,
    **options: Any,
) -> jax.Array:
    """`scale`, or one found from `starts` for which the values `nearest` to `x` have a smaller squared error."""
    lines = [(start, None) for start in starts]
    return fitting.fitted(x, axis, (scale, None), lines, lambda x, scale, _: nearest(x, scale), peak=peak, **options)[0]


def encode_blocks(x: jax.Array, block_size: int, axis: int, largest: int) -> tuple[jax.Array, jax.Array]:
    """int8 in [-largest, largest] of the shape of `x`, and a scale per block along `axis`; rounded as INT8 is."""
    axis = axis % x.ndim
    values, scale = encode_int8(in_blocks(x, axis, block_size), (axis + 1,), largest)
    return merge(values, axis, x.shape[axis]), jnp.squeeze(scale, axis + 1)


def scale_blocks(values: jax.Array, scale: jax.Array, block_size: int, axis: int) -> jax.Array:
    """`values` times the `scale` of their blocks of `block_size` along `axis`, in the dtype of `scale`."""
    axis, length = axis % values.ndim, values.shape[axis]
    blocks = in_blocks(values.astype(scale.dtype), axis, block_size)
    return merge(blocks * jnp.expand_dims(scale, axis + 1), axis, length)


def decode_int8(weight: jax.Array, scale: jax.Array) -> jax.Array:
    return weight.astype(scale.dtype) * scale


def round_to_float(x: jax.Array, info: Any) -> jax.Array:  # a `finfo` of NumPy or of ml_dtypes
    """The nearest value of a smaller floating point type, as the dtype of `x`; what is larger than all becomes largest.

    Casts to 8 and 4 bits do the same, element by element; this is vectorized.
    """
    step = float(info.smallest_subnormal)
    normal = lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, info.nmant)
    near = jnp.where(jnp.abs(x) < float(info.tiny), jnp.round(x / step) * step, normal)
    return jnp.clip(near, float(info.min), float(info.max))


def encode_float8(
    x: jax.Array,
    axis: Sequence[int],
    blocks: Mapping[int, int],
    dtype: DTypeLike,
    fit: bool = False,
    importance: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`weight`, of an 8-bit floating point `dtype`, and `scale`, with which the largest element has the largest code.

    There is one for each slice along `axis`, cut into blocks along the axes that `blocks` gives lengths for. With `fit`
    it has the smallest squared error found. A scale of zeros is 1. Where there is a NaN or an infinity it is NaN, and
    all that it scales decodes to NaN.
    """
    x = without_tiny(x)
    peak = absmax(x, axis)
    for along, block in blocks.items():
        peak = jnp.squeeze(absmax(in_blocks(peak, along, block), (along + 1,)), along + 1)
    largest = float(jnp.finfo(dtype).max)
    scale = _absmax_scale(peak, largest)
    if fit:
        weight = _weights(importance, x.shape)
        scale = _fitted_float8(x.astype(scale.dtype), axis, blocks, scale, peak, jnp.finfo(dtype), weight)
    unit = jnp.clip(divide(x.astype(scale.dtype), repeat_blocks(scale, blocks, x.shape)), -largest, largest)
    return jnp.where(jnp.isnan(unit), 0, unit).astype(dtype), scale


def _fitted_float8(
    x: jax.Array,
    axis: Sequence[int],
    blocks: Mapping[int, int],
    scale: jax.Array,
    peak: jax.Array,
    info: Any,  # as `round_to_float` takes
    weight: jax.Array | None,
) -> jax.Array:
    """`scale`, or a better one. Codes are as dense as their values are small, so only digits of the scale matter."""
    axes = list(axis)
    for along, block in sorted(blocks.items(), reverse=True):  # the last first: `split` moves what is behind
        axes = [each + (each > along) for each in axes] + [along + 1]
        x, weight = in_blocks(x, along, block), None if weight is None else in_blocks(weight, along, block)
        scale, peak = (jnp.expand_dims(each, along + 1) for each in (scale, peak))
    starts = [scale * part for part in FLOAT8_STARTS]
    nearest = lambda x, scale: round_to_float(x / scale, info) * scale  # noqa: E731
    found = _fitted_scale(x, axes, scale, starts, nearest, _finite(peak), weight=weight, moves=0)
    for along in blocks:
        found = jnp.squeeze(found, along + 1)
    return found


def decode_float8(weight: jax.Array, scale: jax.Array, blocks: Mapping[int, int]) -> jax.Array:
    """`weight * scale` in float32, or float64 if the scale is; `blocks` has the lengths of blocks by their axis."""
    scale = scale if scale.dtype == jnp.float64 else scale.astype(jnp.float32)
    return weight.astype(scale.dtype) * repeat_blocks(scale, blocks, weight.shape)


def repeat_blocks(scale: jax.Array, blocks: Mapping[int, int], shape: Sequence[int]) -> jax.Array:
    """`scale`, which has an entry for each block, with one for each element of `shape`; a length of 1 stays."""
    for axis, block in blocks.items():
        if scale.shape[axis] != 1:
            wide = jnp.broadcast_to(
                jnp.expand_dims(scale, axis + 1), (*scale.shape[: axis + 1], block, *scale.shape[axis + 1 :])
            )
            scale = merge(wide, axis, shape[axis])
    return scale


def split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Axis `axis` as two: groups, and `size` within a group; the last group is filled with zeros."""
    axis %= x.ndim
    missing = -x.shape[axis] % size
    if missing:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def in_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """`split` into blocks of `size`; of a block that is longer than the axis, only what the axis has of it."""
    return split(x, axis, min(size, max(x.shape[axis], 1)))


def merge(x: jax.Array, axis: int, length: int) -> jax.Array:
    """The inverse of `split`: axes `axis` and `axis + 1` as one, cut to `length`."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def encode_nf4(x: jax.Array, block_size: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """`packed`, two codes a byte along `axis`, the even one in the high nibble, and `absmax` per block."""
    absmax = nf4_scales(x, block_size, axis)
    return nf4_codes(x, absmax, block_size, axis), absmax


def nearest_in_table(x: jax.Array, table: np.ndarray, *, as_values: bool = False) -> jax.Array:
    """The uint8 code of the entry of `table`, float32, that is nearest to each element of `x`; the lower one of a tie.

    With `as_values`, the entry itself in the dtype of `x`.
    """
    values, codes = np.unique(table, return_index=True)
    found = values.astype(x.dtype) if as_values else codes.astype(np.uint8)
    nearest = jnp.full(x.shape, found[0])
    for boundary, each in zip(_boundaries(values), found[1:], strict=True):
        nearest = jnp.where(x > float(boundary), each, nearest)
    return nearest


def nf4_scales(
    x: jax.Array, block_size: int, axis: int, fit: bool = False, importance: jax.Array | None = None
) -> jax.Array:
    """The largest magnitude of each block, or with `fit` the scale of the smallest squared error.

    It is NaN for a block with a NaN or an infinity.
    """
    axis, shape = axis % x.ndim, x.shape
    blocks = in_blocks(without_tiny(x), axis, block_size)
    peak = _finite(absmax(blocks, (axis + 1,)))

    def nearest(x: jax.Array, scale: jax.Array) -> jax.Array:
        return nearest_in_table(x / jnp.where(scale == 0, 1, scale), NF4_CODES, as_values=True) * scale

    if fit:
        starts = [peak * part for part in NF4_STARTS]
        x = blocks.astype(peak.dtype)
        # A second move gains 1%, and then fitting takes more than five times as long as rounding.
        weight = None if importance is None else in_blocks(fitting.weights(importance, shape), axis, block_size)
        options = {"weight": weight, "moves": 1, "in_one_pass": False}
        peak = _fitted_scale(x, (axis + 1,), peak, starts, nearest, peak, **options)
    return jnp.squeeze(peak, axis + 1)


def nf4_codes(x: jax.Array, scale: jax.Array, block_size: int, axis: int) -> jax.Array:
    """The packed codes nearest to `x` over the `scale` of its block, of two equally near the lower."""
    axis, length = axis % x.ndim, x.shape[axis % x.ndim]
    blocks, scale = in_blocks(x, axis, block_size), jnp.expand_dims(scale, axis + 1)
    unit = divide(blocks.astype(scale.dtype), jnp.where(scale == 0, 1, scale))
    return pack_nf4(merge(nearest_in_table(unit, NF4_CODES), axis, length), axis)


def pack_nf4(codes: jax.Array, axis: int) -> jax.Array:
    """Two uint8 codes a byte along `axis`, the first in the high bits."""
    pairs = split(codes, axis, 2)
    if axis == codes.ndim - 1:  # one 16-bit word a pair: XLA:CPU reads it four times faster than every other byte
        words = lax.bitcast_convert_type(pairs, jnp.uint16)
        return ((words << 4) | (words >> 8)).astype(jnp.uint8)
    high, low = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return (high << 4) | low


def decode_nf4(packed: jax.Array, absmax: jax.Array, block_size: int, axis: int, length: int) -> jax.Array:
    return scale_blocks(unpack_nf4(packed, axis, length), absmax, block_size, axis)


def unpack_nf4(packed: jax.Array, axis: int, length: int) -> jax.Array:
    """float32 values in [-1, 1] that the codes stand for."""
    axis = axis % packed.ndim
    codes = merge(jnp.stack([packed >> 4, packed & 15], axis + 1), axis, length)
    return jnp.asarray(NF4_CODES)[codes]


@functools.cache
def dynamic_map() -> np.ndarray:
    """The 256 values of an 8-bit float whose leading zeros count the exponent (Dettmers, arXiv 1511.04561), signed.

    Seven decades from 1e-6 to 1; decade `i` has the `2**i` means of equal steps, and their negatives; then 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = _even_steps(np.float32(0.1), np.float32(1), 2**decade)
        means = np.float32(10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means, *-means]
    return np.sort(np.array(values, np.float32))


def _even_steps(start: np.float32, stop: np.float32, steps: int) -> np.ndarray:
    """As bitsandbytes' map was made: a float32 step, counted from the nearer end, rounded once."""
    step, index = np.float64((stop - start) / np.float32(steps)), np.arange(steps + 1)
    from_start, from_stop = np.float64(start) + step * index, np.float64(stop) - step * (steps - index)
    return np.where(index < (steps + 1) // 2, from_start, from_stop).astype(np.float32)


def encode_dynamic(x: jax.Array, block_size: int = 256) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x` of shape (..., n), not negative, as codes of `(x - offset) / nested`: its mean, and a scale per block."""
    offset = _mean_of_magnitudes(x, (-1,), max(x.shape[-1], 1))[..., 0]
    blocks = split(x - offset[..., None], -1, block_size)
    nested = absmax(blocks, (-1,))
    unit = divide(blocks, jnp.where(nested == 0, 1, nested))
    codes = jnp.searchsorted(jnp.asarray(_boundaries(dynamic_map())), unit, side="left").astype(jnp.uint8)
    return merge(codes, x.ndim - 1, x.shape[-1]), nested[..., 0], offset


def decode_dynamic(codes: jax.Array, nested: jax.Array, offset: jax.Array, block_size: int = 256) -> jax.Array:
    values = split(jnp.asarray(dynamic_map())[codes], -1, block_size)
    scaled = rounded_product(values, nested[..., None])
    return merge(scaled, codes.ndim - 1, codes.shape[-1]) + offset[..., None]


def decode_dynamic_matrix(codes: jax.Array, nested: jax.Array, offset: jax.Array, block_size: int = 256) -> jax.Array:
    """`decode_dynamic` of codes (..., rows, cols) without a reshape, for which devices would exchange codes."""
    rows, cols = (lax.broadcasted_iota(jnp.int32, codes.shape[-2:], axis) for axis in (0, 1))
    scale = jnp.take(nested, (rows * codes.shape[-1] + cols) // block_size, axis=-1)
    return rounded_product(jnp.asarray(dynamic_map())[codes], scale) + offset[..., None, None]


def rounded_product(values: jax.Array, scale: jax.Array) -> jax.Array:
    """`values * scale`, rounded before anything is added: an integer operation prevents a fused multiply-add.

    It sets no bit, or one of a NaN, which stays a NaN.
    """
    scaled = values * scale
    integer = jnp.dtype(f"int{8 * scaled.dtype.itemsize}")
    bit = jnp.isnan(scale).astype(integer)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(scaled, integer) | bit, scaled.dtype)


def pack_ternary(values: jax.Array, axis: int) -> jax.Array:
    """{0, -1, 1} as two bits 0, 1, 3, and NaN as 2 (`TERNARY_CODES`), four along `axis` to a byte, the first lowest.

    Other values are rounded and clipped. Zeros fill the last byte; this padding is never decoded.
    """
    shifted = jnp.clip(jnp.round(values), -1, 1) + 1
    return pack(jnp.where(jnp.isnan(shifted), 3, shifted).astype(jnp.uint8) ^ 1, 4, axis)


def unpack_ternary(packed: jax.Array, axis: int, length: int) -> jax.Array:
    """float32 values in {-1, 0, 1, NaN}."""
    codes = unpack(packed, 4, axis, length)
    return jnp.where(codes == 2, jnp.nan, (codes ^ 1).astype(jnp.float32) - 1)


def pack(codes: jax.Array, per_byte: int, axis: int) -> jax.Array:
    """uint8 codes, 2, 4 or 8 along `axis` to a byte, the first in the lowest bits; zeros fill the last byte."""
    axis, bits = axis % codes.ndim, 8 // per_byte
    groups = split(codes, axis, per_byte)
    parts = [lax.index_in_dim(groups, i, axis + 1, keepdims=False) << (bits * i) for i in range(per_byte)]
    return functools.reduce(jnp.bitwise_or, parts)


def unpack(packed: jax.Array, per_byte: int, axis: int, length: int) -> jax.Array:
    """The `length` codes along `axis` that `pack` has put `per_byte` to a byte."""
    axis, bits = axis % packed.ndim, 8 // per_byte
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(per_byte)]
    return merge(jnp.stack(parts, axis + 1), axis, length)


def signs(x: jax.Array) -> jax.Array:
    """-1 or 1; 0 becomes 1, and NaN stays NaN."""
    return jnp.where(x == 0, 1, jnp.sign(x))


def ternary(x: jax.Array) -> jax.Array:
    """1 above half a standard deviation, -1 below minus that, else 0; all NaN if it has none, for a NaN or infinity."""
    # By a power of two, which changes no digit, to where squares neither overflow nor vanish.
    peak = absmax(x, range(x.ndim))
    power = jnp.where(peak > 2.0**50, 2.0**-64, jnp.where((peak < 2.0**-50) & (peak > 0), 2.0**64, 1)).astype(x.dtype)
    x = x * power
    threshold = 0.5 * jnp.std(x)
    values = jnp.where(x > threshold, 1.0, jnp.where(x < -threshold, -1.0, 0.0))
    return jnp.where(jnp.isnan(threshold), jnp.nan, values)


def absmean_ternary(x: jax.Array, axis: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Values and scales of BitNet b1.58: the mean magnitude over `axis`, and the nearest of {-1, 0, 1} times it."""
    scale = mean_magnitude(x, jnp.ones_like(x), axis)
    return jnp.clip(jnp.round(divide(x.astype(scale.dtype), jnp.where(scale == 0, 1, scale))), -1, 1), scale


def fitted_ternary(
    x: jax.Array, values: jax.Array, scale: jax.Array, axis: Sequence[int], importance: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Values and scales over `axis` nearer to `x` than `values` times `scale`, which must have its best scale."""

    def nearest(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(x / jnp.where(scale == 0, 1, scale)), -1, 1)

    # A good threshold, half a scale, is about 0.7 of the mean magnitude (Li et al., arXiv 1605.04711).
    starts = [1.4 * mean_magnitude(x, jnp.ones_like(x), axis)]
    x, peak = x.astype(scale.dtype), _finite(absmax(x, axis))
    weight = _weights(importance, x.shape)
    found = _fitted_scale(x, axis, scale, starts, lambda x, scale: nearest(x, scale) * scale, peak, weight=weight)
    return jnp.where(jnp.isnan(values), values, nearest(x, found)), found


def mean_magnitude(x: jax.Array, values: jax.Array, axis: Sequence[int]) -> jax.Array:
    """The scale that brings `values` nearest to `x`: the mean of |x| over `axis` where `values` is not 0."""
    kept = values != 0
    count = jnp.maximum(jnp.sum(kept, tuple(axis), keepdims=True, dtype=jnp.int32), 1)
    return _mean_of_magnitudes(jnp.where(kept, jnp.abs(x.astype(jnp.float32)), 0), axis, count.astype(jnp.float32))


def encode_rsr(bits: jax.Array, k: int) -> jax.Array:
    """{0, 1} of shape (..., n, m) as integers of shape (..., ceil(m / k), n), `k` columns each, the highest bit first.

    The last integer of a row is filled up with zeros, in its lowest bits.
    """
    blocks = split(bits.astype(jnp.uint8 if k <= 8 else jnp.uint16), -1, k)
    place = k - 1 - lax.broadcasted_iota(blocks.dtype, blocks.shape, blocks.ndim - 1)
    return jnp.swapaxes(jnp.sum(blocks << place, -1, dtype=blocks.dtype), -1, -2)


def decode_rsr(codes: jax.Array, k: int, length: int) -> jax.Array:
    """float32, {0, 1}, of shape (..., n, length)."""
    codes = jnp.swapaxes(codes, -1, -2)
    place = k - 1 - lax.broadcasted_iota(codes.dtype, (*codes.shape, k), codes.ndim)
    bits = (jnp.expand_dims(codes, -1) >> place) & 1
    return merge(bits, codes.ndim - 1, length).astype(jnp.float32)
