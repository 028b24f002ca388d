"""A format that is registered owns its options: models, rules, the command line and its help take its defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

from eformer.checkpoint import load, save
from eformer.cli import main
from eformer.model import Rule, default_rules, quantize_model, rules_from_use
from eformer.ops.quantization import ArrayNF4, formats, quantize, register_format

PARAMS = {"kernel": jnp.ones((64, 128))}


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    """NF4 under another name, with another block size by default."""

    def encode(array, *, axis: int = -1, block_size: int = 8) -> ArrayNF4:
        return ArrayNF4.quantize(array, block_size, axis=axis)

    register_format("toy", ArrayNF4, encode)
    yield
    del formats.__globals__["_formats"]["toy"]


def test_a_model_takes_the_defaults_of_the_format():
    q = quantize_model(PARAMS, format="toy")["kernel"]
    assert (q.block_size, q.axis) == (8, -2)


def test_an_array_takes_the_same_defaults_as_a_model():
    q, of_model = quantize(PARAMS["kernel"], format="toy", axis=-2), quantize_model(PARAMS, format="toy")["kernel"]
    assert (q.block_size, q.axis) == (of_model.block_size, of_model.axis)


@pytest.mark.parametrize("option", [{}, {"block_size": 16}], ids=str)
def test_rules_take_them_too(option: dict[str, int]):
    used = rules_from_use(lambda p, x: x @ p["kernel"], PARAMS, jnp.ones((1, 64)), format="toy", **option)
    rules = [[Rule("", "toy", {"axis": -2, **option})], default_rules("toy", **option), used]
    found = [quantize_model(PARAMS, each)["kernel"] for each in rules]
    assert [(q.block_size, q.axis) for q in found] == [(option.get("block_size", 8), -2)] * 3


def test_every_format_takes_an_activation_dtype(tmp_path: Path):
    """Also one whose own options do not have it: in rules, on the command line, and in checkpoints."""
    q = quantize_model(PARAMS, default_rules("toy", activation_dtype="int8"))["kernel"]
    save(tmp_path / "a", PARAMS)
    format = ["--format", "toy,activation_dtype=int8"]
    assert main(["quantize", str(tmp_path / "a"), str(tmp_path / "b"), *format]) == 0
    assert [q.activation_dtype, load(tmp_path / "b")["kernel"].activation_dtype] == ["int8"] * 2
    with pytest.raises(ValueError, match="must be None or 'int8', got 'int4'"):
        quantize_model(PARAMS, default_rules("toy", activation_dtype="int4"))


def test_the_command_line_knows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(tmp_path / "a", PARAMS)
    assert main(["quantize", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "toy,block_size=16"]) == 0
    assert load(tmp_path / "b")["kernel"].block_size == 16
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    text = capsys.readouterr().out
    assert ", toy or keep" in " ".join(text.split())
    assert re.search("  toy +axis=-1, block_size=8\n", text)
    main(["completion", "bash"])
    assert " toy keep" in capsys.readouterr().out
