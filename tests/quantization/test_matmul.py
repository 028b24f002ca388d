"""Matmuls with quantized arrays: every layout, either side, tiled and whole, and what the programs hold."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer._src.kernels import cpu
from eformer._src.quantization.matmul import tiles as tiles_module
from eformer.jaximus import explain, implicit, materialization_error
from eformer.ops.quantization import (
    Array1B,
    Array8B,
    ArrayNF4,
    QuantizationConfig,
    is_kernel_available,
    nf4_use_kernel,
    quantize,
    use_kernels,
)
from eformer.ops.quantization.implicit_array_8bit import matmul_bf16_int8_weight_only

from .cases import (
    Case,
    Numbers,
    assert_product,
    assert_same_array,
    eqns_of,
    example,
    f64,
    name,
    normal,
    primitives,
)

needs_core = pytest.mark.skipif(not cpu.is_available(), reason="installed without the native core")
# Formats that kernels read differently: binary is stored as ternary is, and small blocks show what large ones would.
WEIGHTS = [
    Case.of("int8"),
    Case.of("int8", axis=0),
    Case.of("int8", axis=(-2, -1)),
    Case.of("nf4", block_size=4),
    Case.of("nf4", block_size=4, axis=0),
    Case.of("nf4", block_size=4, double_quantization=True),
    Case.of("ternary"),
    Case.of("ternary", scale="channel"),
]
every_weight = pytest.mark.parametrize("case", WEIGHTS, ids=str)
SIZES = {"b": 3, "m": 5, "k": 10, "l": 4, "n": 6}

# The axes of `x` and of the weight, and those of both that run in parallel. Shared axes are else summed over.
LAYOUTS = [
    ("mk", "kn", ""),
    ("mk", "nk", ""),
    ("km", "kn", ""),
    ("k", "kn", ""),
    ("k", "nk", ""),
    ("bmk", "kn", ""),
    ("bmk", "bkn", "b"),
    ("mkb", "knb", "b"),
    ("mbk", "nbk", "b"),
    ("bk", "bk", "b"),
    ("mbl", "lkbn", "bl"),
    ("mkl", "kln", ""),
    ("mlk", "kln", ""),
    ("mkl", "nlk", ""),
    ("kn", "kn", ""),
    ("m", "kn", ""),
]


def layout_id(layout: Any) -> str:
    return layout if isinstance(layout, str) else "-".join(filter(None, layout))


def numbers_of(x: str, q: str, batch: str = "") -> Numbers:
    summed = [axis for axis in x if axis in q and axis not in batch]
    places = [tuple(axes.index(axis) for axis in which) for which in (summed, batch) for axes in (x, q)]
    return (places[0], places[1]), (places[2], places[3])


def sizes_of(axes: str, **sizes: int) -> tuple[int, ...]:
    return tuple((SIZES | sizes)[axis] for axis in axes)


def dot(lhs: Any, rhs: Any, numbers: Numbers, **params: Any) -> Any:
    """`lax.dot_general` by the rules; nothing may fall back."""
    with materialization_error():
        return implicit(functools.partial(lax.dot_general, dimension_numbers=numbers, **params))(lhs, rhs)


def check_either_side(x: jax.Array, q: Any, dense: Any, numbers: Numbers) -> None:
    """Both matmuls in one program, which is compiled faster than two."""
    (summed_x, summed_q), (batch_x, batch_q) = numbers
    swapped = ((summed_q, summed_x), (batch_q, batch_x))
    right, left = jax.jit(lambda x, q: (dot(x, q, numbers), dot(q, x, swapped)))(x, q)
    assert_product(right, x, dense, numbers)
    assert_product(left, dense, x, swapped)


def int8_of(shape: tuple[int, ...], varies: str) -> Any:
    """An INT8 array, and its dense form, whose scale varies along the first axis, the last, all or none."""
    rng = np.random.default_rng(0)
    lengths = {"first": (*shape[:1], *[1] * (len(shape) - 1)), "last": (*[1] * (len(shape) - 1), *shape[-1:])}
    scale = rng.uniform(0.5, 2, lengths.get(varies, shape if varies == "all" else [1] * len(shape))).astype(np.float32)
    weight = rng.integers(-127, 128, shape, np.int8)
    return Array8B(jnp.asarray(scale), jnp.asarray(weight)), jnp.asarray(weight * scale)


# Along one axis, in every layout; along all or none, where there are axes of each kind to be next to.
SCALES = [(layout, varies) for layout in LAYOUTS for varies in ("first", "last")]
SCALES += [(LAYOUTS[number], varies) for number in (0, 4, 10, 13) for varies in ("all", "none")]


@pytest.mark.parametrize(("layout", "varies"), SCALES, ids=layout_id)
def test_int8_in_every_layout_with_every_placement_of_the_scale(layout, varies):
    q, dense = int8_of(sizes_of(layout[1]), varies)
    check_either_side(normal(sizes_of(layout[0]), seed=1), q, dense, numbers_of(*layout))


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[7]], ids=layout_id)
@pytest.mark.parametrize("case", [case for case in WEIGHTS if case.name != "int8"], ids=str)
def test_other_formats_in_several_layouts(case, layout):
    q, dense = example(case, sizes_of(layout[1]))
    check_either_side(normal(sizes_of(layout[0]), seed=1), q, dense, numbers_of(*layout))


# dtypes of x, of the weight, asked of the result, and given
TYPES = [
    (jnp.bfloat16, jnp.bfloat16, None, jnp.bfloat16),
    (jnp.float16, jnp.float16, None, jnp.float16),
    (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32),
    (jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32),
    (jnp.float32, jnp.float16, jnp.float32, jnp.float32),
    (jnp.float16, jnp.bfloat16, jnp.float16, jnp.float16),
    (jnp.bfloat16, jnp.float32, None, jnp.float32),
    (jnp.float16, jnp.bfloat16, None, jnp.bfloat16),
]
TYPED = [
    Case.of("int8"),
    Case.of("int8", axis=0),
    Case.of("nf4", block_size=4, axis=0),
    Case.of("ternary", scale="channel"),
]


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(map(name, types)))
@pytest.mark.parametrize("case", TYPED, ids=str)
def test_every_float_dtype(case, types):
    x_dtype, q_dtype, asked, given = types
    numbers = numbers_of("mk", "kn")
    x, (q, dense) = normal((5, 10), x_dtype, seed=1), example(case, (10, 6), q_dtype)
    out = dot(x, q, numbers, preferred_element_type=asked)
    assert out.dtype == given == lax.dot_general(x, dense, numbers, preferred_element_type=asked).dtype
    assert_product(out, x, dense, numbers)


@pytest.mark.parametrize("axis", [0, 1])
def test_half_precision_keeps_the_digits_of_a_small_scale(axis):
    """The scale of these weights is below what float16 holds to all its digits."""
    q = Array8B.quantize(normal((64, 6), seed=1).astype(jnp.float16) * np.float16(1e-4), axis=axis)
    x = normal((5, 64), jnp.float16)
    assert_product(dot(x, q, numbers_of("mk", "kn")), x, q.materialize())


def runs_the_kernel(function: Any, *args: Any) -> bool:
    """And no dot of the whole array; or the loop over tiles, where there is no core."""
    with materialization_error():
        made = eqns_of(function, *args)
    names = {eqn.primitive.name for eqn in made}
    if not cpu.is_available():  # a branch for other platforms, whose compilers fuse, multiplies the whole
        return "scan" in names
    dots = [eqn for eqn in made if eqn.primitive.name == "dot_general" and eqn.invars[1].aval.size == args[1].size]
    return bool({"quantized_matmul", "scan"} & names) and not dots


@pytest.mark.parametrize(
    ("case", "dtype", "asked"),
    [
        *((case, jnp.int32, None) for case in TYPED),
        (TYPED[0], jnp.int8, jnp.bfloat16),
        (TYPED[0], jnp.uint8, None),
        (TYPED[0], jnp.bool_, None),
    ],
    ids=name,
)
def test_integers_multiply_as_dense(case, dtype, asked):
    q, dense = example(case, (10, 6))
    x = jnp.asarray(np.arange(-25, 25).reshape(5, 10), dtype)
    run = functools.partial(dot, numbers=numbers_of("mk", "kn"), preferred_element_type=asked)
    out = run(x, q)
    assert runs_the_kernel(run, x, q)
    assert out.dtype == lax.dot(x, dense, preferred_element_type=asked).dtype
    assert_product(out, x.astype(jnp.float32), dense)


INTEGERS = [(jnp.int8, jnp.int8, None), (jnp.int32, jnp.int8, None), (jnp.int8, jnp.int8, jnp.int32)]


@pytest.mark.parametrize("types", INTEGERS, ids=lambda types: "-".join(map(name, types)))
@pytest.mark.parametrize("rows", [3, 50])
def test_integer_results_are_the_dense_ones_bit_for_bit(types, rows):
    """They wrap as the dense matmul does, and are made in tiles."""
    x_dtype, q_dtype, asked = types
    rng = np.random.default_rng(0)
    q = Array1B.quantize(jnp.asarray(rng.integers(-1, 2, (1024, 6)), q_dtype))
    x = jnp.asarray(rng.integers(-128, 128, (rows, 1024)), x_dtype)
    run = functools.partial(dot, numbers=numbers_of("mk", "kn"), preferred_element_type=asked)
    assert_same_array(run(x, q), lax.dot(x, q.materialize(), preferred_element_type=asked))


@pytest.mark.parametrize("case", TYPED, ids=str)
def test_double_precision_is_met(case):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x, w = (jnp.asarray(np.random.default_rng(i).standard_normal(s)) for i, s in enumerate([(5, 10), (10, 6)]))
        q = case(w)
        out = dot(x, q, numbers_of("mk", "kn"))
        dense = q.materialize()
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, x @ dense, rtol=1e-12, atol=1e-12)
        assert dot(x.astype(jnp.float32), q, numbers_of("mk", "kn")).dtype == jnp.float64


PRECISIONS = [
    "default",
    "high",
    "highest",
    "float32",
    lax.Precision.HIGHEST,
    ("default", "highest"),
    lax.DotAlgorithmPreset.DEFAULT,
    lax.DotAlgorithmPreset.F32_F32_F32,
]


@pytest.mark.parametrize(
    ("case", "precision"),
    [*((TYPED[0], each) for each in PRECISIONS), *((case, "highest") for case in TYPED[1:])],
    ids=str,
)
def test_float32_meets_every_precision_up_to_it(case, precision):
    q, dense = example(case, (10, 6))
    x = normal((5, 10), seed=1)
    run = functools.partial(dot, numbers=numbers_of("mk", "kn"), precision=precision)
    out = run(x, q)
    assert "quantized_matmul" in primitives(run, x, q) or not cpu.is_available()
    assert explain(functools.partial(jnp.matmul, precision=precision))(x, q).dense_bytes == 0
    assert_product(out, x, dense)
    program = jax.jit(run).lower(x, q).as_text()
    assert "dot_general" not in program or not cpu.is_available()


@pytest.mark.parametrize("precision", ["default", "float32", "highest"])
def test_default_precision_of_a_block_of_code(precision):
    q, dense = example(Case.of("int8"), (10, 6))
    x = normal((5, 10), seed=1)
    with jax.default_matmul_precision(precision), materialization_error():
        out = jax.jit(implicit(lambda x, q: x @ q))(x, q)
    assert_product(out, x, dense)


@needs_core
@pytest.mark.parametrize("swapped", [False, True])
def test_an_algorithm_in_parts_runs_the_kernel(swapped):
    q, dense = example(Case.of("int8"), (10, 6))
    x, algorithm = normal((5, 10), seed=1), lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32)
    run = functools.partial(dot, numbers=numbers_of("kn", "mk") if swapped else numbers_of("mk", "kn"))
    out = run(*((q, x) if swapped else (x, q)), precision=algorithm)
    assert_product(out.T if swapped else out, x, dense)


def test_other_algorithms_are_those_of_the_dense_matmul():
    """In tiles: each has the numbers that are asked for."""
    q, dense = example(Case.of("int8"), (1024, 6))
    x, numbers = normal((5, 1024), seed=1), numbers_of("mk", "kn")
    algorithm = lax.DotAlgorithmPreset.BF16_BF16_F32
    run = functools.partial(dot, numbers=numbers, precision=algorithm)
    asked = [eqn.params["precision"] for eqn in eqns_of(run, x, q) if eqn.primitive.name == "dot_general"]
    assert asked
    assert set(asked) == {algorithm}
    expected = lax.dot_general(x, dense, numbers, algorithm)
    bound = 1024 * float(jnp.finfo(jnp.float32).eps) * (jnp.abs(x) @ jnp.abs(dense))
    np.testing.assert_array_less(jnp.abs(run(x, q) - expected), bound)


def test_a_precision_asked_for_outranks_rounded_activations():
    w = normal((128, 64))
    x = normal((1, 128), seed=1)
    q, plain = (quantize(w, dtype="int8", axis=0, activation_dtype=kind) for kind in ("int8", None))
    assert_same_array(dot(x, q, numbers_of("mk", "kn"), precision="highest"), x @ plain)


# --- two quantized arrays ---


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[6], LAYOUTS[7]], ids=layout_id)
@pytest.mark.parametrize("cases", [(WEIGHTS[0], WEIGHTS[4]), (WEIGHTS[5], WEIGHTS[7])], ids=str)
def test_two_quantized_arrays(cases, layout):
    (a, dense_a), (b, dense_b) = (example(c, sizes_of(axes)) for c, axes in zip(cases, layout, strict=False))
    numbers = numbers_of(*layout)
    assert_product(dot(a, b, numbers), dense_a, dense_b, numbers)


def test_two_quantized_vectors_are_told():
    """Neither has an axis that can be cut."""
    q, dense = example(Case.of("int8"), (10,))
    np.testing.assert_allclose(implicit(jnp.dot)(q, q), jnp.dot(dense, dense), rtol=1e-5)
    assert explain(jnp.dot)(q, q).dense_bytes == dense.nbytes


@pytest.mark.parametrize(("x_shape", "q_shape"), [((5, 0), (0, 6)), ((0, 10), (10, 6)), ((5, 10), (10, 0))], ids=str)
@pytest.mark.parametrize("case", TYPED, ids=str)
def test_empty_axes(case, x_shape, q_shape):
    x, (q, dense) = normal(x_shape), example(case, q_shape)
    numbers = numbers_of("mk", "kn")
    assert_same_array(dot(x, q, numbers), lax.dot_general(x, dense, numbers))


@pytest.mark.parametrize("form", ["int8", "nf4", "ternary", "binary"])
def test_matmul_with_a_scalar(form):
    q, x, numbers = quantize(jnp.float32(2), dtype=form), normal((5,)), (((), ()), ((), ()))
    assert_product(dot(x, q, numbers), x, q.materialize(), numbers)
    assert_product(dot(q, x, numbers), q.materialize(), x, numbers)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("numbers", [numbers_of("mk", "kn"), numbers_of("mk", "nk")], ids=str)
@every_weight
def test_nan_and_infinity_in_x_go_where_they_go_in_the_dense_matmul(case, numbers, special):
    """All that a float can say of an element: NaN, infinite with a sign, or a number."""
    q, dense = example(case, (10, 10))
    x = normal((5, 10), seed=1).at[2, 3].set(special)
    out, expected = f64(dot(x, q, numbers)), f64(lax.dot_general(x, dense, numbers))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(finite, 0, out), np.where(finite, 0, expected))
    assert np.all(np.isfinite(out[finite]))


@pytest.mark.parametrize("numbers", [numbers_of("mk", "kn"), numbers_of("mk", "nk")], ids=str)
@every_weight
def test_nan_in_the_weight_goes_where_it_goes_in_the_dense_matmul(case, numbers):
    q, x = case(normal((10, 10)).at[2, 3].set(np.nan)), normal((5, 10), seed=1)
    np.testing.assert_array_equal(np.isnan(dot(x, q, numbers)), np.isnan(lax.dot_general(x, q.materialize(), numbers)))


# --- tiles ---


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of so few elements that small arrays have several. Shapes that only these tests use keep `jit` from
    finding programs of whole matmuls."""
    monkeypatch.setattr(tiles_module, "TILE_ELEMENTS", 64)
    assert is_kernel_available()
    with cpu.use_core(False):
        yield


