"""The straight-through estimator: any value forward, the identity's derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax import random as jr

from eformer.jaximus import ImplicitArray, implicit, ste

from .arrays import Scaled, assert_same, assert_same_array, name, scaled


def rounded(x):
    return jnp.round(x)


def quantized(x):
    """An implicit array: `x` rounded to steps of 1/4 per column."""
    scale = jnp.full((1, x.shape[-1]), 0.25, x.dtype) if x.ndim > 1 else jnp.full(x.shape, 0.25, x.dtype)
    return Scaled(jnp.round(x / scale), scale)


def signs(x):
    """Integers: only the value counts."""
    return jnp.sign(x).astype(jnp.int8)


FUNCTIONS = (rounded, quantized, signs)
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=name)


def dense(function, x):
    value = function(x)
    value = value.materialize() if isinstance(value, ImplicitArray) else value
    return value.astype(x.dtype)


@pytest.fixture
def x(getkey):
    return jr.normal(getkey(), (4, 6))


@functions
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_value(function, jit, x):
    assert_same(jit(ste(function))(x), dense(function, x))


def test_value_is_bit_exact():
    """Not `x + (f(x) - x)`, that loses small values beside large ones."""
    x = jnp.array([1e30, -1e30, 1e-30, 0.0, -0.0, 3.0], jnp.float32)
    value = np.asarray(ste(lambda x: jnp.float32(1e-7) / (1 + jnp.abs(x)) * jnp.sign(x))(x))
    expected = np.asarray(jnp.float32(1e-7) / (1 + jnp.abs(x)) * jnp.sign(x))
    np.testing.assert_array_equal(value.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("special", [jnp.inf, -jnp.inf, jnp.nan], ids=str)
def test_special_values(special):
    x = jnp.array([special, 1.0], jnp.float32)
    np.testing.assert_array_equal(ste(lambda x: x)(x), x)


@functions
def test_forward_mode(function, x, getkey):
    tangent = jr.normal(getkey(), x.shape)
    value, pushed = jax.jvp(ste(function), (x,), (tangent,))
    assert_same(value, dense(function, x))
    assert_same_array(pushed, tangent)


@functions
def test_reverse_mode(function, x, getkey):
    cotangent = jr.normal(getkey(), x.shape)
    value, pull_back = jax.vjp(ste(function), x)
    assert_same(value, dense(function, x))
    assert_same_array(pull_back(cotangent)[0], cotangent)


@functions
def test_linearize(function, x):
    _, push_forward = jax.linearize(ste(function), x)
    assert_same_array(push_forward(x), x)


def test_second_derivative(x):
    """Of `f(x)**2`, straight through: the first is `2 f(x)`, the second 2."""
    loss = lambda x: jnp.sum(ste(rounded)(x) ** 2)  # noqa: E731
    assert_same_array(jax.grad(loss)(x), 2 * jnp.round(x))
    assert_same_array(jax.jvp(jax.grad(loss), (x,), (x,))[1], 2 * x)


def under_jit(f, x):
    return jax.jit(f)(x)


def under_vmap(f, x):
    return jax.vmap(f)(x)


def under_scan(f, x):
    return lax.scan(lambda c, row: (c, f(row)), 0, x)[1]


def under_checkpoint(f, x):
    return jax.checkpoint(f)(x)


def under_cond(f, x):
    return lax.cond(True, f, lambda x: 2 * f(x), x)


def under_implicit(f, x):
    return implicit(f)(x)


@functions
@pytest.mark.parametrize(
    "under", [under_jit, under_vmap, under_scan, under_checkpoint, under_cond, under_implicit], ids=name
)
def test_transformations(under, function, x):
    value, gradient = jax.value_and_grad(lambda x: (under(ste(function), x) * x).sum())(x)
    expected = under(lambda x: dense(function, x), x)
    np.testing.assert_array_equal(under(ste(function), x), expected)
    np.testing.assert_array_equal(gradient, expected + x)
    # A sum of 24 products, in another order: each of the 24 additions rounds once.
    magnitude = float(jnp.sum(jnp.abs(expected * x)))
    np.testing.assert_allclose(value, jnp.sum(expected * x), rtol=0, atol=24 * np.finfo(np.float32).eps * magnitude)


def scaled_round(x, step, *, offset=0.0, mode="nearest"):
    rounding = {"nearest": jnp.round, "down": jnp.floor}[mode]
    return rounding(x / step) * step + offset


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((0.5,), {}),
        ((), {"step": 0.5}),
        ((0.5,), {"offset": 1.0, "mode": "down"}),
        ((jnp.float32(0.5),), {"mode": "down"}),
    ],
    ids=["positional", "keyword", "both", "array"],
)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_extra_arguments(jit, args, kwargs, x):
    function = jit(lambda x: ste(scaled_round)(x, *args, **kwargs))
    assert_same(function(x), scaled_round(x, *args, **kwargs))
    assert_same_array(jax.grad(lambda x: function(x).sum())(x), jnp.ones_like(x))


def test_extra_arguments_get_no_gradient(x):
    loss = lambda step, offset: ste(scaled_round)(x, step, offset=offset).sum()  # noqa: E731
    assert jax.grad(loss, argnums=(0, 1))(0.5, 2.0) == (0.0, 0.0)


def test_implicit_argument(getkey):
    q = scaled(getkey(), (4, 6))
    assert_same(ste(rounded)(q), jnp.round(q.materialize()))
    gradient = jax.grad(lambda q: ste(rounded)(q).sum())(q)
    assert_same(gradient, jax.grad(lambda q: q.materialize().sum())(q))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_dtypes(dtype):
    x = jnp.array([0.3, 1.7, -2.2], dtype)
    assert_same(ste(rounded)(x), jnp.round(x))
    assert_same_array(jax.grad(lambda x: ste(rounded)(x).sum())(x), jnp.ones_like(x))


def test_result_of_another_float_dtype(x):
    value, gradient = jax.value_and_grad(lambda x: ste(lambda x: x.astype(jnp.bfloat16))(x).astype(jnp.float32).sum())(
        x
    )
    assert gradient.dtype == jnp.float32
    assert_same_array(gradient, jnp.ones_like(x))
    assert ste(lambda x: x.astype(jnp.bfloat16))(x).dtype == jnp.bfloat16
    assert jnp.isfinite(value)


def test_python_numbers():
    assert float(ste(rounded)(1.6)) == 2.0
    assert float(jax.grad(ste(rounded))(1.6)) == 1.0


def test_numpy_argument():
    x = np.array([0.4, 1.6], np.float32)
    assert_same(ste(rounded)(x), jnp.array([0.0, 2.0], jnp.float32))


def test_wraps_the_function():
    assert ste(rounded).__name__ == "rounded"


@pytest.mark.parametrize(
    "function",
    [lambda x: x[0], lambda x: x.sum(), lambda x: x[None], lambda x: Scaled(x[:2], x[:1])],
    ids=["r", "s", "n", "q"],
)
def test_result_of_another_shape(function, x):
    with pytest.raises(ValueError, match=r"`ste\(.*\)` passes the gradient on .* argument's shape \(4, 6\), got \("):
        ste(function)(x)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, bool], ids=["int32", "int8", "bool"])
def test_argument_that_has_no_derivative(dtype):
    with pytest.raises(TypeError, match=r"`ste` needs a floating point argument .* got (int|bool)"):
        ste(rounded)(jnp.ones(3, dtype))
