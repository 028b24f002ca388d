"""`eformer calibrate`, and what `eformer quantize` does with its statistics."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_llm import write_folder, write_gguf

from eformer.checkpoint import load, open_checkpoint
from eformer.model import Statistics

TEXT = "the hero hears the other; " * 60


@pytest.fixture(autouse=True)
def _as_examples_expect():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def calibrated(run, tmp_path):
    """The arguments of `eformer quantize` for a small model with statistics."""
    model, text, statistics = tmp_path / "model", tmp_path / "text.txt", tmp_path / "statistics.npz"
    write_folder(model, "qwen2")
    text.write_text(TEXT)
    flags = ("--windows", "4", "--length", "64", "--second-moments")
    ran = run("calibrate", model, text, statistics, *flags)
    assert ran.code == 0, ran
    return model, tmp_path / "small.safetensors", statistics


def test_statistics_have_the_names_of_the_file(calibrated):
    model, _, statistics = calibrated
    found = Statistics.load(statistics)
    with open_checkpoint(model) as checkpoint:
        assert {*found, *found.missing} == set(checkpoint)
        assert {name for name in checkpoint if "norm" in name} <= set(found.missing)


@pytest.mark.parametrize("flags", [(), ("--method", "gptq"), ("--budget", "11")])
def test_quantize_with_statistics(run, calibrated, flags):
    model, target, statistics = calibrated
    options = ("--format", "int4,block_size=32", "--statistics", statistics)
    assert run("quantize", model, target, "--format", "int4,block_size=32").code == 0
    plain = load(target, flat=True)
    ran = run("quantize", model, target, "--force", *options, *flags, "--json")
    assert ran.code == 0, ran
    found = load(target, flat=True)
    chosen = [name for name in found if hasattr(found[name], "materialize")]
    assert chosen == [name for name in plain if hasattr(plain[name], "materialize")]
    assert any(not np.array_equal(plain[name].materialize(), found[name].materialize()) for name in chosen)
    assert jnp.isfinite(json.loads(ran.out)["bits"])


def test_gguf_and_errors(run, tmp_path):
    model, text, target = tmp_path / "model.gguf", tmp_path / "text.txt", tmp_path / "statistics.npz"
    write_gguf(model, "llama")
    text.write_text(TEXT)
    assert run("calibrate", model, text, target, "--windows", "1", "--length", "64").code == 0
    assert "exists; --force" in run("calibrate", model, text, target).err
    assert "a window takes 9999" in run("calibrate", model, text, target, "--force", "--length", "9999").err
    small = tmp_path / "small.safetensors"
    assert "`eformer calibrate` finds" in run("quantize", model, small, "--method", "gptq").err
    text.write_text("no statistics")
    assert "no file that" in run("quantize", model, small, "--statistics", text).err
