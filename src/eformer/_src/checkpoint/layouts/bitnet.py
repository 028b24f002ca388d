"""BitNet as transformers keeps it: ternary values, four rows in a byte, and one scale.

Bits 2i of row r hold row `i * (out / 4) + r`; 0, 1 and 2 are -1, 0 and 1. The class of linear layers that the
configuration names divides by the scale ("bitlinear", the default) or multiplies by it ("autobitlinear").
"""

from __future__ import annotations

import jax
import numpy as np

from eformer._src.checkpoint.layouts.gptq import SCALES, said
from eformer._src.checkpoint.prequantized.bit_fields import pack_planes
from eformer._src.checkpoint.prequantized.layout import AT_ONCE, Group, Layout, register_layout
from eformer._src.quantization.formats.ternary import Array1B
from eformer._src.quantization.stored import array_from_fields

WEIGHT, SCALE = ".weight", ".weight_scale"
CODES = np.array([1, 0, 3, 2], np.uint8)  # of `Array1B`, for -1, 0, 1 and none


def _fits(group: Group) -> bool:
    return group[WEIGHT].dtype == np.uint8 and said(group.config(), "quant_method") == "bitnet"


def _divides(group: Group) -> bool:
    kind = said(group.config(), "linear_class") or "bitlinear"
    if kind not in ("bitlinear", "autobitlinear"):
        raise group.wrong(f"`linear_class` must be 'bitlinear' or 'autobitlinear', got {kind[:50]!r}")
    return kind == "bitlinear"


def _like(group: Group) -> Array1B:
    weight, scale = group[WEIGHT], group[SCALE]
    if len(weight.shape) != 2 or scale.shape not in ((), (1,)) or scale.dtype.name not in SCALES:
        raise group.wrong(
            f"a ternary `weight` has two axes and a `weight_scale` of one element, one of {', '.join(SCALES)}; got "
            f"{list(weight.shape)} and {scale.dtype}{list(scale.shape)}"
        )
    _divides(group)  # raises unless it is known
    rows, columns = weight.shape
    leaves = {"weight": ((rows * 4, -(-columns // 4)), np.uint8), "scale": ((1, 1), np.float32)}
    structs = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()}
    return array_from_fields(Array1B, {**structs, "axis": -1, "padding": -columns % 4, "dtype": scale.dtype})


def _read(group: Group, like: Array1B) -> dict[str, np.ndarray]:
    """The leaves, some rows at a time. A scale that the layer divides by becomes one over it."""
    packed = group[WEIGHT].view()
    rows, columns = packed.shape
    made = np.empty(like.weight.shape, np.uint8)
    step = max(AT_ONCE // max(columns, 1), 1)
    for start in range(0, rows, step):
        part = packed[start : start + step]
        for i in range(4):
            values = part >> np.uint8(2 * i) & np.uint8(3)
            if np.any(values == 3):
                raise group.wrong("it has the code 3, which is no ternary value")
            row = i * rows + start
            made[row : row + len(part)] = pack_planes(CODES[values], 2)["packed"]
    with np.errstate(all="ignore"):  # it may be 0, or a NaN that signals
        scale = group[SCALE].view().reshape(1, 1).astype(np.float32)
        return {"weight": made, "scale": np.float32(1) / scale if _divides(group) else scale}


register_layout(Layout("bitnet", "bitnet", (SCALE, WEIGHT), _fits, _like, _read))
