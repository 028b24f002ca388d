"""What every format must do, for all that are registered and the options they have."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from eformer.checkpoint import load, save
from eformer.jaximus import ImplicitArray, explain, implicit, is_implicit, materialization_error, materialize
from eformer.ops.quantization import (
    QuantizationConfig,
    QuantizedArray,
    RSROperatorBinary,
    RSROperatorTernary,
    formats,
    quantize,
    straight_through,
)

from .cases import (
    ALIKE,
    CASES,
    DEFAULTS,
    FLOATS,
    LAYOUTS,
    SHAPE,
    Case,
    about,
    assert_product,
    assert_same,
    assert_same_array,
    assert_same_leaves,
    assert_within,
    every_case,
    every_format,
    example,
    f64,
    in_turn,
    largest_float,
    name,
    normal,
)

# Most primitives have no rule: being made dense is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")

STORED = [case for case in CASES if case.name != "binary"]  # which is ternary, but for the rule
DISTINCT = [case for case in DEFAULTS if case.name != "binary"]
NESTED = Case.of("nf4", block_size=4, double_quantization=True)
every_way_to_store = pytest.mark.parametrize("case", STORED, ids=str)


def test_documented_formats_are_registered():
    assert {"nf4", "int8", "ternary", "binary"} <= {form.name for form in formats()}


RSR = [RSROperatorBinary.quantize, RSROperatorTernary.quantize]


@pytest.mark.parametrize("case", [*STORED, *RSR], ids=lambda case: getattr(case, "__qualname__", str(case)))
def test_zeros_in_place_of_leaves_are_zeros(case):
    """What optimizers, and `zeros_like` over a tree, make of an array that they take for its leaves."""
    zeros = jax.tree.map(jnp.zeros_like, case(normal((13, 8))))
    np.testing.assert_array_equal(np.asarray(zeros.materialize()), np.zeros(zeros.shape))


# --- formats that share their code ---


@pytest.mark.parametrize("form", sorted(ALIKE))
def test_formats_that_share_their_code(form, tmp_path):
    """A round trip, matmuls, joins, parts, rows and a file of each; `cases` says why these do not get all tests."""
    w, x, ids = normal((64, 48)), normal((3, 64), seed=1), jnp.array([5, 0, 47, 5])
    q = quantize(w, dtype=form, axis=0)

    def function(x: Any, q: Any) -> Any:
        return x @ q, x[:, :48] @ q.T, x @ jnp.concatenate([q, q], 1)[:, 40:72], q.T[ids]

    assert explain(function)(x, q).dense_bytes == 0
    made, bound, dense, (one, other, part, rows) = jax.jit(
        lambda w, x, q: (
            quantize(w, dtype=form, axis=0),
            q.error_bound(w),
            q.materialize(),
            implicit(function)(x, q),
        )
    )(w, x, q)
    assert_same_leaves(made, q)
    assert_within(dense, w, bound)
    assert_product(one, x, dense)
    assert_product(other, x[:, :48], dense.T)
    assert_product(part, x, jnp.concatenate([dense, dense], 1)[:, 40:72])
    assert_same_array(rows, dense.T[ids])
    assert_same_leaves(load(save(tmp_path / "w", {"w": q}))["w"], q)


# --- the round trip ---


class Trip(NamedTuple):
    quantized: QuantizedArray
    dense: jax.Array
    bound: jax.Array
    straight_through: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def round_trip(case: Case, w: jax.Array) -> Trip:
    """There and back as one program, which is compiled faster than its steps."""
    q = case(w)
    floating = jnp.issubdtype(w.dtype, jnp.floating)  # else there is no gradient to pass straight through
    return Trip(q, q.materialize(), q.error_bound(w), case.straight_through(w) if floating else q.materialize())


def check_round_trip(case: Case, w: jax.Array) -> None:
    trip = round_trip(case, w)
    assert isinstance(trip.quantized, ImplicitArray)
    assert (trip.quantized.shape, trip.quantized.ndim, trip.quantized.size) == (w.shape, w.ndim, w.size)
    assert (trip.dense.shape, trip.bound.shape) == (w.shape, w.shape)
    assert trip.quantized.dtype == trip.dense.dtype == w.dtype
    assert_within(trip.dense, w, trip.bound)
    assert_same_array(trip.straight_through, trip.dense)


# All options where there are several axes and blocks to choose from; matrices have the tests of dtypes below.
SHAPES = [(case, (2, 3, 5)) for case in CASES]
SHAPES += [(case, shape) for case in DISTINCT for shape in ((), (0,), (3, 0), (0, 3), (2, 1, 2, 3, 5))]
SHAPES += [(Case.of("nf4", double_quantization=True), shape) for shape in ((), (0,), (5,))]


@pytest.mark.parametrize(("case", "shape"), SHAPES, ids=str)
def test_round_trip_of_any_shape(case, shape):
    check_round_trip(case, normal(shape))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_round_trip_of_drawn_shapes_axes_and_blocks(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4), label="shape"))
    check_round_trip(drawn_case(len(shape), data), normal(shape))


def drawn_case(ndim: int, data: Any) -> Case:
    """Any format, with options drawn where it has some."""
    axes = st.lists(st.integers(-ndim, ndim - 1), unique_by=lambda axis: axis % ndim).map(tuple)
    options = {
        "int8": st.fixed_dictionaries({"axis": axes}),
        "nf4": st.fixed_dictionaries(
            {"axis": st.integers(-ndim, ndim - 1), "block_size": st.integers(1, 5).map(lambda half: 2 * half)}
        ),
    }
    form = data.draw(st.sampled_from(formats()), label="format")
    return Case.of(form.name, **data.draw(options.get(form.name, st.just({})), label="options"))


# --- dtypes, and values that break formulas ---

SPECIAL = (3, 70)  # more than one block of 64, and more than one vector register
TYPED = [*((case, jnp.float32) for case in CASES), *((case, dtype) for case in DISTINCT for dtype in FLOATS[1:])]


@pytest.mark.parametrize(("case", "dtype"), TYPED, ids=name)
def test_round_trip_of_any_dtype(case, dtype):
    check_round_trip(case, normal(SPECIAL, dtype) * 9)


@pytest.mark.usefixtures("optimized")
@every_format
def test_round_trip_as_users_compile_it(case):
    check_round_trip(case, normal((3, 71)) * 9)  # a shape of no other test, whose programs are not optimized


@pytest.mark.parametrize("case", [*DISTINCT, NESTED, Case.of("ternary", scale="channel")], ids=str)
def test_round_trip_of_float64(case):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        check_round_trip(case, jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE)))


@pytest.mark.parametrize(("case", "dtype"), TYPED, ids=name)
def test_nan_and_infinity_never_become_a_wrong_number(case, dtype):
    """A result that is a number is within the format's bound. A NaN stays one."""
    for special, place in itertools.product((np.nan, np.inf, -np.inf), ((0, 0), (1, 33), (2, 69))):
        w = np.array(normal(SPECIAL, dtype))
        w[place] = special
        with about(special, place):
            trip = round_trip(case, jnp.asarray(w))
            dense, bound = np.asarray(trip.dense), np.asarray(trip.bound)
            numbers = np.isfinite(f64(dense))
            assert np.isnan(special) <= np.isnan(dense[place])
            assert_within(dense[numbers], w[numbers], bound[numbers])
            assert_same_array(trip.straight_through, trip.dense)


