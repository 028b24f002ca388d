"""Quantized arrays written in the layouts of MLX and compressed-tensors, which hold the same values or refuse.

`test_compressed_tensors_writer.py` opens what is written with that package.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.checkpoint.file import MappedFile
from eformer._src.checkpoint.header import read_header
from eformer._src.checkpoint.prequantized.bit_fields import pack_planes
from eformer.checkpoint import load, save
from eformer.ops.quantization import ArrayFloat8, ArrayGrouped, quantize

from .files import safetensors_file
from .layouts import CASES, E2M1

OUT, IN = 6, 128


def weight(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape or (OUT, IN))


def mxfp4() -> ArrayGrouped:
    found: ArrayGrouped = load(safetensors_file(CASES["mxfp4 ct"]().tensors))["m.weight"]
    return found


def grouped(bits: int, *shape: int, block: int = 64, dtype: Any = jnp.float32, **other: str) -> ArrayGrouped:
    """Any codes, with scales and other leaves of bfloat16 or uint8."""
    shape, random = shape or (OUT, IN), np.random.default_rng(bits)
    planes = pack_planes(random.integers(0, 2**bits, shape, np.uint8), bits)
    entries = (*shape[:-1], shape[-1] // block)
    kinds = {"scale": "bfloat16", **other}
    leaves = {name: jnp.asarray(random.integers(0, 2**bits, entries), kind) for name, kind in kinds.items()}
    return ArrayGrouped(**jax.tree.map(jnp.asarray, planes), **leaves, bits=bits, block_size=block, dtype=dtype)


BIASES = {"offset": "bfloat16"}
ARRAYS: dict[str, Callable[[], ArrayGrouped]] = {
    **{f"{bits} bits": lambda bits=bits: grouped(bits, **BIASES) for bits in (2, 3, 4, 5, 6, 8)},
    "symmetric": lambda: grouped(4),
    "zeros": lambda: grouped(3, block=32, zero="uint8"),
    "long blocks": lambda: grouped(4, OUT, 512, block=256, **BIASES),
    "experts of bfloat16": lambda: grouped(4, 2, OUT, IN, block=32, dtype=jnp.bfloat16, **BIASES),
    "mxfp4": mxfp4,
}


def test_mlx(tmp_path: Path):
    arrays = {name: make() for name, make in ARRAYS.items()}
    save(tmp_path, {name: {"weight": q} for name, q in arrays.items()}, kind="mlx")
    said = json.loads((tmp_path / "config.json").read_text())["quantization"]
    assert (said["bits"], said["group_size"]) == (4, 64)  # the most common
    tensors, _ = read_header(MappedFile(tmp_path / "model.safetensors"))
    found = load(tmp_path)
    for name, q in arrays.items():
        expected = np.asarray(q.with_dtype(jnp.float32).materialize())
        parts = {end: t.view() for end in ("weight", "scales", "biases") if (t := tensors.get(f"{name}.{end}"))}
        # Not bit for bit: a negative scale times zero is -0, and with a bias it is 0.
        assert np.array_equal(mlx_values(parts, said.get(name, said), expected.shape), expected)
        assert (type(found[name]["weight"]), found[name]["weight"].shape) == (ArrayGrouped, q.shape)


def mlx_values(parts: dict[str, np.ndarray], said: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Each value, from its bits in the words of its row."""
    count, size = said["bits"], said["group_size"]
    out = np.empty(shape, np.float32)
    for row in np.ndindex(*shape[:-1]):
        string = sum(int(word) << (32 * i) for i, word in enumerate(parts["weight"][row]))
        for i in range(shape[-1]):
            code, scale = string >> (i * count) & (2**count - 1), parts["scales"][row][i // size]
            if said["mode"] == "mxfp4":
                out[*row, i] = E2M1[code] * 2.0 ** (int(scale) - 127)
            else:
                product = np.float32(code) * np.float32(scale)
                out[*row, i] = product + np.float32(parts["biases"][row][i // size])
    return out


CT, COLUMNS = "compressed-tensors", "transpose it"
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "offsets": (CT, lambda: quantize(weight(), dtype="int4"), "quantize with `symmetric=True`"),
    "axis": (CT, lambda: quantize(weight(), format="int4", axis=0, symmetric=True), COLUMNS),
    "blocks": (CT, lambda: ArrayGrouped.quantize(weight(), 48, symmetric=True), "choose a `block_size`"),
    "int8 columns": (CT, lambda: quantize(weight(), format="int8", axis=0), COLUMNS),
    "nf4": (CT, lambda: quantize(weight(), format="nf4"), "quantize it to int4, int8 or fp8"),
    "vector": (CT, lambda: ArrayGrouped.quantize(weight(64), symmetric=True), "have two axes"),
    "e5m2": (CT, lambda: quantize(weight(), format="fp8_e5m2"), "float8_e4m3fn, not float8_e5m2"),
    "fp8 columns": (CT, lambda: ArrayFloat8.quantize(weight(), axis=0), "quantize with `axis=-1`"),
    "zero": (CT, lambda: dataclasses.replace(grouped(4), zero=jnp.full((1, 1), 16, jnp.uint8)), "does not fit into 4"),
    "levels": (CT, lambda: ArrayGrouped.quantize(weight(), 16, symmetric=True), "`double_quantization=False`"),
    "mlx levels": ("mlx", lambda: quantize(weight(), dtype="int4"), "`double_quantization=False`"),
    "mlx blocks": ("mlx", lambda: ArrayGrouped.quantize(weight(), 72), "must be divided by one of 32, 64, 128"),
    "mlx axis": ("mlx", lambda: quantize(weight(), format="int4", axis=0), COLUMNS),
    "mlx scales": ("mlx", lambda: quantize(weight(), dtype="int8_grouped", symmetric=True), "`symmetric=False`"),
    "mlx int8": ("mlx", lambda: quantize(weight(), format="int8"), "quantize it to int4 or its kin"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_can_not_hold_is_refused_in_words(case: str, tmp_path: Path):
    kind, make, words = REFUSED[case]
    with pytest.raises(ValueError, match=rf"'m\.weight', .*can't be written for .*{words}"):
        save(tmp_path / "model", {"m": {"weight": make()}}, kind=kind)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("kind", ["compressed-tensors", "mlx"])
def test_names_and_places(kind: str, tmp_path: Path):
    q = ArrayGrouped.quantize(weight(), 32, symmetric=True)
    with pytest.raises(ValueError, match=r'names that end in "\.weight"'):
        save(tmp_path / "model", {"kernel": q}, kind=kind)
    with pytest.raises(ValueError, match="must be a folder: its config"):
        save(tmp_path / "model.safetensors", {"m": {"weight": q}}, kind=kind)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"config\.json exists; `overwrite=True`"):
        save(tmp_path, {"m": {"weight": q}}, kind=kind)
    with pytest.raises(ValueError, match="`kind='onnx'` must be one of"):
        save(tmp_path, {"m": {"weight": q}}, kind="onnx")
