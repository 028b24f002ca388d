"""`ArrayGrouped`: every width, both levels of scales, zero points, codebooks; and what a file may not hold."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.kernels import grouped
from eformer._src.quantization.stored import array_from_fields
from eformer.jaximus import explain, implicit
from eformer.ops.quantization import ArrayGrouped, quantize

from .cases import FLOATS, assert_product, assert_same, assert_same_array, assert_within, dense, f64, in_turn, normal

BITS = tuple(grouped.PLANES)
SHAPE = (6, 72)


def codes(bits: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 2**bits, shape, dtype=np.uint8)


def from_codes(bits: int, axis: int, scale: Any, **fields: Any) -> ArrayGrouped:
    planes = grouped.pack_codes(jnp.asarray(codes(bits)), bits, axis)
    named = dict(zip(("packed", "high"), planes, strict=False))
    return ArrayGrouped(**named, scale=scale, bits=bits, axis=axis, shape=SHAPE, **fields)


def spread(leaf: np.ndarray, block: int) -> np.ndarray:
    """An entry per block of the last axis as one per element, in float32."""
    return np.repeat(np.asarray(leaf).astype(np.float32), block, axis=-1)[..., : SHAPE[-1]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_codes_survive_packing(bits, axis):
    """In one program for four lengths, which is compiled faster than four."""
    given = [codes(bits, (length, 3) if axis == 0 else (3, length)) for length in (1, 7, 8, 65)]

    @jax.jit
    def run(given: Any) -> Any:
        packed = [grouped.pack_codes(each, bits, axis) for each in given]
        sizes = [(planes, each.shape[axis]) for planes, each in zip(packed, given, strict=True)]
        return packed, [grouped.unpack_codes(planes, bits, axis, length) for planes, length in sizes]

    for planes, found, expected in zip(*run(given), given, strict=True):
        length = expected.shape[axis]
        assert sum(plane.shape[axis] for plane in planes) <= -(-length * bits // 8) + len(planes) - 1 + bits // 8
        np.testing.assert_array_equal(found, expected)


# Blocks do not ask for the width of codes.
BLOCKED = [(bits, symmetric, 0, 64) for bits in BITS for symmetric in (False, True)]
BLOCKED += [(bits, bits == 3, -1, block_size) for bits in (3, 4) for block_size in (5, 1000)]


@pytest.mark.parametrize(("bits", "symmetric", "axis", "block_size"), BLOCKED)
def test_round_trip(bits, symmetric, axis, block_size):
    w = normal((70, 33))
    q = ArrayGrouped.quantize(w, block_size, bits=bits, axis=axis, symmetric=symmetric)
    assert (q.shape, q.dtype, q.bits) == (w.shape, w.dtype, bits)
    assert_within(dense(q), w, q.error_bound(w))
    spread_of_w = float(jnp.max(w) - jnp.min(w))
    assert float(jnp.max(jnp.abs(dense(q) - w))) <= spread_of_w / 2 ** (bits - 1)


@pytest.mark.parametrize(("bits", "per_weight"), [(2, 2.5), (3, 3.5), (4, 4.5), (5, 5.5), (6, 6.5), (8, 9)])
def test_size(bits, per_weight):
    sizes = [ArrayGrouped.quantize(jnp.ones((1024, 2)), size, bits=bits, axis=0).nbytes for size in (None, 64)]
    # By default there are scales of scales, so that short blocks take no more than those of 64.
    scales_of_scales = 0 if bits == 8 else (16 if bits < 4 else 32) / 1024
    assert [size * 8 / 2048 for size in sizes] == [per_weight + scales_of_scales, per_weight]


@pytest.mark.parametrize(
    ("options", "per_weight"),
    [({}, 4 + 16 / 32 + 32 / 1024), ({"symmetric": True}, 4 + 8 / 32 + 16 / 1024), ({"bits": 2}, 2.5 + 32 / 1024)],
    ids=str,
)
def test_double_quantization(options, per_weight):
    w = normal((2, 2048))
    plain, double = (ArrayGrouped.quantize(w, 32, double_quantization=twice, **options) for twice in (False, True))
    assert double.nbytes * 8 / double.size == per_weight
    assert_within(dense(double), w, double.error_bound(w))
    errors = [float(jnp.sum((dense(q) - w) ** 2)) for q in (plain, double)]
    # A scale is off by half of a 255th of the largest, or a 127th, and an offset so too: of blocks of normal numbers
    # the steps hardly change.
    assert errors[1] < 1.1 * errors[0]


def test_a_nan_spreads_over_the_blocks_that_share_a_scale_of_scales():
    w = normal((1, 3072)).at[0, 1500].set(jnp.nan)
    double = dense(ArrayGrouped.quantize(w, 32, double_quantization=True))
    np.testing.assert_array_equal(np.isnan(double[0]), np.arange(3072) // 1024 == 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("rows", [1, 5])
def test_matmuls_both_ways(bits, axis, rows):
    w = normal((70, 33))
    q = ArrayGrouped.quantize(w, 16, bits=bits, axis=axis)
    for x, weight in ((normal((rows, 70)), q), (normal((rows, 33)), q.T)):
        assert_product(jax.jit(implicit(jnp.matmul))(x, weight), x, weight)
        assert explain(jnp.matmul)(x, weight).dense_bytes == 0


@pytest.mark.parametrize(("bits", "scale_dtype"), [*in_turn(BITS, FLOATS, each=1), *in_turn([4], FLOATS, each=3)])
def test_zero_points(bits, scale_dtype):
    scale = normal((6, 9)).astype(scale_dtype)
    zero = jnp.asarray(codes(bits, (6, 9)))
    q = from_codes(bits, -1, scale, zero=zero, block_size=8)
    expected = spread(scale, 8) * (codes(bits).astype(np.float32) - spread(zero, 8))
    np.testing.assert_array_equal(dense(q), expected)


@pytest.mark.parametrize(("bits", "scale_dtype"), [*in_turn(BITS, FLOATS, each=1), *in_turn([4], FLOATS, each=3)])
def test_offsets_are_added_to_the_rounded_product(bits, scale_dtype):
    scale, offset = (normal((6, 9), seed=seed).astype(scale_dtype) for seed in (1, 2))
    q = from_codes(bits, -1, scale, offset=offset, block_size=8)
    expected = spread(scale, 8) * codes(bits).astype(np.float32) + spread(offset, 8)
    np.testing.assert_array_equal(dense(q), expected)


def two_levels(**fields: Any) -> ArrayGrouped:
    """As GGUF's K-quants: 8-bit scales and minima in blocks of 8 under float16 ones in superblocks of 32."""
    scale, offset = (jnp.asarray(codes(6, (6, 9)) + i) for i in (0, 1))
    supers = {f"{name}_scale": normal((6, 3), jnp.float16, seed) for seed, name in enumerate(("scale", "offset"))}
    return from_codes(4, -1, scale, offset=offset, **supers, block_size=8, superblock_size=32, **fields)


