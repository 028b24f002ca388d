"""Functions with their own derivatives, taking implicit arrays or closing over them.

The derivatives here are three times the true ones, and so differ from them wherever JAX does not use them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax import tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from eformer.jaximus import implicit

from .arrays import (
    assert_same,
    count_materialized,
    densely,
    filled,
    integers,
    low_rank,
    name,
    scaled,
    scaled_int8,
    shifted,
)
from .test_transforms import compiled, eagerly, inside, matmul, outside, tangent


def thrice(tree: Any) -> Any:
    return jtu.tree_map(lambda leaf: leaf if leaf.dtype == jax.dtypes.float0 else 3 * leaf, tree)


# --- functions with their own derivative, made from `f` ---


def custom_jvp(f):
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals, tangents):
        (x, q), (dx, _) = primals, tangents
        return g(x, q), 3 * f(dx, q)

    return g


def custom_jvp_of_both(f):
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals, tangents):
        y, dy = jax.jvp(f, primals, tangents)
        return y, thrice(dy)

    return g


def custom_jvp_symbolic_zeros(f):
    g = jax.custom_jvp(f)

    def rule(primals, tangents):
        (x, q), (dx, dq) = primals, tangents
        constant = all(isinstance(leaf, SymbolicZero) for leaf in jtu.tree_leaves(dq))
        y = g(x, q)
        return y, jnp.zeros_like(y) if isinstance(dx, SymbolicZero) else (5 if constant else 3) * f(dx, q)

    g.defjvp(rule, symbolic_zeros=True)
    return g


def custom_jvp_nondiff(f):
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
    def g(factor, f, x, q):
        return factor * f(x, q)

    @g.defjvp
    def _(factor, f, primals, tangents):
        (x, q), (dx, _) = primals, tangents
        return g(factor, f, x, q), 3 * factor * f(dx, q)

    return functools.partial(g, 2, f)


def custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x, q: (f(x, q), (x, q)), lambda saved, ct: thrice(jax.vjp(f, *saved)[1](ct)))
    return g


def custom_vjp_optimize_remat(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x, q: (f(x, q), (x, q)), lambda saved, ct: thrice(jax.vjp(f, *saved)[1](ct)), optimize_remat=True)
    return g


def custom_vjp_residuals(f):
    """Residuals that are no operands, an operand twice, and none of them an array."""
    g = jax.custom_vjp(f)

    def backward(saved, ct):
        twice, x, q, _ = saved
        return jtu.tree_map(lambda leaf: leaf, jax.vjp(f, twice + x, q)[1](ct))

    g.defvjp(lambda x, q: (f(x, q), (2 * x, x, q, {"none": None})), backward)
    return g


def custom_vjp_symbolic_zeros(f):
    @jax.custom_vjp
    def g(x, q):
        return f(x, q), x

    def forward(x, q):
        perturbed = jtu.tree_leaves(jtu.tree_map(lambda leaf: leaf.perturbed, q))
        factor = jnp.float32(3 if any(perturbed) else 5)
        values = jtu.tree_map(lambda leaf: leaf.value, (x, q))
        return g(*values), (factor, *values)

    def backward(saved, cts):
        factor, x, q = saved
        assert isinstance(cts[1], SymbolicZero)
        dx, dq = jax.vjp(f, x, q)[1](cts[0])
        return factor * dx, dq

    g.defvjp(forward, backward, symbolic_zeros=True)
    return lambda x, q: g(x, q)[0]


def custom_vjp_nondiff(f):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def g(factor, f, x, q):
        return factor * f(x, q)

    def backward(factor, f, saved, ct):
        return thrice(jax.vjp(f, *saved)[1](factor * ct))

    g.defvjp(lambda factor, f, x, q: (factor * f(x, q), (x, q)), backward)
    return functools.partial(g, 2, f)


def custom_vjp_nothing_for_q(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x, q: (f(x, q), (x, q)), lambda saved, ct: (3 * jax.vjp(f, *saved)[1](ct)[0], None))
    return g


def custom_gradient(f):
    @jax.custom_gradient
    def g(x, q):
        y, pull_back = jax.vjp(f, x, q)
        return y, lambda ct: thrice(pull_back(ct))

    return g


def custom_vmap(f):
    g = jax.custom_batching.custom_vmap(f)

    @g.def_vmap
    def _(_axis_size, in_batched, x, q):
        x_batched, q_batched = (any(jtu.tree_leaves(batched)) for batched in in_batched)
        return 3 * jax.vmap(f, (0 if x_batched else None, 0 if q_batched else None))(x, q), True

    return g


CUSTOM = (
    custom_jvp,
    custom_jvp_of_both,
    custom_jvp_symbolic_zeros,
    custom_jvp_nondiff,
    custom_vjp,
    custom_vjp_optimize_remat,
    custom_vjp_residuals,
    custom_vjp_symbolic_zeros,
    custom_vjp_nondiff,
    custom_vjp_nothing_for_q,
    custom_gradient,
)


# --- where they are used ---


def squares_of(g):
    return lambda x, q: jnp.sum(g(x, q) ** 2)


def value(g, x, q):
    return g(x, q)


def grad(g, x, q):
    return jax.grad(squares_of(g), argnums=(0, 1), allow_int=True)(x, q)


def grad_x(g, x, q):
    return jax.value_and_grad(squares_of(g))(x, q)


def grad_of_jit(g, x, q):
    return jax.grad(jax.jit(squares_of(g)), argnums=(0, 1), allow_int=True)(x, q)


def grad_of_vmap(g, x, q):
    loss = lambda x, q: jnp.sum(jax.vmap(g, (0, None))(x[:, None], q) ** 2)  # noqa: E731
    return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, q)


def vmap_of_grad(g, x, q):
    return jax.vmap(jax.grad(squares_of(g)), (0, None))(x[:, None], q)


def grad_of_checkpoint(g, x, q):
    return jax.grad(jax.checkpoint(squares_of(g)), argnums=(0, 1), allow_int=True)(x, q)


def grad_of_scan(g, x, q):
    loss = lambda x, q: jnp.sum(lax.scan(lambda c, _: (c + 1, g(c, q)), x, None, length=2)[1] ** 2)  # noqa: E731
    return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, q)


USES = (value, grad, grad_x, grad_of_jit, grad_of_vmap, vmap_of_grad, grad_of_checkpoint, grad_of_scan)


def custom_inside(wrap, use, custom):
    """The derivative is taken outside `implicit`, of a function that has its own one inside."""
    return lambda x, q: use(wrap(custom(matmul)), x, q)


def both_inside(wrap, use, custom):
    return wrap(lambda x, q: use(custom(matmul), x, q))


def both_outside(wrap, use, custom):
    return lambda x, q: use(custom(wrap(matmul)), x, q)


ORDERS = [custom_inside, both_inside, both_outside]


@pytest.mark.parametrize("order", ORDERS, ids=name)
@pytest.mark.parametrize("custom", CUSTOM, ids=name)
def test_gradient(custom, order, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert_same(*eagerly(order(implicit, grad, custom), order(densely, grad, custom), x, q))


@pytest.mark.parametrize("order", [custom_inside, both_inside], ids=name)
@pytest.mark.parametrize("make", [scaled_int8, low_rank, filled, shifted], ids=name)
@pytest.mark.parametrize("custom", [custom_jvp_of_both, custom_vjp], ids=name)
def test_gradient_of_each_array(custom, make, order, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 4))
    assert_same(*compiled(order(implicit, grad, custom), order(densely, grad, custom), x, q))


@pytest.mark.parametrize("order", [custom_inside, both_inside], ids=name)
@pytest.mark.parametrize("use", USES, ids=name)
@pytest.mark.parametrize("custom", [custom_jvp_symbolic_zeros, custom_vjp_symbolic_zeros], ids=name)
def test_uses(custom, use, order, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert_same(*compiled(order(implicit, use, custom), order(densely, use, custom), x, q))


def jvp_x(g, x, q):
    return jax.jvp(lambda x: g(x, q), (x,), (x,))


def jvp_both(g, x, q):
    return jax.jvp(g, (x, q), tangent((x, q)))


@pytest.mark.parametrize("order", ORDERS, ids=name)
@pytest.mark.parametrize("use", [jvp_x, jvp_both], ids=name)
@pytest.mark.parametrize("custom", [custom_jvp_of_both, custom_jvp_symbolic_zeros], ids=name)
def test_forward_mode(custom, use, order, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert_same(*compiled(order(implicit, use, custom), order(densely, use, custom), x, q))


@pytest.mark.parametrize("place", [inside, outside], ids=name)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_custom_vmap(axes, place, getkey):
    x, q = integers(getkey(), (2, 3, 4)), scaled(getkey(), (2, 4, 4))
    x, q = (
        tree if axis == 0 else jtu.tree_map(lambda leaf: leaf[0], tree) for tree, axis in zip((x, q), axes, strict=True)
    )

    def batch(f, x, q):
        return jax.vmap(custom_vmap(f), axes)(x, q)

    assert_same(place(implicit, batch, matmul)(x, q), place(densely, batch, matmul)(x, q))


@pytest.mark.parametrize("use", [value, grad_x, vmap_of_grad, grad_of_jit], ids=name)
@pytest.mark.parametrize("custom", [custom_jvp_of_both, custom_vjp], ids=name)
def test_closed_over(custom, use, getkey):
    """The function closes over the array itself, not over something `implicit` was given."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))

    def closing_over(q):
        g = custom(lambda x, unused: x @ q)
        return lambda x: use(lambda x, unused: g(x, unused), x, jnp.ones(()))

    assert_same(implicit(closing_over(q))(x), closing_over(q.materialize())(x))


@pytest.mark.parametrize("custom", [custom_jvp, custom_vjp], ids=name)
def test_stays_implicit(custom, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert count_materialized(implicit(custom(matmul)), x, q) == 0


def test_jax_functions_with_their_own_derivative(getkey):
    q = scaled(getkey(), (4, 4))
    loss = lambda q: jnp.sum(jax.nn.relu(q) * jax.nn.relu6(-q))  # noqa: E731
    assert_same(implicit(jax.value_and_grad(loss))(q), jax.value_and_grad(loss)(q.materialize()))


def test_linear_solve(getkey):
    """`custom_linear_solve` holds jaxprs that are differentiated and transposed apart from the function."""
    x, q = integers(getkey(), (4,)), scaled(getkey(), (4, 4))

    def solve(x, q):
        doubled = lambda v: 2 * v + 0 * (v[None] @ q)[0]  # noqa: E731
        return lax.custom_linear_solve(doubled, x, lambda _, b: b / 2, lambda _, b: b / 2)

    assert_same(implicit(jax.grad(lambda x, q: jnp.sum(solve(x, q) ** 2)))(x, q), x / 2)
