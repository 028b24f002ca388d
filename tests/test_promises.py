"""Each promise about files names a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "files.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_the_test_of_a_promise_exists(name: str):
    file, _, test = name.partition("::")
    assert test in {
        node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_row_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line != "| promise | test |"]
    assert len(rows) > 20
    assert not [row for row in rows if not re.fullmatch(r"\| .*\. \| (`tests/[^`]+::test_\w+`(, )?)+ \|", row)]
