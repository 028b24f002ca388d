"""A save leaves the old checkpoint or the new one, wherever it ends, and removes what others left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer._src.atomic_files import files, leftovers, locks, saving, seal
from eformer._src.checkpoint.saving import folder as saving_folder
from eformer._src.checkpoint.saving import save as save_module
from eformer.checkpoint import CheckpointError, load, open_checkpoint, save, save_gguf

WATCHED = {module.__file__ for module in (files, leftovers, locks, saving, seal, saving_folder, save_module)}
TOKEN = "0123456789abcdef"


def swept(path: Path) -> None:
    leftovers.sweep([path, saving_folder.index_path(path)], lambda: saving_folder.named_by_indexes(path.parent))


def filled(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(40, value, np.float32) for name in "abc"}


def values(folder: Path) -> set[float]:
    with open_checkpoint(folder) as checkpoint:
        return {float(v) for name in checkpoint for v in checkpoint.entry(name).host()}


def at_each_line(call: Callable[[], object], look: Callable[[], object]) -> list[Any]:
    """What `look` gives before each line of the code that writes, which is what a kill there would leave."""
    found = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            found.append(look())
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("old", [None, 200], ids=["of one file", "of shards"])
@pytest.mark.parametrize("new", [None, 200], ids=["one file", "shards"])
def test_a_whole_checkpoint_is_there_at_any_line(
    old: int | None, new: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "model"
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and a kill loses nothing that was written
    save(folder, filled(0), max_shard_bytes=old)
    found = at_each_line(
        lambda: save(folder, filled(1), max_shard_bytes=new, overwrite=True),
        lambda: (values(folder), {path.name for path in folder.glob(".*")}),
    )
    counts = [sum(v == {value} for v, _ in found) for value in (0.0, 1.0)]
    assert sum(counts) == len(found)
    assert counts[0] > 40  # lines that ran before the new file was in place
    assert counts[1] > 1  # and some after
    others = set[str]().union(*(names for _, names in found))
    assert {name.rpartition(".")[2] for name in others} == {"tmp", "saving", "lock"}
    assert all(name.startswith(".model.safetensors.") for name in others)
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json"}  # in the end there is none
    assert load(folder)["a"].shape == (40,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one that came in a destructor
@pytest.mark.parametrize("most", [None, 200], ids=["one file", "shards"])
def test_an_interrupt_at_any_line_leaves_a_whole_checkpoint(
    most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C raises wherever the main thread is, also between two lines that belong together."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    save(tmp_path, filled(0), max_shard_bytes=200)
    lines = len(at_each_line(lambda: save(tmp_path, filled(0), max_shard_bytes=most, overwrite=True), lambda: None))
    before, found = 0.0, set()
    for line in [*range(0, lines - 80, 7), *range(lines - 80, lines)]:  # at the end all takes its place
        turns = iter(range(line, -1, -1))

        def interrupt(turns: Iterator[int] = turns) -> None:
            if next(turns, 1) == 0:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            at_each_line(lambda: save(tmp_path, filled(line), max_shard_bytes=most, overwrite=True), interrupt)  # noqa: B023
        (value,) = values(tmp_path)
        assert value in (before, line)
        before = value
        found.add(value == line)
    assert found == {True, False}
    save(tmp_path, filled(-1), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


KILLED = """
import os, signal, sys
import numpy as np
from eformer.checkpoint import save
def progress(name, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
tree = {name: np.full(40, 1.0, np.float32) for name in "abc"}
save(sys.argv[1], tree, overwrite=True, progress=progress, max_shard_bytes=200)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_kill_leaves_the_old_checkpoint_and_the_next_save_nothing_else(tmp_path: Path):
    save(tmp_path, filled(0))
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert values(tmp_path) == {0.0}
    assert sorted(path.suffix for path in tmp_path.glob(".*")) == [".saving", ".tmp", ".tmp", ".tmp"]
    save(tmp_path, filled(2), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def left_by_a_killed_save(folder: Path, **journal: Any) -> list[str]:
    """The names of what a save of `model.safetensors` may have left."""
    names = [f".model.safetensors.{TOKEN}.{end}" for end in ("saving", "1.tmp", "2.tmp")]
    names += [f"model-{TOKEN[:8]}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        (folder / name).write_text("left")
    (folder / names[0]).write_text(json.dumps(journal) if journal else "")
    return names


def test_what_a_killed_save_left_is_removed(tmp_path: Path):
    names = left_by_a_killed_save(tmp_path)
    save(tmp_path, filled(0))
    assert not any((tmp_path / name).exists() for name in names)


def test_what_a_save_made_just_before_it_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It made more files after its journal was seen, and before the journal was free."""
    journal, *others = left_by_a_killed_save(tmp_path)
    for name in others:
        (tmp_path / name).unlink()
    hold = locks.OpenFile.hold

    def killed_now(file: locks.OpenFile) -> bool | None:
        if file.path.name == journal:
            for name in others:
                (tmp_path / name).touch()
        return hold(file)

    monkeypatch.setattr(locks.OpenFile, "hold", killed_now)
    swept(tmp_path / "model.safetensors")
    assert not list(tmp_path.glob(".*"))


def test_what_a_living_save_has_stays(tmp_path: Path):
    names = left_by_a_killed_save(tmp_path)
    journal = locks.OpenFile(tmp_path / names[0])
    assert journal.hold()
    save(tmp_path, filled(0))
    assert all((tmp_path / name).exists() for name in names)
    journal.close()
    save(tmp_path, filled(0), overwrite=True)
    assert not any((tmp_path / name).exists() for name in names)


NOT_OURS = [
    f".model.safetensors.{TOKEN}.tmp",  # not as we name them
    f".model.safetensors.{TOKEN}.x.tmp",
    f".other.safetensors.{TOKEN}.saving",  # of another path
    f".other.safetensors.{TOKEN}.1.tmp",
    ".model.safetensors.fedcba9876543210.1.tmp",  # without a journal
    "model-fedcba98-00001-of-00002.safetensors",
    "model-00001-of-00002.safetensors",
    "other.safetensors",
    "notes.txt",
]


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_others_left_stays(name: str, tmp_path: Path):
    left_by_a_killed_save(tmp_path, replaces=[name, "../" + name, 3])
    (tmp_path / f".model.safetensors.{TOKEN}.0.tmp").touch()  # so it did not come to the end, and replaced nothing
    (tmp_path / name).write_text("mine")
    save(tmp_path, filled(0), max_shard_bytes=200, overwrite=True)
    assert (tmp_path / name).read_text() == "mine"


def test_shards_that_an_index_names_stay(tmp_path: Path):
    """A save that was killed when all was in place, but for its journal."""
    index = save(tmp_path, filled(0), max_shard_bytes=200)
    shards = sorted(tmp_path.glob("model-*"))
    token = shards[0].name.split("-")[1] + "0" * 8
    (tmp_path / f".model.safetensors.{token}.saving").write_text(
        json.dumps({"replaces": [each.name for each in shards]})
    )
    save(tmp_path / "other.safetensors", filled(1))
    assert load(index)["a"][0] == 0
    swept(tmp_path / "model.safetensors")
    assert load(index)["a"][0] == 0
    assert not list(tmp_path.glob(".*"))


def test_old_shards_are_removed_later_if_the_end_came_before(tmp_path: Path):
    save(tmp_path, filled(0))
    for name in ("model-aaaaaaaa-00001-of-00001.safetensors", "model-of-mine.txt"):
        (tmp_path / name).touch()
    journal = {"replaces": ["model-aaaaaaaa-00001-of-00001.safetensors", "model-of-mine.txt", "model.safetensors"]}
    (tmp_path / f".model.safetensors.{TOKEN}.saving").write_text(json.dumps(journal))
    swept(tmp_path / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-of-mine.txt", "model.safetensors"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"replaces": 3}', '{"replaces": [[1]]}', "[" * 100_000], ids=repr)
def test_a_journal_may_say_anything(text: str, tmp_path: Path):
    (tmp_path / f".model.safetensors.{TOKEN}.saving").write_text(text)
    save(tmp_path, filled(0))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_lone_shard_is_no_checkpoint(tmp_path: Path):
    index = save(tmp_path, filled(0), max_shard_bytes=200)
    first, *others = sorted(tmp_path.glob("model-*"))
    for path in (index, *others):
        path.unlink()
    with pytest.raises(CheckpointError, match="is one of several, and no index says which: name it to open it alone"):
        load(tmp_path)
    assert load(first, flat=True).keys() == {"a"}


def test_a_lone_part_of_gguf_is_no_checkpoint(tmp_path: Path):
    path = save_gguf(tmp_path / "model-00001-of-00003.gguf", filled(0))
    with pytest.raises(CheckpointError, match="is one of several"):
        load(tmp_path)
    assert load(path).keys() == set("abc")
    save_gguf(tmp_path / "whole-00001-of-00001.gguf", filled(0))
    assert load(tmp_path).keys() == set("abc")


def test_data_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(_name_of(handle)), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append(f"rename to {paths[1].suffix}"), replace(*paths)))
    monkeypatch.setattr(os, "unlink", lambda path, **_: (calls.append("remove"), unlink(path)))
    save(tmp_path, {"x": np.ones(3), "y": np.ones(3)}, max_shard_bytes=8)
    files, names = ["sync a file"] * 4, ["rename to .safetensors"] * 2  # two shards, the index, the journal
    assert [call for call in calls if call != "remove"][:10] == [
        *files, *names, "sync a folder", "rename to .json", "sync a folder", "sync a folder",
    ]  # fmt: skip


def _name_of(handle: int) -> str:
    return "sync a folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "sync a file"


def test_a_new_folder_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[Path] = []
    sync = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda folder: (synced.append(folder), sync(folder)))
    save(tmp_path / "a" / "b", filled(0))
    assert synced == [tmp_path, tmp_path / "a"]


def test_a_name_that_no_index_may_have_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="can't be split"):
        save(tmp_path / "a" / "x\ny.safetensors", filled(0), max_shard_bytes=200)
    assert not list(tmp_path.iterdir())


def test_other_files_have_no_index(tmp_path: Path):
    """What is named like the index of a page or a GGUF file, and what it names, is not ours to remove."""
    save(tmp_path / "a.safetensors", filled(0))
    (tmp_path / "model.gguf.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    save_gguf(tmp_path, filled(0))
    save_gguf(tmp_path, filled(0), overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "model.gguf", "model.gguf.index.json"}


def test_a_pipe_named_as_an_index_is_not_waited_for(tmp_path: Path):
    save(tmp_path / "a.safetensors", filled(0), max_shard_bytes=200)
    os.mkfifo(tmp_path / "pipe.safetensors.index.json")
    assert load(save(tmp_path / "a.safetensors", filled(1), overwrite=True))["a"][0] == 1


def test_what_comes_in_between_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A save whose turn does not come says so, and leaves nothing."""
    monkeypatch.setattr(locks, "SECONDS", 0.02)
    with (
        locks.locked(tmp_path / ".model.safetensors.lock"),
        pytest.raises(TimeoutError, match="another process has held"),
    ):
        save(tmp_path, filled(0))
    assert not list(tmp_path.iterdir())


def test_a_file_that_goes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another save may remove the old file, or its index, between two calls."""
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    save(tmp_path, filled(0))
    assert values(tmp_path) == {0.0}


def test_a_lock_that_another_user_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It may be read, but neither written nor removed."""
    lock = tmp_path / ".model.safetensors.lock"
    lock.touch()
    opened, unlink = os.open, os.unlink

    def open_(path: Any, flags: int, *mode: int) -> int:
        if path == lock and flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, "not yours")
        return opened(path, flags, *mode)

    def unlink_(path: Any) -> None:
        if path == lock:
            raise PermissionError(errno.EACCES, "not yours")
        unlink(path)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "unlink", unlink_)
    save(tmp_path, filled(0), max_shard_bytes=200)
    save(tmp_path, filled(1), overwrite=True)
    assert values(tmp_path) == {1.0}
    assert {path.name for path in tmp_path.iterdir()} == {lock.name, "model.safetensors"}


# --- full disks ---


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def by_columns(shape: tuple[int, int] = (512, 2048)) -> jax.Array:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(x, NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec(None, "x")))


