"""The command line in this process, and small checkpoints for it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.checkpoint import save
from eformer.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`run("inspect", path)`: the exit code, and what was printed."""

    def call(*argv: object) -> Ran:
        code = main([str(each) for each in argv])
        return Ran(code, *capsys.readouterr())

    return call


def tree() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": {"embedding": jax.random.normal(keys[0], (96, 64))},
        "layers": [{"kernel": jax.random.normal(key, (64, 128)), "bias": jnp.zeros(128)} for key in keys[1:]],
        "steps": np.arange(3, dtype=np.int32),
    }


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder with a checkpoint, its configuration and its tokenizer."""
    folder = tmp_path / "dense"
    save(folder, tree())
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _interrupts_are_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which makes programs ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
