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

from eformer.kernels import Matrix, reference


class Format(NamedTuple):
    """How the codes in a byte are decoded."""

    shifts: tuple[int, ...]  # of the first code in a byte, the second ...; all codes have equally many bits
    table: np.ndarray | None  # the value of each code; None if a code is its value
    block_scales: bool = False  # a scale per block, inside the matmul; else the scales are beside it

    @property
    def codes_per_byte(self) -> int:
        return len(self.shifts)

    @property
    def mask(self) -> int:
        return 2 ** (8 // self.codes_per_byte) - 1

    @property
    def has_nan(self) -> bool:
        """Whether a code decodes to NaN, so that not even zeros of x may be multiplied by padding."""
        return self.table is not None and bool(np.isnan(self.table).any())


FORMATS = {
    "int8": Format((0,), None),
    "nf4": Format((4, 0), reference.NF4_CODES, block_scales=True),
    "ternary": Format((0, 2, 4, 6), reference.TERNARY_CODES),
}


def has_kernel(matrix: Matrix) -> bool:
    """Whether the format is known, in one plane of codes; a scale per element is left to XLA."""
    known = FORMATS.get(matrix.format)
    if known is None or len(matrix.codes) != 1:
        return False
    return known.block_scales or all(1 in scale.shape[1:] for scale in matrix.scales)


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


def applied_scales(
    x: jax.Array, matrix: Matrix, contracted_axis: int
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """x, the float32 scales of blocks for inside the matmul, and a scale (count, 1, n) of the result.

    Scales of blocks are decoded if they are quantized. A scale that varies along the contracted axis multiplies x.
    """
    if not matrix.scales:
        return x, None, None
    scale, *rest = matrix.scales
    if FORMATS[matrix.format].block_scales:
        if rest:
            nested, offset, _ = rest
            decoded = reference.decode_dynamic(scale.reshape(matrix.count, -1), nested, offset)
            scale = decoded.reshape(scale.shape)
        return x, scale, None
    scale = scale if contracted_axis == 0 else jnp.swapaxes(scale, 1, 2)
    if scale.shape[1] > 1:
        return x.astype(jnp.float32) * jnp.swapaxes(scale, 1, 2), None, None
    return x, None, jnp.broadcast_to(scale, (*scale.shape[:2], matrix.cols if contracted_axis == 0 else matrix.rows))


def result(x: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The type of a result, which in `shard_map` varies over the same mesh axes as x."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=jax.typeof(x).mat)


def alike(x: jax.Array, constant: np.ndarray) -> jax.Array:
    """The constant, which in `shard_map` is typed as varying over the same mesh axes as x."""
    varying = tuple(sorted(jax.typeof(x).mat.varying))
    return lax.pcast(jnp.asarray(constant), varying, to="varying") if varying else jnp.asarray(constant)
