"""What tracing through `implicit` must not do twice, or at all: counted, not timed, as `benchmarks/tracing.py` does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eformer.jaximus import ImplicitArray, implicit, is_implicit, register

from .arrays import integers, name

LAYERS = 5
served: list[str] = []  # names of the primitives that the rules below were asked for


class Counted(ImplicitArray):
    """`w`, with rules that count."""

    w: jax.Array

    def materialize(self) -> jax.Array:
        return self.w


@register("dot_general")
def dot_counted(primitive: Any, x: jax.Array, q: Counted, **params: Any) -> Any:
    served.append(primitive.name)
    return primitive.bind(x, q.w, **params)


@register("add")
def add_counted(primitive: Any, q: Counted, x: jax.Array, **params: Any) -> Any:
    served.append(primitive.name)
    return primitive.bind(q.w, x, **params)


def jitted_layers(x, weights):
    step = jax.jit(lambda x, q: jnp.dot(x, q) + 1)
    for q in weights:
        x = step(x, q)
    return x


def checkpointed_layers(x, weights):
    step = jax.checkpoint(jax.jit(lambda x, q: jnp.dot(x, q) + 1))
    for q in weights:
        x = step(x, q)
    return x


def matmuls(x, weights):
    for q in weights:
        x = jnp.matmul(x, q)  # jitted inside JAX
    return x


@pytest.mark.parametrize("function", [jitted_layers, checkpointed_layers, matmuls], ids=name)
def test_equal_layers_ask_a_rule_once(function, getkey):
    x, weights = integers(getkey(), (3, 4)), [Counted(integers(getkey(), (4, 4))) for _ in range(LAYERS)]
    served.clear()
    jax.jit(implicit(function)).lower(x, weights)
    assert served == ["dot_general"]


def test_layers_of_another_shape_ask_again(getkey):
    x, shapes = integers(getkey(), (3, 4)), [(4, 6), (6, 4), (4, 6), (6, 4)]
    served.clear()
    jax.jit(implicit(jitted_layers)).lower(x, [Counted(integers(getkey(), shape)) for shape in shapes])
    assert served == ["dot_general"] * 2


@implicit
def add(x, y):
    return lax.add(x, y)


def test_swapped_operands_ask_the_same_rule(getkey):
    x, q = integers(getkey(), (4, 4)), Counted(integers(getkey(), (4, 4)))
    served.clear()
    results = [add(q, x), add(x, q), add(x, q)]
    assert served == ["add"] * 3
    assert all(jnp.array_equal(result, x + q.w) for result in results)


def elementwise(x):
    return jnp.where(x > 0, jnp.sin(x), x**2) / 2


def einsum(x):
    return jnp.einsum("ij,kj->ik", x, x)


def inner_jit(x):
    return jax.jit(elementwise)(x) + 1


def inner_scan(x):
    return lax.scan(lambda c, row: (c + row, c * row), x[0], x)


def inner_cond(x):
    return lax.cond(x[0, 0] > 0, jnp.cos, jnp.tanh, x)


def inner_while(x):
    return lax.while_loop(lambda x: jnp.sum(x) < 10, lambda x: x + 1, x)


def converted(x):
    return x.astype(jnp.bfloat16).reshape(-1)[::2]


DENSE = (elementwise, einsum, inner_jit, inner_scan, inner_cond, inner_while, converted)


@pytest.mark.parametrize("function", DENSE, ids=name)
def test_dense_functions_trace_to_the_same_program(function, getkey):
    x = integers(getkey(), (3, 4))
    assert str(jax.make_jaxpr(implicit(function))(x)) == str(jax.make_jaxpr(function)(x))


def test_abstract_classes_are_refused():
    class Unfinished(ImplicitArray):
        w: jax.Array

    with pytest.raises(TypeError, match="materialize"):
        Unfinished(jnp.ones(3))  # pyright: ignore[reportAbstractUsage]
    assert not is_implicit(Unfinished)
