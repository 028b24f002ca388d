"""torchao, HQQ and quanto as they wrote their files themselves: `make_golden_others.py` made others.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.checkpoint.file import MappedFile
from eformer._src.checkpoint.header import read_header
from eformer.checkpoint import CheckpointError, convert, load, open_checkpoint
from eformer.ops.quantization import Array8B, ArrayFloat8, ArrayGrouped

from .files import bits, safetensors_file

TENSORS, METADATA = read_header(MappedFile(Path(__file__).parent / "others.safetensors"))
CASES = sorted(METADATA)
ROWS = ("torchao-int8", "torchao-int8-dynamic", "quanto-int8")


def parts_of(case: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{case}."): t.view() for name, t in TENSORS.items() if name.startswith(f"{case}.")}


def file_of(case: str, metadata: Any = None, **changes: Any) -> bytes:
    """The file of a case; tensors by the ends of their names are changed, or left out if they are None."""
    tensors = {name: each for name, each in parts_of(case).items() if name != "expected"}
    ends = {next(name for name in tensors if name.endswith(end)): change for end, change in changes.items()}
    tensors = {name: each for name, each in {**tensors, **ends}.items() if each is not None}
    return safetensors_file(tensors, json.loads(METADATA[case]) if metadata is None else metadata)


@pytest.mark.parametrize("case", CASES)
def test_the_values_of_the_writer(case: str):
    expected = parts_of(case)["expected"]
    with open_checkpoint(file_of(case)) as checkpoint:
        assert checkpoint.kind == checkpoint.info("m.weight").format == case.partition("-")[0]
        found = checkpoint["m.weight"]
    floats = "float8" in case or "e5m2" in case
    assert isinstance(found, ArrayFloat8 if floats else Array8B if case in ROWS else ArrayGrouped)
    assert bits(found.with_dtype(np.float32).materialize()) == bits(expected)


@pytest.mark.parametrize("case", ["torchao-int4-groups-intx", "hqq-4", "quanto-int8"])
def test_converted_to_our_own(case: str, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(file_of(case))
    config = {"quantization_config": {"quant_method": case.partition("-")[0]}}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    found = load(convert(tmp_path / "a", tmp_path / "b", "safetensors"))["m.weight"]
    assert bits(found.with_dtype(np.float32).materialize()) == bits(parts_of(case)["expected"])
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {}


def int4_tensor(offset: bool) -> tuple[bytes, np.ndarray]:
    """An Int4Tensor, whose writer needs a GPU: two codes of four bits with a sign, the first in the low half."""
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(-8, 8, (6, 64)), rng.uniform(0.5, 1, (2, 6)).astype(jnp.bfloat16)
    zero = (rng.uniform(-1, 1, (2, 6)) * offset).astype(jnp.bfloat16)
    packed = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8).view(np.int8)
    said = {"_type": "Int4Tensor", "_data": {"block_size": [1, 32], "shape": [6, 64]}}
    tensors = {"m._weight_qdata": packed, "m._weight_scale": scale, "m._weight_zero_point": zero}
    of_element = [np.repeat(each.T.astype(np.float32), 32, axis=1) for each in (scale, zero)]
    expected = codes.astype(np.float32) * of_element[0] + of_element[1]
    return safetensors_file(tensors, {"m.weight": json.dumps(said)}), expected


@pytest.mark.parametrize("offset", [True, False], ids=["offsets", "symmetric"])
def test_int4_tensors(offset: bool):
    source, expected = int4_tensor(offset)
    found = load(source)["m.weight"]
    assert (found.bits, found.offset is not None) == (4, offset)
    assert bits(found.with_dtype(np.float32).materialize()) == bits(expected)


def test_an_int4_tensor_whose_values_would_be_rounded():
    scale = np.full((2, 6), 1e-30, np.float32)
    tensors = {"m._weight_scale": scale, "m._weight_zero_point": np.ones_like(scale)}
    tensors = {"m._weight_qdata": np.ones((6, 32), np.int8), **tensors}
    described = {"m.weight": json.dumps({"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}})}
    with pytest.raises(CheckpointError, match="no float32 is"):
        load(safetensors_file(tensors, described))


def said(**changes: Any) -> dict[str, str]:
    """The header of "torchao-int4-groups-intx" with other attributes."""
    given = json.loads(json.loads(METADATA["torchao-int4-groups-intx"])["m.weight"])
    kind = changes.pop("_type", given["_type"])
    return {"m.weight": json.dumps({**given, "_type": kind, "_data": {**given["_data"], **changes}})}


INTX = "torchao-int4-groups-intx"
ONE = np.ones((12, 2), np.float32)
LIES: dict[str, tuple[bytes, str]] = {
    "torchao, no header": (file_of(INTX, {}), "the header of the file does not say which tensor of torchao it is"),
    "torchao, another class": (file_of(INTX, said(_type="Int4TilePackedTo4dTensor")), "a Int4TilePackedTo4dTensor of"),
    "torchao, a header of text": (file_of(INTX, {"m.weight": "{"}), "can't be read"),
    "torchao, blocks": (file_of(INTX, said(block_size=[1, 24])), r"blocks of \[1, 24\] do not divide \[12, 64\]"),
    "torchao, columns": (file_of(INTX, said(block_size=[12, 1])), "scales are not those of"),
    "torchao, scales": (file_of(INTX, _scale=ONE[:, :1]), r"\[12, 1\] scales are not those of"),
    "torchao, bits": (file_of(INTX, said(target_dtype={"_data": "int9"})), "one of int1 to int8, got 'int9'"),
    "torchao, zeros": (file_of(INTX, _zero_point=ONE), "`zero_point` must be integers"),
    "torchao, alone": (file_of(INTX, _scale=None), "read here"),
    "HQQ, axis": (file_of("hqq-4", axis=np.int32(0)), "groups along axis 0 is not read"),
    "HQQ, bits": (file_of("hqq-4", nbits=np.int32(5)), "HQQ with 5 bits"),
    "HQQ, scales of scales": (file_of("hqq-4", quant_zero=np.uint8(1)), "quantized themselves"),
    "HQQ, shape": (file_of("hqq-4", shape=np.array([12, 96])), "do not take"),
    "HQQ, no shape": (file_of("hqq-4", shape=None), "its tensors are those of HQQ"),
    "HQQ, groups": (file_of("hqq-4", group_size=np.int32(48)), "groups of 48 do not divide"),
    "HQQ, zeros": (file_of("hqq-4", zero=ONE[:3].astype(np.float16)), "must be 24 floats"),
    "quanto, scales": (file_of("quanto-int8", **{"weight._scale": ONE[:7, :1]}), "are not the scales of rows"),
    "quanto, codes": (file_of("quanto-int8", **{"weight._data": np.ones((12, 64), np.int32)}), "quanto writes int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused_in_words(name: str):
    source, words = LIES[name]
    with pytest.raises(CheckpointError, match=words):
        load(source)


def test_codes_that_the_bits_do_not_reach():
    codes = np.full((12, 64), 9, np.int8)
    with pytest.raises(CheckpointError, match="codes that 4 bits do not reach"):
        load(file_of(INTX, _qdata=codes))


def test_zeros_of_float32_are_exact_only_as_integers():
    scale, zero = np.full((24, 1), 0.1, np.float32), np.full((24, 1), 0.3, np.float32)
    with pytest.raises(CheckpointError, match="zeros of float32"):
        load(file_of("hqq-4", scale=scale, zero=zero))
    assert load(file_of("hqq-4", scale=scale, zero=np.full((24, 1), 3, np.float32)))["m.weight"].zero is not None