def test_two_levels():
    q = two_levels()
    scale, offset = (
        np.repeat(f64(of).astype(np.float32), 4, -1)[:, :9] * f64(leaf).astype(np.float32)
        for leaf, of in ((q.scale, q.scale_scale), (q.offset, q.offset_scale))
    )
    np.testing.assert_array_equal(dense(q), spread(scale, 8) * codes(4).astype(np.float32) + spread(offset, 8))


MOVES = {
    "transpose": lambda w: w.T,
    "rows": lambda w: w[2:5],
    "superblocks": lambda w: w[:, 32:64],
    "stack": lambda w: jnp.stack([w, w]),
    "layers": lambda w: jnp.stack([w, w])[1],
    "concatenate": lambda w: jnp.concatenate([w, w]),
    "gather": lambda w: w[jnp.array([0, 5, 2])],
    "twice": lambda w: 2.0 * w,
    "negative": lambda w: -w,
    "times rows": lambda w: w * jnp.arange(6.0)[:, None],
    "reshape": lambda w: w.reshape(2, 3, 72),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_of_two_levels(move):
    q = two_levels()
    moved, expected = implicit(move)(q), move(dense(q))
    assert_within(dense(moved) if isinstance(moved, ArrayGrouped) else moved, expected, np.abs(f64(expected)) * 2**-22)
    assert explain(move)(q).dense_bytes == 0


@pytest.mark.parametrize("codebook", grouped.CODEBOOKS)
def test_codebooks(codebook):
    scale = normal((6, 9))
    q = from_codes(4, -1, scale, block_size=8, codebook=codebook)
    np.testing.assert_array_equal(dense(q), spread(scale, 8) * grouped.CODEBOOKS[codebook][codes(4)])


def test_powers_of_two():
    scale = jnp.asarray(np.array([[127, 130, 255]] * 6, np.uint8)).view(jnp.float8_e8m0fnu)
    q = from_codes(4, -1, scale, block_size=32, codebook="e2m1")
    expected = spread(np.array([[1, 8, np.nan]] * 6), 32) * grouped.CODEBOOKS["e2m1"][codes(4)]
    np.testing.assert_array_equal(dense(q), expected)


def test_one_scale_of_scales_for_all():
    scale = jnp.asarray(codes(4, (6, 9))).astype(jnp.float8_e4m3fn)
    q = from_codes(4, -1, scale, block_size=8, codebook="e2m1", scale_scale=jnp.full((1, 1), 0.3, jnp.float32))
    expected = spread(f64(scale).astype(np.float32) * np.float32(0.3), 8) * grouped.CODEBOOKS["e2m1"][codes(4)]
    np.testing.assert_array_equal(dense(q), expected)
    assert_same(implicit(lambda w: w[1:3])(q), jnp.asarray(expected)[1:3])


@pytest.mark.parametrize("bits", BITS)
def test_constant_blocks(bits):
    """A block of equal elements is as exact as its offset, and one of zeros is exact."""
    w = jnp.concatenate([jnp.zeros((1, 64)), jnp.full((1, 64), 0.3)])
    q = ArrayGrouped.quantize(w, bits=bits)
    assert_same_array(dense(q)[0], w[0])
    assert_within(dense(q)[1], w[1], 0.3 * 2**-8)


def test_symmetric_zeros_are_exact():
    w = normal(SHAPE).at[:, ::3].set(0)
    np.testing.assert_array_equal(dense(ArrayGrouped.quantize(w, 8, symmetric=True))[:, ::3], 0)


def test_requantizing_keeps_width_and_symmetry():
    q = ArrayGrouped.quantize(normal(SHAPE), 8, bits=5, symmetric=True)
    again = q._requantized(dense(q))
    assert (again.bits, again.block_size, again.offset) == (5, 8, None)


ONES, ZEROS = jnp.ones((6, 9)), jnp.ones((6, 9), jnp.uint8)
eights = functools.partial(from_codes, 4, -1, block_size=8)
WRONG = {
    "bits": (lambda: quantize(jnp.ones((8, 8)), format="int4", bits=7), TypeError, "no option 'bits'"),
    "width": (lambda: ArrayGrouped.quantize(jnp.ones((8, 8)), bits=7), ValueError, "`bits=7` must be one of 2, 3, 4"),
    "block": (lambda: quantize(jnp.ones(8), format="int4", block_size=0), ValueError, "`block_size=0` must be from 1"),
    "codebook": (lambda: eights(ONES, codebook="e3m0"), ValueError, "'iq4_nl'"),
    "scale": (lambda: eights(ZEROS), ValueError, "goes with `scale_scale`"),
    "entries": (lambda: eights(ONES[:, 1:]), ValueError, "it must have 9 entries or 1"),
    "both": (lambda: eights(ONES, zero=ZEROS, offset=ONES), ValueError, "not both"),
    "superblock": (
        lambda: dataclasses.replace(two_levels(), superblock_size=30),
        ValueError,
        "multiple of `block_size=",
    ),
    "plane": (lambda: dataclasses.replace(from_codes(3, -1, ONES, block_size=8), high=None), ValueError, "`high`"),
}


@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG)
def test_bad_input_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_file_gives_the_same_array():
    q = two_levels()
    fields = {field.name: getattr(q, field.name) for field in dataclasses.fields(q)}
    assert_same(array_from_fields(ArrayGrouped, fields), dense(q))