def tiled_layout(*layout: str, length: int) -> Any:
    """Shapes of x and weight where the first axis of the weight that is not parallel, which is cut, has a length."""
    x, q, batch = layout
    cut = next(axis for axis in q if axis not in batch)
    return sizes_of(x, **{cut: length}), sizes_of(q, **{cut: length}), numbers_of(*layout)


# The axis that is cut is summed over or free, after a parallel one or the first; with a rest and without.
SUMMED, FREE = ("mk", "kn", ""), ("mk", "nk", "")
CUT = [SUMMED, FREE, ("bmk", "bkn", "b"), ("mbk", "nbk", "b"), ("mkl", "lkn", "")]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("length", "varies"), [(22, "first"), (22, "last"), (24, "first")])
@pytest.mark.parametrize("layout", CUT, ids=layout_id)
def test_tiled_matmuls_of_int8(layout, length, varies):
    x_shape, q_shape, numbers = tiled_layout(*layout, length=length)
    x, (q, dense) = normal(x_shape, seed=1), int8_of(q_shape, varies)
    assert "scan" in primitives(functools.partial(dot, numbers=numbers), x, q)
    assert_product(dot(x, q, numbers), x, dense, numbers)


# Each weight, and again those whose scales lie along the axis that is cut, or across it.
TILED = [*((case, SUMMED) for case in WEIGHTS), *((case, FREE) for case in (*TYPED, Case.of("nf4", block_size=4)))]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("case", "layout"), TILED, ids=str)
def test_tiled_matmuls_and_their_gradients(case, layout):
    x_shape, q_shape, numbers = tiled_layout(*layout, length=22)
    x, (q, dense) = normal(x_shape, seed=1), example(case, q_shape)
    run = functools.partial(dot, numbers=numbers)
    cotangent = normal((5, dense.shape[1 - numbers[0][1][0]]), seed=2)
    assert "scan" in primitives(run, x, q)
    out, gradient = jax.jit(lambda x, q: (run(x, q), jax.vjp(lambda x: run(x, q), x)[1](cotangent)[0]))(x, q)
    assert_product(out, x, dense, numbers)
    assert_product(gradient, cotangent, dense, numbers_of("mn", layout[1]))


