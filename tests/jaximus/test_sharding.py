"""Implicit arrays over several devices: `shard_map`, sharding constraints, automatic and explicit axes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit

from .arrays import assert_same, count_materialized, densely, filled, integers, low_rank, name, scaled
from .test_transforms import compiled, inside, jitted, matmul, outer_grad, outer_jvp, outer_vmap, outside, tangent, ways

AUTO, EXPLICIT = (AxisType.Auto,), (AxisType.Explicit,)


def mesh(axis_types: Any = AUTO) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("i",), axis_types=axis_types)


def replicated(f, x, q):
    return jax.shard_map(f, mesh=mesh(), in_specs=(P("i"), P()), out_specs=P("i"))(x, q)


def replicated_in_jit(f, x, q):
    return jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=(P("i"), P()), out_specs=P("i")))(x, q)


def replicated_closed_over(f, x, q):
    return jax.shard_map(lambda x: f(x, q), mesh=mesh(), in_specs=P("i"), out_specs=P("i"))(x)


def with_collective(f, x, q):
    total = lambda x, q: lax.psum(f(x, q), "i")  # noqa: E731
    return jax.shard_map(total, mesh=mesh(), in_specs=(P("i"), P()), out_specs=P())(x, q)


def several_outputs(f, x, q):
    body = lambda x, q: {"y": f(x, q), "sum": lax.psum(x.sum(), "i")}  # noqa: E731
    specs = {"y": P("i"), "sum": P()}
    return jax.shard_map(body, mesh=mesh(), in_specs=(P("i"), P()), out_specs=specs)(x, q)


def grad_of_shard_map(f, x, q):
    loss = lambda x, q: jnp.sum(replicated(f, x, q) ** 2)  # noqa: E731
    return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, q)


def jvp_of_shard_map(f, x, q):
    return jax.jvp(lambda x, q: replicated(f, x, q), (x, q), tangent((x, q)))


def grad_in_shard_map(f, x, q):
    loss = lambda x, q: jnp.sum(f(x, q) ** 2)  # noqa: E731
    return jax.shard_map(jax.grad(loss), mesh=mesh(), in_specs=(P("i"), P()), out_specs=P("i"))(x, q)


def vmap_of_shard_map(f, x, q):
    return jax.vmap(lambda x, q: replicated(f, x, q), (0, None))(jnp.stack([x, x + 1]), q)


def scan_of_shard_map(f, x, q):
    return lax.scan(lambda c, _: (replicated(f, c, q), None), x, None, length=2)[0]


SHARD_MAPS = (
    replicated_in_jit,
    replicated_closed_over,
    with_collective,
    several_outputs,
    grad_of_shard_map,
    jvp_of_shard_map,
    grad_in_shard_map,
    vmap_of_shard_map,
    scan_of_shard_map,
)


@pytest.mark.parametrize("transform", SHARD_MAPS, ids=name)
def test_shard_map(transform, getkey):
    x, q = integers(getkey(), (8, 4)), scaled(getkey(), (4, 4))
    assert_same(*compiled(outside(implicit, transform, matmul), outside(densely, transform, matmul), x, q))


@pytest.mark.parametrize("outer", [outer_grad, outer_jvp, outer_vmap], ids=name)
@pytest.mark.parametrize("inner", [replicated, with_collective, replicated_closed_over], ids=name)
def test_shard_map_inside_another_transformation(inner, outer, getkey):
    x, q = integers(getkey(), (8, 4)), scaled(getkey(), (4, 4))
    inside_of = functools.partial(inner, matmul)
    actual, expected = (functools.partial(outer, wrap(inside_of)) for wrap in (implicit, densely))
    assert_same(*compiled(actual, expected, x, q))


@ways
def test_shard_map_of_each_array(place, make, run, getkey):
    x, q = integers(getkey(), (8, 4)), make(getkey(), (4, 4))
    assert_same(*run(place(implicit, replicated, matmul), place(densely, replicated, matmul), x, q))


def sharded(f, x, q):
    return jax.shard_map(f, mesh=mesh(), in_specs=(P(), P(None, "i")), out_specs=P(None, "i"))(x, q)


@pytest.mark.parametrize("make", [scaled, low_rank], ids=name)
def test_shard_map_of_a_sharded_array_outside(make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 8))
    assert_same(outside(implicit, sharded, matmul)(x, q), outside(densely, sharded, matmul)(x, q))


def test_shard_map_of_a_sharded_array_inside(getkey):
    """Only where every leaf has that axis: `Scaled`, here."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 8))
    assert_same(inside(implicit, sharded, matmul)(x, q), inside(densely, sharded, matmul)(x, q))


@pytest.mark.parametrize("transform", [replicated, sharded], ids=name)
def test_shard_map_stays_implicit(transform, getkey):
    x, q = integers(getkey(), (8, 4)), scaled(getkey(), (4, 8))
    assert count_materialized(outside(implicit, transform, matmul), x, q) == 0


