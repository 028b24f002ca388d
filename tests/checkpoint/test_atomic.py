"""A process that is killed while it saves leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eformer.checkpoint import _atomic, _write, open_checkpoint, save


def filled(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(40, value, np.float32) for name in "abc"}


def values(folder: Path) -> set[float]:
    with open_checkpoint(folder) as checkpoint:
        return {float(v) for name in checkpoint for v in checkpoint.entry(name).host()}


@pytest.mark.parametrize("shard", [None, 200], ids=["one file", "shards"])
def test_a_whole_checkpoint_is_there_at_any_line(shard: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a reader finds before each line of the writers is what a kill there would leave."""
    folder, watched, found = tmp_path / "model", {_atomic.__file__, _write.__file__}, []
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and a kill loses nothing that was written
    save(folder, filled(0), max_shard_bytes=shard)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename in watched:
            if event == "line":
                found.append((values(folder), {path.name for path in folder.glob(".*")}))
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save(folder, filled(1), max_shard_bytes=shard, overwrite=True)
    finally:
        sys.settrace(before)
    old, new = sum(v == {0.0} for v, _ in found), sum(v == {1.0} for v, _ in found)
    assert old + new == len(found)
    assert old > 40  # so many lines ran before the new one was in place
    assert new > 1  # and some after
    others = set[str]().union(*(names for _, names in found))
    assert others
    assert all(name.startswith(".model") and name.endswith(".tmp") for name in others)
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json"}  # in the end there is none


KILLED = """
import os, signal, sys
import numpy as np
from eformer.checkpoint import save
def progress(name, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
save(sys.argv[1], {name: np.full(40, 1.0, np.float32) for name in "abc"}, overwrite=True, progress=progress)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_kill_leaves_the_old_checkpoint(tmp_path: Path):
    save(tmp_path, filled(0))
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert values(tmp_path) == {0.0}
    assert [path.suffix for path in tmp_path.glob(".*")] == [".tmp"]


def test_data_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("sync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    save(tmp_path, {"x": np.ones(3)})
    assert calls == ["sync", "rename", "sync"]  # the file, its name, the folder
