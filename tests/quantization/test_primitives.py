"""What real programs do with weights besides matmuls: no value changes, and nothing is made dense where codes allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from eformer.jaximus import explain, implicit, is_implicit, materialize
from eformer.ops.quantization import quantize

from .cases import Case, about, assert_same, assert_within, example, f64, in_turn, largest_float, normal
from .cases import name as name_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),
]

SHAPE = (3, 8, 12)  # a stack of matrices; two axes that blocks of four divide
INT8_LAST, INT8_ROWS, INT8_ALL = Case.of("int8"), Case.of("int8", axis=-2), Case.of("int8", axis=(-3, -2, -1))
NF4_LAST, NF4_ROWS = Case.of("nf4", block_size=4), Case.of("nf4", block_size=4, axis=-2)
NESTED = Case.of("nf4", block_size=4, double_quantization=True)
TERNARY, TENSOR, CHANNEL = Case.of("ternary"), Case.of("ternary", scale="tensor"), Case.of("ternary", scale="channel")
CASES = [INT8_LAST, INT8_ROWS, INT8_ALL, NF4_LAST, NF4_ROWS, NESTED, TERNARY, TENSOR, CHANNEL]
NF4 = {NF4_LAST, NESTED}  # blocks along the last axis
PACKED_ROWS = {NF4_ROWS, TERNARY, TENSOR, CHANNEL}  # codes of several rows in a byte


class Rule(NamedTuple):
    """A function of a quantized array, and the formats that it makes dense: their codes do not allow it."""

    function: Callable[[Any], Any]
    declined: frozenset[Case] = frozenset()


def rule(function: Callable[[Any], Any], *declined: Any) -> Rule:
    return Rule(function, frozenset(case for each in declined for case in (each if isinstance(each, set) else {each})))


def update(q: Any, part: Any, *starts: int) -> Any:
    return lax.dynamic_update_slice(q, part, [jnp.int32(start) for start in starts])


EXACT: dict[str, Rule] = {
    # what changes nothing
    "stop_gradient": rule(lax.stop_gradient),
    "optimization_barrier": rule(lambda q: lax.optimization_barrier((q, jnp.ones(2)))),
    "checkpoint_name": rule(lambda q: checkpoint_name(q, "w")),
    "copy": rule(jnp.copy),
    "device_put": rule(lambda q: jax.device_put(q)),
    "device_put_device": rule(lambda q: jax.device_put((q, jnp.ones(2)), jax.devices()[0])),
    "reduce_precision": rule(lambda q: lax.reduce_precision(q, 8, 23)),
    "reduce_precision_to_less": rule(lambda q: lax.reduce_precision(q, 5, 10), set(CASES)),
    # in parts
    "split": rule(lambda q: jnp.split(q, 3, axis=2)),
    "split_rows": rule(lambda q: lax.split(q, (4, 4), axis=1)),
    "split_short": rule(lambda q: jnp.split(q, [3], axis=1), PACKED_ROWS),
    "unstack": rule(lambda q: jnp.unstack(q)),
    "unstack_last": rule(lambda q: jnp.unstack(q, axis=2), NF4),
    "rev": rule(lambda q: q[::-1]),
    "rev_last": rule(lambda q: lax.rev(q, (0, 2)), NF4),
    "pad_cut": rule(lambda q: lax.pad(q, np.float32(0), ((-1, 0, 0), (0, 0, 0), (0, 0, 0)))),
    # joined
    "stack": rule(lambda q: jnp.stack([q, q[::-1]])),
    "stack_between": rule(lambda q: jnp.stack([q, q], axis=2)),
    "stack_last": rule(lambda q: jnp.stack([q, q], axis=-1)),
    "concatenate_columns": rule(lambda q: jnp.concatenate([q, q[::-1], q], axis=2), INT8_LAST),
    "concatenate_rows": rule(lambda q: jnp.concatenate([q, q[:, :4]], axis=1), INT8_ROWS, CHANNEL),
    "concatenate_stacks": rule(lambda q: jnp.concatenate([q, q[:2]])),
    "concatenate_cut_blocks": rule(lambda q: jnp.concatenate([q[:, :, :6], q], axis=2), INT8_LAST, NF4),
    "tile": rule(lambda q: jnp.tile(q, (2, 1, 3))),
    "repeat": rule(lambda q: jnp.repeat(q, 2, axis=0)),
    "repeat_last": rule(lambda q: jnp.repeat(q, 2, axis=2), NF4),
    "roll": rule(lambda q: jnp.roll(q, 1, axis=0)),
    "append": rule(lambda q: jnp.append(q, q[:1], axis=0)),
    # shapes
    "reshape_stack": rule(lambda q: q.reshape(1, 3, 8, 12)),
    "reshape_split_rows": rule(lambda q: q.reshape(3, 2, 4, 12)),
    "reshape_split_columns": rule(lambda q: q.reshape(3, 8, 3, 4)),
    "reshape_merge_rows": rule(lambda q: q.reshape(24, 12), CHANNEL),
    "reshape_merge_columns": rule(lambda q: q.reshape(3, 96), PACKED_ROWS, INT8_ROWS),
    "reshape_short_blocks": rule(lambda q: q.reshape(3, 8, 6, 2), NF4),
    # by a place that is known later
    "dynamic_index": rule(lambda q: lax.dynamic_index_in_dim(q, jnp.int32(1), 0, keepdims=False)),
    "dynamic_update_stack": rule(lambda q: update(q, q[:1], 2, 0, 0)),
    "dynamic_update_clipped": rule(lambda q: update(q, q[:2], 5, 1, 1)),
    "dynamic_update_rows": rule(lambda q: update(q, q[:, :4], 0, 3, 0), PACKED_ROWS, INT8_ROWS),
    "dynamic_update_columns": rule(lambda q: update(q, q[:, :, :4], 0, 0, 7), NF4, INT8_LAST),
    "dynamic_update_dense": rule(lambda q: update(q, jnp.zeros((1, 8, 12)), 0, 0, 0), set(CASES)),
    "select": rule(lambda q: lax.select(jnp.bool_(True), q, q[::-1])),
    "where": rule(lambda q: jnp.where(jnp.sum(jnp.ones(2)) > 3, q, q[::-1])),
    "select_by_element": rule(lambda q: lax.select(jnp.arange(288).reshape(SHAPE) > 7, q, q[::-1]), set(CASES)),
    # filled up
    "pad_stack": rule(lambda q: jnp.pad(q, ((1, 2), (0, 0), (0, 0)))),
    "pad_value": rule(lambda q: lax.pad(q, np.float32(-2.5), ((0, 1, 1), (0, 0, 0), (0, 0, 0)))),
    "pad_columns": rule(lambda q: jnp.pad(q, ((0, 0), (0, 0), (2, 0))), NF4, INT8_LAST),
    "pad_rows": rule(lambda q: jnp.pad(q, ((0, 0), (0, 4), (0, 0))), PACKED_ROWS, INT8_ROWS),
    # by powers of two, which round nothing
    "neg": rule(lambda q: -q),
    "halved": rule(lambda q: q / 2),
}


# Ternary with one scale for all is stored as ternary, and its scale moves as that of INT8_ALL: nothing new to compile.
@pytest.mark.parametrize("case", [case for case in CASES if case != TENSOR], ids=str)
def test_agrees_with_dense(case):
    q, dense = example(case, SHAPE)
    # As one program: that is compiled faster than fifty.
    run = jax.jit(lambda q: {name: materialize(implicit(each.function)(q)) for name, each in EXACT.items()})
    for name, found in run(q).items():
        with about(name):
            assert_same(found, EXACT[name].function(dense))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_makes_dense_only_what_codes_do_not_allow(case):
    q, _ = example(case, SHAPE)
    made_dense = {name for name, each in EXACT.items() if explain(each.function)(q).dense_bytes > 0}
    assert made_dense == {name for name, each in EXACT.items() if case in each.declined}


@pytest.mark.parametrize("case", [INT8_ROWS, NESTED], ids=str)
def test_agrees_with_dense_outside_jit(case):
    q, dense = example(case, SHAPE)
    for name, (function, declined) in EXACT.items():
        with about(name):
            out = implicit(function)(q)
            assert_same(out, function(dense))
            assert any(map(is_implicit, jax.tree.leaves(out, is_leaf=is_implicit))) == (case not in declined)


# --- slices along blocks, from a place that is known later ---

LONG = (2, 24, 32)
CUTS = [(NF4_LAST, 2), (NESTED, 2), (NF4_ROWS, 1), (CHANNEL, 1)]


@pytest.mark.parametrize(("start", "size"), [(0, 4), (3, 4), (4, 5), (17, 1), (99, 6), (-3, 3)], ids=str)
@pytest.mark.parametrize(("case", "axis"), CUTS, ids=str)
def test_slices_along_blocks_decode_only_their_blocks(case, axis, start, size):
    q, dense = example(case, LONG)
    function = lambda q, start: lax.dynamic_slice_in_dim(q, start, size, axis)  # noqa: E731
    assert_same(implicit(function)(q, jnp.int32(start)), function(dense, jnp.int32(start)))
    assert explain(function)(q, jnp.int32(start)).dense_bytes == 0
    assert largest_float(implicit(function), q, jnp.int32(start)) <= q.size // 2  # three blocks of six, at most


# --- multiplication and division ---


class Factor(NamedTuple):
    """What an array is multiplied and divided by, and the formats whose scales cannot take it."""

    shape: tuple[int, ...]
    declined: frozenset[Case] = frozenset()


FACTORS = {
    "number": Factor(()),
    "per_matrix": Factor((3, 1, 1)),
    "per_row": Factor((1, 8, 1), frozenset({INT8_ROWS, NF4_ROWS, CHANNEL})),
    "per_column": Factor((1, 1, 12), frozenset({INT8_LAST, *NF4})),
    "per_element": Factor(SHAPE, frozenset(CASES)),
}
SCALED: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda q, x: q * x,
    "mul_reversed": lambda q, x: x * q,
    "div": lambda q, x: q / x,
}


TYPES = [("mul", jnp.float32), ("mul_reversed", jnp.bfloat16), ("div", jnp.float32)]


PAIRS = in_turn([(case, factor) for case in CASES for factor in FACTORS], TYPES, each=1)


@pytest.mark.parametrize(("case", "factor", "name", "dtype"), [(*a, *b) for a, b in PAIRS], ids=name_of)
def test_scales_take_factors(case, factor, name, dtype):
    q, dense = example(case, SHAPE, dtype)
    x, function = jnp.abs(normal(FACTORS[factor].shape, dtype, seed=1)) + 1, SCALED[name]
    declined = case in FACTORS[factor].declined
    assert (explain(function)(q, x).dense_bytes > 0) == declined
    out, expected = implicit(function)(q, x), function(dense, x)
    assert (out.shape, out.dtype, is_implicit(out)) == (expected.shape, dtype, not declined)
    # Two roundings on either side; see `_scaling`. Where the dense array divides, XLA may take the inverse: one more.
    assert_within(materialize(out), expected, np.abs(f64(expected)) * 2.5 * float(jnp.finfo(dtype).eps))


NARROW = {"int8": "scale", "nf4": "absmax", "ternary": "scale"}  # the formats whose scales stay as they are stored


@pytest.mark.parametrize("number", [1 / 3, 1e30], ids=["digits", "range"])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scales", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", NARROW)
def test_scales_that_can_not_hold_a_factor_do_not_take_it(form, scales, name, number):
    """A float32 array may have scales of fewer digits, or of less range: a product in these would be another one."""
    q = quantize(normal((8, 64)), format=form, **({"scale": "channel"} if form == "ternary" else {}))
    q = dataclasses.replace(q, **{NARROW[form]: getattr(q, NARROW[form]).astype(scales)})
    expected = SCALED[name](q.materialize(), jnp.float32(number))
    out = implicit(SCALED[name])(q, jnp.float32(number))
    assert_within(materialize(out), expected, np.abs(f64(expected)) * 2.5 * float(jnp.finfo("float32").eps))


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -2.0]


@pytest.mark.parametrize("number", SPECIAL, ids=str)
@pytest.mark.parametrize("name", ["mul", "div"])
@pytest.mark.parametrize("case", [INT8_ROWS, NF4_LAST, NESTED, TERNARY, CHANNEL], ids=str)
def test_factors_that_break_formulas(case, name, number):
    """Zeros keep their signs, 0 times infinity is NaN; 1e38 overflows nothing, as no scale is above 3."""
    q, dense = example(case, SHAPE)
    out, expected = implicit(SCALED[name])(q, np.float32(number)), SCALED[name](dense, np.float32(number))
    eps = float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(
        materialize(out), expected, rtol=2.5 * eps, atol=127 * float(jnp.finfo(jnp.float32).tiny)
    )
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(materialize(out))[known], np.signbit(expected)[known])


@pytest.mark.parametrize("name", ["mul", "div"])
@pytest.mark.parametrize("case", [INT8_ROWS, NF4_LAST, TERNARY], ids=str)
def test_gradients_reach_factors(case, name):
    q, dense = example(case, SHAPE)
    x, rows = jnp.abs(normal((3, 1, 1), seed=1)) + 1, normal((5, 8), seed=2)
    loss = lambda q, x: jnp.sum(jnp.tanh(rows @ SCALED[name](q, x)))  # noqa: E731
    gradient, expected = jax.grad(implicit(loss), argnums=1)(q, x), jax.grad(loss, argnums=1)(dense, x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)  # sums of 160 terms near 1


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("case", [INT8_ROWS, NF4_LAST, TERNARY], ids=str)
def test_factors_under_vmap(case, outside):
    q, dense = example(case, SHAPE)
    x = jnp.array([0.5, -2.0, 4.0])
    function = implicit(jax.vmap(lambda x, q: x * q, (0, None))) if not outside else None
    function = function or jax.vmap(implicit(lambda x, q: x * q), (0, None))
    out = function(x, q)
    assert is_implicit(out)
    assert_same(out, x[:, None, None, None] * dense[None])


@pytest.mark.parametrize("case", [INT8_LAST, INT8_ROWS, NF4_LAST, NF4_ROWS, NESTED, TERNARY, CHANNEL], ids=str)
def test_matmuls_with_negative_scales(case):
    """Also where the kernel rounds activations: every step is as far from zero on either side."""
    q = case(normal((32, 16)))
    x = normal((4, 32), seed=1)
    for_kernel = q.with_activation_dtype("int8")
    np.testing.assert_array_equal(x @ -q, -(x @ q))
    np.testing.assert_array_equal(x[:1] @ -for_kernel, -(x[:1] @ for_kernel))


def test_error_bounds_of_negated_arrays_are_not_negative():
    w = normal((8, 12))
    bounds = [jnp.min((-case(w)).error_bound(-w)) for case in (INT8_LAST, NF4_LAST, CHANNEL)]
    assert min(bounds) >= 0


# --- what is not alike is not joined ---

UNLIKE = {
    "dtypes": lambda q: q.astype(jnp.bfloat16),
    "activations": lambda q: q.with_activation_dtype("int8"),
    "blocks": lambda q: NF4_ROWS(q),
    "formats": lambda q: INT8_LAST(q),
}


@pytest.mark.parametrize("other", UNLIKE)
def test_arrays_that_are_stored_otherwise_are_joined_dense(other):
    q, dense = example(NF4_LAST, SHAPE)
    unlike = UNLIKE[other](q)
    function = lambda a, b: jnp.stack([a, b.astype(a.dtype)])  # noqa: E731
    if other == "dtypes":
        assert_same(implicit(function)(q, unlike), function(dense, dense))  # rounded when it is decoded: not yet
    else:
        assert explain(function)(q, unlike).dense_bytes > 0
        assert_same(implicit(function)(q, unlike), function(dense, unlike.materialize()))


# --- gradients stop, and go on ---


@pytest.mark.parametrize("case", [INT8_ROWS, NF4_LAST, CHANNEL], ids=str)
def test_stop_gradient_stops_the_gradients_of_scales(case):
    q, _ = example(case, SHAPE)
    rows = normal((5, 8), seed=2)

    def loss(scale: Any, stop: Callable[[Any], Any]) -> Any:
        function = lambda q: jnp.sum(rows @ stop(q * scale))  # noqa: E731
        return implicit(function)(q)

    assert jax.grad(loss)(jnp.float32(2), lax.stop_gradient) == 0
    assert jax.grad(loss)(jnp.float32(2), lambda q: q) != 0


def test_checkpoint_name_saves_codes():
    """A policy that saves the named array saves its leaves; what is rematerialized gives the same gradient."""
    q, dense = example(NF4_LAST, SHAPE)
    policy = jax.checkpoint_policies.save_only_these_names("w")
    function = jax.checkpoint(lambda q, x: jnp.sum(jnp.tanh(x @ checkpoint_name(q, "w"))), policy=policy)
    x = normal((5, 8), seed=2)
    gradient, expected = jax.grad(implicit(function), argnums=1)(q, x), jax.grad(function, argnums=1)(dense, x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_layers_are_written_into_a_stack_in_a_loop():
    """As a cache is filled: the stack stays quantized as what a loop carries."""
    q, dense = example(INT8_LAST, SHAPE)

    def fill(stack: Any, layers: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, s: lax.dynamic_update_index_in_dim(s, layers[i], 2 - i, 0), stack)

    assert explain(fill)(q, q).dense_bytes == 0
    assert_same(jax.jit(implicit(fill))(q, q), dense[::-1])
