"""Saves that run at once, or are killed: what is there is the checkpoint of one of them, whole, or the one before.

`make fuzz` does hundreds of rounds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer.checkpoint import load, open_checkpoint, quantize_checkpoint, save
from eformer.model import Rule

from . import writer

MOST = [None, 4000, 8000]  # bytes of a shard: one file, four shards, two
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def values(folder: Path) -> set[float]:
    """Of all elements of all arrays, which must be those that were saved."""
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint) == writer.NAMES
        return {float(v) for name in checkpoint for v in checkpoint.entry(name).host()}


def one_value(folder: Path) -> float:
    (value,) = values(folder)
    return value


def leftovers(folder: Path) -> set[str]:
    """Files that the checkpoint in a folder does not consist of."""
    with open_checkpoint(folder) as checkpoint:
        used = {checkpoint.entry(name).tensors[0].file.path for name in checkpoint}
        return {path.name for path in set(folder.iterdir()) - used - {checkpoint.path}}


class Writers:
    """Processes that save."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "checkpoint.writer"]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )

    def ask(self, **what: Any) -> int:
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps(what), file=self._server.stdin)
        return int(self._server.stdout.readline())

    def start(self, folder: Path, value: float, most: int | None, **more: Any) -> int:
        return self.ask(folder=str(folder), value=value, most=most, **more)

    def wait(self, process: int) -> int:
        """The exit code, or minus the signal that killed it."""
        return os.waitstatus_to_exitcode(self.ask(wait=process))

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        assert self._server.wait() == 0
        assert self._server.stdout
        self._server.stdout.close()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    made = Writers()
    yield made
    made.close()


def killed_after(seconds: float, writers: Writers, folder: Path, value: float, most: int | None) -> int:
    process = writers.start(folder, value, most)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    return writers.wait(process)


def seconds_of(writers: Writers, folder: Path) -> float:
    assert writers.wait(writers.start(folder, 0, None)) == 0  # from then on all is imported
    start = time.monotonic()
    for most in MOST:
        assert writers.wait(writers.start(folder, 0, most)) == 0
    return (time.monotonic() - start) / len(MOST)


@pytest.mark.parametrize("moment", ["time", "line"])
def test_kills(moment: str, writers: Writers, tmp_path: Path, pytestconfig: pytest.Config):
    """After each there is the old checkpoint or the new one; the next save removes what was left."""
    random_ = random.Random(moment)
    save(tmp_path, writer.tree(0), max_shard_bytes=4000)
    longest = 1.2 * seconds_of(writers, tmp_path)
    before, value, killed, most_left = 0.0, 0, 0, 0
    while killed < pytestconfig.getoption("kills") // 2:
        value += 1
        most = random_.choice(MOST)
        if moment == "time":
            code = killed_after(random_.uniform(0, longest), writers, tmp_path, value, most)
        else:
            code = writers.wait(writers.start(tmp_path, value, most, line=random_.randrange(1, 700)))
        assert code in (0, -signal.SIGKILL)
        now = one_value(tmp_path)
        assert now == value or (code and now == before)
        before, killed, most_left = now, killed + bool(code), max(most_left, len(leftovers(tmp_path)))
    assert 0 < most_left <= 5 + 4 + 4 + 2  # of one save: temporary files, its shards, or the old ones; journal and lock
    save(tmp_path, writer.tree(-1), max_shard_bytes=4000, overwrite=True)
    assert one_value(tmp_path) == -1
    assert leftovers(tmp_path) == set()


def watched(folder: Path, all_ended: Callable[[], bool]) -> set[float]:
    """What readers find, as long as writers write."""
    found = {one_value(folder)}
    while not all_ended():
        found.add(one_value(folder))
    return found


def test_races_of_processes(writers: Writers, tmp_path: Path, pytestconfig: pytest.Config):
    """Each save succeeds unless it is killed, readers always find a whole checkpoint, and one remains."""
    random_ = random.Random(0)
    save(tmp_path, writer.tree(0))
    for turn in range(1, 1 + pytestconfig.getoption("races") // 2):
        started = {10 * turn + i: random_.choice(MOST) for i in range(random_.choice([2, 3, 4]))}
        processes = {writers.start(tmp_path, value, most): value for value, most in started.items()}
        victim = random_.choice([None, *processes])
        found = set(values_while(0.01, tmp_path))
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
        codes = {processes[process]: writers.wait(process) for process in processes}
        found.add(one_value(tmp_path))
        assert all(code == 0 or process == victim for process, code in zip(processes, codes.values(), strict=True))
        assert one_value(tmp_path) in codes
        assert found <= codes.keys() | {0.0} | {10 * (turn - 1) + i for i in range(4)}
    save(tmp_path, writer.tree(-1), overwrite=True)
    assert leftovers(tmp_path) == set()


def values_while(seconds: float, folder: Path) -> Iterator[float]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield one_value(folder)


def test_races_of_threads(tmp_path: Path, pytestconfig: pytest.Config):
    save(tmp_path, writer.tree(0), max_shard_bytes=4000)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(1, 1 + pytestconfig.getoption("races") // 2):
            started = [
                pool.submit(
                    save, tmp_path, writer.tree(10 * turn + i), max_shard_bytes=MOST[(turn + i) % 3], overwrite=True
                )
                for i in range(3)
            ]
            watched(tmp_path, lambda: all(each.done() for each in started))  # noqa: B023  # ended in this turn
            assert all(each.result().parent == tmp_path for each in started)
            assert one_value(tmp_path) in range(10 * turn, 10 * turn + 3)
            assert leftovers(tmp_path) == set()


def test_one_of_many_gets_a_free_name(tmp_path: Path):
    """Without `overwrite` the others are told that they came too late."""
    barrier = threading.Barrier(4)

    def attempt(value: int) -> int:
        barrier.wait()
        try:
            save(tmp_path / "model", writer.tree(value), max_shard_bytes=MOST[value % 3])
        except FileExistsError:
            return -1
        return value

    with ThreadPoolExecutor(4) as pool:
        winners = sorted(pool.map(attempt, range(4)))
    assert winners[:3] == [-1, -1, -1]
    assert values(tmp_path / "model") == {winners[3]}
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
