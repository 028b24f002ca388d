"""What type checkers say of a user's programs: nothing of `user.py`, and each marked line of `mistakes.py`.

`make lint` runs it; elsewhere it is skipped where the checkers are not installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
USER, MISTAKES = HERE / "user.py", HERE / "mistakes.py"


def of_pyright() -> set[tuple[str, int]]:
    ran = run("pyright", "--pythonpath", sys.executable, "--outputjson", str(USER), str(MISTAKES))
    found = json.loads(ran)["generalDiagnostics"]
    return {(each["file"], each["range"]["start"]["line"] + 1) for each in found}


def of_mypy() -> set[tuple[str, int]]:
    ran = run("mypy", "--strict", "--follow-imports=silent", "--no-error-summary", str(USER), str(MISTAKES))
    return {
        (str(HERE / Path(name).name), int(line)) for name, line in re.findall(r"^(.*):(\d+): error", ran, re.MULTILINE)
    }


def run(module: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    ).stdout


CHECKERS = {"pyright": of_pyright, "mypy": of_mypy}


@pytest.mark.parametrize("checker", CHECKERS)
def test_what_type_checkers_say(checker):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    marked = [i for i, line in enumerate(MISTAKES.read_text().splitlines(), 1) if line.endswith("# error")]
    assert CHECKERS[checker]() == {(str(MISTAKES), line) for line in marked}


def test_a_user_writes_every_public_name():
    import eformer

    text = USER.read_text()
    others = {
        "Checkpoint",
        "CheckpointError",
        "Report",
        "RSROperatorBinary",
        "RSROperatorTernary",
        "register_format",
    }
    missing = {name for name in eformer._HOME if not re.search(rf"eformer\.{name}\b", text)} - others
    assert not missing
