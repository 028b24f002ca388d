"""No command replaces what it reads, whatever the target is called."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eformer.checkpoint import save, save_adapter
from eformer.model import add_lora, quantize_model

COMMANDS = {
    "quantize": lambda source, target: ["quantize", source, target, "--force"],
    "convert": lambda source, target: ["convert", source, target, "--force"],
    "lora": lambda source, target: ["lora", "merge", source, "adapter", target, "--force"],
}
WAYS = {
    "its name": "a/m.safetensors",
    "an absolute name": "{cwd}/a/m.safetensors",
    "through a folder that is there": "b/../a/m.safetensors",
    "through a folder that is not there": "a/new/../m.safetensors",
    "through folders that are not there": "a/new/deep/../../m.safetensors",
    "a link to its folder": "to-a/m.safetensors",
    "through a link and a folder that is not there": "to-a/new/../m.safetensors",
    "a link to it": "link.safetensors",
    "a link to a link": "link-to-link.safetensors",
    "another name of the file": "hard.safetensors",
}
FOLDERS = {"its folder": "model", "through a folder that is not there": "model/new/..", "a link": "to-model"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tree = {"layer": {"weight": jnp.ones((64, 64))}}
    for path in ("a/m.safetensors", "model"):
        save(path, tree)
    save("shards", {**tree, "other": jnp.ones(64)}, max_shard_bytes=20_000)
    save_adapter("adapter", add_lora(quantize_model(tree, format="int8"), rank=2, key=jax.random.key(0)))
    Path("b").mkdir()
    for link, to in {"to-a": "a", "to-model": "model", "link.safetensors": "a/m.safetensors"}.items():
        Path(link).symlink_to(to)
    Path("link-to-link.safetensors").symlink_to("link.safetensors")
    os.link("a/m.safetensors", "hard.safetensors")
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check_refused(run: Callable[..., Any], files: Path, command: str, source: str, target: str) -> None:
    before = contents(files)
    ran = run(*COMMANDS[command](source, target.format(cwd=files)))
    assert ran.code == 1
    assert "write to another place" in ran.err or " is a link to " in ran.err
    assert contents(files) == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_is_not_written_over_itself(command: str, way: str, files: Path, run: Callable[..., Any]):
    check_refused(run, files, command, "a/m.safetensors", WAYS[way])


@pytest.mark.parametrize("way", FOLDERS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_is_not_written_over_itself(command: str, way: str, files: Path, run: Callable[..., Any]):
    check_refused(run, files, command, "model", FOLDERS[way])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_is_not_written_over_its_file(command: str, files: Path, run: Callable[..., Any]):
    check_refused(run, files, command, "link.safetensors", "a/m.safetensors")


@pytest.mark.parametrize("command", COMMANDS)
def test_shards_are_not_removed_while_they_are_read(command: str, files: Path, run: Callable[..., Any]):
    check_refused(run, files, command, "shards", "shards")


def test_an_adapter_is_not_replaced_by_the_model(files: Path, run: Callable[..., Any]):
    check_refused(run, files, "lora", "model", "adapter/adapter_model.safetensors")
