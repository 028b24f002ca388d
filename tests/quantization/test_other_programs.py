"""Programs that hold functions of their own, or choose weights by index: quantized weights stay so in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

from eformer import explain, implicit, materialization_error

from .cases import LAYOUTS, Case, assert_product, every_case, normal

SQUARE = (64, 64)


@custom_vmap
def product(x, w):
    return x @ w


@product.def_vmap
def _(axis_size, in_batched, x, w):
    del axis_size
    assert in_batched == [True, False]
    return x @ w, True


SOLVERS = {
    "cg of a function": lambda w, b: jax.scipy.sparse.linalg.cg(lambda v: w @ v, b, maxiter=3)[0],
    "cg of a matrix": lambda w, b: jax.scipy.sparse.linalg.cg(w, b, maxiter=3)[0],
    "gmres": lambda w, b: jax.scipy.sparse.linalg.gmres(lambda v: w @ v, b, maxiter=1, restart=3)[0],
    "bicgstab": lambda w, b: jax.scipy.sparse.linalg.bicgstab(lambda v: w @ v, b, maxiter=2)[0],
}


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_solvers_keep_their_matrix(case, solve):
    """The dense matrix is symmetric and positive: half of it is the diagonal."""
    q = case(normal(SQUARE) / 64 + 4 * jnp.eye(64))
    with materialization_error():
        found = jax.jit(implicit(solve))(q, jnp.ones(64))
    np.testing.assert_allclose(found, solve(q.materialize(), jnp.ones(64)), rtol=1e-3, atol=1e-4)


def test_the_gradient_of_a_solver():
    q = Case.of("int8")(normal(SQUARE) / 64 + 4 * jnp.eye(64))
    loss = lambda b, w: jnp.sum(SOLVERS["cg of a matrix"](w, b) ** 2)  # noqa: E731
    gradient = jax.grad(implicit(loss))(jnp.ones(64), q)
    np.testing.assert_allclose(gradient, jax.grad(loss)(jnp.ones(64), q.materialize()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "run", [product, lambda x, w: jax.vmap(lambda x: product(x, w))(x), jax.jit(product)], ids=["plain", "vmap", "jit"]
)
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_functions_with_a_vmap_of_their_own(case, run):
    q, x = case(normal(SQUARE)), normal((3, 64), seed=1)
    with materialization_error():
        found = jax.jit(implicit(run))(x, q)
    assert_product(found, x, q)


@pytest.mark.filterwarnings("ignore:no rule serves")
def test_a_vmap_around_implicit_finds_it_too():
    q, x = Case.of("nf4")(normal(SQUARE)), normal((3, 64), seed=1)
    found = jax.vmap(lambda x: implicit(product)(x, q))(x)
    np.testing.assert_allclose(found, x @ q.materialize(), rtol=1e-4, atol=1e-4)


EXPERTS = jnp.array([1, 3, 3, 0, 2])
ROUTES = {
    "vmap": lambda w, r: jax.vmap(lambda r, i: r @ w[i])(r, EXPERTS),
    "einsum": lambda w, r: jnp.einsum("bk,bkn->bn", r, w[EXPERTS]),
    "take": lambda w, r: jax.vmap(lambda r, i: r @ jnp.take(w, i, axis=0))(r, EXPERTS),
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@every_case
def test_experts_are_chosen_without_a_dense_copy(case, route):
    w, r = case(normal((4, *SQUARE))), normal((5, 64), seed=1)
    assert explain(route)(w, r).dense_bytes == 0
    np.testing.assert_allclose(implicit(route)(w, r), route(w.materialize(), r), rtol=1e-3, atol=1e-3)
