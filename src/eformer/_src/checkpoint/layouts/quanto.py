"""quanto's weights of 8 bits: `_data * _scale`, codes of int8 or FP8 with a scale for each row, or one.

Weights of 4 and 2 bits are not read: their codes are cut into groups, and nothing in the file says the shape.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from eformer._src.checkpoint.prequantized.layout import FLOATS, Group, Layout, register_layout
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.stored import array_from_fields

from .float8 import CODES

DATA, SCALE, GROUPED, SHIFT = "._data", "._scale", "._data._data", "._shift"


def _like(group: Group) -> Array8B | ArrayFloat8:
    data, scale = group[DATA], group[SCALE]
    rows = (*data.shape[:1], *(1,) * (len(data.shape) - 1))
    shape = (1,) * len(data.shape) if math.prod(scale.shape) == 1 else scale.shape
    if scale.dtype not in FLOATS or len(data.shape) < 2 or shape not in (rows, (1,) * len(rows)):
        raise group.wrong(
            f"{scale.dtype}{list(scale.shape)} are not the scales of rows of {list(data.shape)}, as quanto has them"
        )
    weight, dtype = jax.ShapeDtypeStruct(data.shape, data.dtype), scale.dtype
    if data.dtype in CODES:
        fields = {"weight": weight, "scale": jax.ShapeDtypeStruct(shape, dtype), "block_shape": (), "dtype": dtype}
        return array_from_fields(ArrayFloat8, fields)
    if data.dtype != np.int8:
        raise group.wrong(f"codes of {data.dtype} are not read; quanto writes int8 and FP8")
    axes = tuple(axis - len(shape) for axis, size in enumerate(shape) if size == 1)
    fields = {"weight": weight, "scale": jax.ShapeDtypeStruct(shape, np.float32), "axis": axes, "dtype": dtype}
    return array_from_fields(Array8B, fields)


def _read(group: Group, like: Array8B | ArrayFloat8) -> dict[str, np.ndarray]:
    scale = group[SCALE].view().reshape(like.scale.shape).astype(like.scale.dtype)
    return {"weight": group[DATA].view(), "scale": scale}


def _refuse(group: Group) -> Array8B:
    raise group.wrong(
        "quanto's weights of 4 and 2 bits are not read here: the file does not say their shape. What works: those of 8 "
        "bits, or the dense weights of the model, quantized here"
    )


register_layout(Layout("quanto", "quanto", (DATA, SCALE), lambda group: True, _like, _read, array=""))
register_layout(
    Layout(
        "quanto",
        "quanto, in groups",
        (GROUPED, SCALE),
        lambda group: True,
        _refuse,
        lambda group, like: {},
        (SHIFT,),
        "",
    )
)
