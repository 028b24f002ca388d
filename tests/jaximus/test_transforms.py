"""Every transformation of JAX, around a function of implicit arrays, gives what it gives on dense arrays.

Each entry of the tables is a transformation `transform(function, x, q)`. It is tried with `implicit` inside it,
around the function, outside it, around the whole, and between two of them; `densely` at the same place gives the
expected answer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax import tree_util as jtu

from eformer.jaximus import ImplicitArray, implicit, materialize

from .arrays import ARRAYS, assert_same, densely, filled, integers, low_rank, name, scaled, scaled_int8, shifted


def inside(wrap: Any, transform: Any, function: Any) -> Any:
    return functools.partial(transform, wrap(function))


def outside(wrap: Any, transform: Any, function: Any) -> Any:
    return wrap(functools.partial(transform, function))


def jitted(wrap: Any, transform: Any, function: Any) -> Any:
    return jax.jit(wrap(functools.partial(transform, function)))


def eagerly(actual: Any, expected: Any, x: Any, q: Any) -> Any:
    return actual(x, q), jax.jit(expected)(x, q)


def compiled(actual: Any, expected: Any, x: Any, q: Any) -> Any:
    """In one program: compiling is what these tests spend their time on."""
    return jax.jit(lambda x, q: (actual(x, q), expected(x, q)))(x, q)


# Each place and each kind of array, but for that reason not each with each.
WAYS = [
    (outside, scaled, eagerly),
    (outside, low_rank, compiled),
    (inside, filled, compiled),
]
WITH_INTEGERS = (outside, scaled_int8, compiled)
WITH_SHAPE = (outside, filled, compiled)  # a stack of them has leaves of another rank
ways = pytest.mark.parametrize(("place", "make", "run"), WAYS, ids=name)
with_integers = pytest.mark.parametrize(("place", "make", "run"), [*WAYS, WITH_INTEGERS], ids=name)
with_nested = pytest.mark.parametrize(("place", "make", "run"), [*WAYS, (inside, shifted, eagerly)], ids=name)
stacks = pytest.mark.parametrize(("place", "make", "run"), [*WAYS, WITH_SHAPE], ids=name)
layers = pytest.mark.parametrize(("place", "make", "run"), [*WAYS, WITH_SHAPE, WITH_INTEGERS], ids=name)


def matmul(x, q):
    return x @ q


def squares(x, q):
    return jnp.sum((x @ q) ** 2)


def einsum_both_sides(x, q):
    return jnp.einsum("bi,ij,kj->bk", x, q, q)


def elementwise(x, q):
    return jnp.where(q > 0, q * q - 1.0, 2 * q).sum(0) * jnp.sum(x)


FUNCTIONS = (matmul, squares, einsum_both_sides, elementwise)


# --- nothing, jit ---


def eager(f, x, q):
    return f(x, q)


def jit(f, x, q):
    return jax.jit(f)(x, q)


def jit_in_jit(f, x, q):
    return jax.jit(lambda x, q: jax.jit(f)(x, q) * 2)(x, q)


def jit_keyword(f, x, q):
    return jax.jit(lambda *, x, q: f(x, q))(q=q, x=x)


def jit_static(f, x, q):
    return jax.jit(lambda power, x, q: f(x, q) * power, static_argnums=0)(2, x, q)


def jit_container(f, x, q):
    return jax.jit(lambda tree: {"y": [f(x, tree["layers"][0]["w"])], "n": None})({"layers": [{"w": q}]})


def jit_unused(f, x, q):
    return jax.jit(lambda x, q, unused: f(x, q))(x, q, q)


def jit_inlined(f, x, q):
    return jax.jit(f, inline=True)(x, q)


def jit_returning_it(f, x, q):
    return f(x, jax.jit(lambda q: {"q": q, "n": 1})(q)["q"])


def named_call(f, x, q):
    return jax.named_call(f, name="named")(x, q)


def named_scope(f, x, q):
    with jax.named_scope("scope"):
        return f(x, q)


PLAIN = (
    eager,
    jit,
    jit_in_jit,
    jit_keyword,
    jit_static,
    jit_container,
    jit_unused,
    jit_inlined,
    jit_returning_it,
    named_call,
    named_scope,
)


@ways
@pytest.mark.parametrize("transform", PLAIN, ids=name)
def test_plain(transform, place, make, run, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    assert_same(*run(place(implicit, transform, matmul), place(densely, transform, matmul), x, q))


@with_nested
@pytest.mark.parametrize("function", FUNCTIONS, ids=name)
def test_functions(function, place, make, run, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    assert_same(*run(place(implicit, eager, function), place(densely, eager, function), x, q))


# --- derivatives ---


def tangent(tree):
    """Ones for what has a derivative."""

    def one(leaf):
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.ones_like(leaf) if inexact else np.zeros(leaf.shape, jax.dtypes.float0)

    return jtu.tree_map(one, tree)


def grad_x(f, x, q):
    return jax.grad(f)(x, q)


def grad_q(f, x, q):
    return jax.grad(f, argnums=1, allow_int=True)(x, q)


def value_and_grad(f, x, q):
    return jax.value_and_grad(f, argnums=(0, 1), allow_int=True)(x, q)


def grad_has_aux(f, x, q):
    return jax.grad(lambda x, q: (f(x, q), {"y": f(2 * x, q)}), has_aux=True)(x, q)


def jvp(f, x, q):
    return jax.jvp(f, (x, q), tangent((x, q)))


def jvp_x(f, x, q):
    return jax.jvp(lambda x: f(x, q), (x,), (tangent(x),))


def vjp(f, x, q):
    y, pull_back = jax.vjp(f, x, q)
    return y, pull_back(jnp.ones_like(y))


def linearize(f, x, q):
    y, push_forward = jax.linearize(f, x, q)
    return y, push_forward(*tangent((x, q)))


def hvp_forward_over_reverse(f, x, q):
    return jax.jvp(jax.grad(f), (x, q), tangent((x, q)))


def hvp_reverse_over_forward(f, x, q):
    return jax.grad(lambda x: jax.jvp(lambda x: f(x, q), (x,), (tangent(x),))[1])(x)


def hvp_reverse_over_reverse(f, x, q):
    return jax.grad(lambda x: jnp.vdot(jax.grad(f)(x, q), x), allow_int=True)(x)


def hvp_q(f, x, q):
    gradient = jax.grad(f, argnums=1, allow_int=True)
    return jax.jvp(lambda x: gradient(x, q), (x,), (tangent(x),))


def hessian(f, x, q):
    return jax.hessian(f)(x, q)


def jit_of_grad(f, x, q):
    return jax.jit(jax.grad(f, argnums=(0, 1), allow_int=True))(x, q)


def grad_of_jit(f, x, q):
    return jax.grad(jax.jit(f), argnums=(0, 1), allow_int=True)(x, q)


def checkpoint_grad(f, x, q):
    return jax.grad(jax.checkpoint(f), argnums=(0, 1), allow_int=True)(x, q)


def checkpoint_policy_grad(f, x, q):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.grad(jax.jit(jax.checkpoint(f, policy=policy, prevent_cse=False)))(x, q)


def grad_through_scan_constant(f, x, q):
    def loss(x, q):
        return jnp.sum(lax.scan(lambda c, _: (c + jax.grad(f)(c, q), f(c, q)), x, None, length=2)[1])

    return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, q)


def grad_through_cond(f, x, q):
    def loss(x, q):
        return lax.cond(jnp.sum(x) > 0, f, lambda x, q: 2 * f(x, q), x, q)

    return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, q)


def jvp_through_while(f, x, q):
    def loss(x, q):
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(x, q)), (0, jnp.zeros(())))[1]

    return jax.jvp(loss, (x, q), tangent((x, q)))


DERIVATIVES = (
    grad_x,
    grad_q,
    value_and_grad,
    grad_has_aux,
    jvp,
    jvp_x,
    vjp,
    linearize,
    hvp_forward_over_reverse,
    hvp_reverse_over_forward,
    hvp_reverse_over_reverse,
    hvp_q,
    hessian,
    jit_of_grad,
    grad_of_jit,
    checkpoint_grad,
    checkpoint_policy_grad,
    grad_through_scan_constant,
    grad_through_cond,
    jvp_through_while,
)


@with_integers
@pytest.mark.parametrize("transform", DERIVATIVES, ids=name)
def test_derivatives(transform, place, make, run, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    assert_same(*run(place(implicit, transform, squares), place(densely, transform, squares), x, q))


# --- vmap ---


def vmap_x(f, x, q):
    return jax.vmap(f, (0, None))(x, q)


def vmap_x_axes(f, x, q):
    return jax.vmap(lambda q, x: f(x, q), (None, 1), out_axes=-1)(q, x)


def vmap_closed_over(f, x, q):
    return jax.vmap(lambda x: f(x, q))(x)


def vmap_nested_x(f, x, q):
    return jax.vmap(jax.vmap(f, (0, None)), (0, None))(x, q)


def vmap_named_axis(f, x, q):
    return jax.vmap(
        lambda x, q: lax.psum(f(x, q), "i") - lax.axis_index("i").astype(x.dtype), (0, None), axis_name="i"
    )(x, q)


def vmap_of_grad(f, x, q):
    loss = lambda x, q: jnp.sum(f(x, q) ** 2)  # noqa: E731
    return jax.vmap(jax.grad(loss, argnums=(0, 1), allow_int=True), (0, None))(x, q)


def grad_of_vmap(f, x, q):
    loss = lambda x, q: jnp.sum(jax.vmap(f, (0, None))(x, q) ** 2)  # noqa: E731
    return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, q)


def jacobian_forward(f, x, q):
    return jax.jacfwd(f)(x, q)


def jacobian_reverse(f, x, q):
    return jax.jacrev(f)(x, q)


def linear_transpose(f, x, q):
    return jax.linear_transpose(lambda x: f(x, q), x)(f(x, q))


def vmap_in_jit(f, x, q):
    return jax.jit(jax.vmap(f, (0, None)))(x, q)


def vmap_of_jit(f, x, q):
    return jax.vmap(jax.jit(f), (0, None))(x, q)


def vmap_of_scan(f, x, q):
    return jax.vmap(lambda x, q: lax.scan(lambda c, _: (c + 1, f(c, q)), x, None, length=2), (0, None))(x, q)


def vmap_of_cond(f, x, q):
    branches = f, lambda x, q: f(x, -q)
    return jax.vmap(lambda x, q: lax.cond(x[0, 0] > 0, *branches, x, q), (0, None))(x, q)


BATCHES_OF_X = (
    vmap_x,
    vmap_x_axes,
    vmap_closed_over,
    vmap_nested_x,
    vmap_named_axis,
    vmap_of_grad,
    grad_of_vmap,
    jacobian_forward,
    jacobian_reverse,
    linear_transpose,
    vmap_in_jit,
    vmap_of_jit,
    vmap_of_scan,
    vmap_of_cond,
)


@ways
@pytest.mark.parametrize("transform", BATCHES_OF_X, ids=name)
def test_vmap_over_the_dense_operand(transform, place, make, run, getkey):
    x, q = integers(getkey(), (2, 3, 4)), make(getkey(), (4, 6))
    assert_same(*run(place(implicit, transform, matmul), place(densely, transform, matmul), x, q))


def vmap_q(f, x, q):
    return jax.vmap(f, (None, 0))(x[0], q)


def vmap_both(f, x, q):
    return jax.vmap(f)(x, q)


def vmap_nested(f, x, q):
    return jax.vmap(jax.vmap(f, (0, None)), (None, 0))(x, q)


def vmap_nested_q(f, x, q):
    pairs = jtu.tree_map(lambda leaf: jnp.stack([leaf, leaf]), q)
    return jax.vmap(jax.vmap(f), (None, 0))(x, pairs)


def vmap_both_of_grad(f, x, q):
    loss = lambda x, q: jnp.sum(f(x, q) ** 2)  # noqa: E731
    return jax.vmap(jax.grad(loss, argnums=(0, 1), allow_int=True))(x, q)


def vmap_returning_it(f, x, q):
    return jax.vmap(lambda x, q: (f(x, q), {"q": q}))(x, q)


def vmap_both_of_scan(f, x, q):
    return jax.vmap(lambda x, q: lax.scan(lambda c, _: (c + 1, f(c, q)), x, None, length=2))(x, q)


def lax_map_both(f, x, q):
    return lax.map(lambda pair: f(*pair), (x, q))


def lax_map_in_batches(f, x, q):
    return lax.map(lambda pair: f(*pair), (x, q), batch_size=2)


BATCHES_OF_BOTH = (
    vmap_q,
    vmap_both,
    vmap_nested,
    vmap_nested_q,
    vmap_both_of_grad,
    vmap_returning_it,
    vmap_both_of_scan,
    lax_map_both,
    lax_map_in_batches,
)


@stacks
@pytest.mark.parametrize("transform", BATCHES_OF_BOTH, ids=name)
def test_vmap_over_a_stacked_array(transform, place, make, run, getkey):
    x, q = integers(getkey(), (3, 2, 4)), make(getkey(), (3, 4, 6))
    assert_same(*run(place(implicit, transform, matmul), place(densely, transform, matmul), x, q))


def vmap_last_axis(f, x, q):
    return jax.vmap(f, (None, -1), out_axes=-1)(x, q)


@pytest.mark.parametrize("make", ARRAYS, ids=name)
def test_vmap_over_the_last_axis_outside(make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    actual = outside(implicit, vmap_last_axis, matmul)(x, q)
    assert_same(actual, outside(densely, vmap_last_axis, matmul)(x, q))


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)], ids=str)
def test_vmap_over_the_last_axis_inside(shape, getkey):
    """Only where every leaf has that axis: `Scaled`, here."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), shape)
    columns = lambda x, q: jnp.sum(x) * q  # noqa: E731
    assert_same(inside(implicit, vmap_last_axis, columns)(x, q), inside(densely, vmap_last_axis, columns)(x, q))


