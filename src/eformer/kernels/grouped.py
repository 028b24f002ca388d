"""Codes in blocks, `scale * (value of the code - zero) + offset`, in plain `jnp`: their meaning and how to find them.

A code of 3, 5 or 6 bits has two planes, of its low and of its high bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from . import reference

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits in each plane of a code, the lowest first

# What the sixteen codes of 4 bits stand for where they are not integers.
CODEBOOKS = {
    "e2m1": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32),
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
}


def pack_codes(codes: jax.Array, bits: int, axis: int) -> list[jax.Array]:
    """uint8 codes of `bits` bits as planes, each packed along `axis`."""
    planes, below = [], 0
    for width in PLANES[bits]:
        planes.append(reference.pack(codes >> below & (2**width - 1), 8 // width, axis))
        below += width
    return planes


def unpack_codes(planes: Sequence[jax.Array], bits: int, axis: int, length: int) -> jax.Array:
    """The uint8 codes that `pack_codes` has packed."""
    codes, below = jnp.uint8(0), 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        codes = codes | reference.unpack(plane, 8 // width, axis, length) << below
        below += width
    return jnp.asarray(codes)


def decode_blocks(
    values: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    offset: jax.Array | None,
    block_size: int,
    axis: int,
) -> jax.Array:
    """`scale * (values - zero) + offset`, with an entry of each for every block along `axis`.

    The product is rounded before the offset is added, also where a compiler could do both at once.
    """
    axis, length = axis % values.ndim, values.shape[axis]
    blocks = reference.split(values.astype(scale.dtype), axis, block_size)
    if zero is not None:
        blocks = blocks - jnp.expand_dims(zero.astype(scale.dtype), axis + 1)
    scale = jnp.expand_dims(scale, axis + 1)
    if offset is None:
        return reference.merge(blocks * scale, axis, length)
    scaled = reference.rounded_product(blocks, scale)
    return reference.merge(scaled + jnp.expand_dims(offset.astype(scale.dtype), axis + 1), axis, length)


def nearest_codes(
    x: jax.Array, scale: jax.Array, offset: jax.Array | None, bits: int, block_size: int, axis: int
) -> jax.Array:
    """The code of each element of `x` whose value is nearest, as uint8; 0 where there is no scale."""
    axis = axis % x.ndim
    blocks = reference.split(x.astype(scale.dtype), axis, block_size)
    steps = jnp.expand_dims(jnp.where(scale == 0, 1, scale), axis + 1)
    if offset is None:
        codes = jnp.round(blocks / steps) + 2 ** (bits - 1)
    else:
        codes = jnp.round((blocks - jnp.expand_dims(offset, axis + 1)) / steps)
    codes = jnp.where(jnp.isnan(codes), 0, jnp.clip(codes, 0, 2**bits - 1))
    return reference.merge(codes.astype(jnp.uint8), axis, x.shape[axis])


def extremes(x: jax.Array, block_size: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """The least and the largest element of each block; NaN for both where one is not finite."""
    axis, length = axis % x.ndim, x.shape[axis % x.ndim]
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    blocks = reference.split(x, axis, block_size)
    present = reference.split(jnp.ones((length,), bool), 0, block_size)
    present = present.reshape(*present.shape, *[1] * (x.ndim - 1 - axis))
    low = jnp.min(jnp.where(present, blocks, jnp.inf), axis=axis + 1)
    high = jnp.max(jnp.where(present, blocks, -jnp.inf), axis=axis + 1)
    off = jnp.sum(blocks - blocks, axis=axis + 1)  # NaN if an element is, or is infinite; XLA's minimum may drop it
    return low + off, high + off


def round_scales(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` rounded to `dtype`, as float32: what a stored scale will be read as."""
    if jnp.dtype(dtype) == x.dtype:
        return x
    info = jnp.finfo(dtype)
    # XLA may drop a pair of casts; this is the same, bit for bit.
    return lax.reduce_precision(x, info.nexp, info.nmant)


def encode(
    x: jax.Array, bits: int, block_size: int, axis: int, symmetric: bool, scale_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """uint8 codes of the shape of `x`, and the scale and offset of each block, from its extremes.

    With `symmetric` there is no offset: the element of the largest magnitude has code 0, for -2**(bits-1) scales.
    """
    low, high = extremes(x, block_size, axis)
    if symmetric:
        peak = jnp.where(-low > high, low, high)
        scale, offset = round_scales(peak / -(2.0 ** (bits - 1)), scale_dtype), None
    else:
        # Where all codes times the scale would overflow, the extremes are moved together.
        largest = float(jnp.finfo(low.dtype).max)
        excess = jnp.maximum((high / 2 - low / 2) - largest * 0.49, 0)
        low, high = low + excess, high - excess
        scale = round_scales((high - low) / (2**bits - 1), scale_dtype)
        offset = round_scales(low, scale_dtype)
    codes = nearest_codes(x, scale, offset, bits, block_size, axis)
    dtype = scale.dtype if scale.dtype == jnp.float64 else scale_dtype
    return codes, scale.astype(dtype), None if offset is None else offset.astype(dtype)
