"""MLX: codes in rows of 32-bit words without unused bits, and per block a scale and a bias, or only a small scale.

A value is `scale * code + bias`. Of bits and block size, shapes tell only the product; the configuration beside the
weights says the rest, for all modules or by a module's name. Written, an array without offsets gets biases that give
the same values; scales are repeated where its blocks are longer than MLX's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from eformer._src.checkpoint.arrays import ArrayToWrite, CheckpointToWrite, TensorSpec, TensorsToWrite, tensors_to_write
from eformer._src.checkpoint.header import Json
from eformer._src.checkpoint.layouts.compressed_tensors_write import cannot, module_of, planes_in
from eformer._src.checkpoint.layouts.microscaling import BFLOAT16, E4M3, fp4_like, powers
from eformer._src.checkpoint.prequantized.bit_fields import dense_of_planes, dense_words, unpack_dense
from eformer._src.checkpoint.prequantized.layout import (
    E8M0,
    FLOATS,
    Group,
    Layout,
    bytes_of,
    check_said,
    grouped_like,
    planes_of,
    register_layout,
)
from eformer._src.checkpoint.prequantized.quantization_config import CONFIG
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields

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


def _agrees_with(mode: str) -> Callable[[Group, QuantizedArray], None]:
    """Check what the configuration says of the module, or of all."""

    def check(group: Group, like: QuantizedArray) -> None:
        del like
        module = group.config().get(group.name.removesuffix(".weight"))
        said = module if isinstance(module, dict) else group.config()
        facts: dict[str, Callable[[Any], bool]] = {"mode": lambda said: said == mode}
        if mode != "affine":  # there, bits and sizes are needed before
            product, bits = next(
                (product, 8 if mode == "mxfp8" else 4) for product, name in MODES.items() if name == mode
            )
            facts |= {"bits": lambda said: said == bits, "group_size": lambda said: said == product // bits}
        check_said(group, f"mlx {mode}", [said], facts)

    return check


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
    return Layout("mlx", f"mlx {mode}", (SCALES, WEIGHT), _is_mode(mode), like, read, agrees=_agrees_with(mode))


def _mxfp8_like(group: Group) -> ArrayFloat8:
    weight, scales = group[WEIGHT], group[SCALES]
    codes = jax.ShapeDtypeStruct((*weight.shape[:-1], weight.shape[-1] * 4), E4M3)
    scale = jax.ShapeDtypeStruct(scales.shape, E8M0)
    return array_from_fields(ArrayFloat8, {"weight": codes, "scale": scale, "block_shape": (32,), "dtype": BFLOAT16})


def _read_mxfp8(group: Group, like: ArrayFloat8) -> dict[str, np.ndarray]:
    return {"weight": bytes_of(group[WEIGHT], like.shape[-1]).view(E4M3), "scale": powers(group[SCALES])}


register_layout(
    Layout(
        "mlx",
        "mlx affine",
        (BIASES, SCALES, WEIGHT),
        _is_affine,
        _affine_like,
        _read_affine,
        agrees=_agrees_with("affine"),
    )
)
register_layout(_fp4("mxfp4", E8M0))
register_layout(_fp4("nvfp4", E4M3))
register_layout(
    Layout(
        "mlx",
        "mlx mxfp8",
        (SCALES, WEIGHT),
        _is_mode("mxfp8"),
        _mxfp8_like,
        _read_mxfp8,
        agrees=_agrees_with("mxfp8"),
    )
)


Mode = tuple[int, int, str]  # block size, bits, and the name of the mode
UINT32, FLOAT32 = np.dtype(np.uint32), np.dtype(np.float32)


def mlx_records(items: Iterable[ArrayToWrite]) -> CheckpointToWrite:
    """The tensors of arrays in the layout of MLX, and the part of config.json that describes them.

    Dense arrays stay as they are. Modules that differ from the most common mode are named.
    """
    records: list[TensorsToWrite] = []
    modes: dict[str, Mode] = {}
    for item in items:
        if isinstance(item.like, QuantizedArray):
            record, modes[module_of(item, "MLX")] = _record(item, item.like)
            records.append(record)
        else:
            records.append(tensors_to_write(item))
    if not modes:
        return CheckpointToWrite(records, {}, {"format": "mlx"})
    usual = Counter(modes.values()).most_common(1)[0][0]
    others: dict[str, Json] = {module: _mode_settings(mode) for module, mode in modes.items() if mode != usual}
    return CheckpointToWrite(
        records, {CONFIG: {"quantization": {**_mode_settings(usual), **others}}}, {"format": "mlx"}
    )


def _mode_settings(mode: Mode) -> dict[str, Json]:
    size, bits, name = mode
    return {"group_size": size, "bits": bits, "mode": name}


def _cannot(item: ArrayToWrite, why: str) -> ValueError:
    return cannot(item, "MLX", why)


def _record(item: ArrayToWrite, like: QuantizedArray) -> tuple[TensorsToWrite, Mode]:
    if not isinstance(like, ArrayGrouped) or like.ndim < 2 or (like.codebook != "integer" and like.scale.dtype != E8M0):
        raise _cannot(item, "it has no such format: quantize it to int4 or its kin, or `dequantize()` it first")
    if like.axis != -1:
        raise _cannot(item, f"blocks must run along the last axis, not axis {like.axis}; transpose it (`q.mT`)")
    if like.scale_scale is not None or like.offset_scale is not None:
        raise _cannot(item, "its scales have scales of their own: quantize with `double_quantization=False`")
    return _affine(item, like) if like.codebook == "integer" else _mxfp4(item, like)


def _affine(item: ArrayToWrite, like: ArrayGrouped) -> tuple[TensorsToWrite, Mode]:
    size, dtype = _block_size(item, like), _written_dtype(item, like)
    bits, (*rows, count), prefix = like.bits, like.shape, item.name.removesuffix("weight")
    entries = (*rows, count // size)
    parts = [
        TensorSpec(item.name, UINT32, (*rows, dense_words(count, bits))),
        TensorSpec(f"{prefix}scales", dtype, entries),
        TensorSpec(f"{prefix}biases", dtype, entries),
    ]

    def spread(leaf: object) -> np.ndarray:
        """An entry for each block of `size`."""
        given = np.asarray(leaf)
        if given.shape[-1] > 1:
            given = np.repeat(given, like.block_size // size, -1)
        return np.broadcast_to(given, entries)

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayGrouped)
        scale = spread(q.scale).astype(dtype)
        if q.offset is not None:
            biases = spread(q.offset).astype(dtype)
        else:
            zero = 2 ** (bits - 1) if q.zero is None else spread(q.zero).astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                biases = (-scale.astype(np.float32) * zero).astype(dtype)
            if not np.array_equal(np.isfinite(biases), np.isfinite(scale)):
                raise _cannot(
                    item, f"{dtype} can't hold the biases that its scales make; `astype(jnp.float32)` it first"
                )
        return [dense_of_planes(planes_in(q), bits, count), scale, biases]

    return TensorsToWrite(item.name, parts, values, item.done), (size, bits, "affine")


def _block_size(item: ArrayToWrite, like: ArrayGrouped) -> int:
    """The largest block size of MLX that divides rows and the array's own blocks."""
    count, block = like.shape[-1], like.shape[-1] if like.scale.shape[-1] == 1 else like.block_size
    found = [size for size in SIZES if count % size == 0 and block % size == 0]
    if not found or not count:
        sizes = ", ".join(map(str, SIZES))
        raise _cannot(item, f"blocks of {block} in rows of {count} must be divided by one of {sizes}")
    return max(found)