# --- control flow ---


def doubled(q):
    """Where `q` is a tree of its leaves, as for JAX's transformations outside `implicit`, so is the result."""
    return jtu.tree_map(lambda leaf: leaf + leaf, q)


def scan_constant(f, x, q):
    return lax.scan(lambda c, _: (f(c, q), c.sum()), x, None, length=3)


def scan_constant_reverse(f, x, q):
    return lax.scan(lambda c, i: (f(c, q) - i, c.sum()), x, jnp.arange(3.0), reverse=True, unroll=2)


def scan_carry(f, x, q):
    return lax.scan(lambda c, i: (c, f(x * i, c)), q, jnp.arange(3.0))


def scan_carry_doubled(f, x, q):
    return lax.scan(lambda c, _: (doubled(c), f(x, c)), q, None, length=3)


def scan_carry_becoming_dense(f, x, q):
    return lax.scan(lambda c, _: ((c[0] + c[1], c[1]), f(x, c[0])), (q * 1, q), None, length=3)


def scan_carry_of_both(f, x, q):
    return lax.scan(lambda c, _: ((f(c[0], c[1]), c[1]), None), (x, q), None, length=3)


def scan_of_checkpoint(f, x, q):
    return lax.scan(lambda c, _: (jax.checkpoint(f)(c, q), None), x, None, length=3)