@pytest.mark.usefixtures("small_tiles")
def test_parallel_axes_alone_are_not_cut():
    q, dense = int8_of((100, 1, 1), "first")
    x, numbers = normal((100, 5, 1), seed=1), numbers_of("bmk", "bkn", "b")
    assert_product(dot(x, q, numbers), x, dense, numbers)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, jnp.float16) for case in TYPED), *((case, jnp.bfloat16) for case in TYPED[::2])],
    ids=name,
)
def test_tiled_matmuls_of_half_precision(case, dtype):
    x, (q, dense) = normal((5, 22), dtype, seed=1), example(case, (22, 6), dtype)
    out = dot(x, q, numbers_of("mk", "kn"))
    assert out.dtype == dtype
    assert_product(out, x, dense)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [1, 1000])
def test_any_number_of_rows_is_multiplied_in_tiles(rows):
    q, dense = example(Case.of("int8"), (22, 6))
    run, x = functools.partial(dot, numbers=numbers_of("mk", "kn")), normal((rows, 22))
    assert "scan" in primitives(run, x, q)
    assert_product(run(x, q), x, dense)


@pytest.mark.usefixtures("small_tiles")
@every_weight
def test_tiled_matmuls_under_vmap_and_scan(case):
    """A stack of weights: batched tiles, and tiles inside a loop over the stack."""
    qs, arrays = zip(*(example(case, (22, 6), seed=seed) for seed in range(2)), strict=True)
    q, dense = jax.tree.map(lambda *leaves: jnp.stack(leaves), *qs), jnp.stack(arrays)
    x = normal((2, 5, 22), seed=1)

    @jax.jit
    def run(x: Any, q: Any) -> Any:
        each = functools.partial(dot, numbers=numbers_of("mk", "kn"))
        return jax.vmap(each)(x, q), lax.scan(lambda _, xq: (None, each(*xq)), None, (x, q))[1]

    numbers = numbers_of("bmk", "bkn", "b")
    mapped, scanned = run(x, q)
    assert_product(mapped, x, dense, numbers)
    assert_product(scanned, x, dense, numbers)


