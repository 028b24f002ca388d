"""What goes wrong is said in one line; nothing is overwritten, and nothing is left half-written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eformer
from eformer._src.cli.commands import compare as compare_command
from eformer._src.cli.commands import quantize as quantize_command
from eformer._src.cli.interrupt import deferred
from eformer._src.cli.progress import lines, showing
from eformer.checkpoint import load, save
from eformer.cli import main

COMMANDS = ["quantize", "inspect", "compare", "convert", "lora", "bench", "demo", "completion"]


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["quantise"], "invalid choice: 'quantise'"),
        (["quantize", "a"], "the following arguments are required: OUT"),
        (["quantize", "a", "b", "--format", "nf5"], "unknown format 'nf5'; there are 'fp8', 'fp8_e5m2', 'int2', "),
        (["quantize", "a", "b", "--format", "nf4,block=3"], "has no option 'block'; it has 'block_size'"),
        (["quantize", "a", "b", "--embeddings", "q5"], "unknown format 'q5'; there are 'fp8'"),
        (["quantize", "a", "b", "--rule", "kernel"], "'kernel' is no rule: write PATTERN=FORMAT"),
        (["quantize", "a", "b", "--rule", "(=nf4"], "the pattern '(' is no regular expression"),
        (["quantize", "a", "b", "--rule", "w=nf5"], "unknown format 'nf5'"),
        (["quantize", "a", "b", "--shard", "big"], "'big' is no size: write 5GB, 500MB"),
        (["quantize", "a", "b.bin"], "'b.bin' must end in .safetensors or .gguf, or be a folder"),
        (["quantize", "a", "b.saftensors"], "did you mean 'b.safetensors'?"),
        (["convert", "a", "b.ggfu"], "did you mean 'b.gguf'?"),
        (["convert", "a", "b", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["quantize", "a", "b", "--report", "a/model.safetensors", "--force"], "must end in .html or .htm"),
        (["compare", "a", "b", "--report", "a/model.safetensors", "--force"], "must end in .html or .htm"),
        (["bench", "4096x4096"], "'4096x4096' is no problem: write MxKxN"),
        (["bench", "1x16x64"], "K >= 32"),
        (["bench", "--repeats", "0"], "'0' must be a whole number of at least 1"),
    ],
    ids=" ".join,
)
def test_wrong_usage(argv: list[str], match: str, run):
    ran = run(*argv)
    assert ran.code == 2
    assert match in ran.err
    assert ran.err.count("\n") == 1
    assert "--help` shows how" in ran.err
    assert ran.out == ""


FAILURES = {
    "no file": (["inspect", "nowhere"], "there is no 'nowhere'; give a .safetensors or .gguf file"),
    "no such shard": (["inspect", "lost.index.json"], "its shard 'lost.safetensors' can't be read"),
    "a file for a folder": (["quantize", "a", "page.html/new"], "page.html/new: Not a directory"),
    "an integer": (["quantize", "a", "new", "--rule", "steps=nf4"], "no floating point array is left for steps=nf4"),
    "no checkpoint": (["inspect", "text.safetensors"], "text.safetensors: "),
    "an empty folder": (["inspect", "empty"], "the folder has no .safetensors file"),
    "nothing matches": (
        ["quantize", "a", "new", "--rule", "kernal=nf4"],
        "no floating point array is left for kernal=nf4; names look",
    ),
    "does not fit": (["quantize", "a", "new", "--rule", "bias=nf4,axis=-2"], "'bias', float32[8], can't be quantized"),
    "to GGUF": (["quantize", "a", "new.gguf"], "`eformer convert` makes GGUF"),
    "embeddings of nothing": (["quantize", "a", "new", "--format", "keep", "--embeddings", "int8"], "write a --rule"),
    "over itself": (["quantize", "a", "a", "--force"], "write to another place"),
    "over a part": (["quantize", "sharded", "sharded/1.safetensors", "--force"], "write to another place"),
    "a part over the whole": (["quantize", "sharded/1.safetensors", "sharded", "--force"], "write to another place"),
    "converted over itself": (["convert", "a", "a/model.safetensors", "--force"], "write to another place"),
    "page over a model": (["compare", "a", "a", "--report", "link.html", "--force"], "link.html exists and is no page"),
    "page over another file": (["quantize", "a", "new", "--report", "page.html", "--force"], "is no page"),
    "page over a folder": (["compare", "a", "a", "--report", "folder.html", "--force"], "folder.html is no file"),
    "exists": (["quantize", "a", "b"], "b exists; --force replaces it"),
    "file exists": (["convert", "a", "text.safetensors"], "text.safetensors exists; --force replaces it"),
    "page exists": (["compare", "a", "b", "--report", "page.html"], "page.html exists; --force replaces it"),
    "another shape": (["compare", "a", "b"], "'kernel' was [64, 64] and is [8, 8]: that is another array"),
    "nothing in common": (["compare", "a", "c"], "it has no array that a has: 'other' here, 'bias', 'kernel' there"),
    "two endings": (["convert", "a", "new.gguf", "--to", "safetensors"], "give OUT the other ending"),
    "a type for safetensors": (["convert", "a", "new", "--type", "Q8_0"], "is for GGUF"),
    "unknown type": (["convert", "a", "new.gguf", "--type", "Q9"], "Q9"),
    "bench of nothing": (["bench", "1x32x32", "--format", "keep"], "name a format to compare it with"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save("a", {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(8), "steps": jnp.arange(3)})
    save("b", {"kernel": jnp.ones((8, 8))})
    save("c", {"other": jnp.ones((8, 8))})
    Path("empty").mkdir()
    Path("text.safetensors").write_text("this is no checkpoint")
    Path("lost.index.json").write_text('{"weight_map": {"x": "lost.safetensors"}}')
    Path("page.html").write_text("mine")
    Path("link.html").hardlink_to("a/model.safetensors")
    Path("folder.html").mkdir()
    Path("folder.html", "file").touch()
    for name in "12":
        save(f"sharded/{name}.safetensors", {f"kernel{name}": jnp.ones((64, 64))})
    index = {"weight_map": {f"kernel{name}": f"{name}.safetensors" for name in "12"}}
    Path("sharded", "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize(("argv", "match"), FAILURES.values(), ids=FAILURES)
def test_failures(argv: list[str], match: str, run, folder: Path):
    before = contents(folder)
    ran = run(*argv)
    assert ran.code == 1
    assert match in ran.err
    assert len([line for line in ran.err.splitlines() if line.startswith("eformer ")]) == 1
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert contents(folder) == before


def test_traceback_is_there_for_who_asks(folder: Path):
    del folder
    with pytest.raises(FileNotFoundError):
        main(["inspect", "nowhere", "--traceback"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"examples:\n  eformer {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "files", "needs_jax"),
    [(["--help"], set(), False), (["quantise"], set(), False), (["inspect", "--help"], {"inspect"}, True)],
)
def test_only_the_command_that_is_asked_for_is_imported(argv: list[str], files: set[str], needs_jax: bool):
    code = """if True:
        import contextlib, sys
        from eformer.cli import main
        with contextlib.suppress(SystemExit):
            main(sys.argv[1:])
        print(*sys.modules, file=sys.stderr)
    """
    ran = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    modules = set(ran.stderr.split())
    room = "eformer._src.cli.commands."
    assert {name.removeprefix(room) for name in modules if name.startswith(room)} == files
    assert ("jax" in modules) == needs_jax


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"eformer {eformer.__version__}\n"


def test_a_command_that_fails_leaves_what_others_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run):
    """Its folder too, if there is something of theirs in it."""
    save(tmp_path / "a", {"x": np.ones(3, np.float32)})

    def fails(*_: object, **__: object) -> None:
        save(tmp_path / "b" / "c", {"theirs": np.ones(3, np.float32)})
        raise OSError("no")

    monkeypatch.setattr(quantize_command, "quantize_checkpoint", fails)
    assert run("quantize", tmp_path / "a", tmp_path / "b" / "c").code == 1
    assert load(tmp_path / "b" / "c").keys() == {"theirs"}


# --- signals and pipes, in a process of their own ---


def start(*argv: object, **how: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eformer", *map(str, argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    return subprocess.Popen(command, **pipes)  # pyright: ignore[reportArgumentType, reportCallIssue]


def wait_for(process: subprocess.Popen[str], pattern: str, folder: Path) -> None:
    while not list(folder.rglob(pattern)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


INTERRUPTED = ("eformer quantize", "eformer")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_an_interrupt_leaves_nothing(tmp_path: Path):
    # Each shape is compiled for itself, which takes some seconds in all: time to interrupt.
    save(tmp_path / "dense", {f"kernel{i}": np.ones((64 + i, 64), np.float32) for i in range(40)})
    before = contents(tmp_path)
    process = start("quantize", tmp_path / "dense", tmp_path / "small")
    wait_for(process, "*.tmp", tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    # The command says so itself, or, where it was too busy to hear of it, the thread that ends the process.
    assert err.splitlines()[-1] in [f"{name}: interrupted; nothing is left half-written" for name in INTERRUPTED]
    assert out == ""
    assert contents(tmp_path) == before


ENDLESS = {
    "an import": """
