"""Codes in blocks, `scale * (value of the code - zero) + offset`, in plain `jnp`: their meaning and how to find them.

A code of 3, 5 or 6 bits has two planes, of its low and of its high bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from . import fitting, reference

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits in each plane of a code, the lowest first

# What the sixteen codes of 4 bits stand for where they are not integers; formats may add tables.
CODEBOOKS: dict[str, np.ndarray] = {
    "e2m1": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32),
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
}


TABLE_STARTS = (0.9, 0.8)  # of the scale that spans a block: where the search of a better one begins


def checked_table(name: str, values: Sequence[float]) -> np.ndarray:
    """Up to sixteen values as an entry `name` of CODEBOOKS; codes beyond them stand for the last."""
    table = np.asarray(values, np.float32)
    if name == "integer" or name in CODEBOOKS:
        raise ValueError(f"there is a table {name!r} already")
    if table.ndim != 1 or not 2 <= table.size <= 16 or not np.all(np.isfinite(table)) or not np.any(table):
        raise ValueError(f"a table has 2 to 16 finite values that are not all 0; got {values!r} for {name!r}")
    return np.pad(table, (0, 16 - table.size), mode="edge")


def kernel_name(codebook: str) -> str:
    """The name by which kernels know a table: a checksum in it keeps a core that was built of other values away."""
    own = ("e2m1", "iq4_nl")  # csrc/formats has these
    return codebook if codebook in own else f"{codebook}_{zlib.crc32(CODEBOOKS[codebook].tobytes()):08x}"


def kernel_tables() -> dict[str, np.ndarray]:
    """All tables, by the names that kernels know them by."""
    return {kernel_name(name): table for name, table in CODEBOOKS.items()}


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
    blocks = reference.in_blocks(values.astype(scale.dtype), axis, block_size)
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
    blocks = reference.in_blocks(x.astype(scale.dtype), axis, block_size)
    scale, offset = _per_block((scale, offset), axis)
    codes = _nearest(blocks, scale, offset, bits)
    return reference.merge(jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.uint8), axis, x.shape[axis])


def _nearest(x: jax.Array, scale: jax.Array, offset: jax.Array | None, bits: int) -> jax.Array:
    """The codes as floats, NaN where the scale is."""
    steps = jnp.where(scale == 0, 1, scale)
    codes = jnp.round(x / steps) + 2 ** (bits - 1) if offset is None else jnp.round((x - offset) / steps)
    return jnp.clip(codes, 0, 2**bits - 1)


def _per_block(line: fitting.Line, axis: int) -> fitting.Line:
    """With an axis of length 1 where `reference.split` makes that of a block's elements."""
    scale, offset = line
    return jnp.expand_dims(scale, axis + 1), None if offset is None else jnp.expand_dims(offset, axis + 1)


def _present(x: jax.Array, block_size: int, axis: int) -> jax.Array | None:
    """Which elements of the blocks of `x` along `axis` are not padding; None if there is none of it."""
    length = x.shape[axis]
    if length % block_size == 0:
        return None
    present = reference.in_blocks(jnp.ones((length,), bool), 0, block_size)
    return present.reshape(*[1] * axis, *present.shape, *[1] * (x.ndim - 1 - axis))


def _weight(x: jax.Array, importance: jax.Array | None, block_size: int, axis: int) -> jax.Array | None:
    """Of the squared error of each element of the blocks: 0 in their padding."""
    if importance is None:
        present = _present(x, block_size, axis)
        return None if present is None else present.astype(jnp.float32)
    return reference.in_blocks(fitting.weights(importance, x.shape), axis, block_size)


