"""Collectives in `shard_map` over eight devices: the same values as dense arrays, and codes are what moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eformer.jaximus import explain, implicit, is_implicit
from eformer.ops.quantization import RSROperatorTernary

from .cases import Case, assert_product, assert_same, example, name, normal
from .test_collectives import CODES, collectives, make_mesh

P = PartitionSpec
pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),
]

SHAPE = (8, 32, 16)
INT8_LAST, INT8_ROWS = Case.of("int8"), Case.of("int8", axis=-2)
NF4_LAST, NF4_ROWS = Case.of("nf4", block_size=4), Case.of("nf4", block_size=4, axis=-2)
NESTED = Case.of("nf4", block_size=4, double_quantization=True)
TERNARY, CHANNEL = Case.of("ternary"), Case.of("ternary", scale="channel")
CASES = [INT8_LAST, INT8_ROWS, NF4_LAST, NF4_ROWS, NESTED, TERNARY, CHANNEL]
RING = [(i, (i + 1) % 4) for i in range(4)]


class Collective(NamedTuple):
    """What the devices along "model", four of them, do with their parts; how those lie before and after."""

    function: Callable[[Any], Any]
    given: PartitionSpec
    out: PartitionSpec
    declined: tuple[Case, ...] = ()


def gather(axis: int, **options: Any) -> Callable[[Any], Any]:
    return lambda q: lax.all_gather(q, "model", axis=axis, **options)


def exchange(split: int, join: int, **options: Any) -> Callable[[Any], Any]:
    return lambda q: lax.all_to_all(q, "model", split, join, **options)


MOVES = {
    "gather_stack": Collective(gather(0, tiled=True), P("model"), P("model")),
    "gather_rows": Collective(gather(1, tiled=True), P(None, "model"), P("model")),
    "gather_columns": Collective(gather(2, tiled=True), P(None, None, "model"), P("model")),
    "gather_over_two_axes": Collective(
        lambda q: lax.all_gather(q, ("data", "model"), tiled=True), P(("data", "model")), P(("data", "model"))
    ),
    "gather_invariant": Collective(gather(1, tiled=True, to="invarying"), P(None, "model"), P()),
    "gather_untiled": Collective(gather(1), P(None, None, "model"), P("model")),
    "gather_in_groups": Collective(gather(0, tiled=True, axis_index_groups=[[0, 1], [2, 3]]), P("model"), P("model")),
    "gather_copies": Collective(gather(0, tiled=True), P(), P("model")),
    "ring": Collective(lambda q: lax.ppermute(q, "model", RING), P("model"), P("model")),
    "ring_with_a_gap": Collective(lambda q: lax.ppermute(q, "model", RING[:3]), P("model"), P("model"), tuple(CASES)),
    "experts": Collective(exchange(0, 1, tiled=True), P(None, "model"), P("model")),
    "experts_back": Collective(exchange(1, 0, tiled=True), P("model"), P(None, "model")),
    "exchange_columns": Collective(exchange(2, 0, tiled=True), P("model"), P(None, None, "model")),
    "exchange_untiled": Collective(lambda q: exchange(0, 1)(q[:4]), P(None, None, "model"), P(None, None, "model")),
    "exchange_one_axis": Collective(exchange(0, 0, tiled=True), P(None, "model"), P(None, "model")),
    "sum": Collective(lambda q: lax.psum(q, "model"), P("model"), P(), tuple(CASES)),
}


def over_devices(move: Collective, **options: Any) -> Callable[[Any], Any]:
    return jax.shard_map(move.function, mesh=make_mesh(), in_specs=move.given, out_specs=move.out, **options)


def made_dense(function: Callable[..., Any], *args: Any) -> int:
    """Dense bytes made by what runs on the devices; what `shard_map` returns is always dense."""
    return sum(dense for met, _, dense in explain(function)(*args) if met.primitive != "shard_map")


# The way to store an array decides; how it is cut decides less.
CHOSEN = [(case, name) for case in (INT8_ROWS, NF4_ROWS, CHANNEL) for name in MOVES]
CHOSEN += [(case, name) for case in (INT8_LAST, NF4_LAST, NESTED, TERNARY) for name in ("gather_columns", "experts")]
CHOSEN += [(case, "exchange_columns") for case in (INT8_LAST, NF4_LAST)]


@pytest.mark.parametrize(("case", "move"), CHOSEN, ids=str)
def test_collectives_agree_with_dense(case, move):
    q, dense = example(case, SHAPE)
    function = over_devices(MOVES[move])
    assert (made_dense(function, q) > 0) == (case in MOVES[move].declined)
    assert_same(jax.jit(implicit(function))(q), function(dense))


@pytest.mark.parametrize("case", [NF4_ROWS, INT8_ROWS], ids=str)
def test_what_devices_share_is_not_known_unchecked(case):
    """A scale per column is one for all rows; where JAX does not look, devices may differ, and each is of a block."""
    q, dense = example(case, SHAPE)
    function = over_devices(MOVES["gather_rows"], check_vma=False)
    assert made_dense(function, q) == 0
    assert_same(jax.jit(implicit(function))(q), function(dense))


@pytest.mark.parametrize("move", ["gather_rows", "ring", "experts"])
@pytest.mark.parametrize("case", [INT8_ROWS, NF4_ROWS, NESTED, CHANNEL], ids=str)
def test_codes_are_what_moves(case, move):
    q, dense = example(case, SHAPE)
    program = jax.jit(implicit(over_devices(MOVES[move]))).lower(q).compile().as_text()
    moved = {dtype for kind, dtype in collectives(program) if kind != "all-reduce"}
    assert moved & set(CODES)
    expected = jax.jit(over_devices(MOVES[move])).lower(dense).compile().as_text()
    assert {kind for kind, _ in collectives(program)} == {kind for kind, _ in collectives(expected)}


@pytest.mark.parametrize("case", [INT8_ROWS, NF4_ROWS, NESTED, CHANNEL], ids=str)
def test_weights_in_parts_are_gathered_for_a_matmul(case):
    """As fully sharded training has them, and with gradients of what they are multiplied with."""
    x, q = normal((8, 32), seed=1), case(normal((32, 16)))
    step = lambda x, w: x @ lax.all_gather(w, "model", axis=0, tiled=True)  # noqa: E731
    specs = {"in_specs": (P("model"), P("model")), "out_specs": P("model")}
    function = jax.shard_map(step, mesh=make_mesh(), **specs)
    assert made_dense(function, x, q) == 0
    product, dense = jax.jit(implicit(function))(x, q), q.materialize()
    assert_product(product, x, dense)
    loss = lambda x, w: jnp.sum(function(x, w) ** 2)  # noqa: E731
    gradient = jax.jit(jax.grad(implicit(loss)))(x, q)
    np.testing.assert_allclose(gradient, jax.grad(loss)(x, dense), rtol=1e-4, atol=1e-4)


# --- shardings ---


RSR = RSROperatorTernary.quantize


@pytest.mark.parametrize("make", [INT8_ROWS, NF4_LAST, NESTED, CHANNEL, RSR], ids=name)
def test_sharding_constraints_and_reshard(make):
    q = make(normal((32, 16)))
    mesh, explicit = make_mesh(), make_mesh(AxisType.Explicit)
    constrain = lambda q: lax.with_sharding_constraint(q, NamedSharding(mesh, P("model")))  # noqa: E731
    assert explain(constrain)(q).dense_bytes == 0
    placed = jax.jit(implicit(constrain))(q)
    assert is_implicit(placed)
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 2)
    assert_same(placed, q.materialize())
    with jax.set_mesh(explicit):
        q, dense = q.with_sharding(P()), q.materialize()
        reshard = lambda q: jax.sharding.reshard(q, P(None, "data"))  # noqa: E731
        assert explain(reshard)(q).dense_bytes == 0
        moved = implicit(reshard)(q)
        assert is_implicit(moved)
        assert moved.sharding.spec == P(None, "data")
    np.testing.assert_array_equal(moved.materialize(), dense)


def test_device_put_in_a_function():
    q, dense = example(NF4_ROWS, SHAPE)
    device = jax.devices()[3]
    out = implicit(lambda q: jax.device_put(q, device))(q)
    assert {leaf.devices() == {device} for leaf in jax.tree.leaves(out)} == {True}
    assert_same(out, dense)
    sharding = NamedSharding(make_mesh(), P("model"))
    placed, other = implicit(lambda q: jax.device_put((q, jnp.ones((8, 8))), sharding))(q)
    assert is_implicit(placed)
    assert all(each.sharding.is_equivalent_to(sharding, each.ndim) for each in (placed, other))
    assert_same(placed, dense)
