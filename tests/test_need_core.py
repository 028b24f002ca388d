"""`EFORMER_NEED_CORE` makes an error of a core that is not there, and of a test that is skipped for want of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from eformer._src.kernels import cpu

ROOT = Path(__file__).parents[1]
SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="installed without the native core")
def test_it():
    pass
"""


def run(file: Path, need: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", file]
    environment = os.environ | {"EFORMER_NEED_CORE": need}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_core_that_is_not_there(tmp_path):
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    done = run(tmp_path / "test_skipped.py", need="an instruction set that no processor has")
    assert done.returncode == 4
    assert "EFORMER_NEED_CORE=an instruction set that no processor has, and the native core" in done.stderr


def test_a_test_that_is_skipped_without_it(tmp_path):
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    done = run(tmp_path / "test_skipped.py", need="1")
    assert (
        "installed without the native core" in done.stdout if cpu.is_available() else "is not installed" in done.stderr
    )
    assert done.returncode in (1, 4)
    assert run(tmp_path / "test_skipped.py", need="").returncode == 0
