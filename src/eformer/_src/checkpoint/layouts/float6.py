"""MXFP6 of compressed-tensors: E2M3 in 6 bits, four codes in three bytes, and a power of two per block of 32.

E4M3 has all of their values, so they are kept in 8 bits.
"""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np

from eformer._src.checkpoint.prequantized.bit_fields import unpack_dense
from eformer._src.checkpoint.prequantized.grouped_like import AT_ONCE, E8M0
from eformer._src.checkpoint.prequantized.layout import Group, Layout, register_layout
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.stored import array_from_fields

from .float4 import BFLOAT16, E4M3, IN_BLOCK, POWERS, is_mxfp6, powers

PACKED, SCALE = ".weight_packed", ".weight_scale"
# By code: the sign, two bits of exponent and three of fraction.
VALUES = np.arange(64).astype(np.uint8).view(ml_dtypes.float6_e2m3fn).astype(E4M3).view(np.uint8)


def _fits(group: Group) -> bool:
    codes, scale = group[PACKED], group[SCALE]
    return codes.dtype == np.uint8 and len(codes.shape) >= 2 and scale.dtype in POWERS and is_mxfp6(codes, scale)


def _like(group: Group) -> ArrayFloat8:
    scale = group[SCALE].shape
    fields = {
        "weight": jax.ShapeDtypeStruct((*group[PACKED].shape[:-1], scale[-1] * IN_BLOCK), E4M3),
        "scale": jax.ShapeDtypeStruct(scale, E8M0),
    }
    return array_from_fields(ArrayFloat8, {**fields, "block_shape": (IN_BLOCK,), "dtype": BFLOAT16})


def _read(group: Group, like: ArrayFloat8) -> dict[str, np.ndarray]:
    packed, columns = group[PACKED].raw().reshape(-1, group[PACKED].shape[-1]), like.shape[-1]
    made, step = np.empty((len(packed), columns), np.uint8), max(AT_ONCE // columns, 1)
    for start in range(0, len(packed), step):
        words = np.ascontiguousarray(packed[start : start + step]).view(np.uint32)
        made[start : start + step] = VALUES[unpack_dense(words, 6, columns)]
    return {"weight": made.view(E4M3).reshape(like.shape), "scale": powers(group[SCALE])}


register_layout(Layout("compressed-tensors", "mxfp6-pack-quantized", (PACKED, SCALE), _fits, _like, _read))
