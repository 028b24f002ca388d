"""Matmuls of the native core with x rounded to int8, where every sum is exact: bit for bit what NumPy gives."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.kernels import cpu, grouped, reference
from eformer._src.kernels.matrix import Matrix

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason="installed without the native core"),
    pytest.mark.filterwarnings("ignore::eformer.kernels.cpu.SlowerWithoutCore"),
]
SETS = cpu.instruction_sets() if cpu.is_available() else ()
ROWS = (1, 2, 7, 30)
BITS = {"uint2": 2, "uint3": 3, "uint4": 4, "uint5": 5, "uint6": 6, "uint8": 8, "e2m1": 4, "iq4_nl": 4}


def integer_matrix(format: str, shape: tuple[int, ...], axis: int, block: int = 64, zeros: str | None = None) -> Matrix:
    """Random codes packed along `axis`, with scales of 1 and 2, and integers as zero points or offsets."""
    rng = np.random.default_rng(0)
    if format == "int8":
        codes = rng.integers(-128, 128, shape).astype(np.int8)
        return Matrix("int8", (jnp.asarray(codes),), (), shape[1], shape[2])
    if format == "ternary":
        packed = jax.jit(lambda w: reference.pack_ternary(w, axis))(rng.integers(-1, 2, shape).astype(np.float32))
        return Matrix("ternary", (packed,), (), shape[1], shape[2], axis - 1)
    bits = BITS[format]
    codes = jnp.asarray(rng.integers(0, 2**bits, shape), jnp.uint8)
    blocks = [*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :]]
    scales, names = [jnp.asarray(rng.integers(1, 3, blocks), jnp.bfloat16)], ["scale"]
    if zeros is not None:
        some = rng.integers(0, 9, blocks)
        scales.append(jnp.asarray(some, jnp.uint8 if zeros == "zero" else jnp.bfloat16))
        names.append(zeros)
    planes = tuple(jax.jit(lambda codes: grouped.pack_codes(codes, bits, axis))(codes))
    _, rows, cols = shape
    return Matrix(format, planes, tuple(scales), rows, cols, axis - 1, block, scale_names=tuple(names))


def integers(shape: tuple[int, ...]) -> np.ndarray:
    """x of integers that rounding leaves as they are: the largest of every 16 is 127."""
    x = np.random.default_rng(1).integers(-20, 21, shape)
    x[..., ::16] = 127
    return x.astype(np.float32)


def matmuls(matrix: Matrix, contracted_axis: int, x: np.ndarray) -> np.ndarray:
    """`x @ matrix` in parts of ROWS rows, which take different loops."""
    parts = np.split(x, np.cumsum(ROWS)[:-1], axis=1)

    @jax.jit
    def run(codes: Any, scales: Any, parts: Any) -> Any:
        given = replace(matrix, codes=codes, scales=scales)
        return [cpu.matmul(part, given, contracted_axis, round_x=True) for part in parts]

    return np.concatenate(run(matrix.codes, matrix.scales, parts), axis=1)


CASES: dict[str, tuple[Any, ...]] = {
    "int8": ("int8", 1),
    "ternary": ("ternary", 1),
    "ternary packed along the other axis": ("ternary", 2),
    **{name: (name, 1) for name in BITS},
    "uint4, zero points": ("uint4", 1, 64, "zero"),
    "uint4, offsets": ("uint4", 1, 32, "offset"),
    "uint3, offsets": ("uint3", 1, 32, "offset"),
    "uint8, offsets": ("uint8", 1, 16, "offset"),
    "uint4, blocks of 48": ("uint4", 1, 48, "offset"),
    "uint4, blocks of 128": ("uint4", 1, 128),
    "uint5, blocks of 16": ("uint5", 1, 16, "offset"),
    "uint6, blocks of 16": ("uint6", 1, 16),
    "uint6, zero points": ("uint6", 1, 96, "zero"),
}


@functools.cache
def ragged(name: str, contracted_axis: int) -> tuple[Matrix, np.ndarray]:
    """A stack of two matrices, ragged along both axes, and its values."""
    format, axis, *rest = CASES[name]
    axis = axis if contracted_axis == 0 else 3 - axis
    shape = (2, 333, 75) if contracted_axis == 0 else (2, 75, 333)
    matrix = integer_matrix(format, shape, axis, *rest)
    return matrix, np.asarray(cpu.decode(matrix), np.float64)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("contracted_axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact(name, contracted_axis, instructions):
    """Packed along the contracted axis or not."""
    matrix, values = ragged(name, contracted_axis)
    x = integers((2, sum(ROWS), 333))
    with cpu.instruction_set(instructions):
        found = matmuls(matrix, contracted_axis, x)
    expected = x.astype(np.float64) @ (values if contracted_axis == 0 else values.swapaxes(1, 2))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 16, 64), (1, 64, 5), (1, 1100, 4200)], ids=str)
@pytest.mark.parametrize("contracted_axis", [0, 1])
def test_any_size(shape, contracted_axis):
    matrix = integer_matrix("uint4", shape, contracted_axis + 1, 64, "offset")
    values = np.asarray(cpu.decode(matrix), np.float64)
    x = integers((1, sum(ROWS), shape[1 + contracted_axis]))
    expected = x.astype(np.float64) @ (values if contracted_axis == 0 else values.swapaxes(1, 2))
    np.testing.assert_array_equal(matmuls(matrix, contracted_axis, x), expected)


@pytest.mark.parametrize("block", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("rows", [1, 5])
def test_x_is_rounded_in_blocks(rows, block):
    """Blocks of x that are never longer than 32 and divide those of the weights, each with its own step."""
    matrix = integer_matrix("uint4", (1, 384, 8), 1, block)
    x = np.random.default_rng(2).standard_normal((1, rows, 384), np.float32)
    size = max(size for size in (16, 32) if block % size == 0)
    blocks = x.reshape(1, rows, -1, size)
    largest = np.abs(blocks).max(-1, keepdims=True)
    rounded = np.rint(blocks * (np.float32(127) / largest)).astype(np.float64) * (largest / np.float32(127))
    values = np.asarray(cpu.decode(matrix), np.float64)
    terms = np.abs(rounded).reshape(x.shape) @ (np.abs(values) + 32)  # + 32: codes before their centre is subtracted
    found = cpu.matmul(jnp.asarray(x), matrix, 0, round_x=True)
    bound = terms * (384 / size + 4) * np.finfo(np.float32).eps
    np.testing.assert_array_less(np.abs(found - rounded.reshape(x.shape) @ values), bound)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("contracted_axis", [0, 1])
@pytest.mark.parametrize("axis", [1, 2])
def test_nan_weights_reach_their_columns_alone(axis, contracted_axis, instructions):
    values = np.ones((1, 70, 70), np.float32)
    values[0, 3, 40] = values[0, 69, 69] = np.nan
    matrix = Matrix("ternary", (reference.pack_ternary(jnp.asarray(values), axis),), (), 70, 70, packed_axis=axis - 1)
    with cpu.instruction_set(instructions):
        found = matmuls(matrix, contracted_axis, integers((1, sum(ROWS), 70)))
    expected = np.isnan(values.sum(1 + contracted_axis, keepdims=True).reshape(1, 1, 70))
    np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(expected, found.shape))


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("contracted_axis", [0, 1])
def test_scales_reach_their_columns_alone(contracted_axis, instructions):
    """Rows that end within a vector: what follows them belongs to the next row."""
    shape = (1, 72, 70) if contracted_axis == 0 else (1, 70, 72)
    matrix = integer_matrix("uint4", shape, contracted_axis + 1, 16, "offset")
    scale, offset = (np.array(s, np.float32).swapaxes(1, 2 - contracted_axis) for s in matrix.scales)
    scale[:, 40], offset[:, 50] = np.inf, np.nan
    scales = tuple(jnp.asarray(s.swapaxes(1, 2 - contracted_axis), jnp.bfloat16) for s in (scale, offset))
    with cpu.instruction_set(instructions):
        found = matmuls(replace(matrix, scales=scales), contracted_axis, integers((1, sum(ROWS), 72)))
    expected = np.isin(np.arange(70), [40, 50])
    np.testing.assert_array_equal(~np.isfinite(found), np.broadcast_to(expected, found.shape))


@pytest.mark.parametrize("per_superblock", [2, 8, 12, 16, 20, 64])
@pytest.mark.parametrize("contracted_axis", [0, 1])
def test_scales_of_superblocks(contracted_axis, per_superblock):
    """As Q4_K and Q6_K of GGUF have them: integers times a float for each superblock, the last perhaps with less."""
    shape = (2, 512, 70) if contracted_axis == 0 else (2, 70, 512)
    matrix = integer_matrix("uint6", shape, contracted_axis + 1, 16)
    rng, blocks = np.random.default_rng(4), matrix.scales[0].shape
    scale = jnp.asarray(rng.integers(-9, 9, blocks), jnp.int8)
    over = [size if axis != contracted_axis + 1 else -(-size // per_superblock) for axis, size in enumerate(blocks)]
    scales = (scale, jnp.asarray(rng.integers(1, 3, over), jnp.float16))
    names, size = ("scale", "scale_scale"), 16 * per_superblock
    matrix = replace(matrix, scales=scales, scale_names=names, superblock_size=size)
    values = np.asarray(cpu.decode(matrix), np.float64)
    x = integers((2, sum(ROWS), 512))
    expected = x.astype(np.float64) @ (values if contracted_axis == 0 else values.swapaxes(1, 2))
    np.testing.assert_array_equal(matmuls(matrix, contracted_axis, x), expected)


@pytest.mark.parametrize(
    "matrix",
    [
        pytest.param(lambda: integer_matrix("uint4", (1, 64, 32), 2), id="blocks along the other axis"),
        pytest.param(lambda: integer_matrix("uint4", (1, 64, 32), 1, 20), id="blocks of 20"),
        pytest.param(
            lambda: Matrix("int8", (jnp.ones((1, 64, 32), jnp.int8),), (jnp.ones((1, 64, 32)),), 64, 32),
            id="a scale each",
        ),
    ],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_what_cannot_be_rounded_is_exact(rows, matrix):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, rows, 64), np.float32))
    np.testing.assert_array_equal(cpu.matmul(x, matrix(), 0, round_x=True), cpu.matmul(x, matrix(), 0))