# --- what the programs hold ---

LARGE = (2048, 2048)
TILE_BYTES = 4 * tiles_module.TILE_ELEMENTS  # a decoded tile, in float32


def matmul(x: Any, q: Any) -> Any:
    return x @ q


def gradient(x: Any, q: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(x @ q))(x)


@functools.cache
def large(form: str, use_kernel: bool = True) -> Any:
    """One row, and a weight; of zeros, as nothing is run."""
    config = QuantizationConfig(form, use_kernel=use_kernel)
    struct = jax.eval_shape(lambda w: quantize(w, config), jax.ShapeDtypeStruct(LARGE, jnp.float32))
    return jnp.zeros((1, LARGE[0])), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), struct)


def temporary_bytes(function: Any, *args: Any) -> int:
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("core", [True, False], ids=["core", "no core"])
@pytest.mark.parametrize("function", [matmul, gradient], ids=name)
@pytest.mark.parametrize("form", ["int8", "nf4", "ternary"])
def test_a_matmul_of_one_row_never_holds_the_dense_weight(form, function, core):
    """But for a tile of it, and what its decoding takes."""
    x, q = large(form)
    assert 4 * q.size == 4 * TILE_BYTES
    with cpu.use_core(core):
        assert temporary_bytes(function, x, q) < 2 * TILE_BYTES
        assert explain(matmul)(x, q).dense_bytes == 0


