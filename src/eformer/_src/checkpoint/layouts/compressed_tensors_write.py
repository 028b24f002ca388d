"""Quantized arrays in the layout of compressed-tensors: integers packed into words, FP8, and MXFP4.

Codes and scales stay as they are. Scales are written in a dtype that also holds the array's own, because the package
decompresses to the dtype of the scales.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from eformer._src.checkpoint.arrays import ArrayToWrite, CheckpointToWrite, TensorSpec, TensorsToWrite, tensors_to_write
from eformer._src.checkpoint.header import Json
from eformer._src.checkpoint.prequantized.bit_fields import dense_of_planes, dense_words, pack_dense
from eformer._src.checkpoint.prequantized.layout import E8M0, FLOATS
from eformer._src.checkpoint.prequantized.quantization_config import CONFIG
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B

Scheme = dict[str, Json]  # the format of a group of modules, and what it says of their weights
E4M3, BFLOAT16 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.bfloat16)
INT32, FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def compressed_tensors_records(items: Iterable[ArrayToWrite]) -> CheckpointToWrite:
    """The tensors of arrays in the layout of compressed-tensors, and the part of config.json that describes them.

    Dense arrays stay as they are. The configuration names each quantized module.
    """
    records: list[TensorsToWrite] = []
    groups: dict[str, tuple[Scheme, list[str]]] = {}
    for item in items:
        if not isinstance(item.like, QuantizedArray):
            records.append(tensors_to_write(item))
            continue
        record, scheme = _record(item, item.like)
        records.append(record)
        groups.setdefault(json.dumps(scheme), (scheme, []))[1].append(module_of(item, "compressed-tensors"))
    forms = {str(scheme["format"]) for scheme, _ in groups.values()}
    config: dict[str, Json] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{i}": {"targets": [*modules], **scheme} for i, (scheme, modules) in enumerate(groups.values())
        },
        "ignore": [],
    }
    return CheckpointToWrite(records, {CONFIG: {"quantization_config": config}} if groups else {}, {"format": "pt"})


def module_of(item: ArrayToWrite, kind: str) -> str:
    """The name of the module that an array is the weight of."""
    module, _, last = f".{item.name}".rpartition(".")
    if last != "weight" or not module:
        raise cannot(item, kind, 'it finds the tensors of a module by names that end in ".weight"')
    return module[1:]


def cannot(item: ArrayToWrite, kind: str, why: str) -> ValueError:
    return ValueError(f"{item.name!r}, {item.like}, can't be written for {kind}: {why}")


def _cannot(item: ArrayToWrite, why: str) -> ValueError:
    return cannot(item, "compressed-tensors", why)


def _record(item: ArrayToWrite, like: QuantizedArray) -> tuple[TensorsToWrite, Scheme]:
    if like.ndim < 2:
        raise _cannot(item, "weights have two axes, (out, in), or are stacks of such")
    if isinstance(like, Array8B):
        return _int8(item, like)
    if isinstance(like, ArrayFloat8):
        return _float8(item, like)
    if not isinstance(like, ArrayGrouped):
        raise _cannot(item, "it has no such format: quantize it to int4, int8 or fp8, or `dequantize()` it first")
    if like.axis != -1:
        raise _cannot(item, f"blocks must run along the last axis, not axis {like.axis}; transpose it (`q.mT`)")
    return _integers(item, like) if like.codebook == "integer" else _float4(item, like)


def _scheme(form: str, bits: int, type: str, **more: Json) -> Scheme:
    weights: dict[str, Json] = {"num_bits": bits, "type": type, "symmetric": True, "dynamic": False, **more}
    return {"weights": weights, "input_activations": None, "output_activations": None, "format": form}


def _written_dtype(item: ArrayToWrite, like: Array8B | ArrayFloat8 | ArrayGrouped) -> np.dtype:
    """The dtype of scales in the file: one that holds them, and the array's values as exactly as its own dtype."""
    own = BFLOAT16 if like.scale.dtype == E8M0 else np.dtype(like.scale.dtype)  # which holds powers of two
    kinds = {own, np.dtype(like.dtype)}
    if not kinds <= set(FLOATS):
        given = f"{like.dtype} with scales of {like.scale.dtype}"
        raise _cannot(item, f"it holds float32, bfloat16 and float16, not {given}")
    return own if len(kinds) == 1 else FLOAT32


def _full(leaf: object, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    return np.broadcast_to(np.asarray(leaf), shape).astype(dtype)


# --- integers ---


def _words(item: ArrayToWrite, like: QuantizedArray, bits: int) -> list[TensorSpec]:
    *rows, count = like.shape
    prefix = item.name.removesuffix("weight")
    words = TensorSpec(f"{prefix}weight_packed", INT32, (*rows, dense_words(count, bits)))
    return [words, TensorSpec(f"{prefix}weight_shape", np.dtype(np.int64), (like.ndim,))]


def planes_in(q: ArrayGrouped) -> list[np.ndarray]:
    return [np.asarray(plane) for plane in (q.packed, q.high) if plane is not None]


def _int8(item: ArrayToWrite, like: Array8B) -> tuple[TensorsToWrite, Scheme]:
    if like.scale.shape[-1] != 1:
        raise _cannot(item, "it has a scale for each row: quantize with `axis=-1`, or transpose it (`q.mT`)")
    dtype, scale = _written_dtype(item, like), (*like.shape[:-1], 1)
    parts = [*_words(item, like, 8), TensorSpec(f"{item.name}_scale", dtype, scale)]

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, Array8B)
        codes = np.asarray(q.weight).view(np.uint8) ^ np.uint8(128)
        return [
            dense_of_planes([codes], 8, codes.shape[-1]).view(np.int32),
            np.array(like.shape),
            _full(q.scale, scale, dtype),
        ]

    return TensorsToWrite(item.name, parts, values, item.done), _scheme("pack-quantized", 8, "int", strategy="channel")


