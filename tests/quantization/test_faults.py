"""Faults that an implementation of this interface has had, each of which must not come back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import implicit
from eformer.ops.quantization import Array8B, ArrayNF4, RSROperatorBinary, quantize, straight_through

from .cases import FLOATS, assert_product, assert_same_array, every_format, name, normal

# Sums have no rule.
pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),
]


def test_nf4_zero_is_zero():
    w = normal((4, 64)).at[:, ::3].set(0)
    assert not np.any(np.asarray(quantize(w).materialize())[:, ::3])


@every_format
def test_padding_is_never_seen(case):
    q = case(normal((5, 7)))
    assert q.shape == q.materialize().shape == (5, 7)
    assert q.sum().shape == ()
    assert q.T.shape == (7, 5)


def test_rsr_does_not_truncate_v():
    matrix, v = jnp.array([[0, 1], [1, 1]], jnp.int32), jnp.array([0.25, 0.5])
    np.testing.assert_array_equal(RSROperatorBinary.from_matrix(matrix, k=2).dot(v), [0.5, 0.75])


def test_ternary_straight_through_stays_ternary():
    assert set(np.unique(straight_through(normal((20, 20)), dtype="ternary"))) <= {-1.0, 0.0, 1.0}


@every_format
def test_astype_leaves_the_array_it_is_called_on(case):
    q = case(normal())
    half = q.astype(jnp.bfloat16)
    assert (q.dtype, half.dtype) == (jnp.float32, jnp.bfloat16)


def test_transposing_does_not_quantize_again():
    q = ArrayNF4.quantize(normal((64, 64)), 64)
    np.testing.assert_array_equal(q.T.materialize(), np.asarray(q.materialize()).T)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_int8_products_keep_dtype_and_dimension_numbers(dtype):
    x, q = normal((3, 6), dtype), Array8B.quantize(normal((10, 6), dtype, seed=1))
    out = implicit(lambda x, q: jnp.einsum("mk,nk->mn", x, q))(x, q)
    assert out.dtype == dtype
    assert_product(out, x, q, (((1,), (1,)), ((), ())))


@pytest.mark.parametrize("size", [1e-6, 1e-2, 6e4], ids=str)
def test_half_precision_scales_are_right(size):
    w = (normal((4, 64)) * 0.25 * size).astype(jnp.float16)
    q = Array8B.quantize(w)
    assert np.all(np.isfinite(q.scale))
    assert np.all(np.abs(np.asarray(q.materialize(), np.float64) - np.asarray(w, np.float64)) <= q.error_bound(w))


@every_format
def test_cond_and_vmap_over_a_quantized_array(case):
    x, q = normal((3, 6), seed=1), case(normal())
    out = jax.jit(implicit(lambda p, q, x: jax.lax.cond(p, lambda q: x @ q, lambda q: -(x @ q), q)))(True, q, x)
    assert_product(out, x, q)
    stack = jax.vmap(case)(normal((2, 6, 10)))
    out = jax.vmap(implicit(jnp.matmul), (None, 0))(x, stack)
    assert_product(out[1], x, jax.tree.map(lambda leaf: leaf[1], stack))


@every_format
def test_straight_through_is_what_quantize_gives(case):
    w = normal((9, 11))
    assert_same_array(case.straight_through(w), case(w).materialize())


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8.5), ("nf4", 4.5), ("ternary", 2), ("binary", 2)])
def test_codes_are_packed_on_the_device(dtype, bits):
    """JAX's own sub-byte dtypes take a byte for each element on CPU."""
    q = quantize(normal((64, 64)), dtype=dtype)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(q))
    assert (q.nbytes, held) == (bits * q.size / 8,) * 2


@every_format
def test_a_nan_is_not_dropped(case):
    """JAX's maximum on CPU loses one in some places of a vector register."""
    w = normal((2, 64))
    seen = [np.isnan(np.asarray(case(w.at[1, place].set(np.nan)).materialize())[1, place]) for place in (0, 7, 31, 63)]
    assert all(seen)


@every_format
def test_deleting_needs_no_scale(case):
    q = case(normal())
    q.delete()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(q))
