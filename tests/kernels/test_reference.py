"""The oracles themselves, against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.kernels import reference

EPS = float(jnp.finfo(jnp.float32).eps)
FLOATS = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["f32", "bf16", "f16"])


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def run(function: Callable[..., Any], *args: Any) -> Any:
    """`function` as one program, which is compiled faster than its steps; what is no array is static."""
    static = [number for number, arg in enumerate(args) if not isinstance(arg, (jax.Array, np.ndarray))]
    return jax.jit(function, static_argnums=static)(*args)


@pytest.mark.parametrize("axis", [(0,), (1,), (0, 1), (-1,), ()], ids=str)
def test_absmax(axis):
    x = normal(5, 7)
    np.testing.assert_array_equal(reference.absmax(jnp.asarray(x), axis), np.max(np.abs(x), axis, keepdims=True))


@pytest.mark.parametrize("shape", [(3, 64), (64, 3), (1, 1000), (1000, 1)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_absmax_sees_every_nan(shape, axis):
    x = normal(*shape)
    x[shape[0] // 2, shape[1] // 2] = np.nan
    peak = np.asarray(reference.absmax(jnp.asarray(x), (axis,)))
    assert np.isinf(peak).sum() == 1


def test_absmax_of_nothing_is_zero():
    assert reference.absmax(jnp.zeros((3, 0)), (1,)).tolist() == [[0], [0], [0]]


def test_int8_next_to_the_largest_float():
    x = jnp.array([[np.finfo(np.float32).max, -1.0]])
    weight, scale = run(reference.encode_int8, x, (1,))
    assert np.all(np.isfinite(reference.decode_int8(weight, scale)))


@pytest.mark.parametrize(("length", "axis"), [(1, 0), (2, 1), (3, 1), (8, 0), (9, 0)])
def test_nibbles(length, axis):
    shape = (length, 5) if axis == 0 else (5, length)
    codes = np.random.default_rng(0).integers(0, 16, shape)
    padded = np.concatenate([codes, np.zeros_like(np.take(codes, [0] * (length % 2), axis))], axis)
    even, odd = (np.take(padded, range(start, padded.shape[axis], 2), axis) for start in (0, 1))
    packed = run(reference.pack_nf4, codes.astype(np.uint8), axis)
    np.testing.assert_array_equal(packed, even << 4 | odd)


@pytest.mark.parametrize("length", [1, 4, 6, 7])
def test_two_bits(length):
    values = np.random.default_rng(0).integers(-1, 2, (length, 3))
    packed = np.asarray(run(reference.pack_ternary, values, 0))
    for row in range(length):
        codes = (packed[row // 4] >> (2 * (row % 4))) & 3
        np.testing.assert_array_equal(codes, np.array([0, 3, 1])[values[row]])
        np.testing.assert_array_equal(reference.TERNARY_CODES[codes], values[row])
    np.testing.assert_array_equal(run(reference.unpack_ternary, packed, 0, length), values)


def test_the_nearest_code_near_the_middle_of_two():
    codes = reference.NF4_CODES.astype(np.float64)
    middle = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, np.float32(-2)), np.nextafter(middle, np.float32(2))])
    nearest = np.argmin(np.abs(x.astype(np.float64)[:, None] - codes), -1)  # the lower of two
    found = run(lambda x: reference.nearest_in_table(x, reference.NF4_CODES), x)
    np.testing.assert_array_equal(found, nearest)


@pytest.mark.parametrize("shape", [(3, 5), (1, 5000), (2, 0)], ids=str)
def test_sums_do_not_depend_on_the_order(shape):
    x = np.abs(normal(*shape))
    shuffled = np.random.default_rng(1).permutation(x, axis=1)
    one, other = (np.asarray(run(reference._mean_of_magnitudes, a, (1,), 1)) for a in (x, shuffled))
    np.testing.assert_array_equal(one, other)
    # 24 bits of the largest for each element, and the roundings of the few sums of digits.
    bound = x.shape[1] * 2.0**-24 * np.max(x, initial=0) + np.sum(x, 1) * 2.0**-21
    assert np.all(np.abs(one[:, 0] - np.sum(x.astype(np.float64), 1)) <= bound)


def nearest(unit: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The number of the nearest value, the first of equals; distances in float64 are exact."""
    return np.argmin(np.abs(unit[..., None].astype(np.float64) - table.astype(np.float64)), -1)


def test_the_table_is_exact():
    """As bitsandbytes writes it into checkpoints."""
    assert [float(code) for code in reference.NF4_CODES] == [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]


@FLOATS
@pytest.mark.parametrize(("length", "block_size"), [(9, 4), (130, 64)], ids=str)
def test_nf4_of_a_vector(length, block_size, dtype):
    x = normal(length).astype(dtype)
    floats = x.astype(np.float32)
    blocks = [floats[start : start + block_size] for start in range(0, length, block_size)]
    peaks = np.array([np.max(np.abs(block)) for block in blocks])
    codes = np.concatenate([nearest(b / p, reference.NF4_CODES) for b, p in zip(blocks, peaks, strict=True)])
    packed, absmax = run(reference.encode_nf4, x, block_size, 0)
    filled = np.append(codes, [0] * (length % 2))
    np.testing.assert_array_equal(packed, filled[::2] * 16 + filled[1::2])
    np.testing.assert_array_equal(absmax, peaks)
    expected = reference.NF4_CODES[codes] * np.repeat(peaks, block_size)[:length]
    np.testing.assert_array_equal(run(reference.decode_nf4, packed, absmax, block_size, 0, length), expected)


