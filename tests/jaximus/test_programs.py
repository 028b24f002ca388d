"""Random programs agree with dense JAX, and faults show: see `programs` and `agreement`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import register
from eformer.ops.quantization import Array8B

from . import agreement
from .agreement import Disagreement, check, failure, shrunk, snippet, unclear
from .operations import OPERATIONS
from .programs import Input, Program, draw, made

BATCH = 20  # programs of a test
pytestmark = pytest.mark.filterwarnings("ignore")  # what JAX says of a program, it says of a dense one too


@pytest.fixture(autouse=True)
def _as_people_run_it() -> Iterator[None]:
    """Dtypes and ranks are promoted, as they are outside of these tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_programs_agree_with_dense(first):
    if first and first % 1000 == 0:
        jax.clear_caches()  # of programs that run once: by the thousand they take gigabytes
    drawn = [draw(seed) for seed in range(first, first + BATCH)]
    doubtful = unclear(drawn)
    wrong = [(program, mode) for program, mode in doubtful if failure(program, mode) is not None]
    reports = [f"{failure(*pair)!r}\n\n{snippet(shrunk(*pair), pair[1])}" for pair in wrong]
    assert not reports, "\n\n".join(reports)


def test_programs_are_made_of_many_functions():
    assert len({operation.name for operation in OPERATIONS} - {None}) >= 200


# --- faults that must be found ---


class Turned(Array8B):
    """Transposing it moves no element."""


@register("transpose")
def _(primitive: Any, q: Turned, *, permutation: Any, **params: Any) -> Any:
    del primitive, params
    return q.materialize().reshape([q.shape[axis] for axis in permutation])


class Positive(Array8B):
    """Negating it does nothing."""


@register("neg")
def _(primitive: Any, q: Positive, **params: Any) -> Any:
    del primitive, params
    return q


class Coarse(Array8B):
    """Matmuls with it round their operands to bfloat16, without being asked."""


@register("dot_general")
def _(primitive: Any, lhs: Any, rhs: Coarse, **params: Any) -> Any:
    coarse = [jax.lax.reduce_precision(x, 8, 7) for x in (jnp.asarray(lhs), rhs.materialize())]
    return primitive.bind(*coarse, **params)


class Slipped(Array8B):
    """One code of it is off by one."""


# Where each shows, for `a` an INT8 array.
FAULTS = {
    Turned: r"\ba\.T|transpose\(a\b",
    Positive: r"-a\b|neg\w*\(a\b",
    Coarse: r"(matmul|dot)\(\w+, a\)|@ a\b",
    Slipped: r"@ a\b|sum\(a\b",
}


def with_fault(each: Input, in_stack: bool, fault: type[Array8B]) -> Any:
    q, dense = made(each, in_stack)
    if type(q) is not Array8B:
        return q, dense
    codes = q.weight.at[(0,) * q.ndim].add(1 if fault is Slipped else 0)
    return fault(q.scale, codes, q.axis, dtype=q.dtype), dense


def suspects(pattern: str) -> Iterator[Program]:
    """Programs that do what the fault is in."""
    return (p for p in map(draw, range(3000)) if "int8" in p.inputs[0].template and re.search(pattern, p.text()))


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.__name__)
def faulty(request, monkeypatch) -> Iterator[Program]:
    monkeypatch.setattr(agreement, "made", lambda *each: with_fault(*each, request.param))
    return suspects(FAULTS[request.param])


def test_a_fault_is_found(faulty):
    program = next(p for p in faulty if isinstance(failure(p, "eager"), Disagreement))
    small = shrunk(program, "eager")
    assert len(small.steps) <= len(program.steps)
    with pytest.raises(Disagreement):
        check(small, "eager")


@pytest.mark.parametrize("mode", ["eager", "scan"])
def test_what_is_printed_of_a_program_runs(mode, capsys):
    exec(snippet(draw(0), mode), {})
    assert capsys.readouterr().out.count("Array(") >= 2  # of `implicit`, and of dense JAX
