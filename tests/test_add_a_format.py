"""The page "Add a format" of CONTRIBUTING, followed in a scratch copy: its files are all that its two formats need."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGE = re.search(r"^## Add a format$(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```(?:py|cpp)\n(?:#|//) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # its path, its text
# Tests of every format by its name, and tests that list all formats.
BY_NAME = (
    *("tests/added_format.py", "tests/quantization", "tests/model", "tests/cli/test_completion.py"),
    "tests/checkpoint/test_new_format.py",
)
LISTS = (
    *("tests/test_front_door.py", "tests/test_docs.py", "tests/checkpoint/test_new_format.py"),
    *("tests/quantization/test_config.py", "tests/quantization/test_fit.py"),
)


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.skipif(not shutil.which("cmake"), reason="builds the native core")
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="builds the native core")
def test_a_file_or_two_add_a_format(tmp_path: Path):
    assert PAGE is not None
    files = FILE.findall(PAGE[1])
    assert [Path(name).suffix for name, _ in files] == [".py", ".py", ".h"]
    copy, build = tmp_path / "copy", tmp_path / "build"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("src", "csrc", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for name in ("CMakeLists.txt", "pyproject.toml", *(page.name for page in ROOT.glob("*.md"))):
        shutil.copy(ROOT / name, copy)
    assert not any((copy / name).exists() for name, _ in files)
    shutil.rmtree(copy / "csrc/formats")  # our own take two minutes to compile, and are tested elsewhere
    (copy / "csrc/formats").mkdir()
    for name, text in files:
        (copy / name).write_text(text)
    run(
        *("cmake", "-S", copy, "-B", build, "-DEFORMER_SETS=portable"),
        f"-DPython_EXECUTABLE={sys.executable}",
        cwd=tmp_path,
    )
    run("cmake", "--build", build, "--parallel", "2", cwd=tmp_path)
    shutil.copy(build / "libeformer.so", copy / "src/eformer/_src/kernels/cpu")
    # `-S` leaves out the installed package, whose place a file in site-packages tells.
    packages = Path(np.__file__).parents[1]
    pytest = (sys.executable, "-S", "-m", "pytest", "-q", "-n", "0")
    path = f"{copy / 'src'}{os.pathsep}{packages}"
    run(*pytest, "-k", "sym3 or log4", *BY_NAME, cwd=copy, PYTHONPATH=path)
    run(*pytest, "-k", "of_the_package or every_type or documented_formats", *LISTS, cwd=copy, PYTHONPATH=path)
