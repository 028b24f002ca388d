"""What no codes can do falls back to the dense array: without a crash, with its values, and visibly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import MaterializationError, explain, implicit, materialization_error

from .cases import Case, example, normal, type_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),
]

SHAPE = (6, 6)
IDS = np.array([4, 0, 1])


def symmetric(q: Any) -> Any:
    return q @ q.T + 9 * jnp.eye(6)


def solve_triangular(q: Any) -> Any:
    return lax.linalg.triangular_solve(jnp.tril(q) + 3 * jnp.eye(6), jnp.ones((6, 2)), left_side=True, lower=True)


LINALG: dict[str, Callable[[Any], Any]] = {
    "svd": lambda q: jnp.linalg.svd(q, compute_uv=False),
    "qr": jnp.linalg.qr,
    "cholesky": lambda q: jnp.linalg.cholesky(symmetric(q)),
    "eigh": lambda q: jnp.linalg.eigh(symmetric(q))[0],
    "solve": lambda q: jnp.linalg.solve(q + 9 * jnp.eye(6), jnp.ones(6)),
    "solve_with": lambda q: jnp.linalg.solve(9 * jnp.eye(6), q),
    "inv": lambda q: jnp.linalg.inv(q + 9 * jnp.eye(6)),
    "det": jnp.linalg.det,
    "slogdet": jnp.linalg.slogdet,
    "norm": jnp.linalg.norm,
    "norm_2": lambda q: jnp.linalg.norm(q, ord=2),
    "matrix_rank": jnp.linalg.matrix_rank,
    "pinv": jnp.linalg.pinv,
    "lstsq": lambda q: jnp.linalg.lstsq(q + 9 * jnp.eye(6), jnp.ones(6))[0],
    "matrix_power": lambda q: jnp.linalg.matrix_power(q, 3),
    "multi_dot": lambda q: jnp.linalg.multi_dot([q, q, q]),
    "eig": lambda q: jnp.linalg.eigvals(q + 0 * q),
    "lax_lu": lambda q: lax.linalg.lu(q)[0],
    "lax_qr": lambda q: lax.linalg.qr(q, full_matrices=False),
    "lax_svd": lambda q: lax.linalg.svd(q, compute_uv=False),
    "lax_cholesky": lambda q: lax.linalg.cholesky(symmetric(q)),
    "lax_triangular_solve": solve_triangular,
    "lax_hessenberg": lambda q: lax.linalg.hessenberg(q)[0],
    "cho_solve": lambda q: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(symmetric(q)), True), q),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "fft": lambda q: jnp.fft.fft(q, axis=0),
    "rfft2": jnp.fft.rfft2,
    "sort": lambda q: jnp.sort(q, axis=0),
    "argsort": jnp.argsort,
    "top_k": lambda q: lax.top_k(q, 2),
    "median": jnp.median,
    "cumsum": lambda q: jnp.cumsum(q, axis=0),
    "cumlogsumexp": lambda q: lax.cumlogsumexp(q, axis=1),
    "choice": lambda q: jax.random.choice(jax.random.key(0), q, (3,)),
    "permutation": lambda q: jax.random.permutation(jax.random.key(0), q),
    "categorical": lambda q: jax.random.categorical(jax.random.key(0), q),
    "einsum_of_three": lambda q: jnp.einsum("ij,jk,ik->i", q, q, q),
    "scatter_set": lambda q: q.at[IDS].set(jnp.ones((3, 6))),
    "scatter_add": lambda q: q.at[IDS, 2].add(q[0, :3]),
    "scatter_max": lambda q: q.at[:, 1].max(0.25),
    "scatter_mul": lambda q: q.at[1].multiply(2.0),
    "scatter_into_dense": lambda q: jnp.zeros(SHAPE).at[IDS].set(q[:3]),
    "scatter_row": lambda q: q.at[2].set(q[0]),
    "segment_sum": lambda q: jax.ops.segment_sum(q, jnp.array([0, 0, 1, 1, 2, 2]), 3),
    "searchsorted": lambda q: jnp.searchsorted(jnp.sort(q.ravel()), q[0]),
    "associative_scan": lambda q: lax.associative_scan(jnp.maximum, q),
    "map": lambda q: lax.map(jnp.sum, q),
    "convolve": lambda q: jnp.convolve(q[0], q[1]),
    "interp": lambda q: jnp.interp(q[0], jnp.arange(6.0), q[1]),
    "kron": lambda q: jnp.kron(q, jnp.ones((2, 2))),
    "triu": jnp.triu,
    "clip": lambda q: jnp.clip(q, -0.5, 0.5),
}
CHOSEN = [(Case.of("int8"), name) for name in (*LINALG, *OTHERS)]
CHOSEN += [(Case.of("nf4", block_size=4, double_quantization=True), name) for name in ("svd", "sort", "scatter_add")]


@pytest.mark.parametrize(("case", "name"), CHOSEN, ids=str)
def test_agrees_with_dense(case, name):
    """Decompositions and sums of up to 36 products, which may be taken in another order, of numbers up to 30."""
    q, dense = example(case, SHAPE)
    function = {**LINALG, **OTHERS}[name]
    out, expected = jax.tree.leaves(implicit(function)(q)), jax.tree.leaves(function(dense))
    for actual, wanted in zip(out, expected, strict=True):
        assert type_of(actual) == type_of(wanted)
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["svd", "sort", "scatter_set"])
def test_is_visible(name):
    q, _ = example(Case.of("int8"), SHAPE)
    function = {**LINALG, **OTHERS}[name]
    assert explain(function)(q).dense_bytes >= q.size * 4
    with materialization_error(), pytest.raises(MaterializationError, match="no rule serves"):
        implicit(function)(q)


def test_gradients_go_through_fallbacks():
    q, dense = example(Case.of("int8"), SHAPE)
    x = normal((6,), seed=1)
    function = lambda q, x: jnp.sum(jnp.linalg.solve(q + 9 * jnp.eye(6), x) ** 2)  # noqa: E731
    gradient, expected = jax.grad(implicit(function), argnums=1)(q, x), jax.grad(function, argnums=1)(dense, x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