# The rule of the binary format is the sign, and the sign of 0 is 1.
@pytest.mark.parametrize(("case", "dtype"), [(c, d) for c, d in TYPED if c.name != "binary"], ids=name)
def test_zeros_are_exact(case, dtype):
    w = jnp.zeros(SPECIAL, dtype)
    assert_same_array(round_trip(case, w).dense, w)


@pytest.mark.parametrize(("case", "dtype"), TYPED, ids=name)
def test_magnitudes_at_the_ends_of_the_range(case, dtype):
    info = jnp.finfo(dtype)
    # Integers in blocks span no more than a float32 can: `test_extremes.py` has what they refuse.
    in_blocks = case.name in ("int2", "int3", "int4", "int5", "int6", "int8_grouped")
    largest = float(info.max) * (0.45 if in_blocks and float(info.max) > 1e38 else 0.9)
    unit = np.clip(np.asarray(normal(SPECIAL)), -1, 1)
    for factor in (info.smallest_subnormal, info.tiny, largest):
        w = jnp.asarray((f64(unit) * float(factor)).astype(dtype))
        with about(factor):
            assert np.all(np.isfinite(round_trip(case, w).bound))
            check_round_trip(case, w)


# --- primitives ---


def conv(lhs: Any, rhs: Any) -> Any:
    return lax.conv_general_dilated(lhs, rhs, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gather(operand: Any, *indices: int) -> Any:
    """Whole rows by number."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(operand, jnp.array(indices)[:, None], numbers, (1, operand.shape[1]))


# Those that no format has a rule for, or whose result is dense. Each binds its primitives one by one: what a `jit`
# holds JAX compiles as a whole, and may fuse a product and a sum into one rounding, so that the last digit differs.
DENSE: dict[str, Any] = {
    "add": lambda q, x: lax.add(q, x),
    "add_reversed": lambda q, x: lax.add(x, q),
    "mul": lambda q, x: lax.mul(x, q),
    "div": lambda q, x: lax.div(q, x),
    "div_reversed": lambda q, x: lax.div(x, q),
    "sub": lambda q, x: lax.sub(x, q),
    "max": lambda q, x: lax.max(q, x),
    "lt": lambda q, x: lax.lt(q, x),
    "exp": lambda q, x: lax.exp(q),
    "log": lambda q, x: lax.log(q),
    "sqrt": lambda q, x: lax.sqrt(q),
    "integer_pow": lambda q, x: lax.integer_pow(q, 3),
    "reduce": lambda q, x: lax.reduce(q, np.float32(0), lambda a, b: lax.max(a, lax.neg(b)), (1,)),
    "reduce_sum": lambda q, x: lax.reduce(q, np.float32(0), lax.add, (0,)),
    "reduce_prod": lambda q, x: lax.reduce(q, np.float32(1), lax.mul, (0, 1)),
    "reduce_max": lambda q, x: lax.reduce(q, np.float32(-np.inf), lax.max, (1,)),
    "reduce_min": lambda q, x: lax.reduce(q, np.float32(np.inf), lax.min, (0,)),
    "reduce_window": lambda q, x: lax.reduce_window(q, np.float32(0), lax.add, (2, 2), (1, 2), "VALID"),
    "argmax": lambda q, x: lax.argmax(q, 1, jnp.int32),
    "argmin": lambda q, x: lax.argmin(q, 0, jnp.int32),
    "conv_general_dilated_lhs": lambda q, x: conv(q.reshape(1, 6, 5, 2), x.reshape(3, 2, 2, 5)),
    "convert_element_type_int32": lambda q, x: lax.convert_element_type(q, jnp.int32),
    "convert_element_type_bool": lambda q, x: lax.convert_element_type(q, jnp.bool_),
    "convert_element_type_weak": lambda q, x: lax.convert_element_type(q, float),
    "bitcast_convert_type": lambda q, x: lax.bitcast_convert_type(q, jnp.int32),
    "sort": lambda q, x: lax.sort(q, dimension=0),
    "sort_two_operands": lambda q, x: lax.sort([q, x], dimension=1, num_keys=1),
    "top_k": lambda q, x: lax.top_k(q, 3),
    "cumsum": lambda q, x: lax.cumsum(q, axis=1),
    "cummax": lambda q, x: lax.cummax(q, axis=0),
    "dynamic_update_slice": lambda q, x: lax.dynamic_update_slice(q, x[:2, :3], (1, 4)),
    "dynamic_update_slice_with": lambda q, x: lax.dynamic_update_slice(lax.concatenate([x, x], 0), q, (2, 0)),
    "select_n": lambda q, x: lax.select_n(lax.gt(x, np.zeros_like(x)), x, q),
    "select_by_it": lambda q, x: lax.select(lax.gt(q, x), x, q),
    "where": lambda q, x: jnp.where(x > 0, q, x),
    "pad": lambda q, x: lax.pad(q, np.float32(2), ((1, 0, 2), (-1, 3, 0))),
    "pad_with_it": lambda q, x: lax.pad(x, lax.squeeze(lax.slice(q, (0, 0), (1, 1)), (0, 1)), ((1, 1, 0), (0, 0, 0))),
    "clamp": lambda q, x: lax.clamp(np.float32(-0.5), q, np.float32(0.5)),
    "scatter_add": lambda q, x: q.at[jnp.array([1, 1])].add(x[:2]),
    "concatenate_with_dense": lambda q, x: lax.concatenate([q, x], 0),
    "abs": lambda q, x: lax.abs(q),
    "tanh": lambda q, x: lax.tanh(q),
    "is_finite": lambda q, x: lax.is_finite(q),
    "zeros_like": lambda q, x: jnp.zeros_like(q),
}


@pytest.mark.parametrize(("primitive", "case"), in_turn(list(DENSE), DEFAULTS, each=2), ids=str)
def test_primitive_agrees_with_dense(primitive, case):
    function = DENSE[primitive]
    q, dense = example(case)
    x = normal(seed=1)
    assert_same(implicit(function)(q, x), function(dense, x))


# Those that move elements: by rules on the stored leaves where there is one, and always exact.
MOVING: dict[str, Any] = {
    "broadcast_in_dim_leading": lambda q: lax.broadcast_in_dim(q, (3, 6, 10), (1, 2)),
    "broadcast_in_dim_between": lambda q: lax.broadcast_in_dim(q, (6, 3, 10), (0, 2)),
    "broadcast_in_dim_trailing": lambda q: lax.broadcast_in_dim(q, (6, 10, 2), (0, 1)),
    "broadcast_in_dim_of_one": lambda q: lax.broadcast_in_dim(lax.slice(q, (0, 0), (1, 10)), (4, 10), (0, 1)),
    "reshape_split": lambda q: lax.reshape(q, (2, 3, 10)),
    "reshape_split_last": lambda q: lax.reshape(q, (6, 2, 5)),
    "reshape_merge": lambda q: lax.reshape(q, (60,)),
    "reshape_mix": lambda q: lax.reshape(q, (4, 15)),
    "reshape_ones": lambda q: lax.reshape(q, (1, 6, 1, 10, 1)),
    "reshape_permuted": lambda q: lax.reshape(q, (15, 4), dimensions=(1, 0)),
    "transpose": lambda q: lax.transpose(q, (1, 0)),
    "transpose_3d": lambda q: lax.transpose(lax.broadcast_in_dim(q, (2, 6, 10), (1, 2)), (1, 2, 0)),
    "concatenate_rows": lambda q: lax.concatenate([q, q], 0),
    "concatenate_columns": lambda q: lax.concatenate([q, q, q], 1),
    "concatenate_aligned": lambda q: lax.concatenate([lax.slice(q, (0, 0), (4, 8)), lax.slice(q, (0, 0), (4, 10))], 1),
    "gather_rows": lambda q: gather(q, 2, 0, 2),
    "gather_out_of_bounds": lambda q: gather(q, 5, 6, -1),
    "gather_elements": lambda q: q[jnp.array([0, 5]), jnp.array([9, 3])],
    "gather_columns": lambda q: q[:, jnp.array([9, 0, 10])],
    "gather_batch_of_rows": lambda q: q[jnp.array([[1, 2], [3, 5]])],
    "convert_element_type_bfloat16": lambda q: lax.convert_element_type(q, jnp.bfloat16),
    "slice": lambda q: lax.slice(q, (1, 2), (6, 9)),
    "slice_aligned": lambda q: lax.slice(q, (4, 4), (6, 8)),
    "slice_strided": lambda q: lax.slice(q, (0, 1), (6, 10), (2, 3)),
    "slice_empty": lambda q: lax.slice(q, (2, 4), (2, 10)),
    "dynamic_slice": lambda q: lax.dynamic_slice(q, (2, 0), (2, 10)),
    "dynamic_slice_past_the_end": lambda q: lax.dynamic_slice(q, (5, 9), (4, 3)),
    "squeeze": lambda q: lax.squeeze(lax.slice(q, (2, 0), (3, 10)), (0,)),
    "squeeze_last": lambda q: lax.squeeze(lax.slice(q, (0, 0), (6, 1)), (1,)),
    "expand_dims": lambda q: lax.expand_dims(q, (1,)),
    "copy": jnp.copy,
}


# Where the leaves of the array have other lengths than it: blocks along either axis, scales along one.
MOVED = [
    Case.of("int8"),
    Case.of("int8", axis=0),
    Case.of("nf4", block_size=4),
    Case.of("nf4", block_size=4, axis=0),
    Case.of("ternary", scale="channel"),
]
# No scale, one for all, one block, nested ones that are decoded first: of each rule, what depends on that.
PLAINER = [case for case in STORED if case not in MOVED]
TELLING = ["broadcast_in_dim_of_one", "reshape_split_last", "reshape_merge", "transpose", "concatenate_columns"]
TELLING += ["gather_rows", "gather_elements", "slice_strided", "squeeze_last"]


@pytest.mark.parametrize("case", [*MOVED, *PLAINER], ids=str)
def test_moving_agrees_with_dense(case):
    _, dense = example(case)
    functions = {move: MOVING[move] for move in (MOVING if case in MOVED else TELLING)}
    # As one program: that is compiled faster than its parts.
    run = jax.jit(lambda q: {move: materialize(implicit(function)(q)) for move, function in functions.items()})
    for move, found in run(example(case)[0]).items():
        with about(move):
            assert_same(found, functions[move](dense))


@every_format
def test_a_reshape_that_does_not_fit_is_the_error_of_dense_jax(case):
    q, _ = example(case)
    with pytest.raises(ValueError, match="number of output elements"):  # `lax` itself finds out when it compiles
        implicit(lambda q: lax.reshape(q, (6, 5)))(q)


@every_format
def test_operators_outside_implicit_agree_with_dense(case):
    """`q + 1` and the like; a product and a sum may be rounded once instead of twice."""
    q, dense = example(case, dtype=jnp.bfloat16)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    assert_within(2 - q, 2 - f64(dense), eps * (2 + np.abs(f64(dense))))
    assert_same(q > 0.5, dense > 0.5)
    assert_same(q.T, dense.T)
    assert_same(q[2], dense[2])


@every_format
def test_astype_rounds_when_it_is_decoded(case):
    """As documented: only the dtype on record changes, so nothing is lost on the way there and back."""
    q, dense = example(case)
    half = q.astype(jnp.float16)
    assert (half.dtype, half.materialize().dtype) == (jnp.float16, jnp.float16)
    assert_same(half, dense.astype(jnp.float16))
    assert_same_leaves(half.astype(jnp.float32), q)


def drawn_transpose(shape: tuple[int, ...], data: Any) -> Any:
    return functools.partial(lax.transpose, permutation=data.draw(st.permutations(range(len(shape)))))


def drawn_reshape(shape: tuple[int, ...], data: Any) -> Any:
    """Axes merged, a one put in between, or all rearranged."""
    at = data.draw(st.integers(0, len(shape) - 1), label="at")
    merged = (*shape[:at], int(np.prod(shape[at : at + 2])), *shape[at + 2 :])
    choices = [merged, (*shape[:at], 1, *shape[at:]), shape[::-1], (int(np.prod(shape)),)]
    return functools.partial(lax.reshape, new_sizes=data.draw(st.sampled_from(choices), label="new shape"))


def drawn_slice(shape: tuple[int, ...], data: Any) -> Any:
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)), label="ends")) for n in shape]
    strides = data.draw(st.tuples(*[st.sampled_from([1, 1, 2])] * len(shape)), label="strides")
    starts, limits = zip(*ends, strict=True)
    return functools.partial(lax.slice, start_indices=starts, limit_indices=limits, strides=strides)


@pytest.mark.parametrize("move", [drawn_transpose, drawn_reshape, drawn_slice], ids=name)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_moving_drawn_shapes_moves_the_dense_array(move, data):
    """Bit for bit, whatever the axes and blocks."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), label="shape"))
    case, function = drawn_case(len(shape), data), move(shape, data)
    moved, expected = jax.jit(lambda q: (materialize(implicit(function)(q)), function(q.materialize())))(
        case(normal(shape))
    )
    assert_same(moved, expected)


# --- two quantized operands ---

TWO = {
    "add": lambda a, b: lax.add(a, b),
    "lt": lambda a, b: lax.lt(a, b),
    "concatenate": lambda a, b: lax.concatenate([a, b], 0),
    "select": lambda a, b: lax.select_n(lax.gt(a, b), a, b),
    "dynamic_update_slice": lambda a, b: lax.dynamic_update_slice(a, b[:2], (1, 0)),
}


# Each with one of its own kind, and with others in turn.
OTHERS = [*DEFAULTS, NESTED, Case.of("ternary", scale="channel")]
TOGETHER = [*((case, case) for case in DISTINCT), *in_turn(DISTINCT, OTHERS, each=3)]


@pytest.mark.parametrize(("case", "other"), TOGETHER, ids=str)
def test_two_quantized_operands_agree_with_dense(case, other):
    (a, dense_a), (b, dense_b) = example(case), example(other, seed=1)
    for operation, function in TWO.items():
        with about(operation):
            assert_same(implicit(function)(a, b), function(dense_a, dense_b))
    out = implicit(lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ()))))(a, b)
    assert_product(out, dense_a, dense_b, (((1,), (1,)), ((), ())))


