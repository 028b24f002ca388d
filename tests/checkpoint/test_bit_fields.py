"""Codes in words and planes, against decoders that take one code at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.checkpoint.prequantized import bit_fields
from eformer._src.kernels import grouped

COUNTS = [0, 1, 31, 32, 45, 96]


def some_codes(count: int, bits: int) -> np.ndarray:
    return np.random.default_rng(count * 9 + bits).integers(0, 2**bits, (3, count), np.uint8)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", COUNTS)
def test_dense(bits: int, count: int):
    codes = some_codes(count, bits)
    whole = [sum(int(code) << (i * bits) for i, code in enumerate(row)) for row in codes]
    length = -(-count * bits // 32)
    words = np.array([[w >> (32 * i) & 0xFFFFFFFF for i in range(length)] for w in whole], np.uint32).reshape(3, length)
    assert np.array_equal(bit_fields.pack_dense(codes, bits), words)
    assert np.array_equal(bit_fields.unpack_dense(words, bits, count), codes)
    assert np.array_equal(bit_fields.pack_dense(codes.T, bits, 0), words.T)
    assert np.array_equal(bit_fields.unpack_dense(words.T.view(np.int32), bits, count, 0), codes.T)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", COUNTS)
def test_fields(bits: int, count: int):
    codes, each = some_codes(count, bits), 32 // bits
    order = np.random.default_rng(bits).permutation(each).tolist()
    words = np.zeros((3, -(-count // each)), np.uint32)
    for (row, i), code in np.ndenumerate(codes):
        words[row, i // each] |= np.uint32(int(code) << (order[i % each] * bits))
    assert np.array_equal(bit_fields.unpack_fields(words, bits, 1, count, order), codes)
    assert np.array_equal(bit_fields.unpack_fields(words.T, bits, 0, count, order), codes.T)


@pytest.mark.parametrize("bits", grouped.PLANES)
@pytest.mark.parametrize("count", [1, 45])
def test_planes_are_those_of_grouped_arrays(bits: int, count: int):
    codes = some_codes(count, bits)
    for axis, given in ((-1, codes), (0, codes.T)):
        planes = bit_fields.pack_planes(given, bits, axis)
        expected = grouped.pack_codes(jnp.asarray(given), bits, axis)
        assert all(np.array_equal(a, b) for a, b in zip(planes.values(), expected, strict=True))
        assert axis == 0 or np.array_equal(bit_fields.unpack_planes(list(planes.values()), bits, count), codes)
        if axis == -1:
            words = bit_fields.dense_of_planes(list(planes.values()), bits, count)
            assert np.array_equal(words, bit_fields.pack_dense(codes, bits))
        assert {n: p.shape for n, p in planes.items()} == bit_fields.plane_shapes(given.shape, bits, axis)
