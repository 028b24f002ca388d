"""Binary and ternary: the documented rules, packing of any shape, scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import implicit, materialize
from eformer.ops.quantization import Array1B, ArrayNF4, quantize, straight_through_1bit

from .cases import FLOATS, assert_same_array, assert_within, f64, name, normal

SHAPES = [(), (1,), (5,), (2, 4), (7, 3), (3, 5, 2), (0, 4), (4, 0)]


@pytest.mark.parametrize(("shape", "dtype"), [*(((7, 9), dtype) for dtype in FLOATS), ((8, 8), jnp.float32)], ids=name)
def test_rules_as_documented(shape, dtype):
    w = jnp.asarray(np.round(normal(shape) * 3), dtype)
    found = jax.jit(lambda w: [quantize(w, dtype=rule).materialize() for rule in ("binary", "ternary")])(w)
    assert_same_array(found[0], jnp.asarray(np.where(np.asarray(w) < 0, -1, 1), dtype))
    threshold = 0.5 * jnp.std(w)
    x = np.asarray(w, np.float32)
    ternary = np.where(x > np.float32(threshold), 1, np.where(x < -np.float32(threshold), -1, 0))
    assert_same_array(found[1], jnp.asarray(ternary, dtype))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, jnp.int8) for shape in SHAPES), ((7, 3), jnp.float32), ((7, 3), jnp.bfloat16)],
    ids=name,
)
def test_packing_of_any_shape_is_exact(shape, dtype):
    values = jnp.asarray(np.random.default_rng(0).integers(-1, 2, shape), dtype)
    q = Array1B.quantize(values)
    assert_same_array(q.materialize(), values)
    assert q.weight.dtype == jnp.uint8
    if shape:
        rows = shape[max(len(shape) - 2, 0)]
        assert q.nbytes == -(-rows // 4) * (values.size // max(rows, 1))


def test_documented_example():
    weights = jnp.array([[-1, 0, 1, 1], [1, -1, 0, 0]])
    quantized = Array1B.quantize(weights.astype(jnp.int8))
    assert_same_array(quantized.materialize(), weights.astype(jnp.int8))


@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_documented_example_of_arrays_given_alone(capsys):
    array = jax.random.normal(jax.random.key(0), (256, 64), "f2")
    qarray = Array1B(array)
    n4array = ArrayNF4(array)

    def power(x):
        return x**2

    print(jax.jit(implicit(power))(qarray))
    print(qarray)
    print(jax.jit(implicit(power))(n4array))
    print(n4array)
    assert "Array1B(float16[256, 64], 4,096 bytes)" in capsys.readouterr().out
    assert_same_array(qarray.materialize(), quantize(array, dtype="ternary").materialize())
    assert_same_array(jax.jit(implicit(power))(qarray), power(qarray.materialize()))


@pytest.mark.parametrize("value", [2, -3, 0.5, np.nan, np.inf], ids=str)
def test_other_values_raise_where_they_can_be_seen(value):
    with pytest.raises(ValueError, match=r"values in \{-1, 0, 1\}.*quantize\(array, 'ternary'\)"):
        Array1B.quantize(jnp.array([[1.0, value], [0.0, 1.0]]))


def test_other_values_are_rounded_and_clipped_under_tracing():
    values = jnp.array([2.0, -300.0, 0.4, 0.6, -0.6, jnp.nan, jnp.inf])
    packed = jax.jit(lambda x: Array1B.quantize(x).materialize())(values)
    np.testing.assert_array_equal(packed, np.array([1, -1, 0, 1, -1, np.nan, 1], np.float32))
    integers = jnp.array([127, -128, 2, 3, 4, -5], jnp.int8)
    packed = jax.jit(lambda x: Array1B.quantize(x).materialize())(integers)
    np.testing.assert_array_equal(packed, np.array([1, -1, 1, 1, 1, -1], np.int8))


@pytest.mark.parametrize("dtype", ["binary", "ternary"])
@pytest.mark.parametrize("scale", ["tensor", "channel"])
@pytest.mark.parametrize("along", [None, -2, -1])
def test_scales_are_the_mean_magnitude_of_what_is_kept(dtype, scale, along):
    w = normal((9, 7))
    q = quantize(w, dtype=dtype, scale=scale, axis=along)
    assert q.weight.shape == ((9, 2) if along == -1 else (3, 7))  # four values a byte
    values = f64(quantize(w, dtype=dtype).materialize())
    axis = (0, 1) if scale == "tensor" else (1,) if along == -1 else (0,)
    magnitude = np.where(values != 0, np.abs(f64(w)), 0)
    expected = magnitude.sum(axis, keepdims=True) / np.maximum((values != 0).sum(axis, keepdims=True), 1)
    np.testing.assert_allclose(q.scale, expected, rtol=2.0**-20)
    assert_within(q.materialize(), values * expected, np.abs(values * expected) * 2.0**-20)
    # The best scale for these values, so the error is no larger than without.
    assert np.sum((f64(q.materialize()) - f64(w)) ** 2) < np.sum((values - f64(w)) ** 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("shape", [(5,), (9, 7), (2, 3, 9, 7)], ids=str)
def test_absmean_is_the_rule_of_bitnet(shape, dtype):
    """Each matrix by its own mean magnitude, and the nearest of -1, 0 and 1; quarters, so that the mean is exact."""
    w = jnp.asarray(np.round(normal(shape) * 4) / 4, dtype)
    q = quantize(w, dtype="ternary", scale="absmean")
    x, axes = f64(w), tuple(range(len(shape)))[-2:]
    scale = np.abs(x).mean(axes, keepdims=True).astype(np.float32)
    np.testing.assert_allclose(q.scale, scale, rtol=2.0**-22)
    values = np.clip(np.round(x / scale), -1, 1)
    assert_same_array(q.materialize(), jnp.asarray(values * f64(q.scale), dtype))


def test_absmean_of_zeros_and_of_what_has_no_mean():
    w = np.stack([np.zeros((4, 3)), np.ones((4, 3)), np.full((4, 3), 3e38), np.ones((4, 3)), np.ones((4, 3))])
    w[3, 0, 0], w[4, 1, 1] = np.nan, -np.inf
    q = quantize(jnp.asarray(w, jnp.float32), dtype="ternary", scale="absmean")
    expected = np.where(np.isfinite(w).all((1, 2), keepdims=True), w, np.nan).astype(np.float32)
    np.testing.assert_allclose(q.materialize(), expected, rtol=2.0**-22)
    assert quantize(jnp.ones((0, 3)), dtype="ternary", scale="absmean").shape == (0, 3)


def test_absmean_is_for_ternary_and_needs_no_fit():
    with pytest.raises(ValueError, match=r"`scale='absmean'` must be one of 'tensor', 'channel', None"):
        quantize(normal(), dtype="binary", scale="absmean")
    with pytest.raises(ValueError, match=r"fits a scale, and that of `scale='absmean'` is given"):
        quantize(normal(), dtype="ternary", scale="absmean", fit=True)


def test_constructor_as_documented():
    made = Array1B.quantize(jnp.ones((6, 3), jnp.int8))
    q = Array1B(made.weight, shape=(6, 3), dtype=jnp.int8)
    assert_same_array(q.materialize(), made.materialize())
    assert Array1B(made.weight).shape == (8, 3)  # without a shape, all that is packed
    with pytest.raises(ValueError, match="packs four values a byte"):
        Array1B(made.weight, shape=(3, 3))


@pytest.mark.parametrize("dtype", ["ternary", "binary"])
def test_straight_through(dtype):
    w = normal()
    assert_same_array(straight_through_1bit(w, dtype), materialize(quantize(w, dtype=dtype)))
    assert_same_array(jax.grad(lambda w: straight_through_1bit(w, dtype).sum())(w), jnp.ones_like(w))
    with pytest.raises(ValueError, match="'ternary' or 'binary'"):
        straight_through_1bit(w, "int8")