@pytest.mark.usefixtures("optimized")
@needs_core
@pytest.mark.parametrize("form", ["int8", "nf4", "ternary"])
def test_matmuls_with_a_transpose_move_no_codes(form):
    """`x @ q.T` reads the codes as they lie, also through the `jit` that `jnp.matmul` is."""
    x, q = large(form)
    program = jax.jit(implicit(lambda x, q: x @ q.T)).lower(x, q).compile().as_text()
    assert "eformer_matmul" in program
    assert " transpose(" not in program


@needs_core
def test_rounding_what_is_multiplied_is_asked_for():
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(1, 128), (128, 64)]))
    q = quantize(w, dtype="int8", axis=0)
    exact, rounded = (matmul(x, array) for array in (q, quantize(w, dtype="int8", axis=0, activation_dtype="int8")))
    step = jnp.abs(x).max() / 127
    np.testing.assert_array_less(jnp.abs(rounded - exact)[0], 0.501 * step * jnp.abs(q.materialize()).sum(0))
    assert not jnp.array_equal(rounded, exact)
    with pytest.raises(ValueError, match="must be None or 'int8', got 'int4'"):
        q.with_activation_dtype("int4")


@pytest.mark.usefixtures("optimized")
def test_without_the_kernel_the_weight_is_decoded_whole():
    (x, q), (_, whole) = large("int8"), large("int8", use_kernel=False)
    assert {"scan", "quantized_matmul"} & set(primitives(matmul, x, q))
    assert not {"scan", "quantized_matmul"} & set(primitives(matmul, x, whole))
    assert temporary_bytes(matmul, x, whole) >= 4 * whole.size
    assert explain(matmul)(x, whole).dense_bytes == 4 * whole.size


