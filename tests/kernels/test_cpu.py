"""The native core against the oracle: every format, orientation, instruction set and ragged size."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.kernels import cpu, reference
from eformer._src.kernels.matrix import Matrix

from .matrices import FORMATS, in_blocks, made, magnitudes, nf4, oracle

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason="installed without the native core"),
    pytest.mark.filterwarnings("ignore::eformer.kernels.cpu.SlowerWithoutCore"),
]
SETS = cpu.instruction_sets() if cpu.is_available() else ()
every_set = pytest.mark.parametrize("instructions", SETS)
# Special numbers ask nothing of the length of a block but whether strips divide it: two lengths of NF4's stand for all.
TELLING = [name for name in FORMATS if not name.startswith(("nf4 2 ", "nf4 6 ", "nf4 32 ", "nf4 128 "))]
# Every format with ragged sizes and several matrices; one of each way to store codes also with several parts of depth
# and width, with one element, with less than a vector, with whole vectors, and with more than a stripe.
BROAD = ("int8 per row", "nf4 64 along 1", "nf4 64 along 2", "nf4 20 along 2", "ternary", "ternary along 2")
BROAD += ("e4m3 per row", "e5m2 64 along 2")
BROAD += ("uint4 64 offset along 1", "uint4 64 offset along 2", "uint6 16 two levels along 2")
SHAPED = [(name, (2, 70, 33)) for name in FORMATS]
SHAPED += [(name, s) for name in BROAD for s in [(1, 800, 200), (1, 1, 1), (1, 7, 5), (1, 128, 64), (1, 259, 4105)]]
# The best instruction set with all of them, the others with each format once.
CASES = [(*case, best) for best in SETS[:1] for case in SHAPED]
CASES += [(name, (2, 70, 33), other) for other in SETS[1:] for name in FORMATS]
every_case = pytest.mark.parametrize(("name", "shape", "instructions"), CASES, ids=str)
ROWS = [1, 2, 5, 20, 40]


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def dense_matmul(x: Any, values: Any, contracted_axis: int) -> np.ndarray:
    values = np.asarray(values, np.float64)
    with np.errstate(invalid="ignore"):  # infinity times zero
        return np.asarray(x, np.float64) @ (values if contracted_axis == 0 else values.swapaxes(1, 2))


def assert_matmul(out: Any, x: Any, values: Any, contracted_axis: int, terms: Any = None) -> None:
    """Sums of k float32 terms, in whatever order, and scaled once: off by at most k + 2 roundings of their terms."""
    terms = np.abs(values) if terms is None else terms
    bound = dense_matmul(np.abs(np.asarray(x, np.float64)), terms, contracted_axis)
    roundings = (x.shape[-1] + 2) * np.finfo(np.float32).eps
    assert out.dtype == jnp.float32
    np.testing.assert_array_less(
        np.abs(np.asarray(out) - dense_matmul(x, values, contracted_axis)), bound * roundings + 1e-30
    )


@functools.cache
def example(name: str, shape: tuple[int, ...]) -> tuple[Matrix, np.ndarray]:
    """A matrix, and its values."""
    return made(FORMATS[name], normal(shape))


def floating(matrix: Matrix) -> int:
    """Which of the scales can be infinite."""
    wide = (jnp.float32, jnp.bfloat16, jnp.float16)
    return next(i for i, scale in enumerate(matrix.scales) if scale.dtype in wide)


@every_case
def test_matmuls_and_values(name, shape, instructions):
    """With both orientations, and with numbers of rows that take each of the kernels."""
    matrix, values = example(name, shape)
    xs = [normal((shape[0], sum(ROWS), shape[1 + axis]), seed=1) for axis in (0, 1)]

    @jax.jit
    def run(codes: Any, scales: Any, xs: Any) -> Any:
        m = replace(matrix, codes=codes, scales=scales)
        parts = [jnp.split(x, np.cumsum(ROWS)[:-1], axis=1) for x in xs]
        results = [jnp.concatenate([cpu.matmul(part, m, axis) for part in parts[axis]], 1) for axis in (0, 1)]
        return results, cpu.decode(m)

    with cpu.instruction_set(instructions):
        results, decoded = run(matrix.codes, matrix.scales, xs)
    np.testing.assert_array_equal(decoded, values)
    for axis in (0, 1):
        assert_matmul(results[axis], xs[axis], values, axis, magnitudes(matrix, values))


@every_set
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["nf4 64 along 1", "int8 per column"])
def test_many_rows(name, axis, instructions):
    """So many that each panel is decoded more than once."""
    matrix, values = example(name, (1, 200, 100))
    x = normal((1, 600, values.shape[1 + axis]), seed=1)
    with cpu.instruction_set(instructions):
        result = cpu.matmul(x, matrix, axis)
    assert_matmul(result, x, values, axis, magnitudes(matrix, values))


@every_set
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=lambda d: d.__name__)
def test_all_codes_of_float8(dtype, instructions):
    """Every code at each place of a vector, NaN, infinities, subnormal numbers and negative zero among them."""
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), i) for i in range(32)])[None].view(dtype)
    matrix = Matrix("e4m3" if dtype == jnp.float8_e4m3fn else "e5m2", (jnp.asarray(codes),), (), 32, 256)
    with cpu.instruction_set(instructions):
        values = np.asarray(cpu.decode(matrix))
    expected = codes.astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values)[values == 0], np.signbit(expected)[values == 0])


# How far one of the values that are multiplied can be from the one that the format stores, per scale.
ROUNDED = {"int8 per row": 0, "int8 per column": 0, "int8 per matrix": 0, "ternary": 0, "ternary per column": 0}
ROUNDED |= {"nf4 64 along 1": 0.5 / 127}


@pytest.mark.parametrize("instructions", [name for name in SETS if name != "portable"])
@pytest.mark.parametrize("shape", [(2, 70, 33), (1, 530, 200), (1, 3, 5), (1, 259, 4105)], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_matmuls_with_rounded_x(name, shape, instructions):
    """A row of x, times the scales that go with it, is off by at most half of a 127th of its largest."""
    matrix, values = example(name, shape)
    x = normal((shape[0], 1, shape[1]), seed=1)
    with cpu.instruction_set(instructions):
        out = np.asarray(cpu.matmul(jnp.asarray(x), matrix, 0, round_x=True))
    of_depth = np.asarray(matrix.scales[0]) if name == "int8 per row" else np.ones((1, 1, 1), np.float32)
    largest = np.abs(x * of_depth.swapaxes(1, 2)).max(2, keepdims=True).astype(np.float64)
    bound = largest / 254 * np.abs(values / of_depth).sum(1, keepdims=True)
    if ROUNDED[name]:
        scales = np.repeat(np.asarray(matrix.scales[0]), matrix.block_size, axis=1)[:, : shape[1]]
        bound = bound + ROUNDED[name] * (np.abs(x) + largest / 254) @ scales
    exact = dense_matmul(x, values, 0)
    error, bound = np.abs(out - exact), bound * (1 + 1e-5) + 1e-30
    np.testing.assert_array_less(error, bound)
    assert error.max() > 1e-4 * np.abs(exact).max() or shape[1] < 8  # it was rounded


@pytest.mark.parametrize("special", [np.nan, np.inf, 1e-44, 0], ids=str)
def test_special_numbers_are_not_rounded(special):
    matrix, values = example("nf4 64 along 1", (1, 128, 64))
    x = np.zeros((1, 1, 128), np.float32)
    x[0, 0, 5] = special
    out = cpu.matmul(jnp.asarray(x), matrix, 0, round_x=True)
    np.testing.assert_array_equal(out, cpu.matmul(jnp.asarray(x), matrix, 0))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(dense_matmul(x, values, 0)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rows", [1, 3])
def test_half_precision(rows, dtype):
    matrix = nf4(jnp.asarray(normal((1, 96, 40))), 1, 64)
    # Normal numbers, the smallest that there are, and none.
    x = np.concatenate([normal((1, rows, 94)), np.full((1, rows, 1), 6e-8), np.zeros((1, rows, 1))], 2).astype(dtype)
    assert_matmul(cpu.matmul(jnp.asarray(x), matrix, 0), x.astype(np.float32), np.asarray(oracle(matrix)), 0)


# Less than a tile of rows, several tiles, and more rows than are taken at a time.
@pytest.mark.parametrize("rows", [2, 37, 530])
@pytest.mark.parametrize("name", [*BROAD, "int8 per column", "int8 per element", "ternary along 2"])
def test_bfloat16_by_values_rounded_to_it(name, rows):
    """Integers need not be rounded, if their scales go with the result."""
    shape = (2, 70, 33) if rows < 530 else (1, 300, 70)
    matrix, values = example(name, shape)
    for axis in (0, 1):
        x = normal((shape[0], rows, shape[1 + axis]), seed=1).astype(jnp.bfloat16)
        out = np.asarray(cpu.matmul(jnp.asarray(x), matrix, axis, round_values=True))
        x = x.astype(np.float32)
        integers = matrix.format in ("int8", "ternary") and all(scale.shape[1 + axis] == 1 for scale in matrix.scales)
        rounding = (x.shape[-1] + 2) * np.finfo(np.float32).eps + (0 if integers else 2.0**-8)
        error = np.abs(out - dense_matmul(x, values, axis))
        np.testing.assert_array_less(
            error, rounding * dense_matmul(np.abs(x), magnitudes(matrix, values), axis) + 1e-30
        )


@pytest.mark.parametrize("special", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", BROAD)
def test_special_numbers_in_bfloat16(name, special):
    matrix, values = example(name, (2, 70, 33))
    x = normal((2, 20, 70), seed=1)
    x[0, 17, 3] = special
    scales = list(matrix.scales)
    if scales:
        at = floating(matrix)
        scales[at] = scales[at].at[1, 0, 0].set(special)
        values = np.asarray(oracle(replace(matrix, scales=tuple(scales))))
    out = cpu.matmul(jnp.asarray(x, jnp.bfloat16), replace(matrix, scales=tuple(scales)), 0, round_values=True)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(dense_matmul(x, values, 0)))


BESIDE = pytest.mark.parametrize(
    "name", ["int8 per row", "nf4 64 along 1", "nf4 20 along 2", "ternary along 2", "uint4 64 offset along 1"]
)
both_ways = pytest.mark.parametrize("contracted_axis", [0, 1])


@both_ways
@BESIDE
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_row_of_x_beside_more_of_them(rows, name, contracted_axis):
    """Each result is within `k + 2` roundings of its terms from the exact one, so that two are within twice as many."""
    matrix, values = example(name, (1, 530, 200))
    x = normal((1, 250, values.shape[1 + contracted_axis]), seed=1)
    few, many = (np.asarray(cpu.matmul(jnp.asarray(x[:, :m]), matrix, contracted_axis)) for m in (rows, 250))
    terms = dense_matmul(np.abs(x[:, :rows]), magnitudes(matrix, values), contracted_axis)
    bound = 2 * (x.shape[-1] + 2) * np.finfo(np.float32).eps * terms
    np.testing.assert_array_less(np.abs(few.astype(np.float64) - many[:, :rows]), bound + 1e-30)


@every_set
@pytest.mark.parametrize("name", ["nf4 64 along 1", "int8 per column"])
@pytest.mark.parametrize("rows", [9, 17])
def test_equal_rows_of_x(rows, name, instructions):
    """They have the same bits, though tiles have different numbers of rows, and the sum is taken in parts."""
    matrix, _ = example(name, (1, 70, 1600))
    x = np.repeat(normal((1, 1, 1600), seed=1), rows, axis=1)
    with cpu.instruction_set(instructions):
        out = np.asarray(cpu.matmul(jnp.asarray(x), matrix, 1))
    np.testing.assert_array_equal(out, np.repeat(out[:, :1], rows, axis=1))


@both_ways
@BESIDE
@pytest.mark.parametrize("rows", [7, 250])
def test_a_row_of_x_among_as_many_others(rows, name, contracted_axis):
    """Neither its place nor what the others hold changes a bit."""
    matrix, values = example(name, (1, 530, 200))
    x = normal((1, rows, values.shape[1 + contracted_axis]), seed=1)
    turned = np.concatenate([x[:, 1:], np.where(x[:, :1] > 0, np.nan, x[:, :1])], 1)
    here, there = (np.asarray(cpu.matmul(jnp.asarray(each), matrix, contracted_axis)) for each in (x, turned))
    np.testing.assert_array_equal(here[:, 1:], there[:, :-1])


SPECIAL = (1, 70, 66)
WAYS = [(axis, rows) for axis in (0, 1) for rows in (1, 2)]  # each orientation, with one row and with more


@functools.partial(jax.jit, static_argnums=0)
def matmuls_of(name: str, codes: Any, scales: Any, xs: Any) -> Any:
    matrix = replace(example(name, SPECIAL)[0], codes=codes, scales=scales)
    return [cpu.matmul(xs[axis][:, :rows], matrix, axis) for axis, rows in WAYS]


@pytest.mark.parametrize("special", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", TELLING)
def test_special_numbers_in_x(name, special):
    matrix, values = example(name, SPECIAL)
    xs = [normal((1, 2, SPECIAL[1 + axis]), seed=1) for axis in (0, 1)]
    for x in xs:
        x[0, 0, 3] = special
    outs = matmuls_of(name, matrix.codes, matrix.scales, xs)
    for (axis, rows), out in zip(WAYS, outs, strict=True):
        expected = dense_matmul(xs[axis][:, :rows], values, axis)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.where(finite, 0, out), np.where(finite, 0, expected))
        assert np.isfinite(out[0, 1:]).all()


@both_ways
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("factor", [1e-33, 1e-20, 1e8, 1e31], ids=str)
def test_a_block_of_x_unlike_the_others(factor, rows, contracted_axis):
    """And one value in it unlike its neighbours, which some kernels round to its digits."""
    matrix, values = example(f"uint4 64 offset along {contracted_axis + 1}", (1, 800, 800))
    x = normal((1, 3, values.shape[1 + contracted_axis]), seed=1)
    x[0, 0, 64:128] *= np.float32(factor)
    x[0, :, 70] *= np.float32(1e4)
    out = cpu.matmul(jnp.asarray(x[:, :rows]), matrix, contracted_axis)
    assert_matmul(out, x[:, :rows], values, contracted_axis, magnitudes(matrix, values))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("block_size", [20, 64])
def test_infinite_scale_of_a_block_that_ends_early(block_size, rows):
    """What a vector holds behind the end of a row is not multiplied by its scale."""
    matrix = nf4(jnp.ones((1, 3, 65)), 2, block_size)
    matrix = replace(matrix, scales=(matrix.scales[0].at[0, 1, -1].set(np.inf),))
    out = cpu.matmul(jnp.ones((1, rows, 65)), matrix, 1)
    np.testing.assert_array_equal(out, [[[65, np.inf, 65]] * rows])


@pytest.mark.parametrize("special", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", [name for name in TELLING if name != "ternary"])
def test_special_numbers_in_scales(name, special):
    matrix, _ = example(name, SPECIAL)
    at = floating(matrix)
    scales = list(matrix.scales)
    scales[at] = scales[at].at[(0,) * scales[at].ndim].set(special)
    values = jax.jit(lambda codes, scales: oracle(replace(matrix, codes=codes, scales=scales)))(matrix.codes, scales)
    xs = [normal((1, 2, SPECIAL[1 + axis]), seed=1) for axis in (0, 1)]
    outs = matmuls_of(name, matrix.codes, tuple(scales), xs)
    for (axis, rows), out in zip(WAYS, outs, strict=True):
        expected = dense_matmul(xs[axis][:, :rows], values, axis)
        np.testing.assert_array_equal(np.isfinite(out), np.isfinite(expected))


@every_set
@pytest.mark.parametrize("contracted_axis", [0, 1])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_ternary_code_of_nan(rows, contracted_axis, instructions):
    w = normal((1, 66, 70)).round().clip(-1, 1)
    w[0, 5, 7] = np.nan
    matrix = Matrix("ternary", (reference.pack_ternary(jnp.asarray(w), 1),), (), 66, 70)
    x = normal((1, rows, (66, 70)[contracted_axis]), seed=1)
    with cpu.instruction_set(instructions):
        exact, rounded = (cpu.matmul(jnp.asarray(x), matrix, contracted_axis, round_x=r) for r in (False, True))
    for out in (exact, rounded):
        np.testing.assert_array_equal(np.isnan(out), np.isnan(dense_matmul(x, w, contracted_axis)))


@pytest.mark.parametrize(("shape", "rows"), [((1, 0, 5), 2), ((1, 5, 0), 2), ((1, 8, 8), 0), ((0, 8, 8), 3)], ids=str)
@pytest.mark.parametrize("contracted_axis", [0, 1])
def test_nothing(shape, rows, contracted_axis):
    codes = jnp.zeros(shape, jnp.int8)
    matrix = Matrix("int8", (codes,), (), *shape[1:])
    out = cpu.matmul(jnp.ones((shape[0], rows, shape[1 + contracted_axis])), matrix, contracted_axis)
    np.testing.assert_array_equal(out, np.zeros((shape[0], rows, shape[2 - contracted_axis])))


GOOD = nf4(jnp.ones((1, 64, 8), jnp.float32), 1, 64)
FOUR = in_blocks(jnp.ones((1, 64, 8)), 1, "uint4", 32, "two levels")
BAD_BLOCKS = {
    "scale must be floating point .* with scale_scale, uint8": {"scale_names": ("scale",), "scales": FOUR.scales[:1]},
    r"scale_scale must be float32, .* broadcasts over \(1, 1, 8": {"scales": (FOUR.scales[0], *FOUR.scales[:3])},
    "uint4 takes as scale_names: scale, and maybe": {"scale_names": ("scale", "zero", "offset", "offset_scale")},
    "scale_names must be different names": {"scale_names": ("scale", "scale", "offset", "offset_scale")},
    "go with 4 buffers of scales, got 5": {"codes": FOUR.codes * 2},
    "superblock_size must be a multiple of block_size, got 127 and 32": {"superblock_size": 127},
    "block_size a positive integer": {"block_size": 0},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_BLOCKS)
def test_bad_blocks_are_refused_in_words(message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        cpu.matmul(jnp.ones((1, 1, 64)), replace(FOUR, **BAD_BLOCKS[message]), 0).block_until_ready()


BAD = {
    "x must be float32, bfloat16 or float16": ({}, jnp.ones((1, 1, 64), jnp.int32)),
    r"x must be \(1, any, 64\), got": ({}, jnp.ones((1, 1, 63))),
    r"x must be \(1, any, 64\), got .*\(2, 1, 64": ({}, jnp.ones((2, 1, 64))),
    "codes must be uint8": ({"codes": (jnp.zeros((1, 32, 8), jnp.int8),)}, jnp.ones((1, 1, 64))),
    r"codes must be uint8 \(1, 32, 8": ({"codes": (jnp.zeros((1, 31, 8), jnp.uint8),)}, jnp.ones((1, 1, 64))),
    "codes must have 3 axes": ({"codes": (jnp.zeros((1, 32, 8, 1), jnp.uint8),)}, jnp.ones((1, 1, 64))),
    r"scale must be floating point .* \(1, 1, 8": ({"scales": (jnp.ones((1, 2, 8)),)}, jnp.ones((1, 1, 64))),
    "nf4 takes as scale_names: scale": ({"scales": ()}, jnp.ones((1, 1, 64))),
    "a quantized scale must be uint8": (
        {"scales": (jnp.ones((1, 1, 8)),) * 4, "scale_names": ("scale", "nested", "mean", "map")},
        jnp.ones((1, 1, 64)),
    ),
    "block_size a positive integer": ({"block_size": -3}, jnp.ones((1, 1, 64))),
    "axes be 0 or 1": ({"packed_axis": 2}, jnp.ones((1, 1, 64))),
    'unknown format "nf5": there are e2m1, .*nf4, ternary, uint2': ({"format": "nf5"}, jnp.ones((1, 1, 64))),
    "rows and cols must be 0 to .* got rows -64": ({"rows": -64}, jnp.ones((1, 1, 64))),
    "rows and cols must be 0 to .* got rows 9223372036854775807": ({"rows": 2**63 - 1}, jnp.ones((1, 1, 64))),
    "one scale, float32, that broadcasts": (
        {"format": "int8", "codes": (jnp.zeros((1, 64, 8), jnp.int8),), "scales": (jnp.ones((1, 2, 8)),)},
        jnp.ones((1, 1, 64)),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_calls_are_refused_in_words(message):
    changes, x = BAD[message]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        cpu.matmul(x, replace(GOOD, **changes), 0).block_until_ready()


@pytest.mark.parametrize("contracted_axis", [0, 1])
@pytest.mark.parametrize("block_size", [66, 2**62, 2**63 - 2], ids=str)
def test_a_block_longer_than_its_axis_ends_with_it(block_size, contracted_axis):
    values = np.asarray(oracle(GOOD))
    x = normal((1, 1, (64, 8)[contracted_axis]), seed=1)
    out = cpu.matmul(jnp.asarray(x), replace(GOOD, block_size=block_size), contracted_axis)
    assert_matmul(out, x, values, contracted_axis)


def test_a_format_without_a_header_is_not_supported():
    assert {"e4m3", "e5m2", "int8", "nf4", "ternary"} <= {*cpu.formats()}
    assert {"int8", "nf4", "ternary", "uint4"} <= set(cpu.formats())
    assert cpu.supports(GOOD)
    assert not cpu.supports(replace(GOOD, format="nf5"))
    with cpu.use_core(False):
        assert not cpu.supports(GOOD)


def test_an_instruction_set_that_is_not_there():
    with pytest.raises(ValueError, match=r"this processor can run '.*', not 'sse9'"):
        cpu.instruction_set("sse9")


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_use_core_takes_a_bool(value):
    with pytest.raises(TypeError, match=r"takes True or False, got "):
        cpu.use_core(value)


@pytest.mark.parametrize("signs", [1, 2], ids=["binary", "ternary"])
@pytest.mark.parametrize(("k", "rows"), [(1, 1), (5, 3), (8, 1), (8, 9), (9, 1), (9, 2)])
def test_segments(k, rows, signs):
    shape = (2, 3, 40)  # matrices, blocks, elements of x
    codes = [np.random.default_rng(i).integers(2**k, size=shape) for i in range(signs)]
    codes = [jnp.asarray(c, jnp.uint8 if k <= 8 else jnp.uint16) for c in codes]
    bits = [np.asarray(reference.decode_rsr(c, k, shape[1] * k), np.float64) for c in codes]
    values = bits[0] - bits[1] if signs == 2 else bits[0]
    x = normal((2, rows, 40), seed=1)
    lies = tuple(c | ((1 << 8 * c.dtype.itemsize) - 2**k) for c in codes)  # bits beyond `k` do not count
    out = cpu.segment_matmul(jnp.asarray(x), lies, k)
    assert_matmul(
        out, np.concatenate([x] * signs, -1), np.concatenate(bits, 1) * np.repeat([1, -1], 40)[: signs * 40, None], 0
    )
    assert out.shape == (2, rows, 3 * k)
    x[1, 0, 7] = np.inf
    out = cpu.segment_matmul(jnp.asarray(x), tuple(codes), k)
    dense = dense_matmul(x, values, 0)
    assert np.all(np.isnan(out) | (np.asarray(out) == dense) | np.isfinite(dense))
    assert not np.any(np.isfinite(out) & ~np.isfinite(dense))


def test_bad_codes_of_segments_are_refused_in_words():
    x, codes = jnp.ones((1, 1, 8)), jnp.zeros((1, 2, 8), jnp.uint8)
    for message, call in {
        "x must be float32 of 3 axes": lambda: cpu.segment_matmul(x.astype(jnp.bfloat16), (codes,), 4),
        "codes must be uint16": lambda: cpu.segment_matmul(x, (codes,), 9),
        r"codes must be uint8 \(1, blocks, 8\)": lambda: cpu.segment_matmul(x, (codes[..., :7],), 4),
        "k must be 1 to 16": lambda: cpu.segment_matmul(x, (codes,), 17),
    }.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call().block_until_ready()


def test_many_calls_at_once_give_equal_results():
    """From several threads, on several devices, while the pool that they share is busy with each other."""
    matrix = nf4(jnp.asarray(normal((1, 1024, 1024))), 1, 64)
    x = jnp.asarray(normal((1, 1, 1024), seed=1))
    expected = np.asarray(cpu.matmul(x, matrix, 0))
    arrays = (x, *matrix.codes, *matrix.scales)
    devices = jax.devices()
    wrong: list[int] = []

    def call(device: int) -> None:
        here = jax.device_put(arrays, devices[device % len(devices)])
        run = jax.jit(lambda x, codes, *scales: cpu.matmul(x, replace(matrix, codes=(codes,), scales=scales), 0))
        wrong.extend(device for _ in range(50) if not np.array_equal(run(*here), expected))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
