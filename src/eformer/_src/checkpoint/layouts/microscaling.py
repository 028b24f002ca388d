"""Small floats with a scale per block of a row. E2M1: two codes to a byte, the first in the low half.

| | codes | scale of a block | scale of all |
|---|---|---|---|
| MXFP4 of compressed-tensors | `weight_packed` | `weight_scale`, a power of two | |
| NVFP4 of compressed-tensors | `weight_packed` | `weight_scale`, E4M3 | `weight_global_scale`, which divides |
| NVFP4 of ModelOpt | `weight` | `weight_scale`, E4M3 | `weight_scale_2`, which multiplies |
| MXFP4 of gpt-oss | `NAME_blocks` (..., blocks, 16) | `NAME_scales`, a power of two | |
| FP4 experts of DeepSeek | `weight`, as int8 | `weight_scale_inv` or `scale`, a power of two | |

Powers of two are bytes, the exponent plus 127. MXFP6 of compressed-tensors has E2M3 in 6 bits, four codes in three
bytes, and a power of two per block of 32; E4M3 has all of its values, so they are kept in 8 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eformer._src.checkpoint.header import Tensor
from eformer._src.checkpoint.prequantized.bit_fields import unpack_dense
from eformer._src.checkpoint.prequantized.layout import (
    AT_ONCE,
    E8M0,
    Group,
    Layout,
    Leaf,
    bytes_of,
    check_said,
    grouped_like,
    one_per_matrix,
    register_layout,
)
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields

from .compressed_tensors import agrees_with

BYTES = (np.dtype(np.uint8), np.dtype(np.int8))
POWERS = (np.dtype(np.uint8), E8M0)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(jnp.bfloat16)  # holds E2M1 times a power of two exactly
FLOAT32 = np.dtype(np.float32)
IN_BLOCK, OF_NVFP4 = 32, 16  # elements that share a scale


def fp4_like(
    group: Group, codes: Tensor, scale: Tensor, block: int, kind: np.dtype, dtype: np.dtype, **more: Leaf
) -> ArrayGrouped:
    """An array of the codes in `codes`, with a scale of dtype `kind` for each entry of `scale`, one per `block`."""
    shape = (*codes.shape[:-1], codes.shape[-1] * codes.dtype.itemsize * 2)
    blocks = scale.shape[-1] if scale.shape else 0
    if shape[-1] != blocks * block:
        raise group.wrong(f"{shape[-1]} codes of 4 bits are not {blocks} blocks of {block}")
    return grouped_like(shape, 4, block, dtype, {"scale": (scale.shape, kind), **more}, "e2m1")


def powers(tensor: Tensor) -> np.ndarray:
    """Powers of two that a file has as bytes."""
    return tensor.view().view(E8M0)


def is_mxfp6(codes: Tensor, scale: Tensor) -> bool:
    """Whether blocks of 32 codes take 24 bytes, in place of 16."""
    return bool(scale.shape) and 0 < codes.shape[-1] == scale.shape[-1] * IN_BLOCK * 6 // 8


# --- a power of two per block ---


def _mx(kind: str, name: str, codes: str, scale: str, bytes: Sequence[np.dtype], array: str = ".weight") -> Layout:
    def fits(group: Group) -> bool:
        matrix = group[codes].dtype in bytes and group[scale].dtype in POWERS and len(group[codes].shape) >= 2
        return matrix and not is_mxfp6(group[codes], group[scale])

    def read(group: Group, like: ArrayGrouped) -> dict[str, np.ndarray]:
        return {"packed": bytes_of(group[codes], like.packed.shape[-1]).view(np.uint8), "scale": powers(group[scale])}

    like = lambda group: fp4_like(group, group[codes], group[scale], IN_BLOCK, E8M0, BFLOAT16)  # noqa: E731
    agrees = agrees_with("float", (4,), name) if kind == "compressed-tensors" else lambda group, like: None
    return Layout(kind, name, (scale, codes), fits, like, read, array=array, agrees=agrees)


# --- E4M3 per block, and one for all ---


def _is_nv(codes: str, whole: str) -> Callable[[Group], bool]:
    def fits(group: Group) -> bool:
        found = [group[end].dtype for end in (codes, ".weight_scale", whole)]
        return found == [np.uint8, E4M3, np.float32] and len(group[codes].shape) >= 2

    return fits


def _divided_like(group: Group) -> ArrayGrouped:
    codes = group[".weight_packed"]
    one_per_matrix(group, ".weight_global_scale", len(codes.shape))
    return fp4_like(group, codes, group[".weight_scale"], OF_NVFP4, FLOAT32, FLOAT32)


def _read_divided(group: Group, like: ArrayGrouped) -> dict[str, np.ndarray]:
    """Scales as float32: a quotient is no product of E4M3 and another number, bit for bit."""
    whole = group[".weight_global_scale"].view().reshape(one_per_matrix(group, ".weight_global_scale", like.ndim))
    with np.errstate(all="ignore"):
        scale = group[".weight_scale"].view().astype(np.float32) / whole
    return {"packed": bytes_of(group[".weight_packed"], like.packed.shape[-1]), "scale": scale}


def _multiplied_like(group: Group) -> ArrayGrouped:
    codes, whole = group[".weight"], one_per_matrix(group, ".weight_scale_2", len(group[".weight"].shape))
    return fp4_like(group, codes, group[".weight_scale"], OF_NVFP4, E4M3, FLOAT32, scale_scale=(whole, FLOAT32))


def _read_multiplied(group: Group, like: ArrayGrouped) -> dict[str, np.ndarray]:
    assert like.scale_scale is not None
    return {
        "packed": group[".weight"].view(),
        "scale": group[".weight_scale"].view(),
        "scale_scale": group[".weight_scale_2"].view().reshape(like.scale_scale.shape),
    }


def _agrees_with_modelopt(group: Group, like: ArrayGrouped) -> None:
    """Of the model, or of a layer if each has its own."""
    config = group.config()
    layers = config.get("quantized_layers")
    schemes = [config, *(layers.values() if isinstance(layers, dict) else ())]
    facts = {"quant_algo": lambda said: "NVFP4" in str(said), "group_size": lambda said: said == like.block_size}
    check_said(group, "nvfp4", [each for each in schemes if isinstance(each, dict) and "quant_algo" in each], facts)


# --- gpt-oss ---


def _is_gpt_oss(blocks: str, scales: str) -> Callable[[Group], bool]:
    def fits(group: Group) -> bool:
        codes, scale = group[blocks], group[scales]
        bytes = codes.dtype == scale.dtype == np.uint8
        return bytes and len(codes.shape) >= 3 and codes.shape[-1] == IN_BLOCK // 2 and codes.shape[:-1] == scale.shape

    return fits


def _gpt_oss(blocks: str, scales: str) -> Layout:
    def like(group: Group) -> ArrayGrouped:
        *rows, count = group[scales].shape
        leaves = {"scale": (group[scales].shape, E8M0)}
        return grouped_like((*rows, count * IN_BLOCK), 4, IN_BLOCK, BFLOAT16, leaves, "e2m1")

    def read(group: Group, like: ArrayGrouped) -> dict[str, np.ndarray]:
        return {"packed": group[blocks].raw().reshape(like.packed.shape), "scale": powers(group[scales])}

    return Layout("mxfp4", "mxfp4", (blocks, scales), _is_gpt_oss(blocks, scales), like, read, array="")


for _layout in (
    Layout(
        "compressed-tensors",
        "nvfp4-pack-quantized",
        (".weight_global_scale", ".weight_scale", ".weight_packed"),
        _is_nv(".weight_packed", ".weight_global_scale"),
        _divided_like,
        _read_divided,
        agrees=agrees_with("float", (4,), "nvfp4-pack-quantized"),
    ),
    Layout(
        "modelopt",
        "nvfp4",
        (".weight_scale_2", ".weight_scale", ".weight"),
        _is_nv(".weight", ".weight_scale_2"),
        _multiplied_like,
        _read_multiplied,
        agrees=_agrees_with_modelopt,
    ),
    _mx("compressed-tensors", "mxfp4-pack-quantized", ".weight_packed", ".weight_scale", BYTES[:1]),
    _mx("fp8", "mxfp4", ".weight", ".weight_scale_inv", BYTES[1:]),
    _mx("fp8", "mxfp4", ".weight", ".scale", BYTES[1:]),
    _gpt_oss("_blocks", "_scales"),
    _gpt_oss(".blocks", ".scales"),
):
    register_layout(_layout)


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


_mxfp6 = Layout("compressed-tensors", "mxfp6-pack-quantized", (PACKED, SCALE), _fits, _like, _read)
register_layout(dataclasses.replace(_mxfp6, agrees=agrees_with("float", (6,), _mxfp6.name)))
