"""Every writer commits once: kills, races, full disks and read-only disks, for each of them.

What is found is the content of one save, whole, or the one that was there before. `make fuzz` does 200 rounds of each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from . import writer
from .writers import CONTENTS, WRITERS, Writer, check_beside, make_sources

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
LAST = 80  # lines, in which the last files take their names
MANY = 40  # kills: some come before the new content is in place, and some after
each_writer = pytest.mark.parametrize("name", WRITERS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    return folder


class Processes:
    """Processes that write."""

    def __init__(self, sources: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "checkpoint.writer"]
        self._sources = sources
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )

    def ask(self, **what: Any) -> int:
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps(what), file=self._server.stdin)
        return int(self._server.stdout.readline())

    def start(self, name: str, folder: Path, content: int, **more: Any) -> int:
        return self.ask(writer=name, folder=str(folder), content=content, sources=str(self._sources), **more)

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
def processes(sources: Path) -> Iterator[Processes]:
    made = Processes(sources)
    assert made.wait(made.start("save", sources / "written", 0)) == 0  # from then on all is imported
    yield made
    made.close()


def trace(look: Callable[[], object], write: Callable[[], object]) -> None:
    """Call `look` before each line of the code that writes, while `write` runs."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in writer.WATCHED:
            return None
        if event == "line":
            look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        write()
    finally:
        sys.settrace(before)


def lines_of(write: Callable[[], object]) -> int:
    """The number of lines that run of the code that writes."""
    passed = itertools.count()
    trace(lambda: next(passed), write)
    return next(passed)


def hidden(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(".*")}


def found_in(each: Writer, folder: Path) -> int:
    """The content that is there, with all files beside it, where nobody writes."""
    content = each.read(folder)
    check_beside(folder, content)
    return content


def check_whole(each: Writer, folder: Path, content: int) -> None:
    """After a save that nobody disturbed: its content, nothing of others, and all files that belong to it."""
    assert found_in(each, folder) == content
    assert hidden(folder) == set()
    assert {path.name for path in folder.iterdir()} >= set(each.beside)
    assert not any("eformer_save" in path.read_text() for path in folder.glob("*.json"))


@each_writer
def test_kills(name: str, processes: Processes, sources: Path, tmp_path: Path, pytestconfig: pytest.Config):
    """After each there is the old content or the new one; the next save removes what was left."""
    each, random_ = WRITERS[name], random.Random(name)
    folder = tmp_path / "written"
    each.write(folder, 0, sources)
    lines = max([lines_of(lambda: each.write(folder, content, sources)) for content in (1, 0)])  # noqa: B023
    start = time.monotonic()
    assert processes.wait(processes.start(name, folder, 0)) == 0
    longest = 1.1 * (time.monotonic() - start)
    before, kills, outcomes = 0, 0, set[bool]()
    while kills < pytestconfig.getoption("kills"):
        content = 1 - before
        if kills % 4 == 3:
            process = processes.start(name, folder, content)
            time.sleep(random_.uniform(0, longest))
            os.kill(process, signal.SIGKILL)
        else:
            first = (1, lines - 2 * LAST, lines - LAST)[kills % 4]
            process = processes.start(name, folder, content, line=random_.randrange(max(1, first), lines))
        code = processes.wait(process)
        assert code in (0, -signal.SIGKILL)
        now = found_in(each, folder)
        assert now == content or (code and now == before)
        outcomes.add(now == content)
        kills, before = kills + bool(code), now
    assert outcomes == {False, True} or kills < MANY
    each.write(folder, 1 - before, sources)
    check_whole(each, folder, 1 - before)


@each_writer
def test_races_of_processes(name: str, processes: Processes, sources: Path, tmp_path: Path, pytestconfig: Any):
    """Each save succeeds unless it is killed, readers always find one whole content, and one remains."""
    each, random_ = WRITERS[name], random.Random(name)
    each.write(tmp_path, 0, sources)
    for turn in range(pytestconfig.getoption("races")):
        started = [processes.start(name, tmp_path, (turn + i) % 2) for i in range(random_.choice([2, 3, 4]))]
        victim = random_.choice([None, *started])
        found = {each.read(tmp_path) for _ in range(3)}
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
        assert all(processes.wait(process) == 0 or process == victim for process in started)
        assert found | {found_in(each, tmp_path)} <= set(CONTENTS)
    each.write(tmp_path, 1, sources)
    check_whole(each, tmp_path, 1)