@FLOATS
def test_int8(dtype):
    x = normal(5, 7).astype(dtype)
    weight, scale = run(reference.encode_int8, x, (1,))
    floats = x.astype(np.float32)
    np.testing.assert_array_equal(scale, np.max(np.abs(floats), 1, keepdims=True) / np.float32(127))
    np.testing.assert_array_equal(weight, np.round(floats / np.asarray(scale)))
    np.testing.assert_array_equal(reference.decode_int8(weight, scale), np.asarray(weight) * np.asarray(scale))


def test_int8_scale_of_zeros_and_of_nothing_is_one():
    assert reference.encode_int8(jnp.zeros((1, 3)), (1,))[1].tolist() == [[1]]
    assert reference.encode_int8(jnp.zeros((1, 0)), (1,))[1].tolist() == [[1]]


@pytest.mark.parametrize("jit", [False, True])
def test_quotients_are_rounded_once(jit):
    """XLA would multiply by the inverse, which is rounded too."""
    x, by = normal(64, 8), np.abs(normal(1, 8)) + 1
    divide = jax.jit(reference.divide) if jit else reference.divide
    np.testing.assert_array_equal(divide(jnp.asarray(x), jnp.asarray(by)), x / by)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8], ids=["int32", "int8", "uint8"])
def test_absmax_of_integers(dtype):
    info = jnp.iinfo(dtype)
    peak = reference.absmax(jnp.array([info.min, info.max, 3], dtype), (0,))
    assert float(peak[0]) == np.float32(max(abs(int(info.min)), int(info.max)))


def test_cast_to_integers_takes_the_nearest():
    assert reference.cast(jnp.array([0.5, 1.5, -0.6, 2.4]), np.dtype(np.int32)).tolist() == [0, 2, -1, 2]


@pytest.mark.parametrize("length", [5, 600])
def test_dynamic_codes(length):
    x = np.abs(normal(2, length))
    codes, nested, offset = map(np.asarray, reference.encode_dynamic(jnp.asarray(x)))
    table = reference.dynamic_map()
    for row, block in itertools.product(range(2), range(nested.shape[1])):
        part = slice(256 * block, 256 * (block + 1))
        centred = x[row, part] - offset[row]
        assert nested[row, block] == np.max(np.abs(centred))
        np.testing.assert_array_equal(codes[row, part], nearest(centred / nested[row, block], table))
    expected = table[codes] * np.repeat(nested, 256, -1)[:, :length] + offset[:, None]
    # One program, where a product and a sum could be rounded once for both.
    np.testing.assert_array_equal(run(reference.decode_dynamic, codes, nested, offset), expected)


def test_packing_rounds_and_clips():
    values = jnp.array([-300.0, -1.4, -0.4, 0.4, 0.6, 2.0, np.inf, np.nan])
    unpacked = run(lambda x: reference.unpack_ternary(reference.pack_ternary(x, 0), 0, 8), values)
    np.testing.assert_array_equal(unpacked, [-1, -1, 0, 0, 1, 1, 1, np.nan])


@FLOATS
def test_signs_and_ternary_values(dtype):
    x = normal(40, 7).astype(dtype)
    x[3] = 0
    np.testing.assert_array_equal(run(reference.signs, x), np.where(x < 0, -1, 1))
    threshold = np.asarray(0.5 * jnp.std(jnp.asarray(x)))
    np.testing.assert_array_equal(run(reference.ternary, x), 1 * (x > threshold) - 1 * (x < -threshold))
    np.testing.assert_array_equal(run(reference.ternary, np.zeros((40, 7), dtype)), np.zeros((40, 7)))


@pytest.mark.parametrize("factor", [2.0**-110, 2.0**-70, 2.0**70, 2.0**120])
def test_ternary_values_do_not_depend_on_the_unit(factor):
    """Squares of these overflow or vanish; a power of two changes no digit."""
    x = np.round(normal(40, 7) * 16) / 16
    expected = run(reference.ternary, x)
    np.testing.assert_array_equal(run(reference.ternary, x * np.float32(factor)), expected)


def test_mean_magnitude_of_huge_numbers_is_finite():
    x = jnp.full((8, 2), 3e38, jnp.float32)
    found = run(reference.mean_magnitude, x, jnp.ones_like(x), (0,))
    np.testing.assert_allclose(found, np.full((1, 2), 3e38, np.float32), rtol=2 * EPS)


@pytest.mark.parametrize("k", [1, 4, 11])
def test_rsr(k):
    bits = np.random.default_rng(0).integers(0, 2, (3, 13)).astype(np.uint8)
    codes = run(reference.encode_rsr, bits, k)
    words = [["".join(map(str, row[at : at + k])).ljust(k, "0") for row in bits] for at in range(0, 13, k)]
    np.testing.assert_array_equal(codes, [[int(word, 2) for word in block] for block in words])
    np.testing.assert_array_equal(run(reference.decode_rsr, codes, k, 13), bits)
