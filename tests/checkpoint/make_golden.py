"""Writes the golden files beside it with the real packages; needs torch, bitsandbytes, safetensors and gguf.

python tests/checkpoint/make_golden.py

`bitsandbytes.safetensors` has weights as bitsandbytes stores them, and under "expected." how it decodes them.
`blocks.gguf` has random blocks of the types that stay quantized and of one other, and under "expected." the values.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from bitsandbytes import functional
from safetensors.torch import save_file

HERE = Path(__file__).parent
SHAPES = {"rows": (4, 64), "across": (3, 96), "odd": (3, 5), "one": (77,), "stack": (2, 2, 64)}
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TYPES += ("IQ4_NL", "IQ4_XS", "MXFP4", "TQ1_0", "TQ2_0", "IQ2_XXS")
# Where the float16 numbers of a block are, if not at byte 0.
SCALES = {"MXFP4": (), "TQ1_0": (52,), "TQ2_0": (64,), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
SCALES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))


def bitsandbytes_file() -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for kind, dtype, nested, names in (
        ("nf4", torch.float32, False, SHAPES),
        ("nf4", torch.bfloat16, True, ("rows", "across", "stack")),
        ("nf4", torch.float16, False, ("odd",)),
        ("fp4", torch.float32, False, ("rows", "odd")),
    ):
        for name in names:
            shape = SHAPES[name]
            key = f"{kind}-{str(dtype).removeprefix('torch.')}{'-nested' if nested else ''}-{name}.weight"
            weight = torch.randn(*shape).to(dtype)
            q, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
            tensors[key] = q
            tensors |= {f"{key}.{part}": value for part, value in state.as_dict(packed=True).items()}
            tensors[f"expected.{key}"] = functional.dequantize_4bit(q, state)
    weight = torch.randn(6, 10).to(torch.float16)
    q, scale, _ = functional.int8_vectorwise_quant(weight)
    tensors |= {"int8.weight": q, "int8.SCB": scale, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    tensors["expected.int8.weight"] = functional.int8_vectorwise_dequant(q, scale)
    save_file(tensors, HERE / "bitsandbytes.safetensors")
    (HERE / "bitsandbytes.safetensors").chmod(0o644)


def gguf_file() -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(HERE / "blocks.gguf", "golden")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["a", "bc", ""])
    writer.add_float32("fraction", 0.25)
    writer.add_bool("truth", True)
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (2, 1, size), np.uint8)
        for at in SCALES.get(name, (0,)):  # any other two bytes may be a NaN or an infinity
            blocks[..., at : at + 2] = random.standard_normal((2, 1, 1)).astype(np.float16).view(np.uint8)
        if name == "MXFP4":
            blocks[..., 0] = random.integers(100, 140, (2, 1))
        data = blocks.reshape(2, size)
        writer.add_tensor(name, data, raw_dtype=kind)
        writer.add_tensor(f"expected.{name}", gguf.quants.dequantize(data, kind).astype(np.float32))
        assert gguf.quants.dequantize(data, kind).shape == (2, elements)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    bitsandbytes_file()
    gguf_file()
