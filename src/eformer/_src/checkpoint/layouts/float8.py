"""Weights of FP8 with a scale per tensor, row, block of a row, or square block. Every scale multiplies.

| | scale |
|---|---|
| DeepSeek, Qwen and others | `NAME_scale_inv` for each 128 x 128 elements, or one; also of stacked experts |
| DeepSeek's own names | `scale` beside `weight` |
| compressed-tensors, ModelOpt | `NAME_scale` |

Scales are floating point, or powers of two in a byte.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np

from eformer._src.checkpoint.prequantized.layout import (
    E8M0,
    FLOATS,
    Config,
    Group,
    Layout,
    block_of,
    check_said,
    register_layout,
)
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.stored import array_from_fields

from .compressed_tensors import agrees_with, weights_said
from .microscaling import BFLOAT16, POWERS, powers

CODES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
USUAL = 128  # the side of square blocks, where no configuration says another one


@functools.lru_cache(maxsize=16)
def _block_settings(config: Callable[[], Config]) -> list[frozenset[int]]:
    """The lengths of blocks along rows and columns that the configuration names."""
    named = [each.get("block_structure") for each in weights_said(config)] + [config().get("weight_block_size")]
    pairs = [each for each in named if isinstance(each, list) and len(each) == 2]
    rows, columns = ({size for pair in pairs if type(size := pair[axis]) is int} for axis in (0, 1))
    groups = {size for each in weights_said(config) if type(size := each.get("group_size")) is int}
    return [frozenset(rows), frozenset(columns | groups)]


def _block_shape(group: Group, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of blocks along the last two axes, without a leading 1."""
    lengths, stated = [], group.config().get("weight_block_size")
    sizes = [size for size in stated if type(size) is int and size > 0] if isinstance(stated, list) else []
    if stated is not None and len(sizes) != 2:
        raise group.wrong(f"`weight_block_size` must be two lengths, and the configuration says {str(stated)[:50]}")
    if sizes:
        wanted = tuple(-(-length // size) for length, size in zip(shape[-2:], sizes, strict=True))
        if scale[-2:] != wanted:
            what = f"scales {list(scale[-2:])} of a weight {list(shape[-2:])}"
            raise group.wrong(f"{what} are not those of blocks {sizes}, which the configuration says")
    for length, entries, said in zip(shape[-2:], scale[-2:], _block_settings(group.config), strict=True):
        lengths.append(1 if entries in (1, length) else block_of(group, length, entries, said, USUAL))
    return tuple(lengths) if lengths[0] > 1 else tuple(lengths[1:]) if lengths[1] > 1 else ()


def _scale_shape(group: Group, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales with the axes of the weight: one, one for each matrix of a stack or each row, or blocks."""
    if math.prod(scale) == 1:
        return (1,) * len(shape)
    if len(scale) == len(shape):
        return scale
    if scale == shape[:-1] or scale == shape[:-2]:
        return (*scale, *(1,) * (len(shape) - len(scale)))
    raise group.wrong(f"scales {list(scale)} are not those of a weight {list(shape)}")


def _float8(kind: str, name: str, codes: str, scale: str, scales: tuple[np.dtype, ...], array: str = "") -> Layout:
    def fits(group: Group) -> bool:
        weight = group[codes]
        return weight.dtype in CODES and group[scale].dtype in scales and len(weight.shape) >= 2

    def like(group: Group) -> ArrayFloat8:
        weight, factor = group[codes], group[scale]
        shape = _scale_shape(group, weight.shape, factor.shape)
        own = factor.dtype if factor.dtype in FLOATS else E8M0
        fields = {
            "weight": jax.ShapeDtypeStruct(weight.shape, weight.dtype),
            "scale": jax.ShapeDtypeStruct(shape, own),
            "block_shape": _block_shape(group, weight.shape, shape),
            "dtype": own if own in FLOATS else BFLOAT16,
        }
        return array_from_fields(ArrayFloat8, fields)

    def read(group: Group, like: ArrayFloat8) -> dict[str, np.ndarray]:
        factor = group[scale]
        found = factor.view() if factor.dtype in FLOATS else powers(factor)
        return {"weight": group[codes].view(), "scale": found.reshape(like.scale.shape)}

    def agrees(group: Group, like: ArrayFloat8) -> None:
        if kind == "compressed-tensors":
            agrees_with("float", (8,), name)(group, like)
        mine = np.dtype(like.weight.dtype).name.removeprefix("float8_").removesuffix("fn")
        check_said(group, name, [group.config()], {"fmt": lambda said: said == mine})

    return Layout(kind, name, (scale, codes), fits, like, read, array=array, agrees=agrees)


for _layout in (
    _float8("fp8", "fp8", "", "_scale_inv", (*FLOATS, *POWERS)),
    _float8("fp8", "fp8", ".weight", ".scale", (*FLOATS, *POWERS), ".weight"),
    _float8("compressed-tensors", "float-quantized", "", "_scale", FLOATS),
    _float8("compressed-tensors", "mxfp8-quantized", "", "_scale", POWERS),
):
    register_layout(_layout)
