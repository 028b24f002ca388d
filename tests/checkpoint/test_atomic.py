"""A process that is killed while it saves leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eformer.checkpoint import save

# Forks for each point, before JAX has any thread. The child kills itself at the n-th line that runs in the modules that
# write; the parent then reads what is there. A kill does not lose what was written, so nothing is brought to the disk.
SCRIPT = """
import os, shutil, signal, sys, warnings
import numpy as np
warnings.simplefilter("ignore")  # JAX's, on forking
from eformer.checkpoint import _atomic, _write, open_checkpoint, save

folder, shard, every = sys.argv[1], int(sys.argv[2]) or None, int(sys.argv[3])
watched = {_atomic.__file__, _write.__file__}
os.fsync = lambda handle: None

def tree(value):
    return {name: np.full(40, value, np.float32) for name in "abc"}

def save_until(point):
    count = 0
    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename not in watched:
            return None
        count += event == "line"
        if count > point:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    save(folder, tree(1), max_shard_bytes=shard, overwrite=True)
    sys.settrace(None)

def values():
    with open_checkpoint(folder) as checkpoint:
        return {float(v) for name in checkpoint for v in checkpoint.entry(name).host()}

old = new = 0
for point in range(0, 1_000_000, every):
    if shard:  # shards of the last kill, which no index names
        shutil.rmtree(folder)
    save(folder, tree(0), max_shard_bytes=shard, overwrite=True)
    child = os.fork()
    if not child:
        save_until(point)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = values()
    assert found in ({0.0}, {1.0}), (point, found)
    old, new = old + (found == {0.0}), new + (found == {1.0})
    if not os.WIFSIGNALED(status):
        assert found == {1.0}
        break
print(old, new)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")
@pytest.mark.parametrize(("shard", "every"), [(0, 2), (200, 5)], ids=["one file", "shards"])
def test_a_kill_at_any_line_leaves_a_whole_checkpoint(shard: int, every: int, tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(shard), str(every)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    old, new = map(int, done.stdout.split())
    assert old > 40  # so many kills came before the new one was in place
    assert new > 1  # and some after
    left = {path.name for path in tmp_path.glob("*.tmp")} | {path.name for path in tmp_path.glob(".*")}
    assert left or shard  # of kills within the writing of a file; shards begin in an empty folder each time
    assert all(name.startswith(".model") and name.endswith(".tmp") for name in left)


def test_data_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("sync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    save(tmp_path, {"x": np.ones(3)})
    assert calls == ["sync", "rename", "sync"]  # the file, its name, the folder
