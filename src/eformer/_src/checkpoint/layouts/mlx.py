"""MLX: codes in rows of 32-bit words without unused bits, and per block a scale and a bias, or only a small scale.

A value is `scale * code + bias`. Of bits and block size, shapes tell only the product; the configuration beside the
weights says the rest, for all modules or by a module's name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from eformer._src.checkpoint.prequantized.bit_fields import unpack_dense
from eformer._src.checkpoint.prequantized.grouped_like import E8M0, FLOATS, bytes_of, grouped_like, planes_of
from eformer._src.checkpoint.prequantized.layout import Group, Layout, register_layout
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields

from .float4 import BFLOAT16, E4M3, fp4_like, powers

WEIGHT, SCALES, BIASES = ".weight", ".scales", ".biases"
SIZES = (32, 64, 128)  # of blocks that MLX has kernels for


def _bits_per_block(group: Group) -> int:
    """Bits times block size: the bits of the words of a row, for each scale."""
    words, blocks = group[WEIGHT].shape[-1], group[SCALES].shape[-1]
    if not blocks or words * 32 % blocks:
        raise group.wrong(f"{words} words are not divided by {blocks} scales")
    return words * 32 // blocks


def _bits_and_size(group: Group) -> tuple[int, int]:
    """The bits of a code and the size of a block, as the configuration says, or as shapes allow only one."""
    product, config = _bits_per_block(group), group.config()
    module = config.get(group.name.removesuffix(".weight"))
    for said in (module, config):
        bits, size = (said.get("bits"), said.get("group_size")) if isinstance(said, dict) else (None, None)
        if type(bits) is int and type(size) is int:
            if bits * size == product and bits in PLANES:
                return bits, size
            what = f"its shapes are those of {product} bits a block"
            raise group.wrong(f"{what}, and `quantization` in config.json says {bits} bits in blocks of {size}")
    possible = [(bits, size) for bits in PLANES for size in SIZES if bits * size == product]
    sized = [each for each in possible if each[1] == config.get("group_size")]
    for found in (possible, sized):
        if len(found) == 1:
            return found[0]
    said = " or ".join(f"{bits} bits in blocks of {size}" for bits, size in possible) or "none that there is"
    raise group.wrong(f"its shapes are those of {said}; `quantization` in config.json must say which, for this module")


def _is_affine(group: Group) -> bool:
    weight, scales, biases = (group[end] for end in (WEIGHT, SCALES, BIASES))
    kinds = weight.dtype == np.uint32 and scales.dtype in FLOATS and biases.dtype == scales.dtype
    return kinds and len(weight.shape) >= 2 and scales.shape == biases.shape and len(scales.shape) == len(weight.shape)


def _affine_like(group: Group) -> ArrayGrouped:
    (bits, size), scales = _bits_and_size(group), group[SCALES]
    shape, leaf = (*group[WEIGHT].shape[:-1], scales.shape[-1] * size), (scales.shape, scales.dtype)
    return grouped_like(shape, bits, size, scales.dtype, {"scale": leaf, "offset": leaf})


def _read_affine(group: Group, like: ArrayGrouped) -> dict[str, np.ndarray]:
    levels = {"scale": group[SCALES].view(), "offset": group[BIASES].view()}
    if like.high is None:  # the bytes are ours already
        return {**levels, "packed": bytes_of(group[WEIGHT], like.packed.shape[-1])}
    unpack = functools.partial(unpack_dense, bits=like.bits, count=like.shape[-1])
    return {**levels, **planes_of(like, group[WEIGHT].view(), unpack)}


# --- modes without biases, with scales of powers of two or E4M3 ---

MODES = {4 * 32: "mxfp4", 4 * 16: "nvfp4", 8 * 32: "mxfp8"}  # by bits times block size


def _is_mode(mode: str) -> Callable[[Group], bool]:
    def fits(group: Group) -> bool:
        weight, scales = group[WEIGHT], group[SCALES]
        kinds = weight.dtype == np.uint32 and scales.dtype == np.uint8
        if not kinds or len(weight.shape) < 2 or len(scales.shape) != len(weight.shape):
            return False
        return any(name == mode and scales.shape[-1] * n == weight.shape[-1] * 32 for n, name in MODES.items())

    return fits


def _fp4(mode: str, kind: np.dtype) -> Layout:
    def read(group: Group, like: ArrayGrouped) -> dict[str, np.ndarray]:
        return {"packed": bytes_of(group[WEIGHT], like.packed.shape[-1]), "scale": group[SCALES].view().view(kind)}

    size = next(product // 4 for product, name in MODES.items() if name == mode)
    like = lambda group: fp4_like(group, group[WEIGHT], group[SCALES], size, kind, BFLOAT16)  # noqa: E731
    return Layout("mlx", f"mlx {mode}", (SCALES, WEIGHT), _is_mode(mode), like, read)


def _mxfp8_like(group: Group) -> ArrayFloat8:
    weight, scales = group[WEIGHT], group[SCALES]
    codes = jax.ShapeDtypeStruct((*weight.shape[:-1], weight.shape[-1] * 4), E4M3)
    scale = jax.ShapeDtypeStruct(scales.shape, E8M0)
    return array_from_fields(ArrayFloat8, {"weight": codes, "scale": scale, "block_shape": (32,), "dtype": BFLOAT16})


def _read_mxfp8(group: Group, like: ArrayFloat8) -> dict[str, np.ndarray]:
    return {"weight": bytes_of(group[WEIGHT], like.shape[-1]).view(E4M3), "scale": powers(group[SCALES])}


register_layout(Layout("mlx", "mlx affine", (BIASES, SCALES, WEIGHT), _is_affine, _affine_like, _read_affine))
register_layout(_fp4("mxfp4", E8M0))
register_layout(_fp4("nvfp4", E4M3))
register_layout(Layout("mlx", "mlx mxfp8", (SCALES, WEIGHT), _is_mode("mxfp8"), _mxfp8_like, _read_mxfp8))
