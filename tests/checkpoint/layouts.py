"""Small checkpoints in the layouts of other projects, made and decoded here one element at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
E4M3, E8M0, BF16 = (np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e8m0fnu", "bfloat16"))
OUT, IN = 6, 64


class Case(NamedTuple):
    tensors: dict[str, np.ndarray]
    expected: np.ndarray  # float32
    kind: str
    format: str
    config: Mapping[str, Any] = MappingProxyType({})
    name: str = "m.weight"


def numbers(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_floats(shape: tuple[int, ...], dtype: Any = BF16) -> np.ndarray:
    return numbers(1).normal(size=shape).astype(dtype)


def some_exponents(shape: tuple[int, ...]) -> np.ndarray:
    return numbers(2).integers(100, 140, shape, np.uint8)


def powers(exponents: np.ndarray) -> np.ndarray:
    return np.array([2.0 ** (int(e) - 127) for e in exponents.flat], np.float32).reshape(exponents.shape)


def words_of(codes: np.ndarray, bits: int, whole: bool = False) -> np.ndarray:
    """Rows of codes as uint32 words: one bit string, or (`whole`) as many codes in a word as it holds whole."""
    each = 32 // bits
    rows = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        if whole:
            parts = [row[i : i + each] for i in range(0, len(row), each)]
            rows.append([sum(code << (j * bits) for j, code in enumerate(part)) for part in parts])
        else:
            string = sum(code << (i * bits) for i, code in enumerate(row))
            rows.append([string >> (32 * i) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return np.array(rows, np.uint32).reshape(*codes.shape[:-1], -1)


def spread(scale: np.ndarray, shape: tuple[int, ...], *blocks: int) -> np.ndarray:
    """The scale of each element, for blocks along the last axes."""
    out = np.empty(shape, np.float32)
    sizes = (1,) * (len(shape) - len(blocks)) + blocks
    for index in np.ndindex(*shape):
        out[index] = scale[tuple(i // size for i, size in zip(index, sizes, strict=True))]
    return out


# --- compressed-tensors ---


def pack_quantized(
    bits: int, *, whole: bool = False, zeros: bool = False, shape: tuple[int, ...] = (OUT, IN), block: int = 16
) -> Case:
    codes = numbers(bits).integers(0, 2**bits, shape, np.uint8)
    scale = some_floats((*shape[:-1], shape[-1] // block))
    zero = np.full(scale.shape, 2 ** (bits - 1), np.uint8)
    tensors = {
        "m.weight_packed": words_of(codes, bits, whole).view(np.int32),
        "m.weight_scale": scale,
        "m.weight_shape": np.array(shape),
    }
    if zeros:
        zero = numbers(3).integers(0, 2**bits, scale.shape, np.uint8)
        packed = np.swapaxes(words_of(np.swapaxes(zero, -1, -2), bits, whole), -1, -2)
        tensors["m.weight_zero_point"] = np.ascontiguousarray(packed).view(np.int32)
    steps = codes.astype(np.float32) - spread(zero, shape, block)
    config = {"config_groups": {"a": {"weights": {"num_bits": bits, "type": "int", "group_size": block}}}}
    expected = steps * spread(scale.astype(np.float32), shape, block)
    return Case(tensors, expected, "compressed-tensors", "pack-quantized", config)


def permuted(*, zeros: bool) -> Case:
    case, block = pack_quantized(4, zeros=zeros), 16
    groups = numbers(4).permutation(np.repeat(np.arange(IN // block, dtype=np.int32), block))
    scale = case.tensors["m.weight_scale"].astype(np.float32)
    plain = spread(scale, (OUT, IN), block)
    steps = case.expected / plain
    if zeros:
        unpacked = [
            [int(w) >> (4 * o) & 15 for w in case.tensors["m.weight_zero_point"].view(np.uint32)[0]] for o in range(OUT)
        ]
        zero = np.array(unpacked, np.float32)
        steps = np.round(steps) + spread(zero, (OUT, IN), block) - zero[:, groups]
    expected = np.round(steps) * scale[:, groups]
    tensors = {**case.tensors, "m.weight_g_idx": groups}
    return case._replace(tensors=tensors, expected=expected)


def in_order(groups: np.ndarray) -> Case:
    case = pack_quantized(4)
    return case._replace(tensors={**case.tensors, "m.weight_g_idx": groups.astype(np.int32)})


def int_quantized(scale_shape: tuple[int, ...], *, zeros: bool = False) -> Case:
    codes = numbers(5).integers(-128, 128, (OUT, IN), np.int8)
    scale = some_floats(scale_shape)
    tensors = {"m.weight": codes, "m.weight_scale": scale}
    zero = numbers(6).integers(-128, 128, scale_shape, np.int8) if zeros else np.zeros(scale_shape, np.int8)
    if zeros:
        tensors["m.weight_zero_point"] = zero
    block = IN // scale_shape[-1] if len(scale_shape) == 2 else IN
    rows = scale.reshape(-1, scale_shape[-1]) if len(scale_shape) == 2 else scale.reshape(1, 1)
    full = [np.broadcast_to(each, (OUT, rows.shape[1])) for each in (rows.astype(np.float32), zero.reshape(rows.shape))]
    steps = codes.astype(np.float32) - spread(full[1], (OUT, IN), block)
    return Case(tensors, steps * spread(full[0], (OUT, IN), block), "compressed-tensors", "int-quantized")


# --- FP4 ---


def fp4_codes(shape: tuple[int, ...] = (OUT, IN)) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of two codes, the first in the low half, and the values of all."""
    bytes = numbers(7).integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    values = np.array([E2M1[(int(b) >> (4 * half)) & 15] for b in bytes.flat for half in (0, 1)], np.float32)
    return bytes, values.reshape(shape)