# --- transformations ---


def matmul(x: Any, q: Any) -> Any:
    return x @ q


def rows(seed: int = 1, leading: tuple[int, ...] = ()) -> jax.Array:
    """What the arrays of the tests below are multiplied with."""
    return normal((*leading, 4, SHAPE[0]), seed=seed)


@pytest.mark.usefixtures("optimized")
@every_case
def test_materialize_under_jit(case):
    """The same bits as outside, where each step is a program of its own; also of one quantized inside."""
    w = normal()
    q = case(w)
    made, dense = jax.jit(lambda w, q: (case(w), q.materialize()))(w, q)
    assert_same_array(dense, q.materialize())
    assert_same_leaves(made, q)


@every_way_to_store
def test_jit_takes_and_returns_it(case):
    q, dense = example(case)
    x = rows()
    returned, product, moved = jax.jit(implicit(lambda x, q: (q, x @ q, q.T)))(x, q)
    assert_same_leaves(returned, q)
    assert_product(product, x, dense)
    assert_same(moved, dense.T)


@every_way_to_store
def test_derivatives_with_respect_to_x(case):
    """The product is linear in `x`: the cotangent times the transpose, and the product with the tangent."""
    q, dense = example(case)
    x, cotangent = rows(), normal((4, SHAPE[1]), seed=2)

    def loss(x: Any, q: Any) -> Any:
        return jnp.sum(cotangent * (x @ q))

    @jax.jit
    def run(x: Any, q: Any) -> Any:
        _, tangent = jax.jvp(lambda x: implicit(matmul)(x, q), (x,), (x,))
        return jax.grad(implicit(loss))(x, q), implicit(jax.grad(loss))(x, q), tangent

    inside, outside, tangent = run(x, q)
    assert_product(inside, cotangent, dense.T)
    assert_product(outside, cotangent, dense.T)
    assert_product(tangent, x, dense)


