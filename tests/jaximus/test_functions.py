"""Any function of JAX, on an array that has no rule for it."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax import random as jr

from eformer.jaximus import implicit

from .arrays import assert_same, densely, integers, low_rank, name, scaled
from .test_transforms import LOOPS, PLAIN, matmul, outside

FUNCTIONS = {
    "reductions": lambda q: (jnp.sum(q), jnp.prod(q, axis=0), jnp.any(q), jnp.median(q)),
    "cumulative": lambda q: (jnp.cumsum(q, axis=1), lax.cummax(q), jnp.diff(q)),
    "sorting": lambda q: (jnp.sort(q), jnp.argsort(q, axis=0), lax.top_k(q, 2), jnp.unique(q, size=3)),
    "logic": lambda q: (q > 0) & (q < 2) | jnp.isnan(q),
    "rounding": lambda q: (jnp.round(q / 3), jnp.floor(q / 3), jnp.sign(q)),
    "transcendental": lambda q: (jnp.exp(q), jnp.arctan2(q, 1.0), jax.lax.erf(q), jnp.sinc(q)),
    "softmax": lambda q: (jax.nn.softmax(q), jax.nn.logsumexp(q), jax.nn.gelu(q), jax.nn.one_hot(q.astype(int), 3)),
    "shapes": lambda q: (jnp.pad(q, 1), jnp.tile(q, (2, 1)), jnp.roll(q, 1), jnp.flip(q), jnp.stack([q, q])),
    "broadcasting": lambda q: (jnp.broadcast_to(q, (2, 4, 4)), jnp.expand_dims(q, 0), jnp.atleast_3d(q)),
    "slicing": lambda q: (lax.dynamic_slice(q, (1, 1), (2, 2)), lax.dynamic_update_slice(q, q[:1], (2, 0))),
    "gathering": lambda q: (jnp.take(q, jnp.array([1, 1]), axis=0), jnp.take_along_axis(q, q.argsort(), 1)),
    "scattering": lambda q: (q.at[0, 1].add(2.0), jax.ops.segment_sum(q, jnp.array([0, 1, 0, 1]), 2)),
    "choosing": lambda q: (jnp.where(q > 0, q, 0.0), jnp.clip(q, 0, 1), lax.select(q > 0, q, q + 1)),
    "products": lambda q: (jnp.kron(q, q), jnp.outer(q, q), jnp.vdot(q, q), jnp.tensordot(q, q, 2), jnp.inner(q, q)),
    "linear algebra": lambda q: (jnp.linalg.norm(q), jnp.linalg.matrix_power(q, 2), jnp.trace(q), jnp.triu(q)),
    "decompositions": lambda q: (jnp.linalg.qr(q), jnp.linalg.det(q + 4 * jnp.eye(4)), jnp.linalg.svd(q)),
    "fourier": lambda q: (jnp.fft.fft(q), jnp.fft.rfft2(q)),
    "convolution": lambda q: lax.conv_general_dilated(q[None, None], q[None, None], (1, 1), "SAME"),
    "windows": lambda q: lax.reduce_window(q, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    "dtypes": lambda q: (q.astype(jnp.int8), lax.bitcast_convert_type(q, jnp.int32), q.astype(bool)),
    "creation": lambda q: (jnp.zeros_like(q), jnp.ones_like(q, dtype=int), jnp.full_like(q, 2), jnp.array(q)),
    "random": lambda q: (
        jr.normal(jr.key(0), q.shape) * q,
        jr.bernoulli(jr.key(1), abs(q) / 2),
        jr.permutation(jr.key(2), q),
    ),
    "complex": lambda q: lax.complex(q, q).conj().imag,
    "control": lambda q: lax.platform_dependent(q, default=lambda q: q * 2, cpu=lambda q: q * 3),
    "stop gradient": lambda q: (lax.stop_gradient(q), lax.optimization_barrier(q)),
    "vectorize": lambda q: jnp.vectorize(lambda row: row @ row, signature="(n)->()")(q),
    "apply along axis": lambda q: jnp.apply_along_axis(jnp.sum, 0, q),
    "interpolation": lambda q: (jnp.interp(0.5, q[0].sort(), q[1]), jnp.searchsorted(q[0].sort(), q[1])),
    "nested numpy": lambda q: np.asarray(q).sum() + np.asarray(q.sum()),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_function(function, getkey):
    q = scaled(getkey(), (4, 4))
    assert_same(implicit(function)(q), function(q.materialize()))


def attention(q):
    return jax.nn.dot_product_attention(q, q, q, is_causal=True)


def scaled_dot(q):
    return jnp.einsum("bqhd,bkhd->bhqk", q, q, precision="highest")


@pytest.mark.parametrize("function", [attention, scaled_dot], ids=name)
def test_attention(function, getkey):
    q = scaled(getkey(), (1, 3, 2, 4))
    assert_same(jax.jit(implicit(function))(q), jax.jit(function)(q.materialize()))


def test_every_operand_may_be_implicit(getkey):
    q, other = scaled(getkey(), (4, 4)), low_rank(getkey(), (4, 4))
    function = lambda q, other: jnp.concatenate([q, other, q]) @ jnp.where(q > other, q, other)  # noqa: E731
    assert_same(implicit(function)(q, other), densely(function)(q, other))


@pytest.mark.parametrize("transform", [*PLAIN, *LOOPS], ids=name)
def test_without_jit(transform, getkey):
    """`jax.disable_jit` runs loops and branches in Python."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    with jax.disable_jit():
        assert_same(outside(implicit, transform, matmul)(x, q), outside(densely, transform, matmul)(x, q))


