"""The core with calls and files that lie: a right result or an error in words, and never the end of the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eformer._src.kernels import cpu

if not cpu.is_available():
    pytest.skip("installed without the native core", allow_module_level=True)

from .fuzz_core import Fuzzer
from .lying_files import CASES

CALLS = 300  # `make fuzz` makes as many as an hour holds, under the sanitizers


@pytest.mark.parametrize("instructions", cpu.instruction_sets())
def test_random_calls(instructions):
    fuzzer = Fuzzer(seed=0, instruction_set=instructions)
    for index in range(CALLS):
        fuzzer.run(index)
    assert min(fuzzer.right, fuzzer.refused) > CALLS // 5


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each file, in a process of their own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.lying_files", str(tmp_path_factory.mktemp("lies"))]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"it ended with {done.returncode} after {done.stdout[-300:]}: {done.stderr[-2000:]}"
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_lies(case, outcomes):
    found = outcomes[case]
    assert found["right"] if "right" in found else len(found["words"]) > 30, found


def test_what_a_ternary_code_stands_for_behind_the_end_does_not_count(outcomes):
    found = [outcomes[name].get("finite") for name in ("ternary code of NaN behind the end", "ternary codes of NaN")]
    assert found == [True, False]


def test_a_call_without_memory_is_refused(outcomes):
    assert "no memory" in outcomes["without memory"]["words"]