LAYERS = 3


def stacked(case: Case) -> Any:
    """Several arrays as one, each leaf with an axis more in front, and their dense forms."""
    qs, arrays = zip(*(example(case, seed=seed) for seed in range(LAYERS)), strict=True)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *qs), jnp.stack(arrays)


BATCHED = (((2,), (1,)), ((0,), (0,)))


@every_way_to_store
def test_vmap_over_stacked_arrays(case):
    """Over the leaves with `vmap` outside, over the array with `implicit` outside; and of quantizing itself."""
    (q, dense), (one, one_dense) = stacked(case), example(case)
    x = rows(leading=(LAYERS,))
    assert (q.shape, q.is_stacked()) == ((LAYERS, *SHAPE), True)
    assert_same(q, dense)
    assert_same_leaves(jax.vmap(case)(jnp.stack([normal(seed=seed) for seed in range(LAYERS)])), q)

    @jax.jit
    def run(x: Any, q: Any, one: Any) -> Any:
        return (
            jax.vmap(implicit(matmul))(x, q),
            implicit(jax.vmap(matmul))(x, q),
            jax.vmap(implicit(matmul), (0, None))(x, one),
            implicit(jax.vmap(matmul, (None, 0)))(x[0], q),
        )

    inside, outside, only_x, only_q = run(x, q, one)
    assert_product(inside, x, dense, BATCHED)
    assert_product(outside, x, dense, BATCHED)
    assert_product(only_x, x, one_dense)
    assert_product(only_q, jnp.broadcast_to(x[:1], x.shape), dense, BATCHED)


