"""Saves that run at once to a name that is free, or from one source."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from eformer.checkpoint import load, open_checkpoint, quantize_checkpoint, save
from eformer.model import Rule

from .writers import content_of, dense

MOST = [None, 4000, 8000]  # bytes of a shard: one file, four shards, two


def value_in(folder: Path) -> int:
    with open_checkpoint(folder) as checkpoint:
        return content_of(checkpoint)


def leftovers(folder: Path) -> set[str]:
    """Files that the checkpoint in a folder does not consist of."""
    with open_checkpoint(folder) as checkpoint:
        used = {checkpoint.entry(name).tensors[0].file.path for name in checkpoint}
        return {path.name for path in set(folder.iterdir()) - used - {checkpoint.path}}


def test_one_of_many_gets_a_free_name(tmp_path: Path):
    """Without `overwrite` the others are told that they came too late."""
    barrier = threading.Barrier(4)

    def attempt(value: int) -> int:
        barrier.wait()
        try:
            save(tmp_path / "model", dense(value), max_shard_bytes=MOST[value % 3])
        except FileExistsError:
            return -1
        return value

    with ThreadPoolExecutor(4) as pool:
        winners = sorted(pool.map(attempt, range(4)))
    assert winners[:3] == [-1, -1, -1]
    assert value_in(tmp_path / "model") == winners[3]
    assert leftovers(tmp_path / "model") == set()


def test_quantizing_twice_at_once(tmp_path: Path):
    source = save(tmp_path / "dense", {f"w{i}": jnp.full((8, 64), i + 1.0) for i in range(4)})
    (tmp_path / "dense" / "config.json").write_text("{}")
    with ThreadPoolExecutor(2) as pool:
        started = [
            pool.submit(
                quantize_checkpoint,
                source.parent,
                tmp_path / "small",
                [Rule("w", form)],
                overwrite=True,
                max_shard_bytes=600,
            )
            for form in ("nf4", "int8")
        ]
        assert [each.result() for each in started] == [tmp_path / "small" / "model.safetensors.index.json"] * 2
    with open_checkpoint(tmp_path / "small") as checkpoint:
        assert {checkpoint.info(name).format for name in checkpoint} in ({"nf4"}, {"int8"})
    assert leftovers(tmp_path / "small") == {"config.json"}
    for name, w in load(tmp_path / "small").items():
        np.testing.assert_allclose(w.materialize(), int(name[1:]) + 1.0, rtol=1e-6)