def scan_of_scan(f, x, q):
    inner = lambda c: lax.scan(lambda c, _: (f(c, q), None), c, None, length=2)[0]  # noqa: E731
    return lax.scan(lambda c, _: (inner(c), None), x, None, length=2)


def cond(f, x, q):
    return lax.cond(jnp.sum(x) > 0, f, lambda x, q: f(x, q) * 2, x, q)


def cond_closing_over(f, x, q):
    return lax.cond(jnp.sum(x) > 0, lambda: f(x, q), lambda: f(2 * x, q))


def cond_returning_it(f, x, q):
    return f(x, lax.cond(jnp.sum(x) > 0, lambda q: q, doubled, q))


def cond_returning_one_or_another(f, x, q):
    return f(x, lax.cond(jnp.sum(x) > 0, lambda q: q * 1, lambda q: q * 2, q))


def switch(f, x, q):
    return lax.switch(1, [f, lambda x, q: f(2 * x, q), lambda x, q: f(3 * x, q)], x, q)


def switch_returning_it(f, x, q):
    return f(x, lax.switch(jnp.int32(2), [lambda q: q, doubled, lambda q: q], q))


def while_constant(f, x, q):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1], q)), (0, x))


def while_carry(f, x, q):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1], c[2]), c[2]), (0, x, q))[:2]


