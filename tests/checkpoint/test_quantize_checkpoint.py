"""Quantizing on disk is quantizing in memory, one array at a time."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from quantization.cases import assert_same_leaves, normal

from eformer.checkpoint import NotRunnableWarning, convert, load, open_checkpoint, quantize_checkpoint, save, save_gguf
from eformer.model import Rule, UnusedRuleWarning, default_rules, quantize_model
from eformer.ops.quantization import quantize


def model() -> dict[str, Any]:
    return {
        "layers": [{"kernel": normal((128, 64), jnp.bfloat16), "bias": normal((64,))} for _ in range(2)],
        "embed": normal((96, 64)),
        "steps": np.arange(3),
    }


RULES = [Rule("bias", None), Rule("embed", "int8"), Rule("kernel", "nf4", {"axis": -2})]


@pytest.mark.parametrize("shards", [None, 10_000], ids=["one file", "shards"])
def test_as_in_memory(shards: int | None, tmp_path: Path):
    calls: list[Any] = []
    source = save(tmp_path / "dense", model(), max_shard_bytes=shards)
    target = quantize_checkpoint(
        source, tmp_path / "small", RULES, max_shard_bytes=shards, progress=lambda *call: calls.append(call)
    )
    found, expected = load(target), quantize_model(model(), RULES)
    assert_same_leaves(found["layers"][1]["kernel"], expected["layers"][1]["kernel"])
    assert_same_leaves(found["embed"], expected["embed"])
    assert np.array_equal(found["layers"][0]["bias"], expected["layers"][0]["bias"])
    assert found["steps"].dtype == np.int64
    assert calls[-1][1] == calls[-1][2] > 0


def test_default_rules(tmp_path: Path):
    target = quantize_checkpoint(save(tmp_path / "a", model()), tmp_path / "b", default_rules("int8", min_size=1))
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.info("layers.0.kernel").format == "int8"
        assert checkpoint.info("embed").format is None


def test_what_is_quantized_already_stays(tmp_path: Path):
    q = quantize(normal(), dtype="int8")
    target = quantize_checkpoint(save(tmp_path / "a", {"w": q}), tmp_path / "b", [Rule("w", "nf4")])
    assert_same_leaves(load(target)["w"], q)


def test_folders_keep_their_small_files(tmp_path: Path):
    source, target = tmp_path / "a", tmp_path / "b"
    save(source, model())
    (source / "config.json").write_text("{}")
    (source / "tokenizer.model").write_bytes(b"\0\1")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    (source / ".hidden").write_text("")
    (tmp_path / "secret").write_text("")
    (source / "link").symlink_to(tmp_path / "secret")
    quantize_checkpoint(source, target, RULES)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.model"]
    assert (target / "tokenizer.model").read_bytes() == b"\0\1"


def hashes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OVER_ITSELF = {
    "folder over itself": ("sharded", "sharded"),
    "file over itself": ("one/model.safetensors", "one/model.safetensors"),
    "folder over its file": ("one", "one/model.safetensors"),
    "file over its folder": ("one/model.safetensors", "one"),
    "index over its folder": ("sharded/model.safetensors.index.json", "sharded"),
    "shard over its folder": ("sharded/1", "sharded"),
    "folder over its shard": ("sharded", "sharded/1"),
    "shard over another": ("sharded/1", "sharded/2"),
    "shard over itself": ("sharded/1", "sharded/1"),
    "a link": ("one", "link"),
    "a link to the file": ("symbolic.safetensors", "one"),
    "another name of the file": ("one", "hard.safetensors"),
    "from another name": ("hard.safetensors", "one"),
}


@pytest.mark.parametrize(("source", "target"), OVER_ITSELF.values(), ids=OVER_ITSELF)
@pytest.mark.parametrize(
    "write",
    [
        functools.partial(quantize_checkpoint, rules=[Rule(".", "nf4", optional=True)]),
        functools.partial(convert, kind="safetensors"),
    ],
    ids=["quantize", "convert"],
)
def test_what_is_read_is_not_replaced(write: Any, source: str, target: str, tmp_path: Path):
    save(tmp_path / "one", model())
    index = save(tmp_path / "sharded", model(), max_shard_bytes=10_000)
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    (tmp_path / "link").symlink_to(tmp_path / "one")
    (tmp_path / "symbolic.safetensors").symlink_to(tmp_path / "one" / "model.safetensors")
    os.link(tmp_path / "one" / "model.safetensors", tmp_path / "hard.safetensors")
    before = hashes(tmp_path)
    paths = [tmp_path / name.replace("/1", f"/{shards[0]}").replace("/2", f"/{shards[1]}") for name in (source, target)]
    with pytest.raises(ValueError, match="write to another place"):
        write(*paths, overwrite=True)
    assert hashes(tmp_path) == before


def test_a_shard_of_another_checkpoint_is_not_replaced(tmp_path: Path):
    index = save(tmp_path / "a.safetensors", model(), max_shard_bytes=10_000)
    shard = tmp_path / json.loads(index.read_text())["weight_map"]["embed"]
    with pytest.raises(ValueError, match="is a shard of another checkpoint"):
        save(shard, model(), overwrite=True)
    assert load(index)["embed"].shape == (96, 64)


def test_small_files_that_are_not_ours_stay(tmp_path: Path):
    source, target = tmp_path / "a", tmp_path / "b"
    save(source, model())
    target.mkdir()
    for folder, text in ((source, "new"), (target, "old")):
        (folder / "config.json").write_text(text)
    with pytest.raises(FileExistsError, match=r"config\.json exists"):
        quantize_checkpoint(source, target, RULES)
    assert hashes(target) == {"config.json": b"old"}
    quantize_checkpoint(source, target, RULES, overwrite=True)
    assert (target / "config.json").read_text() == "new"


def test_a_link_from_a_cache_is_followed(tmp_path: Path):
    """Hubs keep files under their hashes and link to them, the index and the shards alike."""
    save(tmp_path / "blobs", {"a": np.ones(20), "b": np.ones(20)}, max_shard_bytes=1)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert load(tmp_path / "snapshot").keys() == {"a", "b"}


def test_a_rule_that_does_not_fit_writes_nothing(tmp_path: Path):
    source = save(tmp_path / "a", model())
    with pytest.raises(ValueError, match=r"'layers\.0\.bias', float32"):
        quantize_checkpoint(source, tmp_path / "b", [Rule("bias|kernel", "nf4", {"axis": -2})])
    assert not (tmp_path / "b").exists()
    with pytest.raises(TypeError, match="`rules` must be a format or a sequence"):
        quantize_checkpoint(source, tmp_path / "b", Rule("a", "nf4"))  # pyright: ignore[reportArgumentType]


def test_a_rule_for_nothing_warns(tmp_path: Path):
    with pytest.warns(UnusedRuleWarning, match="no floating point array is left for kernal=nf4") as caught:
        quantize_checkpoint(save(tmp_path / "a", model()), tmp_path / "b", [Rule("kernal", "nf4")])
    assert caught[0].filename == __file__


@pytest.mark.parametrize("how", [{"type": "F32"}, {"type": "BF16"}, {"type": "Q8_0"}, None], ids=str)
def test_what_would_become_infinite_is_refused(how: dict[str, str] | None, tmp_path: Path):
    """Arrays of 64 bits in a file may have values that no narrower type holds."""
    source = save(tmp_path / "a", {"w": np.full((2, 64), -1e300)})
    write = functools.partial(quantize_checkpoint, rules=[Rule("w", "int8")])
    if how is not None:
        write = functools.partial(convert, kind="gguf", **how)
    with pytest.raises(ValueError, match=r"'w' has values up to 1e\+300, which \w+ can't hold"):
        write(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_from_gguf(tmp_path: Path):
    """What is quantized there stays as it is; the rest is quantized by the rules."""
    x, metadata = normal((4, 64)), {"general.architecture": "x", "list": [1]}
    kinds = {"w": "Q8_0", "v": "F32"}
    save_gguf(tmp_path / "a.gguf", {"w": x, "v": x}, type=lambda name, _: kinds[name], metadata=metadata)
    target = quantize_checkpoint(tmp_path / "a.gguf", tmp_path / "b.safetensors", [Rule("[vw]", "nf4")])
    assert_same_leaves(load(target)["v"], quantize(x, "nf4"))
    assert_same_leaves(load(target)["w"], load(tmp_path / "a.gguf")["w"])
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.metadata == {"general.architecture": "x", "list": [1], "general.quantization_version": 2}


# --- from kind to kind ---


def test_convert_keeps_codes(tmp_path: Path):
    tree = {"a": {"weight": quantize(normal((4, 128)), dtype="nf4")}, "b": {"weight": quantize(normal(), dtype="int8")}}
    theirs = convert(save(tmp_path / "ours", tree), tmp_path / "theirs", "bitsandbytes")
    assert open_checkpoint(theirs).kind == "bitsandbytes"
    back = load(convert(theirs, tmp_path / "back", "safetensors"))
    assert_same_leaves(back["a"]["weight"], tree["a"]["weight"])
    assert np.array_equal(back["b"]["weight"].weight, tree["b"]["weight"].weight)


def test_convert_to_gguf_and_back(tmp_path: Path):
    tree = {"w": quantize(normal((4, 64)), dtype="int8"), "b": np.ones(3, np.float32)}
    path = convert(save(tmp_path / "ours", tree, metadata={"who": "me"}), tmp_path / "a.gguf", "gguf", type="Q8_0")
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.info("w").format, checkpoint.info("b").format) == ("Q8_0", None)
        assert checkpoint.metadata == {"who": "me", "general.quantization_version": 2}
    again = convert(path, tmp_path / "b.gguf", "gguf", type="F16")
    with open_checkpoint(again) as checkpoint:
        assert (checkpoint.info("w").dtype, checkpoint.info("b").dtype) == (np.float16, np.float32)


def test_convert_of_folders_takes_the_small_files(tmp_path: Path):
    save(tmp_path / "a", {"x": np.ones(3)})
    (tmp_path / "a" / "config.json").write_text(json.dumps({"x": 1}))
    convert(tmp_path / "a", tmp_path / "b", "bitsandbytes")
    assert set(os.listdir(tmp_path / "b")) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("kind", "more", "match"),
    [
        ("onnx", {}, "must be one of 'safetensors', 'bitsandbytes', 'compressed-tensors', 'mlx', 'gguf'"),
        ("gguf", {"max_shard_bytes": 1}, "written whole"),
        ("safetensors", {"type": "Q8_0"}, "is for GGUF"),
    ],
)
def test_convert_checks_what_it_is_asked(kind: str, more: dict[str, Any], match: str, tmp_path: Path):
    path = save(tmp_path / "a", {"x": np.ones(3)})
    with pytest.raises(ValueError, match=match):
        convert(path, tmp_path / "b", kind, **more)


STALE = {"quantization_config": {"quant_method": "gptq"}, "text_config": {"quantization_config": {"bits": 4}, "a": 1}}


@pytest.mark.parametrize("kind", ["safetensors", "bitsandbytes", "mlx"])
def test_nothing_stale_is_said_of_quantization(kind: str, tmp_path: Path):
    (tmp_path / "a").mkdir()
    save(tmp_path / "a", {"w": {"weight": np.ones((4, 32), np.float32)}})
    (tmp_path / "a" / "config.json").write_text(json.dumps({"hidden_size": 64, **STALE}))
    (tmp_path / "a" / "quantization_config.json").write_text("{}")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "a", tmp_path / "b", kind)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {"hidden_size": 64, "text_config": {"a": 1}}
    assert {each.name for each in (tmp_path / "b").iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}


def test_a_model_that_becomes_gguf_without_its_metadata(tmp_path: Path):
    save(tmp_path / "a", {"w": np.ones((4, 32), np.float32)})
    (tmp_path / "a" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.warns(NotRunnableWarning, match="no program runs it; llama.cpp's convert_hf_to_gguf.py"):
        convert(tmp_path / "a", tmp_path / "a.gguf", "gguf")