def _strategy(item: ArrayToWrite, like: ArrayGrouped) -> tuple[int, dict[str, Json]]:
    """How many scales a row has, and the strategy of that name."""
    if like.scale.shape[-1] == 1:
        return 1, {"strategy": "channel"}
    if like.shape[-1] % like.block_size:
        raise _cannot(
            item, f"blocks of {like.block_size} do not divide rows of {like.shape[-1]}: choose a `block_size`"
        )
    return like.scale.shape[-1], {"strategy": "group", "group_size": like.block_size}


def _integers(item: ArrayToWrite, like: ArrayGrouped) -> tuple[TensorsToWrite, Scheme]:
    if like.offset is not None:
        raise _cannot(item, "it has integer zero points, and no offsets: quantize with `symmetric=True`")
    if like.scale_scale is not None:
        raise _cannot(item, "its scales have scales of their own: quantize with `double_quantization=False`")
    blocks, strategy = _strategy(item, like)
    bits, dtype, (*stack, out, count) = like.bits, _written_dtype(item, like), like.shape
    parts = [*_words(item, like, bits), TensorSpec(f"{item.name}_scale", dtype, (*stack, out, blocks))]
    if like.zero is not None:
        parts.append(TensorSpec(f"{item.name}_zero_point", INT32, (*stack, dense_words(out, bits), blocks)))

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayGrouped)
        packed = dense_of_planes(planes_in(q), bits, count).view(np.int32)
        made = [packed, np.array(like.shape), _full(q.scale, (*stack, out, blocks), dtype)]
        if q.zero is not None:
            zero = _full(q.zero, (*stack, out, blocks), np.dtype(np.uint8))
            if np.any(zero >= 2**bits):
                raise _cannot(item, f"a zero point of {zero.max()} does not fit into {bits} bits")
            made.append(pack_dense(zero, bits, -2).view(np.int32))
        return made

    scheme = _scheme("pack-quantized", bits, "int", symmetric=like.zero is None, **strategy)
    return TensorsToWrite(item.name, parts, values, item.done), scheme


# --- floating point ---


def _float4(item: ArrayToWrite, like: ArrayGrouped) -> tuple[TensorsToWrite, Scheme]:
    if (like.codebook, like.block_size, like.scale.dtype) != ("e2m1", 32, E8M0) or like.offset is not None:
        raise _cannot(item, "of codes that are no integers it holds MXFP4: E2M1 in blocks of 32 with powers of two")
    if like.shape[-1] % 32:
        raise _cannot(item, f"blocks of 32 do not divide rows of {like.shape[-1]}")
    shape, u8 = (*like.shape[:-1], like.shape[-1] // 32), np.dtype(np.uint8)
    parts = [
        TensorSpec(f"{item.name}_packed", u8, tuple(like.packed.shape)),
        TensorSpec(f"{item.name}_scale", u8, shape),
    ]

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayGrouped)
        return [np.asarray(q.packed), np.broadcast_to(np.asarray(q.scale), shape).view(np.uint8)]

    scheme = _scheme("mxfp4-pack-quantized", 4, "float", strategy="group", group_size=32, scale_dtype="torch.uint8")
    return TensorsToWrite(item.name, parts, values, item.done), scheme


def _float8(item: ArrayToWrite, like: ArrayFloat8) -> tuple[TensorsToWrite, Scheme]:
    if like.weight.dtype != E4M3:
        raise _cannot(item, f"its FP8 is float8_e4m3fn, not {like.weight.dtype}")
    shape, strategy = _float8_strategy(item, like)
    dtype = _written_dtype(item, like)
    parts = [TensorSpec(item.name, E4M3, tuple(like.shape)), TensorSpec(f"{item.name}_scale", dtype, shape)]

    def values() -> list[np.ndarray]:
        q = item.make()
        assert isinstance(q, ArrayFloat8)
        scale = np.asarray(q.scale)
        return [np.asarray(q.weight), scale.astype(dtype).reshape(1) if shape == (1,) else _full(scale, shape, dtype)]

    return TensorsToWrite(item.name, parts, values, item.done), _scheme("float-quantized", 8, "float", **strategy)


def _float8_strategy(item: ArrayToWrite, like: ArrayFloat8) -> tuple[tuple[int, ...], dict[str, Json]]:
    """The shape of scales in the file, and the strategy of that name."""
    (out, count), blocks = like.shape[-2:], like.block_shape
    if like.ndim != 2:
        raise _cannot(item, "its FP8 weights have two axes, (out, in)")
    if like.scale.size == 1:
        return (1,), {"strategy": "tensor"}
    if len(blocks) == 2 and min(blocks) > 1:
        return (-(-out // blocks[0]), -(-count // blocks[1])), {"strategy": "block", "block_structure": [*blocks]}
    if like.scale.shape[1] == 1:
        return (out, 1), {"strategy": "channel"}
    if len(blocks) == 1 and blocks[0] > 1 and count % blocks[0] == 0:
        return (out, count // blocks[0]), {"strategy": "group", "group_size": blocks[0]}
    raise _cannot(
        item, "it has a scale for each row, each block of a row or each square block: quantize with `axis=-1`"
    )
