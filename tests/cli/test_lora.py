"""`eformer lora merge`, and `eformer inspect` of an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.checkpoint import load, save, save_adapter
from eformer.cli import main
from eformer.model import add_lora, dequantize, quantize_model


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((64, 128)), jnp.float32)
    whole = {"layer.weight": weight, "layer.bias": jnp.zeros(64)}
    base = quantize_model(whole, format="int4")
    save(tmp_path / "base.safetensors", base)
    adapted = add_lora(base, rank=4, key=jax.random.key(0), original=whole)
    return tmp_path / "base.safetensors", save_adapter(tmp_path / "adapter", adapted)


@pytest.mark.parametrize("options", [[], ["--requantize"]])
def test_merge(folders: tuple[Path, Path], tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]):
    base, adapter = folders
    out = tmp_path / "merged.safetensors"
    assert main(["lora", "merge", str(base), str(adapter), str(out), "--json", *options]) == 0
    found, weight = load(out), load(base)["layer.weight"]
    answer = json.loads(capsys.readouterr().out)
    if options:
        assert type(found["layer.weight"]) is type(weight)
        assert 0 < answer["error"] < 0.1
    else:
        assert found["layer.weight"].dtype == jnp.float32
    assert np.linalg.norm(dequantize(found)["layer.weight"] - weight.materialize()) > 0


def test_inspect(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(folders[1])]) == 0
    out = capsys.readouterr().out
    assert "layer.lora_A.weight" in out
    assert all(line in out for line in ("  adapter: LoRA\n", "  rank: 4\n", "  alpha: 8.0\n"))


def test_gguf_is_refused(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["lora", "merge", *map(str, folders), str(tmp_path / "x.gguf")]) == 1
    assert "`eformer convert` makes GGUF of it" in capsys.readouterr().err
