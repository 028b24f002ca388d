"""Names, metadata and paths may hold anything; what is printed of them moves no cursor and forges no line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eformer._src.cli.answer import Answer
from eformer._src.cli.progress import stage
from eformer._src.text import escaped, printable, table
from eformer.checkpoint import CheckpointError, load, open_checkpoint, save, save_gguf
from eformer.model import quantize_model, report

BAD = "a\x1b[2J\r\nforged: 1 array\u202egnp.exe\u2028\x07\x9b31m"
SHOWN = r"a\x1b[2J\r\nforged: 1 array\u202egnp.exe\u2028\x07\x9b31m"
READABLE = ["kernel", "größe/重み.核", "שלום", "x² ∈ 🙂", "naïve café", "'quoted' \\ \"too\""]


@pytest.mark.parametrize("text", READABLE)
def test_ordinary_text_stays(text: str):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (BAD, SHOWN),
        ("\udc80", r"\udc80"),
        ("a\u00a0b\u3000c", "a b c"),
        ("\u200fx\ue000\U000e0001", r"\u200fx\ue000\U000e0001"),
    ],
    ids=ascii,
)
def test_what_is_not_is_shown_as_an_escape(text: str, shown: str):
    assert printable(text) == shown


def assert_plain(text: str) -> None:
    assert text.replace("\n", "").isprintable()
    assert not [line for line in text.splitlines() if line.startswith("forged")]


def weights(**more: Any) -> dict[str, Any]:
    return {BAD: np.linspace(-1, 1, 64 * 128, dtype=np.float32).reshape(64, 128), **more}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a bad name; in it two checkpoints of bad names, that differ in what they have."""
    place = tmp_path / "b\x1b[2J\nforged"
    place.mkdir()
    monkeypatch.chdir(place)
    save("a", weights(**{f"only{BAD}": np.ones(3, np.float32)}), metadata={BAD: BAD})
    save("b", weights())
    save_gguf("c.gguf", {"x\x1b[2J": np.ones(2, np.float32)}, metadata={BAD: [BAD], "list": [1]})
    return place


COMMANDS = {
    "inspect": ["inspect", "a"],
    "inspect GGUF": ["inspect", "c.gguf"],
    "quantize": ["quantize", "a", "new"],
    "quantize to a bad name": ["quantize", "a", f"new{BAD}", "--report", f"page{BAD}.html"],
    "compare": ["compare", "a", "b"],
    "compare the other way": ["compare", "b", "a"],
    "convert": ["convert", "a", f"new{BAD}.gguf"],
    "nothing in common": ["compare", "a", "c.gguf"],
    "no file": ["inspect", f"nowhere{BAD}"],
    "no format": ["quantize", "a", "new", "--format", BAD],
    "a rule for nothing": ["quantize", "a", "new", "--rule", "zzz=nf4"],
    "an ending": ["quantize", "a", f"new.{'saftensors'}{chr(27)}"],
}


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_commands_print_plain_text(argv: list[str], run, folder: Path):
    del folder
    ran = run(*argv)
    assert_plain(ran.out)
    assert_plain(ran.err)


def test_names_are_whole_in_json(run, folder: Path):
    del folder
    assert BAD in {each["name"] for each in json.loads(run("inspect", "a", "--json").out)["arrays"]}


def test_a_page_is_plain(run, folder: Path):
    assert run("compare", "a", "b", "--report", "page.html").code == 0
    page = (folder / "page.html").read_text("utf-8")
    assert SHOWN in page
    assert_plain(page)


def test_markup_in_a_name_is_shown(tmp_path: Path):
    name = '<img src=x onerror="x">\u202e&'
    found = report({name: np.ones((64, 64), np.float32)}, {name: np.zeros((64, 64), np.float32)})
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<img" not in page
    assert escaped(name) in page
    assert "\u202e" not in page


def test_tables_and_lines_are_plain():
    assert_plain("\n".join(table(["name"], [[BAD]])))
    assert_plain(Answer([BAD, BAD], {}).text)
    assert_plain(report({BAD: np.ones(3, np.float32)}, {BAD: np.zeros(3, np.float32)}).table())


def test_stages_are_plain(capsys: pytest.CaptureFixture[str]):
    import sys

    stage(BAD, sys.stderr)
    assert_plain(capsys.readouterr().err)


def test_a_bar_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("rich")
    quantize_model({f"[/nope]{chr(27)}]0;title{chr(7)}": np.ones((64, 128), np.float32)}, progress=True)
    assert "\x1b]0;" not in capsys.readouterr().out


def test_errors_are_plain(folder: Path):
    (folder / "bad\n.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(CheckpointError) as caught:
        load(folder / "bad\n.safetensors")
    assert str(caught.value).isprintable()
    assert caught.value.file == str(folder / "bad\n.safetensors")
    header = json.dumps({BAD: {"dtype": "\x1b", "shape": ["\x1b[2J"], "data_offsets": "\x1b"}}).encode()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(len(header).to_bytes(8, "little") + header)
    assert str(caught.value).isprintable()