def while_condition(f, x, q):
    return lax.while_loop(lambda c: (c[0] < 3) & (jnp.sum(f(c[1], q)) < 9), lambda c: (c[0] + 1, 2 * c[1]), (0, x))


def fori_static(f, x, q):
    return lax.fori_loop(0, 3, lambda i, c: f(c, q) + jnp.asarray(i, c.dtype), x)


def fori_traced(f, x, q):
    return jax.jit(lambda n, x, q: lax.fori_loop(0, n, lambda i, c: f(c, q), x))(3, x, q)


def lax_map(f, x, q):
    return lax.map(lambda row: f(row[None], q), x)


def checkpoint(f, x, q):
    return jax.checkpoint(f)(x, q)


def checkpoint_returning_it(f, x, q):
    return f(x, jax.checkpoint(lambda q: q)(q))


LOOPS = (
    scan_constant,
    scan_constant_reverse,
    scan_carry,
    scan_carry_doubled,
    scan_carry_becoming_dense,
    scan_carry_of_both,
    scan_of_checkpoint,
    scan_of_scan,
    cond,
    cond_closing_over,
    cond_returning_it,
    cond_returning_one_or_another,
    switch,
    switch_returning_it,
    while_constant,
    while_carry,
    while_condition,
    fori_static,
    fori_traced,
    lax_map,
    checkpoint,
    checkpoint_returning_it,
)