@every_way_to_store
def test_vmap_over_the_last_axis(case):
    """Of the array, with `implicit` outside: `vmap` outside maps leaves, whose last axis may be anything."""
    w = jnp.moveaxis(jnp.stack([normal(seed=seed) for seed in range(LAYERS)]), 0, -1)
    q, x = case(w), rows(leading=(LAYERS,))
    out, dense = jax.jit(lambda x, q: (implicit(jax.vmap(matmul, (0, -1)))(x, q), q.materialize()))(x, q)
    assert_product(out, x, jnp.moveaxis(dense, -1, 0), BATCHED)


@pytest.mark.parametrize("case", [Case.of("nf4", block_size=4, axis=0), Case.of("ternary")], ids=str)
def test_vmap_over_the_packed_axis_of_the_leaves_is_an_error(case):
    """Its elements share bytes, so there is nothing to map over: better an error than other numbers."""
    with pytest.raises(ValueError, match=r"packed along axis -2|inconsistent sizes"):
        jax.vmap(lambda q: q.materialize())(case(normal()))


@every_way_to_store
def test_scan_over_stacked_layers_stays_quantized(case):
    """Nothing falls back, and the program has no floating point array larger than a product with one layer makes."""
    (q, dense), (one, _) = stacked(case), example(case)
    x = rows()

    def model(x: Any, q: Any) -> Any:
        return lax.scan(lambda total, layer: (total + x @ layer, x @ layer), jnp.zeros((4, SHAPE[1])), q)

    with materialization_error():
        total, products = jax.jit(implicit(model))(x, q)
    assert explain(model)(x, q).dense_bytes == 0
    assert largest_float(implicit(model), x, q) <= max(largest_float(implicit(matmul), x, one), products.size)
    assert_product(products, jnp.broadcast_to(x, (LAYERS, *x.shape)), dense, BATCHED)
    both = jnp.broadcast_to(x, (LAYERS, *x.shape))
    assert_product(total, both, dense, (((0, 2), (0, 1)), ((), ())))


