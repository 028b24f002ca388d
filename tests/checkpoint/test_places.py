"""What is opened is a plain file, and what is written has an ending that is known."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.checkpoint.file import MappedFile, check_plain
from eformer.checkpoint import CheckpointError, convert, load, open_checkpoint, save, save_bitsandbytes, save_gguf
from eformer.ops.quantization import quantize

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """To open a pipe is to wait for whoever writes to it."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def a_link(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


SPECIAL: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "a pipe"),
    "socket": (a_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "link to a pipe": (a_link, "a pipe"),
    "folder": (Path.mkdir, "a folder"),
}
every_kind = pytest.mark.parametrize(("make", "kind"), SPECIAL.values(), ids=SPECIAL)


@every_kind
@pytest.mark.parametrize("name", ["x.safetensors", "x.gguf", "x.safetensors.index.json"])
def test_only_plain_files_are_opened(make: Callable[[Path], Any], kind: str, name: str, tmp_path: Path):
    path = tmp_path / name
    make(path)
    expected = "the folder has no" if kind == "a folder" else f"{name}: it is {kind}, and must be a plain file"
    with pytest.raises(CheckpointError, match=expected):
        load(path)


@every_kind
def test_only_plain_files_are_shards(make: Callable[[Path], Any], kind: str, tmp_path: Path):
    make(tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=f"it is {kind}, and must be a plain file|is a link to another folder"):
        load(index)


def test_a_configuration_that_leads_to_itself_is_refused(tmp_path: Path):
    q = quantize(jnp.ones((4, 64)), "int4", axis=-1, symmetric=True)
    save(tmp_path / "model", {"m": {"weight": q}}, kind="compressed-tensors")
    config = tmp_path / "model" / "config.json"
    config.unlink()
    config.symlink_to(config)
    with pytest.raises(CheckpointError, match=r"config.json: it can't be read: "):
        load(tmp_path / "model")


def test_the_suffix_says_what_is_written(tmp_path: Path):
    tree = {"m": {"weight": np.ones((2, 32), np.float32)}}
    written = [save(tmp_path / "a.gguf", tree, type="Q8_0"), save(tmp_path / "b", tree, kind="gguf", type="Q8_0")]
    assert [path.name for path in written] == ["a.gguf", "model.gguf"]
    assert written[0].read_bytes() == written[1].read_bytes()
    back = convert(written[0], tmp_path / "c.safetensors")
    assert convert(back, tmp_path / "d.gguf").read_bytes() == written[0].read_bytes()
    assert convert(written[0], tmp_path / "e").name == "model.safetensors"


def test_a_file_that_becomes_a_pipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.safetensors"
    os.mkfifo(path)
    plain, real = save(tmp_path / "a", {"x": np.ones(1)}).stat(), os.stat
    monkeypatch.setattr(os, "stat", lambda of, **how: real(of, **how) if isinstance(of, int) else plain)
    with pytest.raises(CheckpointError, match="it is a pipe"):
        MappedFile(path)


def test_what_is_not_there_is_plain_enough(tmp_path: Path):
    check_plain(tmp_path / "new")


# --- endings ---

TREE = {"x": np.ones(2, np.float32)}
WRITERS = {"save": save, "save_bitsandbytes": save_bitsandbytes, "save_gguf": save_gguf}
WRONG = {
    "a typo": ("save", "out.saftensors", "did you mean '.*out.safetensors'"),
    "a letter more": ("save_bitsandbytes", "out.safetensorss", "did you mean '.*out.safetensors'"),
    "capitals": ("save", "out.SAFETENSORS", "did you mean '.*out.safetensors'"),
    "another of ours": (
        "save_bitsandbytes",
        "out.gguf",
        r"must end in .safetensors, .*: .gguf is the ending of",
    ),
    "ours for GGUF": ("save_gguf", "out.safetensors", r"must end in .gguf, or be a folder"),
    "a typo of GGUF": ("save_gguf", "out.ggfu", "did you mean '.*out.gguf'"),
    "pickle": ("save", "out.pt", r"\.pt files are not written here; with a slash at the end it is a folder"),
    "a word": ("save", "out.model", r"\.model files are not written here"),
}


@pytest.mark.parametrize(("writer", "name", "match"), WRONG.values(), ids=WRONG)
def test_an_unknown_ending_is_refused(writer: str, name: str, match: str, tmp_path: Path):
    with pytest.raises(ValueError, match=match):
        WRITERS[writer](tmp_path / name, TREE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["llama-3.1-8b", "Qwen2.5", "small.v2", "out.model/", "plain"])
def test_folders_have_dots_too(name: str, tmp_path: Path):
    path = save(f"{tmp_path}/{name}", TREE)
    assert path == tmp_path / name / "model.safetensors"


def test_a_folder_that_is_there_may_end_in_anything(tmp_path: Path):
    (tmp_path / "a.pt").mkdir()
    assert save(tmp_path / "a.pt", TREE).parent == tmp_path / "a.pt"


def test_converting_minds_the_ending(tmp_path: Path):
    save(tmp_path / "a", TREE)
    with pytest.raises(ValueError, match=r"did you mean '.*b.gguf'"):
        convert(tmp_path / "a", tmp_path / "b.gguff", "gguf")


def test_what_is_missing_is_named_with_its_neighbour(tmp_path: Path):
    save(tmp_path / "model.safetensors", TREE)
    with pytest.raises(FileNotFoundError, match=r"did you mean '.*model.safetensors'") as caught:
        open_checkpoint(tmp_path / "model.saftensors")
    assert caught.value.filename == str(tmp_path / "model.saftensors")


@pytest.mark.parametrize("name", ["é" * 120 + ".safetensors", "x" * 243 + ".safetensors", "\U0001f600" * 50], ids=len)
def test_long_names(name: str, tmp_path: Path):
    assert load(save(tmp_path / name, {"a": np.zeros(3)}))["a"][0] == 0


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_only_files_are_replaced(what: str, tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.mkdir() if what == "folder" else os.mkfifo(path)
    with pytest.raises(FileExistsError, match="only files are replaced"):
        save(path, {"a": np.zeros(3)}, overwrite=True)