def test_shard_map_materializes_what_cannot_be_sharded_by_its_leaves(getkey):
    """A slice of rows: the scale is not split, but it is of one row, so each device keeps all of it."""
    x, q = integers(getkey(), (3, 8)), scaled(getkey(), (8, 4))

    def partial_sums(f, x, q):
        body = lambda x, q: lax.psum(f(x, q), "i")  # noqa: E731
        return jax.shard_map(body, mesh=mesh(), in_specs=(P(None, "i"), P("i")), out_specs=P())(x, q)

    assert_same(outside(implicit, partial_sums, matmul)(x, q), outside(densely, partial_sums, matmul)(x, q))


# --- sharding constraints ---


def constrain_result(f, x, q):
    return lax.with_sharding_constraint(f(x, q), NamedSharding(mesh(), P("i")))


def constrain_x(f, x, q):
    return f(lax.with_sharding_constraint(x, NamedSharding(mesh(), P("i"))), q)


def constrain_q(f, x, q):
    return f(x, lax.with_sharding_constraint(q, NamedSharding(mesh(), P())))


def constrain_q_in_jit(f, x, q):
    return jax.jit(lambda x, q: f(x, lax.with_sharding_constraint(q, NamedSharding(mesh(), P()))))(x, q)


def shardings_of_jit(f, x, q):
    everywhere, rows = NamedSharding(mesh(), P()), NamedSharding(mesh(), P("i"))
    return jax.jit(f, in_shardings=(rows, everywhere), out_shardings=everywhere)(x, q)


def device_put(f, x, q):
    return f(*jax.device_put((x, q), NamedSharding(mesh(), P())))


CONSTRAINTS = (constrain_result, constrain_x, constrain_q, constrain_q_in_jit, shardings_of_jit, device_put)


@pytest.mark.parametrize(("place", "make"), [(inside, low_rank), (outside, scaled), (jitted, filled)], ids=name)
@pytest.mark.parametrize("transform", CONSTRAINTS, ids=name)
def test_constraints(transform, place, make, getkey):
    x, q = integers(getkey(), (8, 4)), make(getkey(), (4, 4))
    actual, expected = place(implicit, transform, matmul)(x, q), place(densely, transform, matmul)(x, q)
    assert_same(actual, expected)
    assert actual.sharding.is_equivalent_to(expected.sharding, 2)


def test_constraint_of_a_sharded_array(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 8))

    def constrained(f, x, q):
        return f(x, lax.with_sharding_constraint(q, NamedSharding(mesh(), P(None, "i"))))

    expected = jitted(densely, constrained, matmul)(x, q)
    actual = jitted(implicit, constrained, matmul)(x, q)
    assert_same(actual, expected)
    assert actual.sharding.is_equivalent_to(expected.sharding, 2)


# --- arrays that are sharded ---


@pytest.mark.parametrize("axis_types", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("place", [inside, outside, jitted], ids=name)
def test_sharded_leaves(place, axis_types, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 8))
    columns = NamedSharding(mesh(axis_types), P(None, "i"))
    x, q = jax.device_put((x, q), (NamedSharding(mesh(axis_types), P()), columns))

    def transform(f, x, q):
        return jax.jit(f)(x, q)

    with jax.set_mesh(mesh(axis_types)):
        actual, expected = place(implicit, transform, matmul)(x, q), place(densely, transform, matmul)(x, q)
        assert count_materialized(place(implicit, transform, matmul), x, q) == 0
    assert_same(actual, expected)
    assert actual.sharding.is_equivalent_to(columns, 2)
    assert jax.typeof(actual) == jax.typeof(expected)


@pytest.mark.parametrize("spec", [P("i"), P(None, None)], ids=str)
@pytest.mark.parametrize(
    "function", [matmul, lambda x, q: x @ (q * 2), lambda x, q: x @ -q.T.T], ids=["dot", "mul", "T"]
)
def test_explicit_axes_know_the_sharding_of_an_implicit_array(function, spec, getkey):
    """The types agree while tracing, where explicit axes are checked."""
    explicit = mesh(EXPLICIT)
    x = jax.device_put(integers(getkey(), (8, 4)), NamedSharding(explicit, spec))
    q = jax.device_put(scaled(getkey(), (4, 8)), NamedSharding(explicit, P()))
    with jax.set_mesh(explicit):
        actual, expected = jax.make_jaxpr(implicit(function))(x, q), jax.make_jaxpr(densely(function))(x, q)
    assert actual.out_avals == expected.out_avals


@pytest.mark.parametrize("axis_types", [AUTO, EXPLICIT], ids=str)
def test_shard_map_in_a_mesh_context(axis_types, getkey):
    x, q = integers(getkey(), (8, 4)), scaled(getkey(), (4, 4))
    function = jax.shard_map(matmul, in_specs=(P("i"), P()), out_specs=P("i"))
    with jax.set_mesh(mesh(axis_types)):
        x, q = jax.device_put((x, q), (NamedSharding(mesh(axis_types), P("i")), NamedSharding(mesh(axis_types), P())))
        assert_same(jax.jit(implicit(function))(x, q), jax.jit(densely(function))(x, q))