def in_cond(x: Any, q: Any) -> Any:
    return lax.cond(jnp.sum(x) > 0, lambda q: x @ q, lambda q: x @ q, q)


def out_of_cond(x: Any, q: Any) -> Any:
    return x @ lax.cond(jnp.sum(x) > 0, lambda q: q, lambda q: q, q)


def in_while(x: Any, q: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, y: x @ q, jnp.zeros((4, SHAPE[1])))


def carried_by_while(x: Any, q: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, x @ c[2], c[2]), (0, jnp.zeros((4, SHAPE[1])), q))[1]


def in_checkpoint(x: Any, q: Any) -> Any:
    return jax.checkpoint(matmul)(x, q)


FLOWS = [in_cond, out_of_cond, in_while, carried_by_while, in_checkpoint]


@pytest.mark.parametrize("flow", FLOWS, ids=name)
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_control_flow(case, flow):
    q, dense = example(case)
    x = rows()
    with materialization_error():
        out = jax.jit(implicit(flow))(x, q)
    assert_product(out, x, dense)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_gradient_through_checkpoint_and_scan(case):
    q, dense = stacked(case)
    x = rows()

    def loss(x: Any, q: Any) -> Any:
        return lax.scan(lambda total, layer: (total + jnp.sum(jax.checkpoint(matmul)(x, layer)), None), 0.0, q)[0]

    gradient = jax.jit(jax.grad(implicit(loss)))(x, q)
    ones = jnp.ones((4, LAYERS, SHAPE[1]))
    assert_product(gradient, ones, dense, (((1, 2), (0, 2)), ((), ())))


