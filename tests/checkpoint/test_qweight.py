"""GPTQ, AWQ and BitNet as their own packages wrote them: `make_golden_qweight.py` made qweight.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.checkpoint.file import MappedFile
from eformer._src.checkpoint.header import read_header
from eformer.checkpoint import CheckpointError, load, open_checkpoint
from eformer.ops.quantization import Array1B, ArrayGrouped, ArrayPermuted

from .files import bits
from .layout_examples import write_folder

TENSORS, CONFIGS = read_header(MappedFile(Path(__file__).parent / "qweight.safetensors"))
CASES = sorted(CONFIGS)

Parts = dict[str, np.ndarray]


def parts_of(case: str) -> Parts:
    """The tensors of a case, by the ends of their names."""
    return {name.removeprefix(f"{case}."): t.view() for name, t in TENSORS.items() if name.startswith(f"{case}.")}


def folder_with(folder: Path, parts: Parts, config: Mapping[str, Any] | None) -> Path:
    tensors = {f"layer.{end}": tensor for end, tensor in parts.items() if end != "expected"}
    return write_folder(folder, tensors, config)


def expected_of(case: str) -> np.ndarray:
    """float32 (out, in), as the package that wrote it reads it."""
    parts = parts_of(case)
    integers = parts["expected"].astype(np.float32)
    if "weight_scale" in parts:
        scale = parts["weight_scale"].astype(np.float32)
        return integers / scale if case.endswith("-bitlinear") else integers * scale
    scales = parts["scales"].astype(np.float32)
    if case == "awq-gemv":
        return integers * np.repeat(scales[:, :2], 32, axis=1)
    group_of = parts.get("g_idx", np.arange(integers.shape[1]) // 32)
    return integers * scales.T[:, group_of]


def loaded(case: str, folder: Path, **changes: Any) -> Any:
    return load(folder_with(folder, parts_of(case), {**json.loads(CONFIGS[case]), **changes}))["layer.weight"]


@pytest.mark.parametrize("case", CASES)
def test_the_values_of_the_writer(case: str, tmp_path: Path):
    q = loaded(case, tmp_path)
    kind = Array1B if "bitnet" in case else ArrayPermuted if "desc_act" in case else ArrayGrouped
    assert isinstance(q, kind)
    assert bits(q.with_dtype(jnp.float32).materialize()) == bits(expected_of(case))
    assert q.dtype == parts_of(case)["weight_scale" if "bitnet" in case else "scales"].dtype


def test_facts_without_reading(tmp_path: Path):
    folder = folder_with(tmp_path, parts_of("gptq-4-sym"), json.loads(CONFIGS["gptq-4-sym"]))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.kind == "gptq"
        info = checkpoint.info("layer.weight")
        q = checkpoint["layer.weight"]
    assert (info.shape, info.dtype.name, info.format) == ((32, 64), "float16", "gptq")
    assert q.zero is None  # 8 throughout, the middle of 4 bits
    assert q.nbytes == 32 * 64 // 2 + 32 * 2 * 2


# --- groups ---


@pytest.mark.parametrize("index", ["missing", "negative"])
def test_groups_without_an_index_or_counted_from_the_end(index: str, tmp_path: Path):
    parts = parts_of("gptq-4-asym")
    groups = parts.pop("g_idx")
    parts |= {} if index == "missing" else {"g_idx": groups - 2}
    found = load(folder_with(tmp_path, parts, {"quant_method": "gptq"}))["layer.weight"]
    assert bits(found.with_dtype(jnp.float32).materialize()) == bits(expected_of("gptq-4-asym"))


def test_one_group_for_all_inputs(tmp_path: Path):
    parts = parts_of("gptq-4-asym")
    parts |= {"scales": parts["scales"][:1], "qzeros": parts["qzeros"][:1], "g_idx": np.zeros(64, np.int32)}
    config = {"quant_method": "gptq", "group_size": -1}
    found = load(folder_with(tmp_path, parts, config))["layer.weight"]
    assert (found.shape, found.block_size) == ((32, 64), 64)
    assert bits(found.with_dtype(jnp.float32).materialize()[:, :32]) == bits(expected_of("gptq-4-asym")[:, :32])


def test_a_short_last_group_has_the_size_of_the_configuration(tmp_path: Path):
    parts = parts_of("gptq-4-asym")
    del parts["g_idx"]
    found = load(folder_with(tmp_path, parts, {"quant_method": "gptq", "group_size": 48}))["layer.weight"]
    assert found.block_size == 48


# --- what is stored, and what is said of it ---


def with_zeros(word: int) -> Parts:
    parts = parts_of("gptq-4-sym")
    return {**parts, "qzeros": np.full_like(parts["qzeros"].view(np.uint32), word).view(np.int32)}


V1, V2 = 0x77777777, 0x88888888
AGREE: list[tuple[int, dict[str, Any] | None]] = [
    (V1, None),
    (V2, None),
    (V1, {"quant_method": "gptq"}),
    (V2, {"quant_method": "gptq"}),
    (V1, {"quant_method": "gptq", "checkpoint_format": "gptq"}),
    (V2, {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    (V2, {"quant_method": "gptq", "checkpoint_format": "gptq_p"}),
    (V1, {"quant_method": "auto-round"}),
    (V2, {"quant_method": "auto-round", "packing_format": "auto_round"}),
    (V1, {"quant_method": "gptq", "bits": 8, "dynamic": {"+:layer": {"bits": 4}}}),  # of a module
    (V1, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
]


@pytest.mark.parametrize(("word", "config"), AGREE)
def test_symmetric_zeros_tell_their_dialect(word: int, config: dict[str, Any] | None, tmp_path: Path):
    found = load(folder_with(tmp_path, with_zeros(word), config))["layer.weight"]
    assert bits(found.with_dtype(jnp.float32).materialize()) == bits(expected_of("gptq-4-sym"))


@pytest.mark.parametrize(("word", "form", "other"), [(V1, "gptq_v2", "gptq"), (V2, "gptq", "gptq_v2")])
def test_a_configuration_that_contradicts_symmetric_zeros(word: int, form: str, other: str, tmp_path: Path):
    config = {"quant_method": "gptq", "checkpoint_format": form}
    with pytest.raises(
        CheckpointError, match=rf"the middle of 4 bits in '{other}', and the configuration says '{form}'"
    ):
        load(folder_with(tmp_path, with_zeros(word), config))
    found = load(folder_with(tmp_path, with_zeros(word), {**config, "sym": False}))["layer.weight"]
    assert set(np.unique(found.zero)) == {9 if form == "gptq" else 7}


REFUSED: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any], str]] = {
    "zeros of either dialect": ("gptq-4-asym", None, {}, "whether its zeros are stored less one"),
    "zeros of another method": ("gptq-4-asym", {"quant_method": "awq"}, {}, "whether its zeros are stored less one"),
    "3 bits of either packing": ("gptq-3-asym", None, {}, "codes of 3 bits are packed in two ways"),
    "another format": ("gptq-4-sym", {"quant_method": "gptq", "checkpoint_format": "marlin"}, {}, "'marlin', which is"),
    "int16 codes": ("awq-4", {}, {"qweight": np.zeros((4, 4), np.int16)}, "'gemm'|`gemv_fast`"),
    "int64 codes": ("gptq-4-sym", {}, {"qweight": np.zeros((4, 4), np.int64)}, "words of 32 bits"),
    "scales of bytes": ("gptq-4-sym", {}, {"scales": np.zeros((2, 32), np.uint8)}, "`scales` must be one of"),
    "no rows": ("gptq-4-sym", {}, {"qweight": np.zeros((0, 32), np.int32)}, "must be a matrix that is not empty"),
    "other shapes": ("gptq-4-sym", {}, {"qweight": np.zeros((7, 32), np.int32)}, "neither as GPTQ nor as AWQ"),
    "a matrix of groups": ("gptq-4-sym", {}, {"g_idx": np.zeros((8, 8), np.int32)}, "a vector of integers"),
    "groups that are none": ("gptq-4-sym", {}, {"g_idx": np.full(64, 2, np.int32)}, "none of the 2"),
    "groups of other sizes": ("gptq-4-sym", {}, {"g_idx": (np.arange(64) > 9).astype(np.int32)}, "the same number"),
    "a class of linear layers": ("bitnet-bitlinear", {"quant_method": "bitnet", "linear_class": "x"}, {}, "got 'x'"),
    "scales of rows": (
        "bitnet-bitlinear",
        {"quant_method": "bitnet"},
        {"weight_scale": np.ones((32, 1), np.float32)},
        "a `weight_scale` of one element",
    ),
    "four values": (
        "bitnet-bitlinear",
        {"quant_method": "bitnet"},
        {"weight": np.full((8, 64), 0b11, np.uint8)},
        "the code 3",
    ),
    "a format that is no text": (
        "gptq-4-asym",
        {"quant_method": "gptq", "checkpoint_format": 1e308},
        {},
        "`checkpoint_format` of the configuration must be text, got '1e\\+308'",
    ),
    "groups of any size": ("awq-gemv", {"quant_method": "awq", "version": "gemv"}, {}, "it says nothing"),
    **{
        f"{bits} bits": ("gptq-4-sym", {"quant_method": "gptq", "bits": bits}, {}, f"4 bits, and .* says {bits}")
        for bits in (0, 3, 8, 33)
    },
    "bits of AWQ": ("awq-4", {"quant_method": "awq", "w_bit": 8}, {}, "4 bits, and .* says 8"),
    "groups of GPTQ": (
        "gptq-4-sym",
        {"quant_method": "gptq", "group_size": 16},
        {},
        "2 groups of 32 inputs, and .* 16",
    ),
    "groups of another size": ("awq-gemv", {"quant_method": "awq", "q_group_size": 64}, {}, "do not have 32 scales"),
}


@pytest.mark.parametrize(("case", "config", "changes", "match"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(case: str, config: dict[str, Any] | None, changes: dict[str, Any], match: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=match):
        load(folder_with(tmp_path, {**parts_of(case), **changes}, config))


def test_shapes_of_two_layouts(tmp_path: Path):
    """128 inputs in groups of 64 look alike in AWQ's gemv and in GPTQ with groups of 8."""
    parts = {"qweight": np.zeros((24, 16), np.int32), "qzeros": np.zeros((24, 2), np.int32)}
    parts["scales"] = np.ones((24, 16), np.float16)
    with pytest.raises(CheckpointError, match="fit together in several ways"):
        load(folder_with(tmp_path, parts, None))
    as_awq = load(folder_with(tmp_path, parts, {"quant_method": "awq", "version": "gemv", "group_size": 64}))
    as_gptq = load(folder_with(tmp_path, parts, {"quant_method": "gptq", "group_size": 8}))
    assert (as_awq["layer.weight"].shape, as_gptq["layer.weight"].shape) == ((24, 128), (16, 192))


def test_bytes_of_two_values_are_not_bitnet_without_its_configuration(tmp_path: Path):
    folder = folder_with(tmp_path, parts_of("bitnet-bitlinear"), None)
    with pytest.raises(CheckpointError, match=r"'layer\.weight': it is uint8.* beside 'layer\.weight_scale'"):
        load(folder)
    assert load(folder, raw=True).keys() == {"layer.weight", "layer.weight_scale"}
