"""Generators and coroutines under `implicit`: each of their steps runs on implicit arrays, and gives dense ones."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import ImplicitArray, implicit, is_implicit, materialization_error, register

from .arrays import integers

X = np.arange(4.0, dtype=np.float32)


class Stepped(ImplicitArray):
    """`w`, whose matmul is served by a rule."""

    w: jax.Array

    def materialize(self) -> jax.Array:
        return self.w


@register("dot_general")
def dot_stepped(primitive: Any, x: jax.Array, q: Stepped, **params: Any) -> Any:
    return primitive.bind(x, q.w, **params)


def stepped(key) -> Stepped:
    return Stepped(integers(key, (4, 4)))


def decode(w, x):
    """Two steps, then what was sent, then the weight itself."""
    for _ in range(2):
        x = jnp.dot(x, w)
        yield x
    got = yield w
    return jnp.dot(got, w)


def in_a_list(w, x):
    return [jnp.dot(x, w) for _ in range(2)]


def expression(w, x):
    return (jnp.dot(x, w) * i for i in range(3))


async def coroutine(w, x):
    x = jnp.dot(x, w)
    await asyncio.sleep(0)
    return jnp.dot(x, w)


async def stream(w, x):
    for _ in range(3):
        await asyncio.sleep(0)
        x = jnp.dot(x, w)
        yield x


async def gather(run, w, x):
    """Two that take turns."""
    return await asyncio.gather(run(w, x), run(w, x + 1))


async def collected(run, w, x):
    return [value async for value in run(w, x)]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_generator_gives_what_it_gives_for_dense_arrays(strict, getkey):
    q = stepped(getkey())
    with materialization_error() if strict else jax.disable_jit(False):
        steps, dense = implicit(decode)(q, X), decode(q.w, X)
        for _ in range(2):
            assert jnp.array_equal(next(steps), next(dense))
        assert next(steps) is q  # the array itself, and no tracer
        next(dense)
        with pytest.raises(StopIteration) as stopped:
            steps.send(X)
    assert jnp.array_equal(stopped.value.value, jnp.dot(X, q.w))


def test_a_generator_expression(getkey):
    q = stepped(getkey())
    found, expected = list(implicit(expression)(q, X)), list(expression(q.w, X))
    assert all(map(jnp.array_equal, found, expected))
    assert len(found) == 3


def test_a_generator_inside_jit(getkey):
    q = stepped(getkey())
    out = jax.jit(lambda q, x: list(implicit(expression)(q, x)))(q, X)
    assert all(map(jnp.array_equal, out, expression(q.w, X)))


def test_generators_take_turns(getkey):
    a, b = stepped(getkey()), stepped(getkey())
    pairs = list(zip(implicit(expression)(a, X), implicit(expression)(b, X), strict=True))
    assert all(jnp.array_equal(x, y) for x, y in zip([p[0] for p in pairs], expression(a.w, X), strict=True))
    assert all(jnp.array_equal(x, y) for x, y in zip([p[1] for p in pairs], expression(b.w, X), strict=True))


def test_errors_go_in_and_come_out(getkey):
    seen = []

    def function(w, x):
        try:
            yield jnp.dot(x, w)
        except KeyError:
            seen.append("in")
            yield jnp.dot(x, w) + 1
        raise ValueError("out")

    q = stepped(getkey())
    steps = implicit(function)(q, X)
    next(steps)
    assert jnp.array_equal(steps.throw(KeyError()), jnp.dot(X, q.w) + 1)
    with pytest.raises(ValueError, match="out"):
        next(steps)
    assert seen == ["in"]


def test_closing_runs_what_is_left_and_gives_state_back(getkey):
    def function(params, x):
        try:
            while True:
                params["calls"] += 1
                yield jnp.dot(x, params["w"])
        finally:
            params["closed"] = jnp.dot(x, params["w"])

    params = {"w": stepped(getkey()), "calls": 0}
    steps = implicit(function)(params, X)
    next(steps)
    next(steps)
    steps.close()
    assert params["calls"] == 2
    assert jnp.array_equal(params["closed"], jnp.dot(X, params["w"].w))
    assert is_implicit(params["w"])


def test_values_that_were_given_are_not_kept(getkey):
    class Box:
        pass

    def function(w, x):
        for _ in range(3):
            box: Any = Box()
            box.x = jnp.dot(x, w)
            yield box

    steps = implicit(function)(stepped(getkey()), X)
    first = weakref.ref(next(steps))
    next(steps)
    gc.collect()
    assert first() is None


def test_a_coroutine(getkey):
    q = stepped(getkey())
    assert jnp.array_equal(asyncio.run(implicit(coroutine)(q, X)), jnp.dot(jnp.dot(X, q.w), q.w))


def test_coroutines_that_take_turns(getkey):
    q = stepped(getkey())
    found = asyncio.run(gather(implicit(coroutine), q, X))
    expected = asyncio.run(gather(coroutine, q.w, X))
    assert all(map(jnp.array_equal, found, expected))


def test_an_asynchronous_generator(getkey):
    q = stepped(getkey())
    found, expected = asyncio.run(collected(implicit(stream), q, X)), asyncio.run(collected(stream, q.w, X))
    assert all(map(jnp.array_equal, found, expected))
    assert len(found) == 3
