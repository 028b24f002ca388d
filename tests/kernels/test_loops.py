"""Which loop of the core multiplies, for every format, layout and number of rows, and that the page names them all."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from eformer._src.kernels import cpu
from eformer._src.kernels.matrix import Matrix

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="installed without the native core")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "cpu-kernels.md"
KINDS = {"dots": (1, 1), "gemv": (0, 1), "gemm": (0, 64)}  # the contracted axis, and rows of x


def loops(name: str, *, round_x: bool) -> set[str]:
    """All loops of a format."""
    matrices = [
        Matrix(name, (jnp.zeros((1, 1, 1)),), (), 1024, 1024, packed_axis, block)
        for packed_axis in (0, 1)
        for block in (5, 16, 32, 64)
    ]
    return {
        cpu.loop_name(each, axis, rows, round_x=round_x) for each in matrices for axis in (0, 1) for rows in (1, 4, 512)
    }


@pytest.mark.parametrize("name", cpu.formats() if cpu.is_available() else ())
def test_every_format_has_its_own_loops_for_floats(name):
    """None is left to packing where its blocks are common, by any processor that looks codes up."""
    common = Matrix(name, (jnp.zeros((1, 1, 1)),), (), 1024, 1024, 0, 64)
    for kind, (axis, rows) in KINDS.items():
        for instructions in {"portable", *cpu.instruction_sets()[-2:]}:
            with cpu.instruction_set(instructions):
                assert cpu.loop_name(common, axis, rows) == ("gemm" if instructions == "portable" else kind)


@pytest.mark.parametrize("round_x", [False, True])
def test_the_page_names_every_loop(round_x):
    table = PAGE.read_text().partition("| loop | rows of x |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall("`([^`]+)`", row.split("|")[1])}
    found = set().union(*(loops(name, round_x=round_x) for name in cpu.formats()))
    assert found <= named
