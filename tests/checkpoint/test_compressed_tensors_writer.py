"""What the package compressed-tensors writes, read here, and the other way round; all values bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eformer.checkpoint import load, open_checkpoint, save
from eformer.ops.quantization import Array8B, ArrayFloat8, ArrayGrouped, quantize

from .files import bits, safetensors_file

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

OUT, IN = 24, 256


def to_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor of any dtype, bit for bit."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(dtype).reshape(tuple(tensor.shape))


def blocks_of(weight: Any, args: Any) -> Any:
    """The weight with the elements that share a scale along its last axis."""
    match args.strategy:
        case "tensor":
            return weight.reshape(1, -1)
        case "channel":
            return weight.reshape(*weight.shape[:-1], 1, -1)
        case "group" | "tensor_group":
            return weight.unflatten(-1, (-1, args.group_size))
        case "block":
            rows, cols = args.block_structure
            pad = (0, -weight.shape[1] % cols, 0, -weight.shape[0] % rows)
            padded = torch.nn.functional.pad(weight, pad)
            return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).transpose(1, 2).flatten(2)
    raise ValueError(args.strategy)


def compressed(form: str, dtype: Any, shape: tuple[int, ...], **args: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors that the package writes for a random weight, and the weight that it decompresses from them."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    assert scheme.weights is not None
    blocks = blocks_of(weight, scheme.weights)
    whole = generate_gparam(weight.min(), weight.max()) if form.startswith("nvfp4") else None
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    state |= {} if whole is None else {"weight_global_scale": whole.reshape(1)}
    compressor = BaseCompressor.get_value_from_registry(form)
    written = compressor.compress(state, scheme)
    tensors = {f"m.{name}": to_numpy(tensor) for name, tensor in written.items()}
    return tensors, to_numpy(compressor.decompress(written, scheme)["weight"])


STRATEGIES = {"group": {"strategy": "group", "group_size": 32}, "channel": {"strategy": "channel"}, "tensor": {}}


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_bits", range(1, 9))
def test_pack_quantized(num_bits: int, strategy: str, symmetric: bool):
    args = {"num_bits": num_bits, "symmetric": symmetric, **STRATEGIES[strategy]}
    tensors, expected = compressed("pack-quantized", torch.bfloat16, (OUT, IN), **args)
    rows = num_bits == 8 and symmetric and strategy != "group"
    check(tensors, expected, Array8B if rows else ArrayGrouped, "pack-quantized")


def check(tensors: dict[str, np.ndarray], expected: np.ndarray, cls: type, format: str | None = None) -> None:
    source = safetensors_file(tensors)
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.kind == "compressed-tensors"
        assert list(checkpoint) == ["m.weight"]
        assert format is None or checkpoint.info("m.weight").format == format
        found = checkpoint["m.weight"]
    assert type(found) is cls
    assert bits(found.materialize().astype(expected.dtype)) == bits(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_of_scales(dtype: Any):
    tensors, expected = compressed("pack-quantized", dtype, (OUT, IN), num_bits=4, **STRATEGIES["group"])
    check(tensors, expected, ArrayGrouped)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("columns", [IN, 36])
def test_experts(columns: int, symmetric: bool):
    args = {"num_bits": 3, "symmetric": symmetric, "strategy": "group", "group_size": columns // 4}
    tensors, expected = compressed("pack-quantized", torch.bfloat16, (3, OUT, columns), **args)
    check(tensors, expected, ArrayGrouped)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
def test_int_quantized(form: str, strategy: str, symmetric: bool):
    args = {"num_bits": 8, "symmetric": symmetric, **STRATEGIES[strategy]}
    tensors, expected = compressed(form, torch.bfloat16, (OUT, IN), **args)
    check(tensors, expected, Array8B if symmetric and strategy != "group" else ArrayGrouped, "int-quantized")


def test_mxfp4():
    args = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    tensors, expected = compressed("mxfp4-pack-quantized", torch.bfloat16, (OUT, IN), **args)
    check(tensors, expected, ArrayGrouped, "mxfp4-pack-quantized")


def test_nvfp4():
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    args["scale_dtype"] = torch.float8_e4m3fn
    tensors, expected = compressed("nvfp4-pack-quantized", torch.bfloat16, (OUT, IN), **args)
    check(tensors, expected, ArrayGrouped, "nvfp4-pack-quantized")


BLOCK = {"strategy": "block", "block_structure": [128, 128]}


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_quantized(strategy: str, dtype: Any):
    args = {"num_bits": 8, "type": "float", **{**STRATEGIES, "block": BLOCK}[strategy]}
    tensors, expected = compressed("float-quantized", dtype, (200, 272), **args)
    check(tensors, expected, ArrayFloat8, "float-quantized")


def test_mxfp8():
    args = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    tensors, expected = compressed("mxfp8-quantized", torch.bfloat16, (OUT, IN), **args)
    check(tensors, expected, ArrayFloat8, "mxfp8-quantized")


# --- what is written here, opened by the package ---


def with_zeros() -> ArrayGrouped:
    q = ArrayGrouped.quantize(weight(OUT, IN), 32, bits=5, symmetric=True)
    zero = np.random.default_rng(1).integers(0, 32, (OUT, IN // 32), np.uint8)
    return dataclasses.replace(q, zero=jnp.asarray(zero))


WRITTEN: dict[str, Callable[[], Any]] = {
    "W4A16": lambda: quantize(weight(OUT, IN), format="int4", block_size=128, symmetric=True),
    "W4A16 of bfloat16": lambda: quantize(weight(OUT, IN).astype(jnp.bfloat16), format="int4", symmetric=True),
    "W3A16": lambda: quantize(weight(OUT, IN), format="int3", block_size=32, symmetric=True),
    "zero points": with_zeros,
    "W8A16": lambda: quantize(weight(OUT, IN), format="int8"),
    "W8A16 in groups": lambda: quantize(weight(OUT, IN), format="int8_grouped", symmetric=True),
    "FP8 per row": lambda: quantize(weight(OUT, IN), format="fp8"),
    "FP8 per tensor": lambda: ArrayFloat8.quantize(weight(OUT, IN), axis=(0, 1)),
    "FP8 per block": lambda: ArrayFloat8.quantize(weight(200, 272), block_shape=(128, 128)),
}


def weight(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


@pytest.mark.parametrize("case", WRITTEN)
def test_the_package_opens_what_is_written(case: str, tmp_path: Path):
    q = WRITTEN[case]()
    save(tmp_path / "model", {"m": {"weight": q, "bias": jnp.ones(4)}}, kind="compressed-tensors")
    found = decompressed(tmp_path / "model", q.dtype.name)
    assert bits(found["m.weight"]) == bits(q.materialize())
    assert bits(found["m.bias"].astype(np.float32)) == bits(np.ones(4, np.float32))
    again = load(tmp_path / "model")["m"]["weight"]
    assert bits(again.materialize()) == bits(q.materialize())


def test_a_model_of_several_formats(tmp_path: Path):
    tree = {name: {"weight": make()} for name, make in WRITTEN.items() if "bfloat16" not in name}
    (tmp_path / "config.json").write_text('{"hidden_size": 7, "quantization_config": {"bits": 3}}')
    save(tmp_path, tree, kind="compressed-tensors", max_shard_bytes=20_000, overwrite=True)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 7
    found = decompressed(tmp_path, "float32")
    assert found.keys() == {f"{name}.weight" for name in tree}
    assert all(bits(found[f"{name}.weight"]) == bits(q["weight"].materialize()) for name, q in tree.items())


def decompressed(folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """The arrays of a folder, dequantized by the package as it dequantizes a whole checkpoint."""
    pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.load_file(file)
    converter = CompressedTensorsDequantizer(str(folder), dtype=getattr(torch, dtype))
    return {name: to_numpy(tensor) for name, tensor in converter.process(tensors).items()}
