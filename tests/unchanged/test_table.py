"""Each line of docs/runs-unchanged.md is what its program gives now; and state is kept as dense code keeps it."""

from __future__ import annotations

import warnings

import jax
import pytest

from .case import Case, row
from .table import CASES, PAGE


@pytest.fixture(autouse=True)
def _as_users_run_them():
    """JAX's own settings; what packages warn of is not ours."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_line_of_the_page_is_what_the_program_gives(case: Case):
    for package in case.packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    assert str(row(case)) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_no_other_lines():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == ["code", *(case.name for case in CASES)]