# --- the straight-through estimator ---


@pytest.mark.usefixtures("optimized")
@every_case
def test_straight_through_is_quantize_and_materialize(case):
    """Bit for bit, outside and inside a `jit`; and so is `simulate=True`."""
    w = normal()
    expected = case(w).materialize()
    assert_same_array(case.straight_through(w), expected)
    assert_same_array(case(w, simulate=True), expected)
    assert_same_array(jax.jit(case.straight_through)(w), expected)


@every_case
def test_straight_through_has_the_gradient_of_the_identity(case):
    w, t = normal(), normal(seed=1)
    both = jnp.stack([w, t])

    @jax.jit
    def run(w: Any, t: Any, both: Any) -> Any:
        _, tangent = jax.jvp(case.straight_through, (w,), (t,))
        gradient = jax.grad(lambda w: jnp.sum(case(w, simulate=True) * t))(w)
        values, pull_back = jax.vjp(jax.vmap(case.straight_through), both)
        return tangent, gradient, pull_back(both)[0], values

    tangent, gradient, cotangent, values = run(w, t, both)
    assert_same_array(tangent, t)
    assert_same_array(gradient, t)
    assert_same_array(cotangent, both)
    assert_same_array(values, jnp.stack([case.straight_through(w), case.straight_through(t)]))
    assert_same_array(jax.grad(lambda w: jnp.vdot(case.straight_through(w), t))(w), t)