import pathlib, time
pathlib.Path("begun").touch()
time.sleep(600)
""",
    "a call that hears nothing": """
import ctypes, pathlib, sys
from eformer._src.checkpoint.saving import save
from eformer.cli import main
def write(*args):
    pathlib.Path("begun").touch()
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
save._write_piece = write
sys.exit(main())
""",
}


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("what", ENDLESS)
def test_an_interrupt_ends_what_would_not_end(what: str, tmp_path: Path):
    """Nothing is left, also if the main thread never gets to know of it."""
    save(tmp_path / "dense", {"kernel": np.ones((64, 64), np.float32)})
    (tmp_path / "modules").mkdir()
    if what == "an import":
        (tmp_path / "modules" / "jax.py").write_text(ENDLESS[what])
        command, path = ["-m", "eformer"], [tmp_path / "modules", Path(eformer.__file__).parents[1]]
    else:
        command, path = ["-c", ENDLESS[what]], sys.path
    before = contents(tmp_path)
    process = subprocess.Popen(
        [sys.executable, *command, "quantize", "dense", "new/small"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    wait_for(process, "begun", tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    # The command says it if the signal came just before the call.
    assert re.fullmatch(r"eformer( quantize)?: interrupted; nothing is left half-written\n", err)
    (tmp_path / "begun").unlink()
    assert contents(tmp_path) == before


def test_an_interrupt_that_got_lost_is_heard_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run):
    save(tmp_path / "a", {"x": np.ones(3, np.float32)})
    compared = compare_command.compare_checkpoints

    def losing(*args: object) -> object:
        with contextlib.suppress(KeyboardInterrupt):  # as destructors do
            signal.raise_signal(signal.SIGINT)
        return compared(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(compare_command, "compare_checkpoints", losing)
    ran = run("compare", tmp_path / "a", tmp_path / "a")
    assert ran == (130, "", "eformer compare: interrupted; nothing is left half-written\n")


def test_an_interrupt_waits_for_the_end_of_an_import():
    done = []

    def imports() -> None:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("imported")

    with pytest.raises(KeyboardInterrupt):
        imports()
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path):
    save(tmp_path, {f"x{i}": np.ones(2, np.float32) for i in range(5000)})
    process = start("inspect", tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


# --- progress ---


def test_progress_in_plain_lines():
    stream, times = io.StringIO(), iter([0.0, 0.5, 1.5, 2.0, 2.6, 4.0])
    show = lines("copying", stream, lambda: next(times))
    for done in (1, 2, 3, 1300, 2000):
        show("x", done, 2000)
    assert stream.getvalue().splitlines() == [
        "copying   0%  2 B of 2.00 kB",  # too early to say how long it takes
        "copying  65%  1.30 kB of 2.00 kB, 500 B/s, 1 s left",
        "copying 100%  2.00 kB of 2.00 kB, 500 B/s, 4.0 s",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal():
    pytest.importorskip("rich")
    stream = Terminal()
    with showing("copying", stream) as show:
        show("x", 1000, 2000)
    assert "copying" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()  # it moves the cursor, as no plain line does


def test_progress_without_rich(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = Terminal()
    with showing("copying", stream) as show:
        show("x", 2000, 2000)
    assert stream.getvalue().startswith("copying 100%")
