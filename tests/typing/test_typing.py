"""What type checkers say of a user's programs: nothing but each marked line of `mistakes.py`.

`make lint` runs it; elsewhere it is skipped where the checkers are not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
USER, PACKAGES, MISTAKES = HERE / "user.py", HERE / "packages.py", HERE / "mistakes.py"


def of_pyright() -> set[tuple[str, int]]:
    files = map(str, (USER, PACKAGES, MISTAKES))
    ran = run("pyright", "--pythonpath", sys.executable, "--outputjson", *files)
    found = json.loads(ran)["generalDiagnostics"]
    return {(each["file"], each["range"]["start"]["line"] + 1) for each in found}


def of_mypy() -> set[tuple[str, int]]:
    ran = run(
        "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", str(USER), str(PACKAGES), str(MISTAKES)
    )
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


def test_a_user_writes_every_public_function():
    text = USER.read_text() + PACKAGES.read_text()
    packages = [f"eformer.{name}" for name in ("jaximus", "ops.quantization", "model", "checkpoint", "cache")]
    functions = {
        name
        for package in map(importlib.import_module, ("eformer", *packages))
        for name in dir(package)
        if not name.startswith("_") and inspect.isfunction(getattr(package, name))
    }
    written = set(re.findall(r"\b\w+\b", text))
    assert functions - written - OTHERS == set()


# Older and documented names of functions with a better one, and functions of whoever adds a format.
OTHERS = {
    *("use_implicit", "nf4_use_kernel", "dequantize_model", "save_gguf", "save_bitsandbytes"),
    *("straight_through_1bit", "straight_through_8bit", "straight_through_nf4"),
    *("register_format", "register_bitsandbytes_codec"),
}