@pytest.mark.parametrize("most", [None, 2 * 10**6], ids=["one file", "shards"])
@pytest.mark.parametrize("write", [save, save_gguf], ids=lambda f: f.__name__)
def test_a_full_disk_is_an_error_that_leaves_nothing(most: int | None, write: Any, tmp_path: Path):
    with small_disk(tmp_path / "disk", 5 * 10**6) as disk:
        write(disk, filled(0))
        before = {path.name for path in disk.iterdir()}
        how = {"max_shard_bytes": most} if write is save else {}
        with pytest.raises(OSError, match=r"No space left on device: \d+ bytes are needed .* are missing") as caught:
            write(disk, {"a": by_columns(), "b": by_columns()}, overwrite=True, **how)
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value.filename).startswith(str(disk / "model."))
        assert {path.name for path in disk.iterdir()} == before
        assert load(disk)["a"][0] == 0


def test_a_full_disk_that_was_not_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the system can't reserve room, writing raises."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "no")))
    with small_disk(tmp_path / "disk", 10**6) as disk:
        with pytest.raises(OSError, match="No space left on device"):
            save(disk / "new" / "a.safetensors", {"a": by_columns()})
        assert not list(disk.iterdir())


def test_a_limit_on_the_size_of_files(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    x = by_columns()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: \d+ bytes are needed") as caught:
            save(tmp_path / "new", {"a": x})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / "new" / "model.safetensors")
    assert not list(tmp_path.iterdir())