def _written_dtype(item: ArrayToWrite, like: ArrayGrouped) -> np.dtype:
    """The dtype of scales and biases: one that holds both, and the array's values as exactly as its own dtype."""
    leaves = [leaf for leaf in (like.scale, like.offset) if leaf is not None]
    kinds = {np.dtype(each.dtype) for each in (like, *leaves)}
    if not kinds <= set(FLOATS):
        raise _cannot(item, f"it holds float32, bfloat16 and float16, not {' and '.join(sorted(map(str, kinds)))}")
    if like.offset is None and like.scale.dtype == FLOAT32:
        what = "with biases, float32 scales would give values that are rounded otherwise"
        raise _cannot(item, f"{what}: quantize with `symmetric=False`")
    # Zero points times scales of 16 bits need more than 16 bits.
    return kinds.pop() if len(kinds) == 1 and like.zero is None else FLOAT32


def _mxfp4(item: ArrayToWrite, like: ArrayGrouped) -> tuple[TensorsToWrite, Mode]:
    if like.codebook != "e2m1" or like.block_size != 32 or like.shape[-1] % 32 or like.offset is not None:
        raise _cannot(item, "of powers of two as scales it holds MXFP4: E2M1 in whole blocks of 32")
    (*rows, count), u8 = like.shape, np.dtype(np.uint8)
    parts = [
        TensorSpec(item.name, UINT32, (*rows, count // 8)),
        TensorSpec(f"{item.name.removesuffix('weight')}scales", u8, (*rows, count // 32)),
    ]

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayGrouped)
        scale = np.broadcast_to(np.asarray(q.scale), parts[1].shape)
        return [np.ascontiguousarray(q.packed).view(np.uint32), scale.view(np.uint8)]

    return TensorsToWrite(item.name, parts, values, item.done), (32, 4, "mxfp4")