def mxfp4(codes: str, scale: str, kind: str, format: str, dtype: Any = np.uint8) -> Case:
    bytes, values = fp4_codes()
    exponents = some_exponents((OUT, IN // 32))
    tensors = {codes: bytes.view(dtype), scale: exponents if dtype == np.uint8 else exponents.view(E8M0)}
    return Case(tensors, values * spread(powers(exponents), (OUT, IN), 32), kind, format)


def mxfp6() -> Case:
    """E2M3 of 6 bits: a sign, two bits of exponent, three of fraction."""
    codes = numbers(9).integers(0, 64, (OUT, IN), np.uint8)
    steps = [(c & 7) / 8 if c & 31 < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3 & 3) - 1) for c in range(64)]
    values = np.array([-step if code & 32 else step for code, step in enumerate(steps)], np.float32)[codes]
    exponents = some_exponents((OUT, IN // 32))
    tensors = {"m.weight_packed": words_of(codes, 6).view(np.uint8), "m.weight_scale": exponents}
    config = {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}
    expected = values * spread(powers(exponents), (OUT, IN), 32)
    return Case(tensors, expected, "compressed-tensors", "mxfp6-pack-quantized", config)


def nvfp4(codes: str, whole: str, kind: str, format: str) -> Case:
    bytes, values = fp4_codes()
    scale = np.abs(some_floats((OUT, IN // 16), E4M3))
    one = np.array([np.float32(0.7)]) if kind == "compressed-tensors" else np.float32(0.003)
    factor = scale.astype(np.float32) / one if kind == "compressed-tensors" else scale.astype(np.float32) * one
    tensors = {codes: bytes, "m.weight_scale": scale, whole: np.asarray(one)}
    return Case(tensors, values * spread(factor, (OUT, IN), 16), kind, format)


def gpt_oss(blocks: str, scales: str) -> Case:
    bytes, values = fp4_codes((3, OUT, IN))
    exponents = some_exponents((3, OUT, IN // 32))
    tensors = {f"x{blocks}": bytes.reshape(3, OUT, IN // 32, 16), f"x{scales}": exponents}
    return Case(tensors, values * spread(powers(exponents), values.shape, 32), "mxfp4", "mxfp4", name="x")


# --- FP8 ---


def fp8(
    shape: tuple[int, ...],
    scale: np.ndarray,
    blocks: tuple[int, ...] = (),
    *,
    ends: tuple[str, str] = ("", "_scale_inv"),
    kind: str = "fp8",
    format: str = "fp8",
    name: str = "m.weight",
    **config: Any,
) -> Case:
    codes = some_floats(shape, E4M3)
    factor = powers(scale.view(np.uint8)) if scale.dtype in (E8M0, np.uint8) else scale.astype(np.float32)
    full = factor.reshape(factor.shape + (1,) * (len(shape) - factor.ndim)) if factor.size > 1 else factor.reshape(1, 1)
    each = spread(full, shape, *blocks) if blocks else np.broadcast_to(full, shape)
    tensors = {name.removesuffix(ends[0]) + end: tensor for end, tensor in zip(ends, (codes, scale), strict=True)}
    return Case(tensors, codes.astype(np.float32) * each, kind, format, config, name)


# --- MLX ---


def mlx(bits: int, block: int, shape: tuple[int, ...] = (OUT, 128), dtype: Any = BF16, config: Any = None) -> Case:
    codes = numbers(bits).integers(0, 2**bits, shape, np.uint8)
    entries = (*shape[:-1], shape[-1] // block)
    scales, biases = some_floats(entries, dtype), numbers(8).normal(size=entries).astype(dtype)
    tensors = {"m.weight": words_of(codes, bits), "m.scales": scales, "m.biases": biases}
    wide = [spread(each.astype(np.float32), shape, block) for each in (scales, biases)]
    said = config or {"bits": bits, "group_size": block}
    return Case(tensors, codes.astype(np.float32) * wide[0] + wide[1], "mlx", "mlx affine", said)


def mlx_mode(mode: str) -> Case:
    if mode == "mxfp8":
        codes, exponents = some_floats((OUT, IN), E4M3), some_exponents((OUT, IN // 32))
        tensors = {"m.weight": codes.view(np.uint32), "m.scales": exponents}
        expected = codes.astype(np.float32) * spread(powers(exponents), (OUT, IN), 32)
        return Case(tensors, expected, "mlx", "mlx mxfp8")
    bytes, values = fp4_codes()
    if mode == "mxfp4":
        scales, block = some_exponents((OUT, IN // 32)), 32
        factor = powers(scales)
    else:
        scale, block = some_floats((OUT, IN // 16), E4M3), 16
        scales, factor = scale.view(np.uint8), scale.astype(np.float32)
    tensors = {"m.weight": bytes.view(np.uint32), "m.scales": scales}
    return Case(tensors, values * spread(factor, (OUT, IN), block), "mlx", f"mlx {mode}")


OFTEN = np.arange(IN) // 16
WIDE = (200, 272)  # more than a block of 128, and no multiple of it
OLD = (3, 5, 6, 7)  # bits that releases before 0.18 packed with unused bits between
IN_CT = {"ends": ("", "_scale"), "kind": "compressed-tensors"}
CASES: dict[str, Callable[[], Case]] = {
    **{f"pack {bits} bits": lambda bits=bits: pack_quantized(bits) for bits in range(1, 9)},
    **{f"pack {bits} bits, zeros": lambda bits=bits: pack_quantized(bits, zeros=True) for bits in (1, 3, 4, 7)},
    **{f"pack {bits} bits, old": lambda bits=bits: pack_quantized(bits, whole=True, zeros=True) for bits in OLD},
    "pack experts": lambda: pack_quantized(4, zeros=True, shape=(2, OUT, IN)),
    "pack ragged": lambda: pack_quantized(4, shape=(OUT, 45), block=15),
    "pack channel": lambda: pack_quantized(3, block=IN),
    "pack 8 bits, channel": lambda: pack_quantized(8, block=IN),
    "pack permuted": lambda: permuted(zeros=False),
    "pack permuted, zeros": lambda: permuted(zeros=True),
    "pack in order": lambda: in_order(OFTEN),
    "pack no order": lambda: in_order(np.full(IN, -1)),
    "int8 channel": lambda: int_quantized((OUT, 1)),
    "int8 tensor": lambda: int_quantized((1,)),
    "int8 groups": lambda: int_quantized((OUT, 4)),
    "int8 zeros": lambda: int_quantized((OUT, 1), zeros=True),
    "mxfp4 ct": lambda: mxfp4("m.weight_packed", "m.weight_scale", "compressed-tensors", "mxfp4-pack-quantized"),
    "mxfp4 deepseek": lambda: mxfp4("m.weight", "m.weight_scale_inv", "fp8", "mxfp4", np.int8),
    "mxfp4 deepseek native": lambda: mxfp4("m.weight", "m.scale", "fp8", "mxfp4", np.int8),
    "mxfp6 ct": lambda: mxfp6(),
    "nvfp4 ct": lambda: nvfp4(
        "m.weight_packed", "m.weight_global_scale", "compressed-tensors", "nvfp4-pack-quantized"
    ),
    "nvfp4 modelopt": lambda: nvfp4("m.weight", "m.weight_scale_2", "modelopt", "nvfp4"),
    "gpt-oss": lambda: gpt_oss("_blocks", "_scales"),
    "gpt-oss original": lambda: gpt_oss(".blocks", ".scales"),
    "fp8 blocks": lambda: fp8(WIDE, some_floats((2, 3), np.float32), (128, 128)),
    "fp8 blocks, config": lambda: fp8(WIDE, some_floats((2, 3)), (100, 96), weight_block_size=[100, 96]),
    "fp8 blocks, E8M0": lambda: fp8(WIDE, some_exponents((2, 3)).view(E8M0), (128, 128)),
    "fp8 blocks, bytes": lambda: fp8(WIDE, some_exponents((2, 3)), (128, 128), ends=(".weight", ".scale")),
    "fp8 tensor": lambda: fp8((OUT, IN), some_floats((), np.float32)),
    "fp8 experts": lambda: fp8((2, 200, IN), some_floats((2, 2, 1), np.float32), (128, 128), name="x.gate_up_proj"),
    "fp8 ct channel": lambda: fp8(
        (OUT, IN),
        some_floats((OUT, 1)),
        **IN_CT,
        format="float-quantized",
        config_groups={"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    ),
    "mxfp8 ct": lambda: fp8((OUT, IN), some_exponents((OUT, 2)), (32,), **IN_CT, format="mxfp8-quantized"),
    **{f"mlx {bits} bits": lambda bits=bits: mlx(bits, 64) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx experts": lambda: mlx(4, 32, (2, OUT, 64), np.float16),
    "mlx override": lambda: mlx(6, 64, config={"m": {"bits": 6, "group_size": 64}, "bits": 4, "group_size": 32}),
    "mlx only one": lambda: mlx(5, 64, config={"group_size": 64}),
    **{f"mlx {mode}": lambda mode=mode: mlx_mode(mode) for mode in ("mxfp4", "nvfp4", "mxfp8")},
}  # fmt: skip