@each_writer
def test_races_of_threads(name: str, sources: Path, tmp_path: Path, pytestconfig: pytest.Config):
    each = WRITERS[name]
    each.write(tmp_path, 0, sources)
    with ThreadPoolExecutor(3) as pool:
        for turn in range(pytestconfig.getoption("races")):
            started = [pool.submit(each.write, tmp_path, (turn + i) % 2, sources) for i in range(3)]
            found = {each.read(tmp_path) for _ in range(3)}
            codes = {done.result() for done in started}
            assert not each.command or codes == {0}
            assert found <= set(CONTENTS)
            check_whole(each, tmp_path, each.read(tmp_path))


# --- disks ---


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[Callable[[str], object]]:
    """A disk of its own, and a function that mounts it again with other options."""

    def mount(options: str) -> int:
        return subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
        ).returncode

    folder.mkdir()
    if mount(f"size={size}"):
        pytest.skip("only root can mount a disk")
    try:
        yield lambda options: mount(f"remount,{options}")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


PAGE = 4096
ROOM = 64  # pages: more than any writer needs


def attempt(each: Writer, folder: Path, sources: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What is said if content 1 can't be written; nothing if it can."""
    capfd.readouterr()
    try:
        code = each.write(folder, 1, sources)
    except OSError as error:
        return str(error)
    return capfd.readouterr().err if each.command and code else ""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@each_writer
def test_full_disks(name: str, sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """With ever more room, a save fails and leaves all as it was, until it succeeds."""
    each = WRITERS[name]
    with disk(tmp_path / "disk", 2 * ROOM * PAGE):
        folder, filler = tmp_path / "disk" / "written", tmp_path / "disk" / "filler"
        each.write(folder, 0, sources)
        before, room = contents(folder), 0
        filler.write_bytes(b"x" * free(tmp_path / "disk", filler))
        while said := attempt(each, folder, sources, capfd):
            assert "No space left on device" in said
            assert " 0 bytes are needed" not in said
            assert contents(folder) == before
            assert each.read(folder) == 0
            room += 1
            assert room < ROOM
            os.truncate(filler, free(tmp_path / "disk", filler) - room * PAGE)
        assert room > 0
        check_whole(each, folder, 1)


def free(disk: Path, but: Path) -> int:
    """Bytes on the disk that are free, or taken by one file."""
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize + (but.stat().st_size if but.exists() else 0)


@each_writer
def test_read_only_disks(name: str, sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    each = WRITERS[name]
    with disk(tmp_path / "disk", 2 * ROOM * PAGE) as remount:
        folder = tmp_path / "disk" / "written"
        each.write(folder, 0, sources)
        before = contents(folder)
        remount("ro")
        said = attempt(each, folder, sources, capfd)
        assert "Read-only file system" in said
        assert str(folder) in said
        assert contents(folder) == before
        assert each.read(folder) == 0


# --- what is replaced ---


def said_by(each: Writer, folder: Path, sources: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Why content 1 can't be written."""
    if each.command:
        capfd.readouterr()
        assert each.write(folder, 1, sources) == 1
        return capfd.readouterr().err
    with pytest.raises(FileExistsError) as caught:
        each.write(folder, 1, sources)
    return str(caught.value)


@each_writer
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444], ids=oct)
def test_permissions_stay(name: str, mode: int, sources: Path, tmp_path: Path):
    """Also where the files have other names now, and never more than that while they are written."""
    each = WRITERS[name]
    each.write(tmp_path, 0, sources)
    for path in tmp_path.iterdir():
        path.chmod(mode)
    seen = set[int]()
    trace(lambda: seen.update(modes(tmp_path)), lambda: each.write(tmp_path, 1, sources))
    check_whole(each, tmp_path, 1)
    assert set(modes(tmp_path)) == {mode}
    assert not any(found & ~(mode | 0o600) for found in seen)


def modes(folder: Path) -> list[int]:
    """The permissions of what is in a folder, but for empty files: locks and journals."""
    found = [path.lstat() for path in folder.iterdir() if path.suffix not in (".lock", ".saving")]
    return [each.st_mode & 0o777 for each in found]


@each_writer
def test_new_files_are_as_the_system_makes_them(name: str, sources: Path, tmp_path: Path):
    WRITERS[name].write(tmp_path, 0, sources)
    (tmp_path / "mine").touch()
    assert set(modes(tmp_path)) == {(tmp_path / "mine").stat().st_mode & 0o777}


@each_writer
def test_links_stay(name: str, sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    each, folder = WRITERS[name], tmp_path / "links"
    each.write(tmp_path / "files", 0, sources)
    folder.mkdir()
    for path in (tmp_path / "files").iterdir():
        (folder / path.name).symlink_to(path)
    before = contents(folder)
    assert f"is a link to {tmp_path / 'files'}" in said_by(each, folder, sources, capfd)
    assert contents(folder) == before
    assert all(path.is_symlink() for path in folder.iterdir())
