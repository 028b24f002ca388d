"""The oracles themselves, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from eformer.kernels import reference


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


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
    weight, scale = reference.encode_int8(x, (1,))
    assert np.all(np.isfinite(reference.decode_int8(weight, scale)))


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("axis", [0, 1])
def test_nibbles(length, axis):
    shape = (length, 5) if axis == 0 else (5, length)
    codes = np.random.default_rng(0).integers(0, 16, shape)
    padded = np.concatenate([codes, np.zeros_like(np.take(codes, [0] * (length % 2), axis))], axis)
    even, odd = (np.take(padded, range(start, padded.shape[axis], 2), axis) for start in (0, 1))
    packed = reference._pack_nibbles(jnp.asarray(codes, jnp.uint8), axis)
    np.testing.assert_array_equal(packed, even << 4 | odd)


@pytest.mark.parametrize("length", [1, 4, 6, 7])
def test_two_bits(length):
    values = np.random.default_rng(0).integers(-1, 2, (length, 3))
    packed = np.asarray(reference.pack_ternary(jnp.asarray(values), 0))
    for row in range(length):
        np.testing.assert_array_equal((packed[row // 4] >> (2 * (row % 4))) & 3, values[row] + 1)
    np.testing.assert_array_equal(reference.unpack_ternary(jnp.asarray(packed), 0, length), values)


def test_boundaries_belong_to_the_lower_code():
    codes = reference.NF4_CODES.astype(np.float64)
    below, above = reference.NF4_BOUNDARIES, np.nextafter(reference.NF4_BOUNDARIES, np.float32(2))

    def nearest(x: np.ndarray) -> np.ndarray:
        return np.argmin(np.abs(x.astype(np.float64)[:, None] - codes), -1)

    np.testing.assert_array_equal(nearest(below), np.arange(15))
    np.testing.assert_array_equal(nearest(above), np.arange(1, 16))


@pytest.mark.parametrize("shape", [(3, 5), (1, 5000), (2, 0)], ids=str)
def test_sums_do_not_depend_on_the_order(shape):
    x = np.abs(normal(*shape))
    shuffled = np.random.default_rng(1).permutation(x, axis=1)
    one, other = (np.asarray(reference._sum_of_magnitudes(jnp.asarray(a), (1,))) for a in (x, shuffled))
    np.testing.assert_array_equal(one, other)
    # 24 bits of the largest for each element, and the roundings of the few sums of digits.
    bound = x.shape[1] * 2.0**-24 * np.max(x, initial=0) + np.sum(x, 1) * 2.0**-21
    assert np.all(np.abs(one[:, 0] - np.sum(x.astype(np.float64), 1)) <= bound)
