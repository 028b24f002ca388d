"""Which loop of the core multiplies, for every format, layout and number of rows, and that the page names them all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

import eformer
from eformer._src.kernels import cpu
from eformer._src.kernels.matrix import Matrix

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="installed without the native core")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "cpu-kernels.md"
KINDS = {"dots": (1, 1), "gemv": (0, 1), "gemm": (0, 64)}  # the contracted axis, and rows of x


def problems(name: str) -> Iterator[tuple[Matrix, int, int]]:
    """Matrices of a format in several layouts, contracted axes and numbers of rows of x."""
    for packed_axis, block, axis, rows in itertools.product((0, 1), (5, 16, 32, 64), (0, 1), (1, 4, 512)):
        yield Matrix(name, (jnp.zeros((1, 1, 1)),), (), 1024, 1024, packed_axis, block), axis, rows


def loops(name: str, *, round_x: bool) -> set[str]:
    """All loops of a format."""
    return {cpu.loop_name(*problem, round_x=round_x) for problem in problems(name)}


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


@pytest.mark.parametrize("name", cpu.formats() if cpu.is_available() else ())
def test_there_is_a_reason_exactly_where_x_is_not_rounded(name):
    for problem in problems(name):
        rounds = cpu.loop_name(*problem, round_x=True).startswith("rounded")
        assert rounds == (not cpu.why_not_rounded(*problem))


@pytest.mark.parametrize(("form", "why"), [("nf4", ""), ("fp8", "its values are no integers"), ("int4", "")])
def test_explain_tells_the_loop_and_why_x_is_not_rounded(form, why):
    q = eformer.quantize(jnp.ones((128, 64)), form, axis=0, activation_dtype="int8")
    explanation = eformer.explain(jnp.matmul)(jnp.ones((3, 128)), q)
    kernel = "gemm" if why else "rounded gemm"
    assert [met.kernel for met, *_ in explanation if met.primitive == "dot_general"] == [kernel]
    assert f" {kernel} " in str(explanation)
    assert [why in remark for remark in explanation.remarks] == [True] * bool(why)
