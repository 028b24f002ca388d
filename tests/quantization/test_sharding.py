"""Quantized arrays over eight devices: each leaf's layout follows from the array's."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eformer.ops.quantization import Array8B, ArrayNF4, quantize

from .cases import Case, normal

P = PartitionSpec
W = normal((32, 64))
# What devices must agree on: nothing, a mean of all, of a column, of the blocks' scales.
LAYOUTS = [
    Case.of("int8"),
    Case.of("nf4"),
    Case.of("nf4", block_size=4, double_quantization=True),
    Case.of("ternary", scale="tensor"),
    Case.of("ternary", scale="channel"),
    Case.of("binary"),
]


def make_mesh(kind: AxisType) -> Any:
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)


@pytest.fixture
def auto() -> Any:
    return make_mesh(AxisType.Auto)


def equal(x: Any, y: Any) -> bool:
    return np.array_equal(np.asarray(x), np.asarray(y))


# Explicit axes concern every step, automatic axes only steps that look across devices.
COMMUTING = [(case, AxisType.Explicit, P("a", "b")) for case in LAYOUTS]
COMMUTING += [(case, AxisType.Auto, P("a")) for case in LAYOUTS[2:5]]
COMMUTING += [(case, AxisType.Auto, P(("a", "b"))) for case in LAYOUTS[:2]]


@pytest.mark.parametrize(("case", "kind", "spec"), COMMUTING, ids=str)
def test_sharding_and_quantizing_commute(case, kind, spec):
    sharding = NamedSharding(make_mesh(kind), spec)
    before = case(jax.device_put(W, sharding))
    after = case(W).with_sharding(sharding)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.all(jax.tree.map(equal, before, after))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), before, after))
    assert before.is_sharded
    assert before.sharding.is_equivalent_to(sharding, 2)
    dense = before.materialize()
    assert dense.sharding.is_equivalent_to(sharding, 2)
    assert equal(dense, case(W).materialize())


JITTED = [*((case, AxisType.Explicit) for case in LAYOUTS[:3]), *((case, AxisType.Auto) for case in LAYOUTS[2:])]


@pytest.mark.parametrize(("case", "kind"), JITTED, ids=str)
def test_under_jit(case, kind):
    mesh = make_mesh(kind)
    w = jax.device_put(W, NamedSharding(mesh, P(None, "b")))
    with jax.set_mesh(mesh):
        q = jax.jit(lambda w: case(w))(w)
        dense = jax.jit(lambda q: q.materialize())(q)
        moved = jax.jit(lambda q: q.with_sharding(P()))(q)
    assert jax.tree.all(jax.tree.map(equal, q, case(W)))
    assert equal(dense, case(W).materialize())
    assert jax.tree.all(jax.tree.map(equal, moved, case(W)))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(moved))


def test_leaves_take_the_part_they_can(auto):
    q = Array8B.quantize(W).with_sharding(NamedSharding(auto, P("a", "b")))
    assert q.weight.sharding.spec == P("a", "b")
    assert q.scale.sharding.spec == P("a", None)  # length 1 along the other axis
    nf4 = ArrayNF4.quantize(W, 64).with_sharding(NamedSharding(auto, P(None, "b")))
    assert nf4.packed.sharding.spec == P(None, "b")
    assert nf4.absmax.sharding.spec == P(None, None)  # one block


@pytest.mark.parametrize(
    ("axes", "spec"), [(None, P()), (P("a", "b"), P("a", "b")), (("a", None), P("a")), (["a"], P("a")), ("b", P("b"))]
)
def test_mesh_and_axis(axes, spec, auto):
    q = Array8B.quantize(W)
    placed = q.with_mesh_and_axis((auto, axes))
    assert placed.sharding.is_equivalent_to(NamedSharding(auto, spec), 2)
    assert jax.tree.all(jax.tree.map(equal, placed, q.reshard(NamedSharding(auto, spec))))


def test_none_leaves_it_as_it_is():
    q = Array8B.quantize(W)
    assert q.with_sharding(None) is q
    assert q.sharding is None
    assert not q.is_sharded


def test_constructor_takes_a_sharding(auto):
    sharding = NamedSharding(auto, P("a", "b"))
    q = Array8B.quantize(W)
    assert Array8B(q.scale, q.weight, q.axis, sharding).sharding.is_equivalent_to(sharding, 2)
    n = ArrayNF4.quantize(W)
    assert ArrayNF4(n.packed, n.absmax, 64, sharding).sharding.is_equivalent_to(sharding, 2)


def test_a_spec_takes_the_mesh_around_it(auto):
    with jax.set_mesh(auto):
        q = quantize(W, dtype="int8").with_sharding(P("a"))
    assert q.sharding.is_equivalent_to(NamedSharding(auto, P("a")), 2)


@pytest.mark.filterwarnings("ignore:`with mesh.` context manager:DeprecationWarning")
@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_spec_takes_the_mesh_that_was_entered(call, auto):
    with auto:
        q = call(lambda q: q.with_sharding(P("a", "b")))(quantize(W, dtype="int8"))
    assert q.sharding.is_equivalent_to(NamedSharding(auto, P("a", "b")), 2)
    assert equal(q.materialize(), quantize(W, dtype="int8").materialize())


def test_moving_moves_the_sharding(auto):
    q = Array8B.quantize(W).with_sharding(NamedSharding(auto, P("a", "b")))
    assert q.T.sharding.is_equivalent_to(NamedSharding(auto, P("b", "a")), 2)


BAD = {
    "longer than the rank": (
        lambda q, m: q.with_sharding(NamedSharding(m, P("a", None, "b"))),
        ValueError,
        "3 entries",
    ),
    "unknown axis": (lambda q, m: q.with_mesh_and_axis((m, "c")), ValueError, r"'c', but the mesh has \('a', 'b'\)"),
    "not divisible": (
        lambda q, m: q[:3].with_sharding(NamedSharding(m, P("a"))),
        ValueError,
        "axis 0 of length 3 can't be split over 'a', 2 devices",
    ),
    "no mesh": (lambda q, m: q.with_sharding(P("a")), ValueError, "needs a mesh"),
    "no sharding": (lambda q, m: q.with_sharding("a"), TypeError, "NamedSharding, a PartitionSpec or None, got str"),
    "no pair": (lambda q, m: q.with_mesh_and_axis(m), TypeError, r"a pair \(mesh, axes\)"),
    "axes of no kind": (lambda q, m: q.with_mesh_and_axis((m, 3)), TypeError, "got 3"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_shardings_are_named(bad, auto):
    call, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        call(Array8B.quantize(W), auto)
