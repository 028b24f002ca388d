"""NF4 against NumPy: the table, ties, blocks along any axis, double quantization, reading only what is asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer._src.kernels import reference
from eformer.jaximus import implicit
from eformer.ops.quantization import ArrayNF4, quantize
from eformer.ops.quantization.implicit_array_nf4 import safe_delete, safe_materialize

from .cases import assert_same_array, largest_float, normal

CODES = reference.NF4_CODES.astype(np.float64)


def decode_by_definition(w: np.ndarray, block_size: int, axis: int) -> np.ndarray:
    """The nearest code of each element's share of its block's largest magnitude, the lower of two, times that."""
    moved = np.moveaxis(np.asarray(w), axis, -1)
    out = np.zeros(moved.shape, np.float32)
    for start in range(0, moved.shape[-1], block_size):
        block = moved[..., start : start + block_size]
        absmax = np.max(np.abs(block), -1, keepdims=True)
        unit = (block / np.where(absmax == 0, 1, absmax)).astype(np.float64)
        code = np.argmin(np.abs(unit[..., None] - CODES), -1)  # the first of equals
        out[..., start : start + block_size] = CODES[code].astype(np.float32) * absmax
    return np.moveaxis(out, -1, axis)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 3))
def test_values_are_by_definition(shape, half, axis):
    w, axis = normal(shape), axis % len(shape)
    decoded = jax.jit(lambda w: ArrayNF4.quantize(w, 2 * half, axis=axis).materialize())(w)
    np.testing.assert_array_equal(decoded, decode_by_definition(np.asarray(w), 2 * half, axis))


def test_codes_decode_to_themselves():
    w = jnp.asarray(reference.NF4_CODES * np.float32(3))
    np.testing.assert_array_equal(quantize(w).materialize(), w)


def test_a_tie_is_the_lower_code():
    middle = (CODES[1:] + CODES[:-1]) / 2
    ties = middle[middle.astype(np.float32) == middle].astype(np.float32)
    assert ties.size  # some are exact in float32
    q = ArrayNF4.quantize(jnp.asarray(np.concatenate([[np.float32(1)], ties])), 64)
    lower = np.array([CODES[tie > CODES].max() for tie in ties], np.float32)
    np.testing.assert_array_equal(np.asarray(q.materialize())[1:], lower)


@pytest.mark.parametrize("above", [False, True])
def test_next_to_a_boundary(above):
    middle = (CODES[1:] + CODES[:-1]) / 2
    near = middle.astype(np.float32)
    step = np.where(near.astype(np.float64) > middle, near, np.nextafter(near, np.float32(2)))
    values = step if above else np.nextafter(step, np.float32(-2))
    expected = CODES[1:] if above else CODES[:-1]
    decoded = ArrayNF4.quantize(jnp.asarray(np.concatenate([[np.float32(1)], values])), 64).materialize()
    np.testing.assert_array_equal(decoded[1:], expected.astype(np.float32))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_transpose_is_exact(axis):
    q = ArrayNF4.quantize(normal((9, 7)), 4, axis=axis)
    assert isinstance(q.T, ArrayNF4)
    np.testing.assert_array_equal(q.T.materialize(), np.asarray(q.materialize()).T)
    np.testing.assert_array_equal(q.T.T.packed, q.packed)


def test_size_in_bits():
    w = normal((128, 128))
    assert quantize(w).nbytes * 8 == 4.5 * w.size
    double = quantize(normal((1024, 2048)), double_quantization=True)
    assert round(double.nbytes * 8 / double.size, 3) == 4.127


def test_double_quantization_by_definition():
    w = normal((64, 48))
    plain, double = ArrayNF4.quantize(w, 4), ArrayNF4.quantize(w, 4, double_quantization=True)
    absmax = np.asarray(plain.absmax, np.float64).reshape(-1)
    assert absmax.size > 2 * 256
    offset = np.float32(absmax.mean())
    np.testing.assert_allclose(double.offset, offset, rtol=2.0**-22)
    shifted = (np.asarray(plain.absmax).reshape(-1) - np.asarray(double.offset)).reshape(-1, 256)
    nested = np.max(np.abs(shifted), -1)
    np.testing.assert_array_equal(double.nested, nested)
    table = reference.dynamic_map().astype(np.float64)
    codes = np.argmin(np.abs((shifted / nested[:, None]).astype(np.float64)[..., None] - table), -1)
    np.testing.assert_array_equal(np.asarray(double.absmax).reshape(-1), codes.reshape(-1))
    np.testing.assert_array_equal(double.packed, plain.packed)
    decoded = table[codes].astype(np.float32) * nested[:, None] + np.asarray(double.offset)
    expected = np.asarray(plain.materialize()).reshape(-1, 4) / absmax[:, None] * decoded.reshape(-1, 1)
    np.testing.assert_allclose(np.asarray(double.materialize()).reshape(-1, 4), expected, rtol=1e-5, atol=1e-6)


def test_the_dynamic_map():
    table = reference.dynamic_map()
    assert (table.size, table.dtype, table[0], table[-1]) == (256, np.float32, np.float32(-0.99296874), 1)
    assert np.all(np.diff(table) > 0)
    assert 0 in table
    np.testing.assert_array_equal(table[table < 0], -table[(table > 0) & (table < 1)][::-1])


@pytest.mark.parametrize("options", [{}, {"double_quantization": True}], ids=str)
def test_an_embedding_lookup_decodes_only_its_rows(options):
    table, rows = quantize(normal((500, 64)), **options), jnp.array([[7, 499], [0, 7]])
    lookup = implicit(lambda table, rows: jnp.take(table, rows, axis=0))
    assert_same_array(lookup(table, rows), jnp.take(table.materialize(), rows, axis=0))
    # Four rows; and, of a nested absmax, one number for each of the 500, filled up to blocks of 256.
    assert largest_float(lookup, table, rows) <= 512


@pytest.mark.parametrize("rows", [[0, 9], [-1, 3], [-40]], ids=str)
@pytest.mark.parametrize("mode", [None, "clip", "fill", "wrap"])
def test_rows_out_of_bounds_are_what_dense_arrays_give(rows, mode):
    q = ArrayNF4.quantize(normal((6, 10)), 4)
    take = implicit(lambda q, rows: jnp.take(q, rows, axis=0, mode=mode))
    rows = jnp.array(rows)
    assert_same_array(take(q, rows), jnp.take(q.materialize(), rows, axis=0, mode=mode))


def test_constructor_as_documented():
    made = ArrayNF4.quantize(normal((3, 7)), 4)
    q = ArrayNF4(made.packed, made.absmax, 4, None, shape=(3, 7), dtype=jnp.float32)
    assert (q.shape, q.block_size, q.sharding) == ((3, 7), 4, None)
    assert_same_array(q.materialize(), made.materialize())


def test_a_float_array_given_alone_is_quantized():
    w = normal((16, 64), jnp.float16)
    q = ArrayNF4(w)
    assert (q.shape, q.dtype) == (w.shape, w.dtype)
    assert_same_array(q.materialize(), ArrayNF4.quantize(w).materialize())


def test_vmap_of_arrays_quantized_one_by_one():
    """Each has an offset of its own, which has no axis besides that of the stack."""
    w = normal((2, 6, 8))
    q = jax.vmap(lambda w: quantize(w, block_size=2, double_quantization=True))(w)
    out = jax.vmap(implicit(jnp.transpose))(q)
    assert_same_array(out.materialize(), jnp.matrix_transpose(q.materialize()))


def test_a_stack_of_vectors_quantized_one_by_one():
    w = normal((2, 8))
    each = [quantize(row, block_size=2, double_quantization=True) for row in w]
    leaves = [jnp.stack(pair) for pair in zip(*map(jax.tree.leaves, each), strict=True)]
    q = jax.tree.unflatten(jax.tree.structure(each[0]), leaves)
    dense = jnp.stack([row.materialize() for row in each])
    assert_same_array(q.materialize(), dense)
    assert_same_array(q.T.materialize(), dense.T)
    x = jnp.eye(2)
    assert_same_array(implicit(jnp.matmul)(x, q), x @ dense)


def test_verbose_says_what_was_made(capsys):
    ArrayNF4.quantize(normal(), verbose=True)
    assert capsys.readouterr().out == "ArrayNF4(float32[6, 10], 54 bytes)\n"


def test_safe_materialize_and_delete():
    q, x = quantize(normal()), normal()
    dense, was = safe_materialize(q)
    assert was
    assert_same_array(dense, q.materialize())
    assert safe_materialize(x) == (x, False)
    safe_delete(q, True)
    assert_same_array(jax.block_until_ready(q).materialize(), dense)


def test_documented_example():
    weights = jnp.ones((128, 256), dtype=jnp.float32)
    quantized = ArrayNF4.quantize(weights, block_size=64)
    inputs = jnp.ones((32, 128))
    output = inputs @ quantized
    assert_same_array(output, inputs @ weights)  # ones are exact, and so are their sums


@pytest.mark.usefixtures("optimized")
def test_quantizing_takes_less_than_twice_the_input():
    """Sixteen distances for each element would take sixteen times as much."""
    w = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    memory = jax.jit(quantize).lower(w).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2 * memory.argument_size_in_bytes
