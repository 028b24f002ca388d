"""`register_table_format`: a format that is a table of up to sixteen values, with a scale for each block."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._src.kernels import grouped
from eformer._src.quantization.formats.grouped import ArrayGrouped

from .base import Leaves
from .registry import Format, register_format
from .validation import FLOATS, a_bool


def register_table_format(
    name: str, values: Sequence[float], block_size: int = 64, *, scale_dtype: DTypeLike = jnp.bfloat16
) -> Format:
    """Make `quantize(w, format=name)` store each element as the code of one of `values`, times the scale of its block.

    A code has four bits, so there are 2 to 16 values, in any order. The arrays are `ArrayGrouped`, with `name` as their
    codebook. The native core knows the table if the call is in an `implicit_array_*.py` of this package that imports
    nothing else of it: `csrc/table_formats.py` runs such files when the core is built.
    """
    if jnp.dtype(scale_dtype) not in map(jnp.dtype, FLOATS):
        known = ", ".join(jnp.dtype(each).name for each in FLOATS)
        raise ValueError(f"`scale_dtype` of the format {name!r} must be one of {known}, got {scale_dtype}")
    table = grouped.checked_table(name, values)

    def quantize(
        array: jax.Array,
        block_size: int = block_size,
        *,
        axis: int = -1,
        fit: bool = False,
        use_kernel: bool = True,
        importance: jax.Array | None = None,
    ) -> ArrayGrouped:
        a_bool("fit", fit)
        fit = fit or importance is not None
        fields = {"bits": 4, "block_size": block_size, "codebook": name, "use_kernel": use_kernel}
        options = {"table": tuple(table), "block_size": block_size, "dtype": scale_dtype, "fit": fit}
        encode = functools.partial(_encode, **options, importance=importance)
        return ArrayGrouped._quantized(name, array, axis, encode, **fields)

    made = register_format(name, ArrayGrouped, quantize)
    grouped.CODEBOOKS[name] = table
    return made


@functools.partial(jax.jit, static_argnames=("axis", "table", "block_size", "dtype", "fit"))
def _encode(
    x: jax.Array,
    axis: int,
    table: tuple[float, ...],
    block_size: int,
    dtype: DTypeLike,
    fit: bool,
    importance: jax.Array | None,
) -> Leaves:
    codes, scale = grouped.encode_table(x, np.asarray(table, np.float32), block_size, axis, dtype, fit, importance)
    [packed] = grouped.pack_codes(codes, 4, axis)
    return {"packed": packed, "scale": scale}