@ways
@pytest.mark.parametrize("transform", LOOPS, ids=name)
def test_control_flow(transform, place, make, run, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 4))
    assert_same(*run(place(implicit, transform, matmul), place(densely, transform, matmul), x, q))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("other", ["its transpose", "another class", "a dense array"])
def test_branches_that_return_different_forms(other, sign, getkey):
    x, q = sign * jnp.ones((3, 4)), scaled(getkey(), (4, 4))
    others = {"its transpose": lambda q: q.T, "another class": lambda _: low_rank(getkey(), (4, 4))}
    choose = lambda x, q, other: x @ lax.cond(x[0, 0] > 0, lambda q, _: q, lambda _, other: other, q, other)  # noqa: E731
    operands = x, q, others.get(other, lambda q: q.materialize())(q)
    assert_same(implicit(choose)(*operands), densely(choose)(*operands))


@stacks
def test_scan_over_rows(place, make, run, getkey):
    """Rows of a matrix, that are no slices of its leaves."""
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 4))
    rows = lambda _, x, q: lax.scan(lambda c, row: (c + row, row * 2), jnp.zeros(4), q * 1 if place is inside else q)  # noqa: E731
    assert_same(*run(place(implicit, rows, matmul), place(densely, rows, matmul), x, q))


class Turned(ImplicitArray):
    """`w`, with its axes in reverse order."""

    warn_on_materialize = False

    w: jax.Array

    def materialize(self) -> jax.Array:
        return self.w.T


def test_scan_over_an_array_whose_leaves_are_stacked_otherwise(getkey):
    """The lengths agree, but a slice of the leaf is not a slice of the array."""
    x, q = integers(getkey(), (2, 3)), Turned(integers(getkey(), (3, 3, 3)))
    assert not q.is_stacked()
    assert scaled(getkey(), (3, 4, 4)).is_stacked()
    layers = functools.partial(scan_layers, matmul)
    assert_same(implicit(layers)(x, q), densely(layers)(x, q))


def scan_layers(f, x, q):
    return lax.scan(lambda c, w: (f(c, w), c.sum()), x, q)


def scan_layers_reverse(f, x, q):
    return lax.scan(lambda c, w: (f(c, w), c.sum()), x, q, reverse=True, unroll=2)


def scan_layers_with_inputs(f, x, q):
    return lax.scan(lambda c, w: (f(c, w["q"]) + w["b"], c), x, {"q": q, "b": jnp.ones((3, 2, 4))})


def scan_layers_of_checkpoint(f, x, q):
    return lax.scan(jax.checkpoint(lambda c, w: (f(c, w), None)), x, q)


def scan_layers_collecting(f, x, q):
    return lax.scan(lambda c, w: (f(c, w), w.sum(0)), x, q)


def grad_through_layers(f, x, q):
    def loss(x, q):
        return jnp.sum(lax.scan(lambda c, w: (f(c, w), None), x, q)[0] ** 2)

    return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, q)


