"""INT8 against NumPy: scales over any axes, moving on the leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import explain, implicit, materialization_error
from eformer.ops.quantization import Array8B

from .cases import assert_same, assert_same_array, assert_within, f64, normal


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0,), (0, 2), (-1, 0, 1), ()], ids=str)
def test_scale_is_the_largest_magnitude_over_the_axes(axis):
    w = normal((3, 5, 4))
    q = Array8B.quantize(w, axis=axis)
    axes = (-1,) if axis is None else axis
    scale = np.max(np.abs(np.asarray(w)), axis=axes, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(q.scale, scale)
    np.testing.assert_array_equal(q.weight, np.clip(np.round(np.asarray(w) / scale), -127, 127).astype(np.int8))
    assert (q.weight.dtype, q.scale.dtype) == (jnp.int8, jnp.float32)
    assert q.axis == tuple(sorted(a - 3 if a >= 0 else a for a in (axes if isinstance(axes, tuple) else (axes,))))
    assert_within(q.materialize(), w, f64(scale) / 2 * (1 + 2.0**-20))
    assert q.nbytes == w.size + 4 * scale.size


def test_dtype_is_that_of_the_dense_array():
    q = Array8B.quantize(normal(), dtype=jnp.bfloat16)
    assert q.dtype == q.materialize().dtype == jnp.bfloat16


def test_documented_example():
    weights = jnp.ones((128, 256), dtype=jnp.float32)
    quantized = Array8B.quantize(weights, axis=(-1,))
    inputs = jnp.ones((32, 128), dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        output = inputs @ quantized
        expected = inputs @ weights
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    assert_within(output, expected, 128 * 2.0**-20)


def test_constructor_as_documented():
    w = normal()
    made = Array8B.quantize(w, axis=0)
    q = Array8B(made.scale, made.weight, (0,), None, shape=(6, 10), dtype=jnp.float32)
    assert (q.shape, q.axis, q.sharding, q.is_sharded) == ((6, 10), (-2,), None, False)
    assert_same_array(q.materialize(), made.materialize())
    assert Array8B(made.scale, made.weight).axis == (-2,)  # read off the scale
    assert_same_array(q.dequantize(), q.materialize())


MOVES = {
    "transpose": lambda a: a.T,
    "swapaxes": lambda a: jnp.swapaxes(a, 0, 2),
    "broadcast": lambda a: jnp.broadcast_to(a, (2, 4, 6, 5)),
    "new axis": lambda a: a[:, None],
    "merge": lambda a: a.reshape(24, 5),
    "split": lambda a: a.reshape(2, 2, 6, 5),
    "squeeze": lambda a: a[None].squeeze(0),
    "slice": lambda a: a[1:3, ::2],
    "one": lambda a: a[2],
    "reverse order of rows": lambda a: jax.lax.slice(a, (0, 0, 0), (4, 6, 5), (2, 1, 1)),
    "dynamic": lambda a: jax.lax.dynamic_slice(a, (9, 0, 0), (2, 6, 5)),
    "concatenate": lambda a: jnp.concatenate([a, a], 0),
    "astype": lambda a: a.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("move", MOVES)
def test_moving_is_exact_and_stays_int8(move):
    q = Array8B.quantize(normal((4, 6, 5)))
    with materialization_error():
        moved = implicit(MOVES[move])(q)
    assert isinstance(moved, Array8B)
    assert_same(moved, MOVES[move](q.materialize()))


def test_rows_are_gathered_from_the_leaves():
    q = Array8B.quantize(normal((50, 4)))
    rows = jnp.array([3, 49, 3])
    assert explain(lambda q: q[rows])(q).dense_bytes == 0  # rows that are asked for are no dense copy of the array
    assert_same_array(q[rows], q.materialize()[rows])
