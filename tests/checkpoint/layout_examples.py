"""A small valid example of every layout of another project, for tests that run on all of them.

`test_fuzz.py` and `test_lies.py` mutate these; `test_layout_examples.py` fails if a layout has none.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .files import safetensors_file, write_anew

Tensors = Mapping[str, np.ndarray]
E4M3 = ml_dtypes.float8_e4m3fn
BFLOAT16 = ml_dtypes.bfloat16


class Example(NamedTuple):
    """Tensors by their names, without a common prefix, and the `quantization_config` beside them."""

    tensors: Tensors
    config: Mapping[str, Any] = {}
    metadata: Mapping[str, str] = {}  # of the file, by the name of the array without the prefix
    refused: bool = False  # a layout that is only told from others to say that it is not read

    def said(self, prefix: str) -> dict[str, str]:
        return {prefix + name: text for name, text in self.metadata.items()}


def example_of(rng: np.random.Generator, shapes: Mapping[str, tuple[Any, tuple[int, ...]]], **config: Any) -> Example:
    """Random bytes of these dtypes and shapes; floating point of two or more bytes is near one."""

    def tensor(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        kind = np.dtype(dtype)
        if kind.kind == "f" or kind == BFLOAT16:
            return rng.uniform(0.5, 2, shape).astype(kind)
        size = int(np.prod(shape)) * kind.itemsize
        return rng.integers(1, 0x7E, size, np.uint8).view(kind).reshape(shape)  # no E4M3 of these is NaN

    return Example({name: tensor(*each) for name, each in shapes.items()}, config)


@functools.cache
def examples() -> dict[str, Example]:
    rng = np.random.default_rng(0)
    make = functools.partial(example_of, rng)
    i32, u8, i8, f16, f32, u32 = np.int32, np.uint8, np.int8, np.float16, np.float32, np.uint32
    words = {"qweight": (i32, (8, 32)), "qzeros": (i32, (2, 4)), "scales": (f16, (2, 32))}
    three = {"qweight": (i32, (6, 32)), "qzeros": (i32, (2, 3)), "scales": (BFLOAT16, (2, 32))}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}
    ours = {"quant_method": "compressed-tensors", **groups}
    floats = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
    }
    bytes = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
    packed = {"weight_packed": (i32, (8, 8)), "weight_scale": (BFLOAT16, (8, 2))}
    shape = {"weight_shape": np.array([8, 64])}
    order = rng.permutation(64).astype(i32)
    found = {
        "gptq": make(words, **gptq),
        "gptq, desc_act": make(words, **gptq, desc_act=True),
        "gptq, 3 bits": make(three, **{**gptq, "bits": 3, "checkpoint_format": "gptq_p"}),
        "awq": make(
            {"qweight": (i32, (64, 4)), "qzeros": (i32, (2, 4)), "scales": (f16, (2, 32))}, quant_method="awq", bits=4
        ),
        "awq, gemv": make(
            {"qweight": (i32, (24, 8)), "qzeros": (i32, (24, 4)), "scales": (f16, (24, 32))},
            quant_method="awq",
            version="gemv",
            group_size=32,
        ),
        "bitnet": make({"weight": (u8, (2, 10)), "weight_scale": (BFLOAT16, (1,))}, quant_method="bitnet"),
        "pack-quantized": make({**packed, "weight_zero_point": (i32, (1, 2))}, **ours),
        "pack-quantized, permuted": make(packed, **ours),
        "int-quantized": make({"weight": (i8, (4, 6)), "weight_scale": (f32, (4, 1))}, **bytes),
        "int-quantized, asymmetric": make(
            {"weight": (i8, (4, 6)), "weight_scale": (f32, (4, 1)), "weight_zero_point": (i8, (4, 1))}, **bytes
        ),
        "marlin-24": make({"scale_packed": (f16, (2, 2)), "weight_packed": (i32, (2, 2)), "meta": (np.int16, (2, 2))}),
        "sparse": make({"bitmask": (u8, (2, 1)), "compressed": (f16, (3,))}),
        "nvfp4-pack-quantized": make(
            {"weight_packed": (u8, (4, 16)), "weight_scale": (E4M3, (4, 2)), "weight_global_scale": (f32, (1,))}
        ),
        "nvfp4 of ModelOpt": make(
            {"weight": (u8, (4, 16)), "weight_scale": (E4M3, (4, 2)), "weight_scale_2": (f32, ())}
        ),
        "mxfp6-pack-quantized": make({"weight_packed": (u8, (4, 24)), "weight_scale": (u8, (4, 1))}),
        "mxfp4-pack-quantized": make({"weight_packed": (u8, (4, 16)), "weight_scale": (u8, (4, 1))}),
        "mxfp4 of DeepSeek": make({"weight": (i8, (4, 16)), "weight_scale_inv": (u8, (4, 1))}),
        "mxfp4 of DeepSeek, its names": make({"weight": (i8, (4, 16)), "scale": (u8, (4, 1))}),
        "mxfp4 of gpt-oss": make({"up_blocks": (u8, (2, 3, 1, 16)), "up_scales": (u8, (2, 3, 1))}),
        "mxfp4 of gpt-oss, its names": make({"up.blocks": (u8, (2, 3, 1, 16)), "up.scales": (u8, (2, 3, 1))}),
        "mlx affine": make(
            {"weight": (u32, (4, 8)), "scales": (f16, (4, 2)), "biases": (f16, (4, 2))}, bits=4, group_size=32
        ),
        "mlx mxfp4": make({"weight": (u32, (4, 8)), "scales": (u8, (4, 2))}, bits=4, group_size=32, mode="mxfp4"),
        "mlx nvfp4": make({"weight": (u32, (4, 8)), "scales": (u8, (4, 4))}, bits=4, group_size=16, mode="nvfp4"),
        "mlx mxfp8": make({"weight": (u32, (4, 16)), "scales": (u8, (4, 2))}, bits=8, group_size=32, mode="mxfp8"),
        "fp8": make({"weight": (E4M3, (4, 8)), "weight_scale_inv": (f32, (2, 2))}, weight_block_size=[2, 4]),
        "fp8, its names": make({"weight": (E4M3, (4, 8)), "scale": (u8, (2, 2))}, weight_block_size=[2, 4]),
        "float-quantized": make({"weight": (E4M3, (4, 8)), "weight_scale": (BFLOAT16, (4, 1))}, **floats),
        "mxfp8-quantized": make({"weight": (E4M3, (4, 64)), "weight_scale": (u8, (4, 2))}, **floats),
    }
    said = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"block_size": [1, 32], "target_dtype": {"_data": "int8"}}}
    found |= {
        "torchao": make(
            {"_weight_qdata": (i8, (4, 64)), "_weight_scale": (f32, (4, 2)), "_weight_zero_point": (i8, (4, 2))}
        )._replace(metadata={"weight": json.dumps(said)}),
        "hqq": make({"W_q": (u8, (4, 32)), "scale": (f16, (8, 1)), "zero": (f16, (8, 1))}, quant_method="hqq"),
        "quanto": make({"weight._data": (i8, (4, 8)), "weight._scale": (f32, (4, 1))}, quant_method="quanto"),
        "quanto, in groups": make({"weight._data._data": (u8, (4, 8)), "weight._scale": (f32, (8, 1))}),
    }
    more: dict[str, Tensors] = {
        "gptq": {"g_idx": (np.arange(64) // 32).astype(i32)},
        "gptq, desc_act": {"g_idx": order // 32},
        "bitnet": {"weight": np.full((2, 10), 0b10010010, u8)},
        "hqq": {
            **{name: np.array(number, i32) for name, number in {"nbits": 4, "group_size": 32, "axis": 1}.items()},
            "shape": np.array([4, 64]),
        },
        "pack-quantized": shape,
        "pack-quantized, permuted": {**shape, "weight_g_idx": order // 32},
    }
    found = {name: each._replace(tensors={**each.tensors, **more.get(name, {})}) for name, each in found.items()}
    return found | {name: found[name]._replace(refused=True) for name in ("marlin-24", "sparse", "quanto, in groups")}


def write_folder(
    folder: Path, tensors: Tensors, config: Mapping[str, Any] | None, metadata: Mapping[str, str] | None = None
) -> Path:
    """A folder with these tensors and this `quantization_config`."""
    folder.mkdir(exist_ok=True)
    write_anew(folder / "model.safetensors", safetensors_file(tensors, metadata))
    (folder / "config.json").unlink(missing_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder
