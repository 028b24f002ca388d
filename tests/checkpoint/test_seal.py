"""Weights and the configuration they are read by are replaced as one, for our readers and for others."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.atomic_files import seal
from eformer.checkpoint import CheckpointError, convert, load, open_checkpoint, save

from .files import safetensors_file
from .test_atomic import at_each_line
from .writers import SHAPES, STEP, quantized, weights


def as_others_write_it(folder: Path) -> None:
    """Take out of the weights in a folder what they say themselves of their configuration."""
    file = folder / "model.safetensors"
    tensors = load_tensors(file)
    file.write_bytes(safetensors_file(tensors, {"format": "mlx"}))


def load_tensors(file: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(file, copy=True) as checkpoint:
        return {t.name: np.array(t.view()) for name in checkpoint for t in checkpoint.entry(name).tensors}


def content_in(folder: Path) -> int:
    """Which of the two contents our reader finds, whose tensors have the same shapes."""
    w = np.asarray(load(folder, flat=True)["m.weight"].materialize())
    np.testing.assert_allclose(w, weights(content := SHAPES.index(w.shape)), atol=STEP)
    return content


def said_in(folder: Path) -> Any:
    """What another program finds in config.json; None for a seal, with which it can't do anything."""
    text = json.loads((folder / "config.json").read_text())
    return None if text.keys() == {"eformer_save"} else text["quantization"]["bits"]


def old(folder: Path) -> Path:
    """A folder that MLX wrote."""
    save(folder, quantized(0), kind="mlx")
    change(folder, lambda config: {"model_type": "x", **config})
    as_others_write_it(folder)
    return folder


def change(folder: Path, to: Callable[[Any], Any]) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(to(json.loads(config.read_text()))))


def test_ours_and_others_read_one_content_at_any_line(tmp_path: Path):
    folder, new = old(tmp_path / "model"), quantized(1)
    found = at_each_line(
        lambda: save(folder, new, kind="mlx", overwrite=True),
        lambda: (content_in(folder), (folder / "model.safetensors").stat().st_ino, said_in(folder)),
    )
    first, last = found[0][1], found[-1][1]
    assert {(content, said) for content, file, said in found if file == first} == {(0, 4), (0, None)}
    assert {(content, said) for content, file, said in found if file == last} == {(1, None), (1, 8)}


@pytest.mark.parametrize("beside", [False, True], ids=["weights alone", "another configuration"])
def test_the_next_save_takes_the_seal_away(beside: bool, tmp_path: Path):
    """Wherever the one before was killed: the old configuration is there, or the new one."""
    folder, new, states, copies = old(tmp_path / "model"), quantized(1), [None], list[Path]()

    def copy() -> None:
        state = sorted((path.name, path.stat().st_ino) for path in folder.iterdir())
        if state != states[-1]:
            states.append(state)
            copies.append(shutil.copytree(folder, tmp_path / str(len(copies))))

    at_each_line(lambda: save(folder, new, kind="mlx", overwrite=True), copy)
    assert None in map(said_in, copies)
    for each in copies:
        before = content_in(each)
        save(each, {"w": np.ones(3)} if not beside else new, kind="mlx" if beside else "safetensors", overwrite=True)
        assert not list(each.glob(".*"))
        assert said_in(each) == (8 if beside else (4, 8)[before])
        assert json.loads((each / "config.json").read_text())["model_type"] == "x"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that came in a destructor
def test_an_interrupt_at_any_line_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What had begun to take its place is settled at once, one way or the other."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and a kill loses nothing that was written
    folder, contents = tmp_path / "model", [quantized(0), quantized(1)]
    save(folder, contents[0], kind="mlx")
    lines = len(at_each_line(lambda: save(folder, contents[1], kind="mlx", overwrite=True), lambda: None))
    content, found = 1, set[bool]()
    for line in range(lines - 250, lines, 3):
        turns = iter(range(line, -1, -1))

        def interrupt(turns: Iterator[int] = turns) -> None:
            if next(turns, 1) == 0:
                raise KeyboardInterrupt

        new = contents[1 - content]
        with contextlib.suppress(KeyboardInterrupt):
            at_each_line(lambda: save(folder, new, kind="mlx", overwrite=True), interrupt)  # noqa: B023
        now = content_in(folder)
        assert said_in(folder) in ((4, 8)[now], None)
        found.add(now == content)
        content = now
    assert found == {False, True}
    save(folder, contents[0], kind="mlx", overwrite=True)
    assert said_in(folder) == 4
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}


SEALS = ["", "{", "3}", '{"token": 3}}', '{"token": "x", "before": 3}}', "[" * 100_000]


@pytest.mark.parametrize("text", SEALS)
def test_a_seal_may_say_anything(text: str, tmp_path: Path):
    """It is a configuration that can't be read."""
    folder = old(tmp_path / "model")
    (folder / "config.json").write_bytes(seal.BEGINNING + text.encode())
    with pytest.raises(CheckpointError):
        load(folder)
    save(folder, quantized(1), kind="safetensors", overwrite=True)
    assert content_in(folder) == 1


CHANGES = {
    "of other weights": lambda config: {**config, "quantization": {"group_size": 32, "bits": 8, "mode": "affine"}},
    "changed": lambda config: {**config, "quantization": {**config["quantization"], "mode": "other"}},
    "without it": lambda _: {"model_type": "x"},
    "no object": lambda _: [],
}


@pytest.mark.parametrize("to", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("most", [None, 500], ids=["a file", "shards"])
def test_a_configuration_of_other_weights_is_refused(to: Any, most: int | None, tmp_path: Path):
    save(tmp_path, quantized(0), kind="mlx", max_shard_bytes=most)
    change(tmp_path, to)
    with pytest.raises(CheckpointError, match=r"`quantization` is not what it was when model\.safetensors.* was"):
        load(tmp_path)


def test_what_else_a_configuration_says_is_not_ours(tmp_path: Path):
    save(tmp_path, quantized(0), kind="mlx")
    change(tmp_path, lambda config: {**config, "model_type": "llama"})
    assert content_in(tmp_path) == 0
    (tmp_path / "config.json").unlink()
    assert content_in(tmp_path) == 0


# --- other checkpoints in the folder ---


@pytest.mark.parametrize("kind", ["mlx", "gguf"])
def test_the_configuration_of_another_checkpoint_stays(kind: str, tmp_path: Path):
    """Converting a folder brings a config.json along, by which what is there would be read as something else."""
    save(tmp_path / "there", quantized(0), kind="mlx")
    (tmp_path / "there" / "model.safetensors").rename(tmp_path / "there" / "first.safetensors")
    save(tmp_path / "other", quantized(1), kind="mlx")
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    with pytest.raises(ValueError, match=r"first\.safetensors is read by the config\.json beside it"):
        convert(tmp_path / "other", tmp_path / "there", kind, type="F32" if kind == "gguf" else None, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before


@pytest.mark.parametrize("given", ["a method", "tensors"])
def test_so_does_that_of_one_that_is_refused(given: str, tmp_path: Path):
    """Its configuration is all that says how others read it."""
    tensors = {"m.weight": np.ones((4, 8), np.float32), "n.codes": np.ones((4, 8), np.int16)}
    tensors |= {"n.codebooks": np.ones(4, np.float32)} if given == "tensors" else {}
    (tmp_path / "first.safetensors").write_bytes(safetensors_file(tensors))
    method = "gptq" if given == "tensors" else "aqlm"
    text = json.dumps({"quantization_config": {"quant_method": method, "bits": 4}})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"first\.safetensors is read by the config\.json beside it"):
        save(tmp_path, quantized(0), kind="mlx", overwrite=True)
    assert (tmp_path / "config.json").read_text() == text


def test_two_checkpoints_may_share_a_configuration(tmp_path: Path):
    save(tmp_path, quantized(0), kind="mlx")
    (tmp_path / "model.safetensors").rename(tmp_path / "first.safetensors")
    save(tmp_path, quantized(0), kind="mlx", overwrite=True)
    for name in ("first", "model"):
        assert "m.weight" in load(tmp_path / f"{name}.safetensors", flat=True)


def test_a_dense_checkpoint_needs_no_configuration(tmp_path: Path):
    save(tmp_path / "dense.safetensors", {"w": jnp.ones(3)})
    save(tmp_path, quantized(0), kind="mlx")
    assert content_in(tmp_path) == 0


UNKNOWN = {"quantization_config": {"quant_method": "unheard-of"}}


@pytest.mark.parametrize("most", [None, 600], ids=["file", "shards"])
def test_what_a_configuration_adds_is_refused_by_name(most: int | None, tmp_path: Path):
    """Weights that say how they are quantized do not hide that a part of the model is quantized in another way."""
    save(tmp_path, quantized(0), kind="mlx", max_shard_bytes=most)
    change(tmp_path, lambda config: {**config, "text_config": UNKNOWN})
    with pytest.raises(CheckpointError, match=r"config.json says.*'unheard-of', a method that is unknown"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, raw=True).kind == "safetensors"


def test_what_a_seal_holds_is_refused_by_name(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_file({"w": np.ones((2, 2), np.float32)}))
    config = tmp_path / "config.json"
    config.write_bytes(seal.sealed("0", json.dumps(UNKNOWN).encode()))
    with pytest.raises(CheckpointError, match=r"config.json says.*'unheard-of', a method that is unknown"):
        open_checkpoint(tmp_path)
    config.write_bytes(seal.sealed("0", None))
    assert list(open_checkpoint(tmp_path)) == ["w"]


def test_a_seal_is_not_copied_along(tmp_path: Path):
    said = {"model_type": "x", "quantization_config": {"quant_method": "gptq"}}
    (source := tmp_path / "source").mkdir()
    (source / "model.safetensors").write_bytes(safetensors_file({"w": np.ones((2, 2), np.float32)}))
    (source / "config.json").write_bytes(seal.sealed("0", json.dumps(said).encode()))
    convert(source, tmp_path / "copy", "safetensors")
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == {"model_type": "x"}
    (source / "config.json").write_bytes(seal.sealed("0", None))
    convert(source, tmp_path / "none", "safetensors")
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["model.safetensors"]
