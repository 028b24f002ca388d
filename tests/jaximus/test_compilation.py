"""Shapes, jaxprs, ahead-of-time compilation, export and donation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util as jtu

from eformer.jaximus import implicit

from .arrays import ARRAYS, Scaled, assert_same, densely, integers, name, scaled, type_of
from .test_transforms import FUNCTIONS, matmul, squares

arrays = pytest.mark.parametrize("make", ARRAYS, ids=name)


def structs(tree: Any) -> Any:
    return jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@arrays
@pytest.mark.parametrize("function", FUNCTIONS, ids=name)
def test_eval_shape(function, make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    expected = type_of(jax.eval_shape(densely(function), x, q))
    assert type_of(jax.eval_shape(implicit(function), x, q)) == expected
    assert type_of(implicit(lambda x, q: jax.eval_shape(function, x, q))(x, q)) == expected
    assert type_of(jax.eval_shape(implicit(function), *structs((x, q)))) == expected


@arrays
def test_make_jaxpr(make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    outside = jax.make_jaxpr(implicit(matmul))(x, q)
    assert outside.out_avals == jax.make_jaxpr(densely(matmul))(x, q).out_avals
    assert len(outside.in_avals) == 1 + len(jtu.tree_leaves(q))
    (result,) = jax.core.eval_jaxpr(outside.jaxpr, outside.consts, x, *jtu.tree_leaves(q))
    assert_same(result, x @ q.materialize())
    assert str(implicit(jax.make_jaxpr(matmul))(x, q)) == str(jax.make_jaxpr(matmul)(x, q.materialize()))


@arrays
def test_ahead_of_time(make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    lowered = jax.jit(implicit(matmul)).lower(*structs((x, q)))
    assert type_of(lowered.out_info) == ((3, 6), jnp.float32, False)
    assert_same(lowered.compile()(x, q), x @ q.materialize())


def test_ahead_of_time_compiles_once_for_arrays_alike(getkey):
    traced = []

    @jax.jit
    @implicit
    def function(x, q):
        traced.append(None)
        return x @ q

    x = integers(getkey(), (3, 4))
    results = [function(x, q) for q in (scaled(getkey(), (4, 6)), scaled(getkey(), (4, 6)))]
    assert len(traced) == 1
    assert np.any(results[0] != results[1])


@pytest.mark.parametrize("function", [matmul, squares], ids=name)
def test_export(function, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 6))
    exported = jax.export.export(jax.jit(implicit(function)))(*structs((x, q)))
    restored = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_same(restored.call(x, q), densely(function)(x, q))
    assert_same(jax.jit(restored.call)(x, q), densely(function)(x, q))
    expected = jax.vjp(densely(function), x, q)[1](function(x, q.materialize()))
    assert_same(jax.vjp(restored.call, x, q)[1](function(x, q.materialize())), expected)


@arrays
def test_export_of_leaves(make, getkey):
    """Without telling JAX how to save the tree."""
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    leaves, treedef = jtu.tree_flatten(q)
    flat = jax.jit(lambda x, *leaves: implicit(matmul)(x, jtu.tree_unflatten(treedef, leaves)))
    restored = jax.export.deserialize(jax.export.export(flat)(x, *leaves).serialize())
    assert_same(restored.call(x, *leaves), x @ q.materialize())


def test_export_with_symbolic_shapes(getkey):
    q = scaled(getkey(), (4, 6))
    leaves, treedef = jtu.tree_flatten(q)
    flat = jax.jit(lambda x, *leaves: implicit(matmul)(x, jtu.tree_unflatten(treedef, leaves)))
    (batch,) = jax.export.symbolic_shape("batch")
    restored = jax.export.export(flat)(jax.ShapeDtypeStruct((batch, 4), jnp.float32), *structs(leaves))
    x = integers(getkey(), (5, 4))
    assert_same(restored.call(x, *leaves), x @ q.materialize())


def test_exported_function_called_inside(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 6))
    restored = jax.export.export(jax.jit(matmul))(x, structs(q.materialize()))
    assert_same(implicit(restored.call)(x, q), x @ q.materialize())


# --- donation ---


def test_donate_the_dense_operand(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    expected = x @ q.materialize()
    assert_same(jax.jit(implicit(matmul), donate_argnums=0)(x, q), expected)
    assert x.is_deleted()


def test_donate_the_dense_operand_inside(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    expected = x @ q.materialize()
    assert_same(implicit(jax.jit(matmul, donate_argnums=0))(x, q), expected)
    assert x.is_deleted()


def test_donate_the_implicit_array(getkey):
    q = scaled(getkey(), (4, 4))
    expected = -q.materialize()
    negated = jax.jit(implicit(lambda q: -q), donate_argnums=0)(q)
    assert isinstance(negated, Scaled)
    assert q.w.is_deleted()
    assert_same(negated, expected)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_donate_the_implicit_array_inside(jit, getkey):
    """Its leaves may be used elsewhere, so they are kept."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    expected = (x @ q.materialize(), -q.materialize())
    inner = jax.jit(lambda x, q: (x @ q, -q), donate_argnums=1)
    assert_same(jit(implicit(inner))(x, q), expected)
    assert_same(-q, expected[1])


def test_donate_in_a_training_loop(getkey):
    """The usual step: parameters in, parameters out."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(q, x):
        return jtu.tree_map(lambda leaf, g: leaf - g, q, jax.grad(implicit(squares), argnums=1)(x, q))

    expected = jtu.tree_map(lambda leaf, g: leaf - g, q, jax.grad(densely(squares), argnums=1)(x, q))
    assert_same(step(q, x), expected)
    assert q.w.is_deleted()
