"""Checkpoints of other projects, against decoders that take one element at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from eformer.checkpoint import CheckpointError, convert, load, open_checkpoint
from eformer.cli import main

from .files import bits, safetensors_file
from .layouts import BF16, CASES, E4M3, Case


def folder_of(case: Case, folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(safetensors_file(case.tensors))
    key = "quantization" if case.kind == "mlx" else "quantization_config"
    (folder / "config.json").write_text(json.dumps({key: dict(case.config)}))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_file(name: str, tmp_path: Path):
    case = CASES[name]()
    with open_checkpoint(folder_of(case, tmp_path)) as checkpoint:
        assert list(checkpoint) == [case.name]
        assert (checkpoint.kind, checkpoint.info(case.name).format) == (case.kind, case.format)
        found = checkpoint[case.name]
    assert found.shape == case.expected.shape
    assert bits(found.with_dtype(np.float32).materialize()) == bits(case.expected)


def test_what_is_said_of_a_part_of_the_model_is_read(tmp_path: Path):
    case = CASES["mlx 4 bits"]()
    folder = folder_of(case, tmp_path)
    (folder / "config.json").write_text(json.dumps({"text_config": {"quantization": dict(case.config)}}))
    assert bits(load(folder)[case.name].with_dtype(np.float32).materialize()) == bits(case.expected)


# --- a folder as a whole ---


def model(folder: Path) -> tuple[Path, dict[str, Case]]:
    """A folder of two shards with three weights, whose tensors are in both, and a norm."""
    cases = {"a": CASES["pack 4 bits, zeros"](), "b": CASES["fp8 ct channel"](), "c": CASES["pack 3 bits"]()}
    tensors = {f"{name}{key[1:]}": array for name, case in cases.items() for key, array in case.tensors.items()}
    tensors["norm.weight"] = np.ones(8, np.float32)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": list(tensors)[i::2] for i in (0, 1)}
    for shard, names in shards.items():
        (folder / shard).write_bytes(safetensors_file({name: tensors[name] for name in names}))
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    groups = [case.config.get("config_groups", {}).get("a") for case in cases.values()]
    said = {f"group_{i}": group for i, group in enumerate(groups) if group}
    config = {"hidden_size": 64, "quantization_config": {"quant_method": "compressed-tensors", "config_groups": said}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, {f"{name}.weight": case for name, case in cases.items()}


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, Case]]:
    (tmp_path / "source").mkdir()
    return model(tmp_path / "source")


def check_values(found: dict[str, Any], cases: dict[str, Case]) -> None:
    assert found.keys() == {*cases, "norm.weight"}
    for name, case in cases.items():
        assert bits(found[name].with_dtype(np.float32).materialize()) == bits(case.expected)


def test_straight_to_a_sharding(source: tuple[Path, dict[str, Case]]):
    folder, cases = source
    mesh = jax.make_mesh((2,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    found = load(folder, sharding=rows)
    assert all(array.sharding.spec[0] == "x" for array in found.values())
    check_values(found, cases)


@pytest.mark.parametrize("kind", ["safetensors", "compressed-tensors"])
def test_converted(kind: str, source: tuple[Path, dict[str, Case]], tmp_path: Path):
    folder, cases = source
    written = convert(folder, tmp_path / "target", kind, max_shard_bytes=1000)
    with open_checkpoint(written) as checkpoint:
        assert checkpoint.kind == kind
    check_values(load(tmp_path / "target", flat=True), cases)
    assert json.loads((tmp_path / "target" / "config.json").read_text())["hidden_size"] == 64


def test_on_the_command_line(source: tuple[Path, dict[str, Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, cases = source
    assert main(["inspect", str(folder)]) == 0
    assert "pack-quantized" in capsys.readouterr().out
    assert main(["quantize", str(folder), str(tmp_path / "q"), "--format", "int8"]) == 0
    check_values(load(tmp_path / "q", flat=True), cases)
    assert main(["convert", str(folder), str(tmp_path / "c"), "--to", "compressed-tensors"]) == 0
    check_values(load(tmp_path / "c", flat=True), cases)


# --- files that lie ---


def lie(name: str, **changes: Any) -> Callable[[], Case]:
    """A case with other tensors: functions of its own tensors, or arrays; `config` is another configuration."""

    def make() -> Case:
        case = CASES[name]()
        config = changes.get("config", case.config)
        ends = {key: change for key, change in changes.items() if key != "config"}
        tensors = dict(case.tensors)
        for end, change in ends.items():
            tensors[f"m.{end}"] = change(tensors[f"m.{end}"]) if callable(change) else change
        return case._replace(tensors=tensors, config=config)

    return make


def without(*names: str) -> Callable[[], Case]:
    """Tensors of a layout that is not read."""
    return lambda: CASES["pack 4 bits"]()._replace(tensors={name: np.ones(3, np.int32) for name in names})


def said(bits: int, size: int | None = None) -> dict[str, Any]:
    return {"config_groups": {"a": {"weights": {"num_bits": bits, "group_size": size}}}}


HUGE = np.array([2**62, 2**62])
LIES: dict[str, tuple[Callable[[], Case], str]] = {
    "bits": (lie("pack 4 bits", config=said(3)), "64 codes in 8 words are of 4 bits, and the configuration says 3"),
    "few columns": (lie("pack 4 bits", weight_shape=np.array([6, 3])), "3 codes in 8 words are of no number of bits"),
    "many columns": (lie("pack 4 bits", weight_shape=np.array([6, 10**6])), "are of no number of bits"),
    "huge shape": (lie("pack 4 bits", weight_shape=HUGE), r"`weight_shape` says .*, and `weight_packed` is \[6, 8\]"),
    "negative shape": (lie("pack 4 bits", weight_shape=np.array([-6, 64])), "`weight_shape` says"),
    "float shape": (lie("pack 4 bits", weight_shape=np.ones(2)), "`weight_shape` must be 2 integers"),
    "scales": (lie("pack 4 bits", weight_scale=np.ones((6, 5), np.float32)), "5 blocks do not divide 64 columns"),
    "rows of scales": (lie("pack 4 bits", weight_scale=np.ones((5, 4), np.float32)), "scale .* must have 6 entries"),
    "no scales": (lie("pack 4 bits", weight_scale=np.ones((6, 0), np.float32)), "0 blocks"),
    "axes of scales": (lie("pack 4 bits", weight_scale=np.ones((6, 4, 1), np.float32)), "are not those of a weight"),
    "zeros": (lie("pack 4 bits", weight_zero_point=np.ones((2, 4), np.int32)), r"must be int32\[1, 4\]"),
    "int8 zeros": (lie("pack channel", weight_zero_point=np.full((6, 1), -128, np.int8)), "3 bits do not reach"),
    "groups": (lie("pack permuted", weight_g_idx=lambda groups: groups + 1), "each group for 16 columns, from 0 on"),
    "columns": (lie("pack permuted", weight_g_idx=lambda groups: groups[:-1]), r"`weight_g_idx` must be int32\[64\]"),
    "both packings": (
        lie("pack 4 bits", weight_packed=np.ones((6, 2), np.int32), weight_shape=np.array([6, 20]), config={}),
        "20 codes in 2 words are of 2 or 3 bits, and no configuration says which",
    ),
    "int8 scales": (lie("int8 channel", weight_scale=np.ones((7, 1), np.float32)), "scale .* must have 6 entries"),
    "fp8 scales": (lie("fp8 blocks", weight_scale_inv=np.ones((7, 7, 7), np.float32)), "are not those of a weight"),
    "fp8 blocks": (lie("fp8 blocks", weight_scale_inv=np.ones((7, 3), np.float32)), "7 blocks do not divide 200"),
    "fp8 no scales": (lie("fp8 blocks", weight_scale_inv=np.ones((0, 3), np.float32)), "0 blocks"),
    "mxfp4 scales": (lie("mxfp4 ct", weight_scale=np.ones((6, 3), np.uint8)), "64 codes .* not 3 blocks of 32"),
    "mxfp4 one scale": (lie("mxfp4 ct", weight_scale=np.array(3, np.uint8)), "not 0 blocks of 32"),
    "nvfp4 scales": (lie("nvfp4 modelopt", weight_scale_2=np.ones(3, np.float32)), "`weight_scale_2` must have one"),
    "mlx": (lie("mlx 4 bits", config={}), "4 bits in blocks of 64 or 8 bits in blocks of 32; `quantization`"),
    "mlx bits": (lie("mlx 4 bits", config={"bits": 5, "group_size": 77}), "says 5 bits in blocks of 77"),
    "mlx words": (lie("mlx 4 bits", weight=np.ones((6, 7), np.uint32)), "of 112 bits a block, and .* says 4 bits in"),
    "mlx scales": (lie("mlx 4 bits", scales=np.ones((6, 0)).astype(BF16), biases=np.ones((6, 0)).astype(BF16)), "by 0"),
    "pack groups, denied": (lie("pack 4 bits", config=said(4, 32)), "64 columns have 16, and .* says 32"),
    "fp8 blocks, denied": (lie("fp8 blocks", config={"weight_block_size": [64, 64]}), r"blocks \[64, 64\], which"),
    "fp8 one block, denied": (lie("fp8 tensor", config={"weight_block_size": [4, 64]}), r"blocks \[4, 64\], which"),
    "nvfp4 blocks": (lie("nvfp4 modelopt", weight_scale=np.ones((6, 2), E4M3)), "are not 2 blocks of 16"),
    "mlx, denied": (lie("mlx 4 bits", config={"bits": 3, "group_size": 64}), "says 3 bits in blocks of 64"),
    "sparse": (without("m.compressed", "m.bitmask"), "let compressed-tensors decompress"),
    "marlin": (without("m.weight_packed", "m.scale_packed", "m.meta"), "let compressed-tensors decompress"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused_in_words(name: str, tmp_path: Path):
    make, words = LIES[name]
    with pytest.raises(CheckpointError, match=words):
        load(folder_of(make(), tmp_path))
