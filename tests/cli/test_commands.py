"""Each command does what it says, for readers and for machines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.layout_examples import examples, write_folder
from quantization.cases import assert_same_leaves

from eformer._src.cli.commands import bench
from eformer.checkpoint import load, open_checkpoint, save, save_gguf
from eformer.model import default_rules, quantize_model
from eformer.ops.quantization import format_names

from .conftest import tree

FILES = {"config.json", "model.safetensors", "tokenizer.json"}


def formats_of(path: Path) -> dict[str, str | None]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.info(name).format for name in checkpoint}


# --- quantize ---


def test_quantize_is_quantize_model(run, dense: Path, tmp_path: Path):
    ran = run("quantize", dense, tmp_path / "small", "--format", "nf4")
    assert ran.code == 0
    found, expected = load(tmp_path / "small"), quantize_model(tree(), default_rules("nf4"))
    for old, new in zip(expected["layers"], found["layers"], strict=True):
        assert_same_leaves(new["kernel"], old["kernel"])
    assert np.array_equal(found["embed"]["embedding"], expected["embed"]["embedding"])
    assert {path.name for path in (tmp_path / "small").iterdir()} == FILES
    assert "2 of 6 arrays are quantized" in ran.out
    assert "kept as it was: embed.embedding" in ran.out
    assert "quantizing 100%" in ran.err


KERNELS, EMBED = ("layers.0.kernel", "layers.1.kernel"), "embed.embedding"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], dict.fromkeys(KERNELS, "int4")),
        (["--format", "int8"], dict.fromkeys(KERNELS, "int8")),
        (["--embeddings", "int8,axis=-1"], {**dict.fromkeys(KERNELS, "int4"), EMBED: "int8"}),
        (["--rule", "layers[.]0.*kernel=int8,axis=-2"], {KERNELS[0]: "int8", KERNELS[1]: "int4"}),
        (["--rule", "[.]0[.]=keep", "--rule", "kernel=int8"], {KERNELS[1]: "int8"}),
        (["--format", "keep", "--rule", "embed=nf4"], {EMBED: "nf4"}),
        (["--format", "keep"], {}),
    ],
    ids=str,
)
def test_quantize_goes_by_format_and_rules(
    options: list[str], expected: dict[str, str], run, dense: Path, tmp_path: Path
):
    assert run("quantize", dense, tmp_path / "small.safetensors", *options).code == 0
    found = formats_of(tmp_path / "small.safetensors")
    assert {name: form for name, form in found.items() if form} == expected


def test_quantize_takes_options_of_the_format(run, dense: Path, tmp_path: Path):
    assert (
        run("quantize", dense, tmp_path / "small", "--format", "nf4,block_size=16,double_quantization=true").code == 0
    )
    kernel = load(tmp_path / "small")["layers"][0]["kernel"]
    assert kernel.block_size == 16
    assert kernel.nested is not None


def test_quantize_reads_and_writes_shards(run, dense: Path, tmp_path: Path):
    assert run("quantize", dense, tmp_path / "a", "--format", "keep", "--shard", "30kB").code == 0
    index = tmp_path / "a" / "model.safetensors.index.json"
    assert index.exists()
    assert run("quantize", index, tmp_path / "b.safetensors").code == 0
    assert formats_of(tmp_path / "b.safetensors")["layers.0.kernel"] == "int4"


def test_quantize_replaces_with_force_and_names_what_it_replaced(run, dense: Path, tmp_path: Path):
    small = tmp_path / "small"
    old = save(small, {f"x{i}": np.ones(9) for i in range(3)}, max_shard_bytes=100)
    shards = sorted(small.glob("*.safetensors"))
    for name in ("config.json", "notes.txt"):
        (small / name).write_text("mine")
    ran = run("quantize", dense, small, "--force", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["replaced"] == sorted(map(str, [small / "config.json", old, *shards]))
    assert {path.name for path in small.iterdir()} == FILES | {"notes.txt"}
    assert (small / "notes.txt").read_text() == "mine"
    text = run("quantize", dense, small, "--force").out
    assert f"replaced: {small / 'model.safetensors'}\n" in text  # the others are what they were
    assert "replaced" not in run("quantize", dense, tmp_path / "new").out


def test_convert_names_what_it_replaced(run, dense: Path, tmp_path: Path):
    (tmp_path / "other.gguf").touch()
    save_gguf(tmp_path / "a.gguf", {"w": np.ones(3, np.float32)})
    ran = run("convert", dense, tmp_path / "a.gguf", "--force", "--json")
    assert json.loads(ran.out)["replaced"] == [str(tmp_path / "a.gguf")]


def test_quantize_reports(run, dense: Path, tmp_path: Path):
    page = tmp_path / "pages" / "small.html"
    ran = run("quantize", dense, tmp_path / "small", "--report", page, "--json")
    data = json.loads(ran.out)
    assert data["report"] == str(page)
    assert data["bytes_after"] < data["bytes_before"]
    assert 0 < data["error"] < 0.15  # the widest gap of NF4 is 0.304 of the largest of a block
    assert "layers.1.kernel" in page.read_text()
    assert [path.name for path in page.parent.iterdir()] == [page.name]


# --- what other projects quantized ---


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    """A folder with two arrays of GPTQ, one of them with `desc_act`, and two dense ones."""
    tensors: dict[str, np.ndarray] = {"embed.weight": np.ones((96, 64), np.float16), "w": np.ones((64, 64), np.float32)}
    for layer, name in enumerate(("gptq", "gptq, desc_act")):
        tensors |= {f"layers.{layer}.{end}": each for end, each in examples()[name].tensors.items()}
    return write_folder(tmp_path / "gptq", tensors, examples()["gptq"].config)


def test_inspect_names_the_layout(run, gptq: Path):
    ran = run("inspect", gptq)
    assert ran.out.startswith(f"{gptq / 'model.safetensors'}: gptq\n")
    assert re.search(r"layers\.1\.weight +32x64 +gptq +1\.44 kB\n", ran.out)
    assert "4 arrays, 2 quantized" in ran.out


def test_what_is_quantized_is_kept(run, gptq: Path, tmp_path: Path):
    ran = run("quantize", gptq, tmp_path / "small", "--format", "int8")
    assert "3 of 4 arrays are quantized" in ran.out
    converted = run("convert", gptq, tmp_path / "a.safetensors", "--json")
    assert json.loads(converted.out)["formats"] == {"int4": 2, "float16": 1, "float32": 1}
    before, small, after = load(gptq), load(tmp_path / "small"), load(tmp_path / "a.safetensors")
    for name in ("layers.0.weight", "layers.1.weight"):
        for found in (small[name], after[name]):
            assert type(found) is type(before[name])
            assert np.array_equal(found.materialize(), before[name].materialize())
    assert format_names(small["w"]) == ("int8",)
    assert (tmp_path / "small" / "config.json").exists()


def test_a_layout_that_lies(run, gptq: Path):
    (gptq / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "format": "marlin"}}')
    ran = run("inspect", gptq)
    assert ran.code == 1
    assert "config.json says by `quantization_config` `format` 'marlin', which is not read for GPTQ" in ran.err


# --- inspect ---


def test_inspect(run, dense: Path, tmp_path: Path):
    run("quantize", dense, tmp_path / "small")
    ran = run("inspect", tmp_path / "small")
    assert ran.code == 0
    assert re.search(r"layers\.0\.kernel +64x128 +int4 +5\.12 kB\n", ran.out)
    assert "6 arrays, 2 quantized" in ran.out
    data = json.loads(run("inspect", tmp_path / "small", "--json").out)
    assert data["kind"] == "safetensors"
    assert data["total"]["quantized"] == 2
    kernel = next(each for each in data["arrays"] if each["name"] == "layers.0.kernel")
    assert kernel == {
        "name": "layers.0.kernel",
        "shape": [64, 128],
        "dtype": "float32",
        "format": "int4",
        "bytes": 5120,
    }


def test_inspect_shortens_metadata(run, tmp_path: Path):
    save(tmp_path / "a", {"x": np.ones(3)}, metadata={"who": "me", "text": "long\n" * 100})
    ran = run("inspect", tmp_path / "a")
    assert "who: me" in ran.out
    assert max(map(len, ran.out.splitlines()[1:])) < 80


def test_inspect_can_be_trusted_with_any_name(run, tmp_path: Path):
    save(tmp_path / "a", {"x\x1b[2J\n": np.ones(3)}, metadata={"\x1b[0m": "\x07"})
    ran = run("inspect", tmp_path / "a")
    assert ran.out.replace("\n", "").isprintable()
    assert json.loads(run("inspect", tmp_path / "a", "--json").out)["arrays"][0]["name"] == "x\x1b[2J\n"


def test_inspect_of_gguf(run, tmp_path: Path):
    metadata = {"general.architecture": "x", "list": [1, 2], "yes": True, "half": 0.5}
    save_gguf(tmp_path / "a.gguf", {"w": np.ones((2, 32), np.float32)}, type="Q8_0", metadata=metadata)
    data = json.loads(run("inspect", tmp_path / "a.gguf", "--json").out)
    assert data["kind"] == "gguf"
    assert data["arrays"][0]["format"] == "Q8_0"
    assert data["metadata"] == {**metadata, "general.quantization_version": 2}


# --- compare ---


def test_compare(run, dense: Path, tmp_path: Path):
    run("quantize", dense, tmp_path / "small", "--format", "int8")
    ran = run("compare", dense, tmp_path / "small", "--sort", "error", "--report", tmp_path / "page.html")
    assert ran.code == 0
    assert "layers." in ran.out.splitlines()[2]  # the largest error first
    assert (tmp_path / "page.html").exists()
    data = json.loads(run("compare", dense, tmp_path / "small", "--json").out)
    errors = {leaf["path"]: leaf["error"] for leaf in data["leaves"]}
    assert errors["embed.embedding"] == 0
    assert 0 < errors["layers.0.kernel"] < 0.02
    assert data["only_before"] == data["only_after"] == []


def test_compare_of_dense_arrays(run, tmp_path: Path):
    x = jax.random.normal(jax.random.key(0), (8, 8))
    save(tmp_path / "a", {"x": x, "y": x, "old": x})
    save(tmp_path / "b", {"x": x.astype(jnp.bfloat16), "y": x, "new": x})
    ran = run("compare", tmp_path / "a", tmp_path / "b", "--json")
    leaves = {leaf["path"]: leaf for leaf in json.loads(ran.out)["leaves"]}
    assert 0 < leaves["x"]["error"] <= 2**-8
    assert leaves["y"]["error"] == 0
    text = run("compare", tmp_path / "a", tmp_path / "b").out
    assert re.search(r"^x .*0\.\d\d%", text, re.MULTILINE)
    assert f"only in {tmp_path / 'a'}: old" in text
    assert f"only in {tmp_path / 'b'}: new" in text


# --- convert ---


@pytest.mark.parametrize(
    ("name", "options", "kind", "file", "form"),
    [
        ("b.gguf", ["--type", "Q8_0"], "gguf", "b.gguf", "Q8_0"),
        ("b.gguf", ["--type", "F16"], "gguf", "b.gguf", "float16"),
        ("b.safetensors", [], "safetensors", "b.safetensors", "nf4"),
        ("b", [], "safetensors", "b/model.safetensors", "nf4"),
        ("b", ["--to", "gguf", "--type", "Q4_0"], "gguf", "b/model.gguf", "Q4_0"),
        ("b", ["--to", "bitsandbytes"], "bitsandbytes", "b/model.safetensors", "nf4"),
    ],
)
def test_convert(name: str, options: list[str], kind: str, file: str, form: str, run, tmp_path: Path):
    from eformer.ops.quantization import quantize

    weight = jax.random.normal(jax.random.key(0), (4, 64))
    save(tmp_path / "a", {"layer": {"weight": quantize(weight, dtype="nf4")}})
    (tmp_path / "a" / "config.json").write_text("{}")
    data = json.loads(run("convert", tmp_path / "a", tmp_path / name, *options, "--json").out)
    assert data["kind"] == kind
    assert data["formats"] == {form: 1}
    assert data["path"] == str(tmp_path / file)
    assert (tmp_path / name / "config.json").exists() == ("." not in name)  # from folder to folder
    with open_checkpoint(data["path"]) as checkpoint:
        assert checkpoint.kind == kind
        assert checkpoint.info("layer.weight").shape == (4, 64)


def test_convert_says_what_does_not_run(run, tmp_path: Path):
    save(tmp_path / "a", {"w": np.ones((4, 32), np.float32)})
    (tmp_path / "a" / "config.json").write_text('{"model_type": "llama"}')
    ran = run("convert", tmp_path / "a", tmp_path / "a.gguf")
    assert (ran.code, ran.err.count("Warning")) == (0, 0)
    assert "it has no metadata of a model, such as `general.architecture`" in ran.out
    run("convert", tmp_path / "a", tmp_path / "b.safetensors")
    assert "general.architecture" not in run("inspect", tmp_path / "b.safetensors").out


# --- bench ---


def test_bench(run):
    options = ["--format", "int8", "--format", "nf4,block_size=32", "--repeats", "1", "--ring", "50kB"]
    ran = run("bench", "1x64x48", "3x32x32", *options, "--json")
    problems = json.loads(ran.out)["problems"]
    assert [(each["m"], each["k"], each["n"]) for each in problems] == [(1, 64, 48), (3, 32, 32)]
    results = problems[0]["results"]
    assert [each["format"] for each in results] == ["float32", "int8", "nf4,block_size=32"]
    assert [each["nbytes"] for each in results] == [4 * 64 * 48, 64 * 48 + 4 * 48, 64 * 48 // 2 + 4 * 2 * 48]
    assert results[0]["speed"] == 1
    assert all(each["seconds"] > 0 for each in results)
    assert "measuring 1x64x48" in ran.err


def test_bench_as_text(run, monkeypatch: pytest.MonkeyPatch):
    measured: list[Any] = []
    rows = [bench.Timed("float32", 0.004, 4096), bench.Timed("int8", 0.001, 1152)]
    monkeypatch.setattr(bench, "measure", lambda *args: measured.append(args) or rows)
    lines = run("bench").out.splitlines()
    ((problem, contenders, repeats, ring),) = measured
    assert (str(problem), repeats, ring) == ("1x4096x4096", 20, 800 * 10**6)
    assert [each.format for each in contenders] == ["int8", "int4", "ternary"]
    assert "x (1, 4096) @ weight (4096, 4096)" in lines
    assert lines[-1].split() == ["int8", "1.15", "kB", "1.000", "4.00x"]


def test_the_least_time_of_all_turns_counts(monkeypatch: pytest.MonkeyPatch):
    from eformer._src.cli.commands import bench

    ticks = iter([0, 5, 10, 14, 20, 23, 30, 36])  # a: 5, 3; b: 4, 6
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
    calls: list[str] = []
    found: dict[str, Any] = bench.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert found == {"a": 3, "b": 4}
    assert calls == ["a", "b"] * 3
