"""`fit`: scales with a smaller squared error than those of rounding, in every format that has scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eformer._src.kernels import fitting, grouped, reference
from eformer.model import default_rules, parse_rule, quantize_model
from eformer.ops.quantization import (
    QuantizationConfig,
    QuantizedArray,
    find_format,
    formats,
    quantize,
    straight_through,
)

from .cases import Case, assert_same_array, assert_same_leaves, assert_within, dense, f64, name, normal

BLOCK = 32
GROUPED = [f"int{bits}" for bits in grouped.PLANES if bits != 8] + ["int8_grouped"]
BLOCKS = [
    *(Case.of(each, block_size=BLOCK, double_quantization=False) for each in GROUPED),  # whose scales are rounded once
    Case.of("int4", block_size=BLOCK, symmetric=True),
    Case.of("int2", block_size=BLOCK, symmetric=True),
    Case.of("nf4", block_size=BLOCK),
    Case.of("mxfp4"),
    Case.of("fp8", block_shape=(1, BLOCK)),
    Case.of("fp8_e5m2", block_shape=(1, BLOCK)),
]
every_block = pytest.mark.parametrize("case", BLOCKS, ids=str)


def weight() -> jax.Array:
    """Rows of ordinary numbers, the last block short; and rows of numbers that break formulas."""
    w = np.array(normal((14, 70))) * np.exp(np.array(normal((14, 1), seed=1)))
    w[6] = 0
    w[7] = 0.3
    w[8] *= 1e-40
    w[9] *= 1e38 / np.abs(w[9]).max()
    w[10] = 1000 + w[10]
    w[11, 3], w[12, 40] = np.nan, np.inf
    w[13, 5] = 1e6  # among ordinary ones
    return jnp.asarray(w)


@functools.cache
def made(case: Case, fit: bool) -> tuple[QuantizedArray, Any, Any]:
    q = case(weight(), fit=fit)
    return q, f64(dense(q)), f64(q.error_bound(weight()))


def block_errors(values: np.ndarray) -> np.ndarray:
    """The squared error of each block."""
    w = f64(weight())
    off = np.pad(values - w, ((0, 0), (0, -w.shape[1] % BLOCK)))
    return np.sum(off.reshape(len(w), -1, BLOCK) ** 2, axis=-1)


@every_block
def test_no_block_is_worse(case: Case):
    (_, plain, _), (_, fitted, _) = (made(case, fit) for fit in (False, True))
    np.testing.assert_array_equal(np.isnan(fitted), np.isnan(plain))
    before, after = block_errors(plain), block_errors(fitted)
    known = ~np.isnan(before)
    assert np.all(after[known] <= before[known])
    assert np.sum(after[:6]) < np.sum(before[:6])


@every_block
def test_the_bound_holds(case: Case):
    _, fitted, bound = made(case, True)
    usual = ~np.isnan(fitted)
    assert_within(fitted[usual], f64(weight())[usual], bound[usual])


# The relative squared errors of the best uniform steps for normal numbers (Max, 1960); blocks that choose their own
# steps have less.
@pytest.mark.parametrize(("bits", "most"), [(4, 0.0115), (3, 0.0375), (2, 0.119)])
def test_normal_numbers_come_near_the_best_steps(bits: int, most: float):
    w = normal((64, 256))
    off = f64(dense(quantize(w, format=f"int{bits}"))) - f64(w)
    assert np.sum(off**2) <= most * np.sum(f64(w) ** 2)


WHOLE = [
    Case.of("int8"),
    Case.of("ternary", scale="channel"),
    Case.of("ternary", scale="tensor"),
    Case.of("ternary"),
    Case.of("fp8"),
    Case.of("fp8", axis=0),
    Case.of("nvfp4"),
    Case.of("fp8", block_shape=(4, 16)),
    Case.of("nf4", block_size=BLOCK, double_quantization=True),
    Case.of("int4", block_size=BLOCK, double_quantization=True),
    Case.of("int3", block_size=BLOCK, double_quantization=True, symmetric=True),
]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_formats_with_larger_slices(case: Case):
    w = normal((6, 560)) * jnp.exp(normal((6, 1), seed=1))
    plain, fitted = (case(w, fit=fit) for fit in (False, True))
    errors = [np.sum((f64(dense(q)) - f64(w)) ** 2) for q in (plain, fitted)]
    assert errors[1] < errors[0]
    assert_within(dense(fitted), w, fitted.error_bound(w))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_rounding_to_smaller_floats_is_that_of_casts(dtype: str):
    info = ml_dtypes.finfo(dtype)
    values = np.arange(2**info.bits, dtype=np.uint8).view(info.dtype).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middles = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf)]
    x = np.concatenate([values, middles, *near])
    found = jax.jit(reference.round_to_float, static_argnums=1)(x, info)
    assert_same_array(found, jnp.asarray(x.astype(info.dtype).astype(np.float32)))
    ends = reference.round_to_float(jnp.asarray([-1e30, 1e30, np.nan], jnp.float32), info)
    np.testing.assert_array_equal(ends, np.array([info.min, info.max, np.nan], np.float32))


# Along the last axis, and one that is short, long, or long and no multiple; with rows that are short; over two axes.
SUMMED = [((9, 40), (1,)), ((2, 32, 2048), (1,)), ((320, 512), (0,)), ((330, 512), (0,)), ((5, 32, 8), (1,))]
SUMMED += [((3, 4, 5, 6), (1, 3))]


@pytest.mark.parametrize("in_one_pass", [True, False])
@pytest.mark.parametrize(("shape", "axes"), SUMMED, ids=str)
def test_sums_are_the_same_in_every_way(shape: tuple[int, ...], axes: tuple[int, ...], in_one_pass: bool):
    x = normal(shape)
    present = jnp.asarray(np.arange(shape[axes[0]]) % 3 > 0).reshape([-1 if i == axes[0] else 1 for i in range(x.ndim)])

    def terms(x: jax.Array, present: jax.Array | None) -> tuple[jax.Array, ...]:
        assert present is not None
        return jnp.where(present, x, 0), jnp.where(present, x * x, 0)

    kept = f64(x) * f64(present)
    count = np.prod([shape[axis] for axis in axes])
    found = fitting.sums_of(terms, x, present, axes, in_one_pass)
    for each, expected in zip(found, (kept, kept**2), strict=True):
        off = np.abs(f64(each) - expected.sum(axes, keepdims=True))
        assert np.all(off <= count * 2.0**-24 * np.abs(expected).sum(axes, keepdims=True))


def test_of_signs_the_mean_magnitude_is_the_best_scale():
    w = weight()[:6]
    assert_same_leaves(*(quantize(w, format="binary", scale="channel", fit=fit) for fit in (True, False)))


def test_integers_in_blocks_are_fitted_and_the_documented_formats_rounded_by_default():
    assert {form.name for form in formats() if form.options.get("fit")} == set(GROUPED)


@pytest.mark.parametrize("form", ["int4", "nf4"])
def test_the_option_reaches_everywhere(form: str):
    w, fit = normal((64, 96)), not find_format(form).options["fit"]
    expected = quantize(w, format=form, axis=-2, fit=fit)
    assert not np.array_equal(dense(expected), dense(quantize(w, format=form, axis=-2)))
    assert_same_leaves(quantize(w, QuantizationConfig(form, fit=fit), axis=-2), expected)
    assert_same_array(straight_through(w, format=form, axis=-2, fit=fit), dense(expected))
    by_rules = [default_rules(form, fit=fit), [parse_rule(f"kernel={form},axis=-2,fit={str(fit).lower()}")]]
    for rules in by_rules:
        assert_same_leaves(quantize_model({"kernel": w}, rules)["kernel"], expected)


@pytest.mark.parametrize("case", [Case.of("int4", axis=0, block_size=BLOCK), Case.of("nf4", axis=0, fit=True)], ids=str)
@pytest.mark.parametrize("size", [16, 2048])  # with many columns, rows are summed one by one
def test_the_same_under_jit_vmap_and_sharding(case: Case, size: int):
    w = normal((64, size))
    expected = case(w)
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    over_columns = jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, "x")))
    sharded = case(over_columns)
    assert sharded.sharding.spec == PartitionSpec(None, "x")
    assert_same_leaves(jax.jit(lambda w: case(w))(w), expected)
    assert_same_array(jnp.asarray(np.asarray(dense(sharded))), dense(expected))
    both = jax.vmap(lambda w: case(w))(jnp.stack([w, w]))
    assert_same_array(dense(both)[1], dense(expected))


@pytest.mark.parametrize("case", [*BLOCKS[:6], Case.of("int8"), Case.of("nf4")], ids=str)
def test_integers_that_rounding_holds_exactly_stay_exact(case: Case):
    x = jnp.asarray(np.resize([0, 3, 1, 2, 0, 3], (4, 64)).astype(np.int8))
    x = x if case.name != "nf4" else jnp.asarray(np.resize([0, -4, 1, 4, -1], (4, 64)).astype(np.int8))
    assert_same_array(case(x, fit=True).materialize(), x)


WRONG = {
    "int4": (2, TypeError, "`fit` must be True or False, got 2"),
    "fp8": (2, TypeError, "`fit` must be True or False, got 2"),
    "nvfp4": (2, TypeError, "`fit` must be True or False, got 2"),
}


@pytest.mark.parametrize(("form", "fit", "error", "words"), [(k, *v) for k, v in WRONG.items()], ids=name)
def test_bad_options_are_named(form: str, fit: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        quantize(jnp.ones((4, 8)), format=form, fit=fit)


WEIGHED = [
    *(Case.of(each, block_size=BLOCK, double_quantization=False) for each in GROUPED),  # whose scales are rounded once
    Case.of("int4", block_size=BLOCK, symmetric=True),
    Case.of("int3", block_size=BLOCK, double_quantization=True),
    Case.of("int8"),
    Case.of("nf4", block_size=BLOCK),
    Case.of("nvfp4"),
    Case.of("fp8"),
    Case.of("fp8_e5m2", block_shape=(1, BLOCK)),
    Case.of("ternary", scale="channel", axis=-1),
]


def importance() -> jax.Array:
    return jnp.exp(2 * normal((1, 70), seed=2))


@pytest.mark.parametrize("case", [*WEIGHED, Case.of("mxfp4")], ids=str)
def test_importance_counts(case: Case):
    """The error of what is important is smaller than with all alike, in sum over rows of ordinary numbers."""
    w = jnp.asarray(normal((64, 70)))
    plain, weighed = case(w, fit=True), case(w, importance=importance())
    before, after = (float(jnp.sum(importance() * (dense(q) - w) ** 2)) for q in (plain, weighed))
    assert after < before


@pytest.mark.parametrize("case", WEIGHED, ids=str)
def test_importance_that_is_the_same_for_all_changes_nothing_much(case: Case):
    w = jnp.asarray(normal((64, 70)))
    before, after = (f64(dense(case(w, **options))) for options in ({"fit": True}, {"importance": jnp.ones((1, 1))}))
    assert np.sum((after - f64(w)) ** 2) <= np.sum((before - f64(w)) ** 2) * (1 + fitting.MARGIN)


def test_every_format_that_is_fitted_takes_importance():
    assert {form.name for form in formats() if "fit" in form.options and not form.takes_importance} == {"binary"}


@pytest.mark.parametrize("given", [lambda zeros: zeros, lambda zeros: zeros.at[0, :BLOCK].set(1)])
def test_inputs_that_never_came_leave_blocks_rounded(given):
    w = jnp.asarray(normal((4, 64)))
    plain = f64(quantize(w, format="int4", block_size=BLOCK).error_bound(w))
    q = quantize(w, format="int4", block_size=BLOCK, importance=given(jnp.zeros((1, 64))))
    assert np.max(f64(q.error_bound(w))) < 2 * np.max(plain)
    assert_within(dense(q), w, q.error_bound(w))
