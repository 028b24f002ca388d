"""The table of formats that the kernels know, and where their scales are applied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from eformer._src.kernels import grouped, reference
from eformer._src.kernels.matrix import Matrix


class Format(NamedTuple):
    """How codes are stored, and what they stand for."""

    planes: tuple[int, ...]  # bits of a code in each plane, the lowest first
    table: np.ndarray | None = None  # the value of each code; None if codes are integers
    block_scales: bool = False  # a scale per block, inside the matmul; else the scales are beside it
    high_first: bool = False  # the first code of a byte is in its highest bits

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.planes[0]

    @property
    def shifts(self) -> tuple[int, ...]:
        """Of the first code in a byte of the first plane, the second ..."""
        upwards = range(0, 8, self.planes[0])
        return tuple(reversed(upwards) if self.high_first else upwards)

    @property
    def mask(self) -> int:
        return 2 ** self.planes[0] - 1

    @property
    def centre(self) -> int:
        """The code that stands for 0 where blocks of integers have no offset."""
        return 2 ** (sum(self.planes) - 1)

    @property
    def integer_blocks(self) -> bool:
        return self.table is None and self.block_scales

    @property
    def has_nan(self) -> bool:
        """Whether a code decodes to NaN, so that not even zeros of x may be multiplied by padding."""
        return self.table is not None and bool(np.isnan(self.table).any())


class _Formats(dict[str, Format]):
    def __missing__(self, name: str) -> Format:
        """That of a table; tables may be registered at any time."""
        return self.setdefault(name, Format((4,), grouped.kernel_tables()[name], block_scales=True))


FORMATS = _Formats(
    {
        "int8": Format((8,)),
        "nf4": Format((4,), reference.NF4_CODES, block_scales=True, high_first=True),
        "ternary": Format((2,), reference.TERNARY_CODES),
        **{f"uint{bits}": Format(planes, block_scales=True) for bits, planes in grouped.PLANES.items()},
    }
)


def has_kernel(matrix: Matrix) -> bool:
    """Whether the format is known, and blocks fill bytes.

    A scale per element, and offsets of values from a table, are left to XLA.
    """
    if matrix.format not in {*FORMATS, *grouped.kernel_tables()}:
        return False
    known = FORMATS[matrix.format]
    if len(matrix.codes) != len(known.planes):
        return False
    if known.block_scales:
        return matrix.block_size % known.codes_per_byte == 0 and (
            known.table is None or "offset" not in _levels(matrix)
        )
    return all(1 in scale.shape[1:] for scale in matrix.scales)


def scale_and_offset(matrix: Matrix) -> tuple[jax.Array, jax.Array | None]:
    """The scale and the offset of each block, (count, rows / block_size, cols) or (count, rows, cols / block_size).

    An integer stands for `scale * code + offset`, or without an offset for `scale * (code - centre)`. They are as they
    are stored if that is in 16 bits, else float32.
    """
    levels = _levels(matrix)
    scale, offset = (_decoded_level(levels, name, matrix) for name in ("scale", "offset"))
    assert scale is not None
    if "zero" in levels:
        offset = -scale.astype(jnp.float32) * levels["zero"].astype(jnp.float32)
    return scale, offset


def _levels(matrix: Matrix) -> dict[str, jax.Array]:
    return dict(zip(matrix.scale_names, matrix.scales, strict=False))


def _decoded_level(levels: dict[str, jax.Array], name: str, matrix: Matrix) -> jax.Array | None:
    """The scales or the offsets of blocks, times their own scales."""
    leaf, of_leaf = levels.get(name), levels.get(f"{name}_scale")
    if leaf is None:
        return None
    if "nested" in levels:
        decoded = reference.decode_dynamic(leaf.reshape(matrix.count, -1), levels["nested"], levels["mean"])
        return decoded.reshape(leaf.shape)
    if of_leaf is None:
        return leaf if leaf.dtype in (jnp.bfloat16, jnp.float16) else leaf.astype(jnp.float32)
    axis, leaf, of_leaf = 1 + matrix.packed_axis, leaf.astype(jnp.float32), of_leaf.astype(jnp.float32)
    if of_leaf.shape[axis] == 1:
        return leaf * of_leaf
    return reference.scale_blocks(leaf, of_leaf, matrix.superblock_size // matrix.block_size, axis)


@functools.cache
def nibble_words(name: str) -> np.ndarray:
    """int32 (2, 16): for the high and for the low nibble of a byte, the word of two bfloat16 that it selects.

    Codes 0 and 1 of a byte are the lower and the upper half of one word, codes 2 and 3 of another. A nibble that holds
    one code selects half a word, and 0 for the other half.
    """
    format = FORMATS[name]
    assert format.table is not None
    bits = format.table.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    words = np.zeros((2, 16), np.uint32)
    for i, shift in enumerate(format.shifts):
        code = np.arange(16) >> shift % 4 & format.mask
        words[0 if shift >= 4 else 1] |= bits[code] << 16 * (i % 2)
    return words.view(np.int32)


def applied_scales(x: jax.Array, matrix: Matrix, contracted_axis: int) -> tuple[jax.Array, jax.Array | None]:
    """x, and a scale (count, 1, n) of the result; scales of blocks are applied inside the matmul.

    A scale that varies along the contracted axis multiplies x.
    """
    if not matrix.scales or FORMATS[matrix.format].block_scales:
        return x, None
    [scale] = matrix.scales
    scale = scale if contracted_axis == 0 else jnp.swapaxes(scale, 1, 2)
    if scale.shape[1] > 1:
        return x.astype(jnp.float32) * jnp.swapaxes(scale, 1, 2), None
    return x, jnp.broadcast_to(scale, (*scale.shape[:2], matrix.cols if contracted_axis == 0 else matrix.rows))


def result(x: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a result, which in `shard_map` varies over the same mesh axes as x."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=jax.typeof(x).mat)


def alike(x: jax.Array, constant: np.ndarray) -> jax.Array:
    """The constant, which in `shard_map` is typed as varying over the same mesh axes as x."""
    varying = tuple(sorted(jax.typeof(x).mat.varying))
    return lax.pcast(jnp.asarray(constant), varying, to="varying") if varying else jnp.asarray(constant)