@every_format
def test_simulate_and_config_mean_the_same(case):
    w = normal()
    config = QuantizationConfig(dtype=case.name, simulate=True)
    assert_same_array(quantize(w, config), straight_through(w, config))
    assert_same_array(quantize(w, config), quantize(w, dtype=case.name, simulate=True))


# --- a value like any other ---


@every_case
def test_is_a_tree_of_arrays(case):
    q, _ = example(case)
    leaves, structure = jax.tree.flatten(q)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert q.nbytes == sum(leaf.nbytes for leaf in leaves)
    hash(structure)
    assert_same_leaves(jax.tree.unflatten(structure, leaves), q)
    assert_same_leaves(jax.tree.map(lambda leaf: leaf, q), q)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path({"w": q})[0]]
    assert len(set(paths)) == len(leaves)
    for path, leaf in zip(paths, leaves, strict=True):
        assert getattr(q, path.removeprefix("['w'].")) is leaf
    # What JAX puts into leaves while it only restructures.
    jax.tree.structure(jax.tree.map(lambda _: object(), q))
    assert repr(jax.tree.map(lambda _: None, q))
    assert jax.eval_shape(lambda q: q, q).shape == q.shape


COPIES = {
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "device_put": jax.device_put,
    "copy_to_host": lambda q: jax.device_put(jax.device_get(q)),
}


@every_case
def test_copies_are_equal(case):
    q, _ = example(case)
    for way, duplicate in COPIES.items():
        with about(way):
            assert_same_leaves(duplicate(q), q)


@every_case
def test_is_frozen(case):
    q, _ = example(case)
    with pytest.raises(AttributeError):
        q.dtype = jnp.bfloat16


@every_case
def test_delete_frees_all_leaves(case):
    q = case(normal())
    q.delete()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(q))
    assert q.shape == SHAPE  # what is known without the values
    with pytest.raises(RuntimeError, match="deleted"):
        q.materialize()
    with pytest.raises(RuntimeError, match="deleted"):
        rows() @ q


@every_case
def test_requantizing_changes_nothing_that_is_exact(case):
    """An implicit array is quantized as the dense array it stands for, and the caller's array is left alone."""
    q, dense = example(case)
    assert_same_leaves(case(q), case(dense))
    assert is_implicit(q)