def test_mutable_array(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))

    def function(x, q):
        total = jax.new_ref(jnp.zeros((3, 4)))
        total[...] += x @ q
        total[0] = q[0]
        return total[...]

    assert_same(implicit(function)(x, q), densely(function)(x, q))
    assert_same(jax.jit(implicit(function))(x, q), densely(function)(x, q))


def test_compile_time_evaluation(getkey):
    q = scaled(getkey(), (4, 4))

    def function(x, q):
        with jax.ensure_compile_time_eval():
            total = jnp.sum(jnp.arange(3.0))
        return x @ q * total

    x = integers(getkey(), (3, 4))
    assert_same(jax.jit(implicit(function))(x, q), jax.jit(densely(function))(x, q))


def test_threads(getkey):
    """What is current in one thread is not in another."""
    x, arrays = integers(getkey(), (3, 4)), [scaled(getkey(), (4, 4)) for _ in range(4)]
    results = [None] * len(arrays)

    def work(i):
        results[i] = jax.jit(implicit(lambda x, q: x @ jnp.sin(q * 0) + x @ q))(x, arrays[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(arrays))]
    list(map(threading.Thread.start, threads))
    list(map(threading.Thread.join, threads))
    assert_same(results, [x @ q.materialize() for q in arrays])


def test_error_inside_leaves_nothing_behind(getkey):
    """After an exception JAX's state is as before, inside `implicit` and out."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))

    def failing(x, q):
        x @ q
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        implicit(failing)(x, q)
    assert_same(implicit(matmul)(x, q), x @ q.materialize())
    with pytest.raises(TypeError, match="Scaled"):
        jnp.sin(q)


def test_tracers_do_not_leak(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (3, 4, 4))
    function = jax.jit(implicit(lambda x, q: lax.scan(lambda c, w: (jax.checkpoint(matmul)(c, w), None), x, q)[0]))
    with jax.checking_leaks():
        actual = jax.grad(lambda x: function(x, q).sum())(x)
    assert_same(
        actual, jax.grad(lambda x: densely(lambda x, q: lax.scan(lambda c, w: (c @ w, None), x, q)[0])(x, q).sum())(x)
    )