SPLITS = [(None, "x"), ("x", None), ("y", "x"), ("x", "y", "z"), (None, "y", "x"), (None, None, "x"), ("z", None, "y")]


@pytest.mark.parametrize("spec", SPLITS, ids=str)
def test_parts_go_where_they_belong(spec: tuple[str | None, ...], tmp_path: Path):
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"))
    x = np.arange(np.prod((4, 6, 8)[: len(spec)]), dtype=np.int16).reshape((4, 6, 8)[: len(spec)])
    found = load(save(tmp_path, {"x": jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))}))["x"]
    assert np.array_equal(found, x)


# --- files that change while they are read ---


def test_a_copy_does_not_mind_what_becomes_of_the_file(tmp_path: Path):
    path = save(tmp_path, filled(3), max_shard_bytes=200)
    with open_checkpoint(path, copy=True) as checkpoint:
        for shard in tmp_path.glob("model-*"):
            os.truncate(shard, 0)
        assert float(checkpoint["c"][-1]) == 3


def test_a_file_that_is_cut_while_it_is_copied_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(tmp_path / "a.safetensors", filled(3))
    fstat = os.fstat

    def cut(handle: int) -> os.stat_result:
        found = fstat(handle)
        os.truncate(path, 100)
        return found

    monkeypatch.setattr(os, "fstat", cut)
    with pytest.raises(CheckpointError, match=r"it had \d+ bytes, and ended after 100"):
        load(path, copy=True)


def test_a_reader_finds_the_checkpoint_that_took_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The index was read, and then it and its shards were replaced."""
    from eformer._src.checkpoint import open as open_module

    save(tmp_path, filled(0), max_shard_bytes=200)
    read, turns = open_module.read_index, iter([1])

    def replaced(path: Path) -> Any:
        found = read(path)
        for value in turns:
            save(tmp_path, filled(value), max_shard_bytes=200, overwrite=True)
        return found

    monkeypatch.setattr(open_module, "read_index", replaced)
    assert values(tmp_path) == {1.0}


def test_a_save_that_fails_leaves_what_others_put_beside_it(tmp_path: Path):
    """The folder that it made goes too, unless there is something of theirs in it."""

    def stop(name: str, done: int, total: int) -> None:
        (tmp_path / "a" / "mine").touch()
        raise KeyboardInterrupt(name, done, total)

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "a" / "b", filled(0), progress=stop)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]