def grad_through_layers_of_checkpoint(f, x, q):
    def loss(x, q):
        return jnp.sum(lax.scan(jax.checkpoint(lambda c, w: (f(c, w), None)), x, q)[0] ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)(x, q)


def jvp_through_layers(f, x, q):
    return jax.jvp(lambda x, q: lax.scan(lambda c, w: (f(c, w), None), x, q)[0], (x, q), tangent((x, q)))


def lax_map_layers(f, x, q):
    return lax.map(lambda w: f(x, w), q)


def associative_scan(f, x, q):
    return lax.associative_scan(jnp.add, q * 1) * jnp.sum(f(x, q[0] * 1))


LAYERS = (
    scan_layers,
    scan_layers_reverse,
    scan_layers_with_inputs,
    scan_layers_of_checkpoint,
    scan_layers_collecting,
    grad_through_layers,
    grad_through_layers_of_checkpoint,
    jvp_through_layers,
    lax_map_layers,
    associative_scan,
)


@layers
@pytest.mark.parametrize("transform", LAYERS, ids=name)
def test_layers(transform, place, make, run, getkey):
    x, q = integers(getkey(), (2, 4)), make(getkey(), (3, 4, 4))
    assert_same(*run(place(implicit, transform, matmul), place(densely, transform, matmul), x, q))


# --- `implicit` between two transformations ---


def as_loss(f):
    """The sum of squares of all that `f` returns."""

    def loss(x, q):
        leaves = jtu.tree_leaves(materialize(f(x, q)))
        return sum(jnp.sum(leaf**2) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))

    return loss


def outer_grad(f, x, q):
    return jax.value_and_grad(as_loss(f), argnums=(0, 1), allow_int=True)(x, q)


def outer_jvp(f, x, q):
    return jax.jvp(as_loss(f), (x, q), tangent((x, q)))


def outer_vmap(f, x, q):
    return jax.vmap(as_loss(f), (0, None))(jnp.stack([x, -x]), q)


def outer_vmap_q(f, x, q):
    return jax.vmap(as_loss(f), (None, 0))(x, jtu.tree_map(lambda leaf: jnp.stack([leaf, leaf + leaf]), q))


def between(outer, inner):
    return tuple(functools.partial(outer, wrap(functools.partial(inner, matmul))) for wrap in (implicit, densely))


INNER = [
    jit,
    scan_constant,
    scan_carry,
    scan_carry_of_both,
    scan_of_checkpoint,
    cond,
    cond_closing_over,
    switch_returning_it,
    fori_static,
    lax_map,
    checkpoint,
    vmap_closed_over,
]
# Gradients and batches of the array itself with all; the others with one of each kind.
BETWEEN = [(inner, outer, scaled) for inner in INNER for outer in (outer_grad, outer_vmap_q)]
KINDS = [jit, scan_constant, scan_carry, cond, checkpoint, vmap_closed_over]
BETWEEN += [(inner, *other) for inner in KINDS for other in ((outer_jvp, scaled), (outer_vmap, filled))]
BETWEEN += [(inner, outer_grad, scaled_int8) for inner in (scan_of_checkpoint, switch_returning_it, lax_map)]


@pytest.mark.parametrize(("inner", "outer", "make"), BETWEEN, ids=name)
def test_between(inner, outer, make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 4))
    assert_same(*compiled(*between(outer, inner), x, q))


@pytest.mark.parametrize("outer", [outer_jvp, outer_vmap, outer_vmap_q], ids=name)
@pytest.mark.parametrize("inner", [while_constant, while_carry, while_condition], ids=name)
def test_between_with_while(inner, outer, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert_same(*compiled(*between(outer, inner), x, q))


@pytest.mark.parametrize(
    ("outer", "make"), [(outer_grad, scaled), (outer_grad, filled), (outer_jvp, low_rank)], ids=name
)
@pytest.mark.parametrize("inner", [scan_layers, scan_layers_of_checkpoint, vmap_both], ids=name)
def test_between_with_layers(inner, outer, make, getkey):
    q = make(getkey(), (3, 4, 4))
    x = integers(getkey(), (3, 2, 4) if inner is vmap_both else (2, 4))
    assert_same(*compiled(*between(outer, inner), x, q))