@pytest.mark.parametrize(
    ("core", "kernel"), [pytest.param(True, "eformer_matmul", marks=needs_core), (False, "stablehlo.while")], ids=str
)
@pytest.mark.parametrize("form", ["int8", "nf4", "ternary"])
@pytest.mark.parametrize("switch", [use_kernels, nf4_use_kernel], ids=["use_kernels", "nf4_use_kernel"])
def test_use_kernels_changes_programs_that_are_cached(switch, form, core, kernel):
    x, q = large(form)
    function = jax.jit(matmul)

    def has_kernel() -> bool:
        with cpu.use_core(core):
            return kernel in function.lower(x, q).as_text()

    assert has_kernel()
    with switch(False):
        assert not has_kernel()
        with switch(True):
            assert has_kernel()
    assert has_kernel()


@needs_core
def test_a_format_that_the_core_does_not_have_runs_in_tiles(monkeypatch):
    x, q = normal((3, 72)), quantize(normal((72, 88)), dtype="nf4")  # shapes of no other test, which JAX has not traced
    monkeypatch.setattr(cpu, "formats", lambda: ("int8",))
    program = jax.jit(matmul).lower(x, q).as_text()
    assert "eformer_matmul" not in program
    assert "stablehlo.while" in program


@pytest.mark.usefixtures("small_tiles")
def test_use_kernels_changes_operators_that_ran_before():
    """`x @ q` is compiled and kept; the switch is part of what it is kept under."""
    q = ArrayNF4.quantize(normal((26, 6)), block_size=2, axis=0)
    x = normal((5, 26), seed=1)
    tiled = x @ q
    with use_kernels(False):
        whole = x @ q
        assert "scan" not in primitives(matmul, x, q)
    assert "scan" in primitives(matmul, x, q)
    assert_product(tiled, x, q.materialize())
    assert_product(whole, x, q.materialize())


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_use_kernels_takes_a_bool(value):
    with pytest.raises(TypeError, match=r"takes True or False, got "):
        use_kernels(value)