def extremes(x: jax.Array, block_size: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """The least and the largest element of each block; NaN for both where one is not finite."""
    axis = axis % x.ndim
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    blocks = reference.in_blocks(x, axis, block_size)
    present = _present(x, block_size, axis)
    low = jnp.min(blocks if present is None else jnp.where(present, blocks, jnp.inf), axis=axis + 1)
    high = jnp.max(blocks if present is None else jnp.where(present, blocks, -jnp.inf), axis=axis + 1)
    off = jnp.sum(blocks - blocks, axis=axis + 1)  # NaN if an element is, or is infinite; XLA's minimum may drop it
    return low + off, high + off


def round_scales(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` rounded to `dtype`, as float32: what a stored scale will be read as."""
    if jnp.dtype(dtype) == x.dtype or x.dtype == jnp.float64:
        return x
    info = jnp.finfo(dtype)
    # XLA may drop a pair of casts; this is the same, bit for bit.
    return lax.reduce_precision(x, info.nexp, info.nmant)


def encode(
    x: jax.Array,
    bits: int,
    block_size: int,
    axis: int,
    symmetric: bool,
    scale_dtype: DTypeLike,
    fit: bool,
    superblock_size: int = 0,
    importance: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """uint8 codes of the shape of `x`, and what their blocks are scaled by, from the extremes or then fitted.

    That is a `scale` and an `offset`, by the names that `ArrayGrouped` has for them. With `symmetric` there is no
    offset: the element of the largest magnitude has code 0, for -2**(bits-1) scales. With a `superblock_size` both are
    8-bit integers, with a `scale_scale` and an `offset_scale` for each superblock. The squared error of an element that
    is fitted counts as much as its `importance`.
    """
    axis = axis % x.ndim
    x = reference.without_tiny(x)
    low, high = extremes(x, block_size, axis)
    in_blocks = scale_dtype if not superblock_size else low.dtype
    line = _spanning(low, high, bits, symmetric, in_blocks)
    if fit:
        weight = _weight(x, importance, block_size, axis)
        line = _fitted(x, line, low, high, weight, bits, block_size, axis, in_blocks)
    leaves: dict[str, jax.Array] = {}
    if superblock_size:
        scale, offset = line
        per_factor = superblock_size // block_size
        integers = jnp.int8 if symmetric else jnp.uint8
        leaves["scale"], leaves["scale_scale"], scale = in_two_levels(scale, per_factor, axis, integers, scale_dtype)
        if offset is not None:
            two_levels = in_two_levels(offset, per_factor, axis, jnp.int8, scale_dtype)
            leaves["offset"], leaves["offset_scale"], offset = two_levels
        line = scale, offset
    else:
        dtype = low.dtype if low.dtype == jnp.float64 else scale_dtype
        named = zip(("scale", "offset"), line, strict=True)
        leaves = {name: level.astype(dtype) for name, level in named if level is not None}
    return nearest_codes(x, *line, bits, block_size, axis), leaves


def encode_table(
    x: jax.Array,
    table: np.ndarray,
    block_size: int,
    axis: int,
    scale_dtype: DTypeLike,
    fit: bool,
    importance: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """uint8 codes of the shape of `x`, of the nearest entries of `table` times the scales of their blocks; and these.

    A scale spreads the table over its block, or with `fit` makes the squared error smaller, in which an element counts
    as much as its `importance`. It is NaN for a block with a NaN or an infinity.
    """
    axis = axis % x.ndim
    low, high = extremes(x, block_size, axis)
    least, largest = float(min(table.min(), 0)), float(max(table.max(), 0))
    below, above = (low / least if least else 0 * low), (high / largest if largest else 0 * high)
    limit = float(jnp.finfo(scale_dtype).max)

    def stored(scale: jax.Array) -> jax.Array:
        return round_scales(jnp.clip(scale, 0, limit), scale_dtype)

    def nearest(x: jax.Array, scale: jax.Array, _: jax.Array | None = None) -> jax.Array:
        return reference.nearest_in_table(x / jnp.where(scale == 0, 1, scale), table, as_values=True) * scale

    blocks = reference.in_blocks(x.astype(low.dtype), axis, block_size)
    scale = jnp.expand_dims(stored(jnp.maximum(below, above)), axis + 1)
    if fit:
        peak = jnp.expand_dims(jnp.maximum(-low, high), axis + 1)
        starts = [(stored(scale * part), None) for part in TABLE_STARTS]
        options = {"peak": peak, "stored": stored, "weight": _weight(x, importance, block_size, axis)}
        scale, _ = fitting.fitted(blocks, (axis + 1,), (scale, None), starts, nearest, **options)
    codes = reference.nearest_in_table(reference.divide(blocks, jnp.where(scale == 0, 1, scale)), table)
    dtype = low.dtype if low.dtype == jnp.float64 else scale_dtype
    return reference.merge(codes, axis, x.shape[axis]), jnp.squeeze(scale, axis + 1).astype(dtype)


def in_two_levels(
    level: jax.Array, per_factor: int, axis: int, integers: DTypeLike, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`level` as `integers`, with a factor of `dtype` for each `per_factor` of them; and what both are read as.

    A factor with a NaN or an infinity among its entries is NaN.
    """
    wide = level.astype(jnp.float32)
    groups = reference.split(wide, axis, per_factor)
    largest = jnp.iinfo(integers).max
    factor = jnp.max(jnp.abs(groups), axis=axis + 1) + jnp.sum(groups - groups, axis=axis + 1)
    factor = round_scales(factor / largest, dtype)
    steps = jnp.expand_dims(jnp.where(factor > 0, factor, 1), axis + 1)
    small = jnp.clip(jnp.round(groups / steps), max(jnp.iinfo(integers).min, -largest), largest)
    small = reference.merge(jnp.where(jnp.isnan(small), 0, small), axis, level.shape[axis])
    return small.astype(integers), factor.astype(dtype), reference.scale_blocks(small, factor, per_factor, axis)


def _spanning(low: jax.Array, high: jax.Array, bits: int, symmetric: bool, scale_dtype: DTypeLike) -> fitting.Line:
    """The scale and offset with which codes span a block from `low` to `high`; NaN where codes times it overflow."""
    most = float(jnp.finfo(low.dtype).max) * 0.98
    overflows = jnp.maximum(-low, high) > most
    if not symmetric:
        overflows |= high / 2 - low / 2 > most / 2
    low, high = (jnp.where(overflows, jnp.nan, each) for each in (low, high))
    if symmetric:
        peak = jnp.where(-low > high, low, high)
        return round_scales(peak / -(2.0 ** (bits - 1)), scale_dtype), None
    return round_scales((high - low) / (2**bits - 1), scale_dtype), round_scales(low, scale_dtype)


def _fitted(
    x: jax.Array,
    plain: fitting.Line,
    low: jax.Array,
    high: jax.Array,
    weight: jax.Array | None,
    bits: int,
    block_size: int,
    axis: int,
    scale_dtype: DTypeLike,
) -> fitting.Line:
    """The `plain` scale and offset, which span blocks from `low` to `high`, or better ones."""
    symmetric = plain[1] is None
    step = 1 / (2**bits - 1)  # of the range
    inward = (high - low) * (step / 2)
    ends = (low * (1 - step), high * (1 - step)) if symmetric else (low + inward, high - inward)
    start = _spanning(*ends, bits, symmetric, scale_dtype)

    def nearest(x: jax.Array, scale: jax.Array, offset: jax.Array | None) -> jax.Array:
        inverse = 1 / jnp.where(scale == 0, 1, scale)  # twice as fast as division, and wrong only where two are as near
        codes = jnp.round((x if offset is None else x - offset) * inverse) + (2 ** (bits - 1) if offset is None else 0)
        codes = jnp.clip(codes, 0, 2**bits - 1)
        return (codes - 2 ** (bits - 1)) * scale if offset is None else codes * scale + offset

    scale, offset = fitting.fitted(
        reference.in_blocks(x.astype(low.dtype), axis, block_size),
        (axis + 1,),
        _per_block(plain, axis),
        [_per_block(start, axis)],
        nearest,
        peak=jnp.expand_dims(jnp.maximum(-low, high), axis + 1),
        stored=lambda scale: round_scales(scale, scale_dtype),
        weight=weight,
        moves=0 if bits == 8 else fitting.MOVES,  # 8 bits gain 2% at most, and hardly more with more lines
    )
    return jnp.squeeze(scale, axis + 1), None if offset is None else jnp.squeeze(offset, axis + 1)
