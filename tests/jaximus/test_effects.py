"""Callbacks and printing see the array that an implicit array stands for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from eformer.jaximus import implicit

from .arrays import ARRAYS, assert_same, densely, integers, name, scaled
from .test_transforms import matmul

PLACES = {"eager": lambda f: f, "jit": jax.jit, "vmap": lambda f: lambda x, q: jax.vmap(f, (0, None))(x[:, None], q)}
places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def on_host(x, q):
    return np.asarray(x) @ np.asarray(q)


def call_back(x, q):
    return jax.pure_callback(on_host, jax.ShapeDtypeStruct((*x.shape[:-1], 4), x.dtype), x, q, vmap_method="sequential")


def call_back_io(x, q):
    return io_callback(on_host, jax.ShapeDtypeStruct((*x.shape[:-1], 4), x.dtype), x, q)


@pytest.mark.parametrize("make", ARRAYS, ids=name)
@pytest.mark.parametrize("function", [call_back, call_back_io], ids=name)
def test_callback(function, make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 4))
    assert_same(implicit(function)(x, q), densely(function)(x, q))


@places
def test_pure_callback(place, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert_same(place(implicit(call_back))(x, q), place(densely(call_back))(x, q))
    assert_same(implicit(place(call_back))(x, q), densely(place(call_back))(x, q))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_callback_given_a_tree_holding_the_array(jit, getkey):
    """Outside `implicit` the array is a tree, and arrives at the host as one."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    actual = jit(lambda x, q: jax.pure_callback(lambda x, q: x @ np.asarray(q.materialize()), x, x, q))(x, q)
    assert_same(actual, x @ q.materialize())


@places
def test_debug_print(place, capsys, getkey):
    x, q = jnp.ones((1, 4)), scaled(getkey(), (4, 4))

    def function(x, q):
        jax.debug.print("q = {q}, {total}", q=q, total=(x @ q).sum())
        return x @ q

    def printed(wrapped):
        wrapped(x, q)
        jax.effects_barrier()
        return capsys.readouterr().out

    expected = printed(place(densely(function)))
    assert "q = [[" in expected
    assert printed(place(implicit(function))) == expected
    assert printed(implicit(place(function))) == expected


def test_debug_callback(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    seen = []

    def function(x, q):
        jax.debug.callback(lambda q: seen.append(np.asarray(q)), q)
        return matmul(x, q)

    jax.jit(implicit(function))(x, q)
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, [q.materialize()])