# --- the documented function ---


@pytest.mark.parametrize("leading", [(), (4,), (2, 4)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, (0, 1), ()], ids=str)  # per column, per row, one for all, one for each
def test_matmul_bf16_int8_weight_only(axis, leading):
    q = Array8B.quantize(normal((10, 6)), axis=axis)
    x = normal((*leading, 10), jnp.bfloat16, seed=1)
    out = matmul_bf16_int8_weight_only(x, q.weight, q.scale)
    assert (out.shape, out.dtype) == ((*leading, 6), jnp.bfloat16)
    assert_product(out, x, q.materialize())


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("axis", [0, 1, (0, 1)], ids=str)
def test_matmul_bf16_int8_weight_only_makes_no_dense_copy(axis):
    q = Array8B.quantize(normal((1024, 512)), axis=axis)
    program = jax.jit(matmul_bf16_int8_weight_only).lower(normal((4, 1024), jnp.bfloat16), q.weight, q.scale)
    assert "eformer_matmul" in program.as_text() or not cpu.is_available()
    assert program.compile().memory_analysis().temp_size_in_bytes < 2 * q.size  # half of a dense copy


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 9), (10, 6), (1, 6)), r"\(4, 9\) @ rhs \(10, 6\)"),
        (((4, 10), (10, 6), (6,)), r"scale of two axes, got .*\(6,\)"),
        (((4, 10), (2, 10, 6), (1, 6)), r"rhs \(K, N\).* got .*\(2, 10, 6\)"),
        (((4, 10), (10, 6), (5, 6)), r"\(5, 6\)"),
    ],
    ids=str,
)
def test_matmul_bf16_int8_weight_only_says_what_does_not_fit(shapes, message):
    x, weight, scale = shapes
    with pytest.raises(ValueError, match=message):
        matmul_bf16_int8_weight_only(jnp.ones(x, jnp.bfloat16), jnp.ones(weight, jnp.int8), jnp.ones(scale))
