"""RSR operators: products equal the dense ones, from the integers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eformer.jaximus import MaterializationError, explain, implicit, materialization_error
from eformer.ops.quantization import Array8B, RSROperatorBinary, RSROperatorTernary, quantize

OPERATORS = [RSROperatorBinary, RSROperatorTernary]
CASES = [  # rows, columns, k
    (5, 7, 3),
    (16, 24, 8),
    (20, 30, 12),
    (33, 1, 4),
    (1, 9, 1),
    (1, 1, 8),
    (0, 5, 3),
    (5, 0, 4),
]

# Sums are of integers, or compared at a bound that holds in any order.
operators = pytest.mark.parametrize("cls", OPERATORS, ids=lambda cls: cls.__name__)
may_materialize = pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")


def matrix(cls: type, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    smallest = 0 if cls is RSROperatorBinary else -1
    return np.random.default_rng(seed).integers(smallest, 2, shape).astype(np.int8)


def integers(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    """Small enough for sums that are exact in bfloat16 of a few, in float32 of many."""
    return np.random.default_rng(seed).integers(-3, 4, shape)


def normal(shape: tuple[int, ...], seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def assert_sums(result: Any, v: np.ndarray, A: np.ndarray) -> None:
    """`result` is `v @ A` to what summing `n` terms in any order can lose: a rounding each, eps / 2 of sum|v|."""
    v, A = np.asarray(v, np.float64), np.asarray(A, np.float64)
    own = float(jnp.finfo(result.dtype).eps)  # of the cast at the end
    terms = (v.shape[-1] + 1) * float(np.finfo(np.float32).eps) / 2
    bound = (terms + own) * np.abs(v).sum(-1, keepdims=True)
    assert np.all(np.abs(np.asarray(result, np.float64) - v @ A) <= bound)


def test_the_documented_examples():
    A = jnp.array([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=jnp.int32)
    rsr = RSROperatorBinary.from_matrix(A, k=4)
    v = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(rsr.dot(v), [2, 1, 1, 2])
    B = jnp.array([[-1, 0, 1], [1, -1, 0]], dtype=jnp.int32)
    rsr_ternary = RSROperatorTernary.from_matrix(B, k=4)
    np.testing.assert_array_equal(rsr_ternary.dot(v), [1, -2, 1])
    assert (rsr.k, rsr.padding, rsr.org_dtype) == (4, 0, jnp.float32)
    assert rsr.one_hot_maps.shape == (1, 2, 16)
    assert (rsr_ternary.rsr_b1.padding, rsr_ternary.dtype) == (1, jnp.float32)
    for cls in OPERATORS:
        assert (cls.commute_ops, cls.warn_on_materialize) == (True, True)


# A ternary operator is two binary ones: of several shapes, both signs in one.
@pytest.mark.parametrize(
    ("cls", "n", "m", "k"),
    [*((RSROperatorBinary, *case) for case in CASES), *((RSROperatorTernary, *CASES[at]) for at in (0, 2, 6))],
)
def test_dot_and_materialize_are_exact(cls: Any, n: int, m: int, k: int):
    A = matrix(cls, (n, m))
    q = cls.from_matrix(jnp.asarray(A), k=k)
    v = integers((3, n))
    assert (q.shape, q.dtype) == ((n, m), jnp.float32)
    np.testing.assert_array_equal(q.materialize(), A)
    result = q.dot(v.astype(np.float32))
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, v @ A)


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(
    cls=st.sampled_from(OPERATORS),
    n=st.integers(0, 20),
    m=st.integers(0, 20),
    k=st.integers(1, 16),
    batch=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 99),
)
def test_any_shape(cls: Any, n: int, m: int, k: int, batch: list[int], seed: int):
    A = matrix(cls, (n, m), seed)
    q = cls.from_matrix(A, k)
    np.testing.assert_array_equal(q.materialize(), A)
    assert_sums(q.dot(normal((*batch, n), seed).astype(np.float32)), normal((*batch, n), seed).astype(np.float32), A)


@pytest.mark.parametrize(
    ("cls", "dtype", "batch"),
    [
        (RSROperatorBinary, "float32", ()),
        (RSROperatorTernary, "float32", (2, 3)),
        (RSROperatorBinary, "bfloat16", (4,)),
        (RSROperatorTernary, "float16", ()),
    ],
)
def test_floats_are_summed_to_the_last_digit(cls: Any, dtype: Any, batch: tuple[int, ...]):
    A = matrix(cls, (300, 20))
    q = cls.from_matrix(jnp.asarray(A)).astype(dtype)
    v = jnp.asarray(normal((*batch, 300)), dtype)
    assert q.dot(v).dtype == dtype
    assert_sums(q.dot(v), np.asarray(v, np.float64), A)


def test_many_rows_are_taken_in_pieces():
    A = matrix(RSROperatorTernary, (3, 5))
    v = integers((257, 2, 3)).astype(np.float32)
    np.testing.assert_array_equal(RSROperatorTernary.from_matrix(A, k=2).dot(v), v @ A)


def test_half_precision_is_summed_in_float32():
    """In bfloat16, 256 + 1 is 256: a sum of ones would end there."""
    q = RSROperatorBinary.from_matrix(jnp.ones((1000, 3), jnp.int8), org_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(q.dot(jnp.ones(1000, jnp.bfloat16)), jnp.full(3, 1000, jnp.bfloat16))


@operators
def test_vectors_are_not_truncated_to_integers(cls: Any):
    A = matrix(cls, (11, 13))
    v = integers((11,)).astype(np.float32) / 8
    np.testing.assert_array_equal(cls.from_matrix(A, k=4).dot(v), v @ A.astype(np.float32))


@pytest.mark.parametrize(
    ("cls", "v_dtype", "dtype"),
    [
        (RSROperatorBinary, "bool", "float32"),
        (RSROperatorBinary, "int8", "int8"),
        (RSROperatorBinary, "float16", "bfloat16"),
        (RSROperatorBinary, "uint8", "uint8"),
        (RSROperatorTernary, "uint8", "int8"),
        (RSROperatorTernary, "int32", "bfloat16"),
        (RSROperatorTernary, "float32", "int32"),
        (RSROperatorTernary, "complex64", "float32"),
    ],
)
def test_the_dtype_of_the_result_is_that_of_the_dense_product(cls: Any, v_dtype: str, dtype: str):
    A = matrix(cls, (6, 5))
    v = jnp.asarray(np.abs(integers((2, 6)))).astype(v_dtype)
    with jax.numpy_dtype_promotion("standard"):
        q = cls.from_matrix(A).astype(dtype)
        result, dense = q.dot(v), v @ jnp.asarray(A).astype(dtype)
    assert q.dtype == q.materialize().dtype == dtype
    assert (result.dtype, result.shape) == (dense.dtype, dense.shape)
    np.testing.assert_array_equal(result, dense)


def test_integers_wrap_as_in_the_dense_product():
    q = RSROperatorBinary.from_matrix(np.ones((3, 2), np.int8), org_dtype=jnp.int8)
    v = jnp.full(3, 100, jnp.int8)
    np.testing.assert_array_equal(q.dot(v), v @ q.materialize())


@pytest.mark.parametrize("k", [3, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_as_in_the_dense_product(bad: float, k: int):
    A = matrix(RSROperatorBinary, (9, 12))
    v = normal((2, 9)).astype(np.float32)
    v[0, 4] = bad
    result = RSROperatorBinary.from_matrix(A, k).dot(v)
    dense = jnp.asarray(v) @ jnp.asarray(A, jnp.float32)
    np.testing.assert_allclose(result, dense, rtol=1e-5, atol=1e-5)
    assert not np.isfinite(result[0]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_nan_in_a_ternary_product(bad: float):
    A = matrix(RSROperatorTernary, (9, 12))
    v = normal((2, 9)).astype(np.float32)
    v[0, 4] = bad
    result = RSROperatorTernary.from_matrix(A, 3).dot(v)
    assert np.isnan(result[0]).all()
    assert_sums(result[1], v[1], A)


def test_a_sum_that_overflows_is_not_finite():
    q = RSROperatorBinary.from_matrix(np.array([[1, 0, 1], [1, 0, 0]]), k=3)
    result = q.dot(np.array([3e38, 3e38], np.float32))
    assert np.isinf(result[0])


# Transforms


@operators
def test_gradient_is_that_of_the_dense_product(cls: Any):
    A = matrix(cls, (11, 13))
    q = cls.from_matrix(A, k=4)
    v, weights = integers((3, 11)).astype(np.float32), integers((3, 13)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(q.dot(v) * weights)))(v)
    np.testing.assert_array_equal(gradient, weights @ A.T)
    primal, tangent = jax.jit(lambda v: jax.jvp(q.dot, (v,), (v + 1,)))(v)
    np.testing.assert_array_equal(primal, v @ A)
    np.testing.assert_array_equal(tangent, (v + 1) @ A)


@operators
def test_jit_vmap_scan_cond_and_remat(cls: Any):
    A = matrix(cls, (11, 13))
    q = cls.from_matrix(A, k=4)
    v = integers((3, 11)).astype(np.float32)

    @jax.jit
    def run(v: jax.Array, q: Any) -> Any:
        return (
            q.dot(v),
            cls.from_matrix(A, k=4).dot(v),
            jax.vmap(q.dot)(v),
            jax.lax.map(q.dot, v),
            jax.lax.cond(v[0, 0] < 9, lambda v: q.dot(v), lambda v: 0 * q.dot(v), v),
            jax.checkpoint(q.dot)(v),
        )

    np.testing.assert_array_equal(run(v, q), [v @ A] * 6)


@operators
def test_encoding_under_jit_and_vmap(cls: Any):
    stack = np.stack([matrix(cls, (6, 5), seed) for seed in range(3)])
    jitted = jax.jit(lambda A: cls.from_matrix(A, k=2))(stack[0])
    np.testing.assert_array_equal(jitted.materialize(), stack[0])
    q = jax.vmap(lambda A: cls.from_matrix(A, k=2))(stack)
    assert q.shape == (3, 6, 5)
    assert q.is_stacked()
    assert not jitted.is_stacked()
    np.testing.assert_array_equal(q.materialize(), stack)
    v = integers((3, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(jax.vmap(lambda v, q: q.dot(v))(v, q), v @ stack)


@operators
def test_stacks_without_materializing(cls: Any):
    stack = np.stack([matrix(cls, (6, 5), seed) for seed in range(3)])
    q = jax.vmap(lambda A: cls.from_matrix(A, k=2))(stack)
    v = integers((3, 4, 6)).astype(np.float32)
    with materialization_error():
        np.testing.assert_array_equal(jnp.asarray(v) @ q, v @ stack)
        np.testing.assert_array_equal(q.dot(v), v @ stack)
        scanned = implicit(lambda q, v: jax.lax.scan(lambda _, pair: (None, pair[1] @ pair[0]), None, (q, v))[1])
        np.testing.assert_array_equal(scanned(q, v), v @ stack)
        np.testing.assert_array_equal(implicit(jax.vmap(jnp.matmul))(v, q), v @ stack)


# As an operand


@pytest.mark.parametrize(
    "product",
    [
        lambda v, q: v @ q,
        implicit(jnp.dot),
        implicit(lambda v, q: jnp.dot(v, q, precision="highest")),
        jax.jit(lambda v, q: v @ q),
        implicit(jax.jit(jnp.matmul)),
        implicit(lambda v, q: jnp.einsum("bcn,nm->bcm", v, q)),
        implicit(lambda v, q: jnp.einsum("bcn,nm->mbc", v, q).transpose(1, 2, 0)),
        implicit(lambda v, q: jnp.tensordot(v, q, 1)),
        implicit(lambda v, q: jax.lax.dot_general(v.T, q, (((0,), (0,)), ((), ()))).swapaxes(0, 1)),
        implicit(lambda v, q: jax.vmap(lambda v: v @ q)(v)),
    ],
    ids=["@", "dot", "precision", "jit", "matmul", "einsum", "einsum_t", "tensordot", "dot_general", "vmap"],
)
def test_operand_of_a_product_without_materializing(product: Callable[..., Any]):
    A = matrix(RSROperatorTernary, (11, 13))
    v = integers((2, 3, 11)).astype(np.float32)
    with materialization_error():
        result = product(jnp.asarray(v), RSROperatorTernary.from_matrix(A, k=4))
    np.testing.assert_array_equal(result, v @ A)


def test_numpy_and_integers_on_the_left():
    A = matrix(RSROperatorBinary, (11, 13))
    v = integers((2, 11))
    np.testing.assert_array_equal(v.astype(np.float32) @ RSROperatorBinary.from_matrix(A), v @ A)
    np.testing.assert_array_equal(v.astype(np.int32) @ RSROperatorBinary.from_matrix(A).astype(jnp.int32), v @ A)


def test_float32_asked_for_is_not_rounded_on_the_way():
    A = matrix(RSROperatorTernary, (300, 20))
    q = RSROperatorTernary.from_matrix(A).astype(jnp.bfloat16)
    v = jnp.asarray(normal((2, 300)), jnp.bfloat16)
    with materialization_error():
        result = implicit(lambda v, q: jnp.dot(v, q, preferred_element_type=jnp.float32))(v, q)
    assert result.dtype == jnp.float32
    assert_sums(result, np.asarray(v, np.float64), A)


@may_materialize
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda q, y: q @ y, lambda A, y: A @ y),
        (lambda q, y: y.T @ q.T, lambda A, y: y.T @ A.T),
        (lambda q, y: q + 1, lambda A, y: A + 1),
        (lambda q, y: q[2:4], lambda A, y: A[2:4]),
        (lambda q, y: jnp.sum(q, 0), lambda A, y: np.sum(A, 0)),
        (lambda q, y: y[:11, 0] @ jnp.stack([q, q]), lambda A, y: y[:11, 0] @ np.stack([A, A])),
    ],
    ids=["q @ y", "x @ q.T", "add", "slice", "sum", "stacked"],
)
def test_all_else_is_materialized(function: Callable[..., Any], expected: Callable[..., Any]):
    A = matrix(RSROperatorBinary, (11, 13))
    y = integers((13, 2)).astype(np.float32)
    q = RSROperatorBinary.from_matrix(A, k=4)
    np.testing.assert_array_equal(implicit(function)(q, jnp.asarray(y)), expected(A.astype(np.float32), y))
    with materialization_error(), pytest.raises(MaterializationError):
        implicit(function)(q, jnp.asarray(y))


@operators
@may_materialize
def test_without_the_kernel_the_matrix_is_decoded(cls: Any):
    A = matrix(cls, (11, 13))
    q = cls.from_matrix(A)
    parts = (q.rsr_b1, q.rsr_b2) if cls is RSROperatorTernary else (q.codes, q.k, q.padding, q.org_dtype)
    slow = cls(*parts, use_kernel=False)
    v = jnp.asarray(integers((2, 11)), jnp.float32)
    np.testing.assert_array_equal(slow.dot(v), v @ A.astype(np.float32))
    assert [met.rule for met, _, _ in explain(jax.lax.dot)(v, slow)] == ["materialize"]
    assert "materialize" not in [met.rule for met, _, _ in explain(jax.lax.dot)(v, q)]


@pytest.mark.parametrize(("cls", "other"), [(RSROperatorBinary, "int8"), (RSROperatorTernary, "rsr")])
def test_both_operands_quantized(cls: Any, other: str):
    A = matrix(cls, (11, 13))
    q = cls.from_matrix(A, k=4)
    v = jnp.asarray(normal((3, 11)), jnp.float32)
    x = RSROperatorTernary.quantize(v) if other == "rsr" else quantize(v, dtype=other)
    result = x @ q
    assert result.shape == (3, 13)
    assert_sums(result, np.asarray(x.materialize()), A)
    assert_sums(q.dot(x), np.asarray(x.materialize()), A)


@may_materialize
def test_sums_over_a_stack_are_materialized():
    stack = np.stack([matrix(RSROperatorBinary, (6, 5), seed) for seed in range(3)])
    q = jax.vmap(RSROperatorBinary.from_matrix)(stack)
    v = integers((2, 3, 6)).astype(np.float32)
    np.testing.assert_array_equal(implicit(jnp.tensordot)(v, q), np.tensordot(v, stack))
    np.testing.assert_array_equal(v[0, 0] @ q, v[0, 0] @ stack)


def test_operands_that_do_not_fit():
    q = RSROperatorBinary.from_matrix(matrix(RSROperatorBinary, (6, 5)))
    with pytest.raises(TypeError, match=r"array\[2, 5\] @ RSROperatorBinary\[6, 5\].* \(5\) .*\(6\)"):
        q.dot(jnp.ones((2, 5)))
    with pytest.raises(TypeError, match="at least one axis"):
        q.dot(jnp.float32(1))
    with pytest.raises(ValueError, match="not one matrix into rows"):
        jax.vmap(lambda q: q.materialize())(q)


# Values


def test_only_the_integers_are_stored():
    A = matrix(RSROperatorBinary, (100, 30))
    assert RSROperatorBinary.from_matrix(A, k=8).nbytes == math.ceil(30 / 8) * 100
    assert RSROperatorBinary.from_matrix(A, k=5).nbytes == math.ceil(30 / 5) * 100
    assert RSROperatorBinary.from_matrix(A, k=12).nbytes == math.ceil(30 / 12) * 100 * 2
    assert RSROperatorTernary.from_matrix(A, k=8).nbytes == 2 * math.ceil(30 / 8) * 100
    assert repr(RSROperatorBinary.from_matrix(A)) == "RSROperatorBinary(float32[100, 30], 400 bytes)"


@pytest.mark.parametrize(("k", "dtype"), [(1, jnp.uint8), (8, jnp.uint8), (9, jnp.uint16), (16, jnp.uint16)])
def test_first_column_is_the_highest_bit(k: int, dtype: Any):
    q = RSROperatorBinary.from_matrix(np.array([[1] + [0] * (k - 1), [0] * (k - 1) + [1]]), k)
    assert q.codes.dtype == dtype
    assert q.codes.tolist() == [[2 ** (k - 1), 1]]


@pytest.mark.parametrize(("k", "dtype"), [(1, None), (3, jnp.float32), (9, jnp.bool)])
def test_one_hot_maps_round_trip(k: int, dtype: Any):
    A = matrix(RSROperatorBinary, (6, 10))
    q = RSROperatorBinary.from_matrix(A, k)
    maps = q.one_hot_maps
    assert maps.shape == (math.ceil(10 / k), 6, 2**k)
    assert maps.dtype == jnp.int8
    again = RSROperatorBinary(maps if dtype is None else maps.astype(dtype), k, q.padding, jnp.float32, shape=(6, 10))
    np.testing.assert_array_equal(again.codes, q.codes)
    assert again.codes.dtype == q.codes.dtype
    np.testing.assert_array_equal(again.materialize(), A)


def test_the_constructor_takes_codes_and_dtypes():
    q = RSROperatorBinary(np.array([[5, 2]]), 3, 1, jnp.bfloat16)
    assert (q.shape, q.dtype, q.org_dtype) == ((2, 2), jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(q.materialize(), jnp.array([[1, 0], [0, 1]], jnp.bfloat16))
    q = RSROperatorBinary(one_hot_maps=np.array([[5, 2]]), k=3, padding=1, org_dtype=jnp.bfloat16, dtype=jnp.int8)
    assert (q.dtype, q.org_dtype) == (jnp.int8, jnp.bfloat16)
    t = RSROperatorTernary(rsr_b1=q, rsr_b2=q, shape=(2, 2), dtype=jnp.float16)
    assert (t.dtype, t.materialize().tolist()) == (jnp.float16, [[0, 0], [0, 0]])


@operators
def test_is_a_pytree_of_integers(cls: Any):
    q = cls.from_matrix(matrix(cls, (6, 10)), k=4)
    leaves, treedef = jax.tree.flatten(q)
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [((3, 6), jnp.uint8)] * len(leaves)
    assert len(leaves) == (1 if cls is RSROperatorBinary else 2)
    hash(treedef)
    again = jax.tree.unflatten(treedef, leaves)
    np.testing.assert_array_equal(again.materialize(), q.materialize())
    path = jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(q)[0][0][0])
    assert path == (".codes" if cls is RSROperatorBinary else ".rsr_b1.codes")
    assert repr(jax.tree.unflatten(treedef, [object()] * len(leaves)))
    assert jax.eval_shape(lambda q: q, q).shape == (6, 10)


@operators
def test_delete_frees_all_leaves(cls: Any):
    q = cls.from_matrix(jnp.asarray(matrix(cls, (6, 10))))
    q.delete()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(q))
    with pytest.raises(RuntimeError, match="deleted"):
        q.materialize()


# Quantizing


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_quantize_binary_is_one_above_zero(dtype: Any):
    x = jnp.asarray(3 * normal((6, 10)), dtype).at[0, 0].set(0)
    q = RSROperatorBinary.quantize(x, k=3)
    assert (q.dtype, q.org_dtype, q.k) == (dtype, dtype, 3)
    np.testing.assert_array_equal(q.materialize(), (x > 0).astype(dtype))
    assert jnp.all(jnp.abs(q.materialize().astype(jnp.float32) - x.astype(jnp.float32)) <= q.error_bound(x))
    np.testing.assert_array_equal(RSROperatorBinary.quantize(q.materialize()).materialize(), q.materialize())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_quantize_ternary_is_the_rule_of_the_format(dtype: Any):
    x = jnp.asarray(3 * normal((6, 10)), dtype)
    q = RSROperatorTernary.quantize(x, k=3)
    assert (q.dtype, q.rsr_b1.k) == (dtype, 3)
    np.testing.assert_array_equal(q.materialize(), quantize(x, dtype="ternary").materialize())
    assert jnp.all(jnp.abs(q.materialize().astype(jnp.float32) - x.astype(jnp.float32)) <= q.error_bound(x))
    np.testing.assert_array_equal(RSROperatorTernary.quantize(q.materialize()).materialize(), q.materialize())


def test_quantize_of_a_quantized_array():
    x = Array8B.quantize(jnp.asarray(normal((6, 10)), jnp.float32))
    q, of_dense = RSROperatorTernary.quantize(x), RSROperatorTernary.quantize(x.materialize())
    np.testing.assert_array_equal(q.materialize(), of_dense.materialize())


@operators
def test_values_that_are_not_seen_are_clipped(cls: Any):
    A = np.array([[-5, 0, 1, 7]])
    q = jax.jit(lambda A: cls.from_matrix(A, k=2))(A)
    np.testing.assert_array_equal(q.materialize(), np.clip(A, 0 if cls is RSROperatorBinary else -1, 1))


@pytest.mark.parametrize(
    ("cls", "dtype"), [(RSROperatorBinary, np.uint8), (RSROperatorTernary, np.int16), (RSROperatorBinary, np.uint32)]
)
def test_every_integer_dtype_is_taken(cls: Any, dtype: Any):
    A = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    np.testing.assert_array_equal(cls.from_matrix(A, k=2).materialize(), A)


# Bad input

ONES = np.ones((2, 4), np.int8)


@operators
@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda cls: cls.from_matrix(ONES.astype(np.float32)), TypeError, "takes an integer matrix.*float32"),
        (lambda cls: cls.from_matrix(ONES.astype(bool)), TypeError, "got bool"),
        (lambda cls: cls.from_matrix([[0, 1]]), TypeError, "got list"),
        (lambda cls: cls.from_matrix(ONES * 2), ValueError, r"values in \{.*0, 1\}, got some from 2 to 2"),
        (lambda cls: cls.from_matrix(ONES * -2), ValueError, r"values in \{.*0, 1\}, got some from -2 to -2"),
        (lambda cls: cls.from_matrix(ONES[0]), ValueError, r"a matrix, got an array of shape \(4,\)"),
        (lambda cls: cls.from_matrix(ONES[None]), ValueError, "vmap makes a stack"),
        (lambda cls: cls.quantize(ONES[0]), ValueError, "a matrix"),
        (lambda cls: cls.quantize(ONES * np.float32(np.nan)), ValueError, "NaN"),
        (lambda cls: cls.from_matrix(ONES, k=0), ValueError, "`k=0` must be from 1 to 16"),
        (lambda cls: cls.from_matrix(ONES, k=17), ValueError, "`k=17` must be from 1 to 16"),
        (lambda cls: cls.from_matrix(ONES, k=2.0), TypeError, "`k` must be an int, got float"),
        (lambda cls: cls.from_matrix(ONES, k=True), TypeError, "`k` must be an int, got bool"),
    ],
)
def test_bad_matrices(cls: Any, make: Callable[[Any], Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        make(cls)


MAPS = np.eye(4, dtype=np.int8)[None]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: RSROperatorBinary.from_matrix(-ONES), ValueError, r"\{0, 1\}, got some from -1 to -1"),
        (lambda: RSROperatorBinary.from_matrix(ONES, org_dtype=jnp.bool), TypeError, "floating point or integer"),
        (lambda: RSROperatorBinary(MAPS * 2, 2, 0, jnp.float32), ValueError, "must be one-hot"),
        (lambda: RSROperatorBinary(MAPS * 0, 2, 0, jnp.float32), ValueError, "must be one-hot"),
        (lambda: RSROperatorBinary(np.ones_like(MAPS), 2, 0, jnp.float32), ValueError, "must be one-hot"),
        (lambda: RSROperatorBinary(MAPS, 3, 0, jnp.float32), ValueError, r"\(num_blocks, n, 8\) for `k=3`.*int8"),
        (lambda: RSROperatorBinary(MAPS[0, 0], 2, 0, jnp.float32), ValueError, "must have shape"),
        (lambda: RSROperatorBinary(np.float32(ONES), 2, 0, jnp.float32), ValueError, "or be integers"),
        (lambda: RSROperatorBinary(ONES * 4, 2, 0, jnp.float32), ValueError, "from 0 to 3, got 4 to 4"),
        (lambda: RSROperatorBinary(ONES * -1, 8, 0, jnp.float32), ValueError, "from 0 to 255, got -1 to -1"),
        (lambda: RSROperatorBinary(ONES, 2, 0.0, jnp.float32), TypeError, "`padding` must be an int, got float"),
        (lambda: RSROperatorBinary(ONES, 2, 2, jnp.float32), ValueError, "`padding=2` must be"),
        (lambda: RSROperatorBinary(ONES, 2, -1, jnp.float32), ValueError, "`padding=-1` must be"),
        (lambda: RSROperatorBinary(ONES[:0], 2, 1, jnp.float32), ValueError, "columns of no block"),
        (lambda: RSROperatorBinary(ONES, 2, 0, jnp.float32, shape=(4, 5)), ValueError, r"`shape=\(4, 5\)`"),
        (lambda: RSROperatorTernary(ONES, ONES), TypeError, "`rsr_b1` must be an RSROperatorBinary"),
        (lambda: RSROperatorTernary(_binary(4), _binary(5)), ValueError, r"the same shape.*\(3, 4\) .*\(3, 5\) "),
        (lambda: RSROperatorTernary(_binary(4), _binary(4, k=2)), ValueError, "`k=8` and .*`k=2`"),
        (lambda: RSROperatorTernary(_binary(4), _binary(4), dtype=jnp.uint8), ValueError, "can't hold -1"),
        (lambda: RSROperatorTernary.quantize(ONES * np.float32(np.inf)), ValueError, "NaN"),
    ],
)
def test_bad_parts(make: Callable[[], Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        make()


def _binary(m: int, k: int = 8) -> RSROperatorBinary:
    return RSROperatorBinary.from_matrix(matrix(RSROperatorBinary, (3, m)), k)


@may_materialize
def test_a_dtype_without_a_sign_makes_a_ternary_operator_dense():
    q = RSROperatorTernary.from_matrix(ONES)
    assert isinstance(q.astype(jnp.uint8), jax.Array)
    assert isinstance(RSROperatorBinary.from_matrix(ONES).astype(jnp.uint8), RSROperatorBinary)


# Sharding


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


SPECS = [PartitionSpec(None, "y"), PartitionSpec("x", "y"), PartitionSpec(("x", "y"))]


@pytest.mark.parametrize(
    ("cls", "spec"), [(RSROperatorTernary, SPECS[1]), *((RSROperatorBinary, spec) for spec in SPECS)], ids=str
)
def test_sharding_the_operator_or_the_matrix_is_the_same(cls: Any, spec: PartitionSpec):
    A = matrix(cls, (16, 32))
    sharding = NamedSharding(mesh(AxisType.Auto), spec)
    rows, columns = (*spec, None)[:2]
    first = cls.from_matrix(jax.device_put(A, sharding), k=4)
    then = cls.from_matrix(A, k=4).with_sharding(sharding)
    for q in (first, then):
        assert q.is_sharded
        assert q.sharding.spec == PartitionSpec(rows, columns)
        assert {leaf.sharding.spec for leaf in jax.tree.leaves(q)} == {PartitionSpec(columns, rows)}
        assert q.materialize().sharding.spec == PartitionSpec(rows, columns)
        np.testing.assert_array_equal(q.materialize(), A)
    v = integers((3, 16)).astype(np.float32)
    np.testing.assert_array_equal(first.dot(v), v @ A)


@operators
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_quantize_keeps_the_sharding(cls: Any, kind: AxisType):
    x = jnp.asarray(normal((16, 32)), jnp.float32)
    sharding = NamedSharding(mesh(kind), PartitionSpec("x", "y"))
    q = cls.quantize(jax.device_put(x, sharding))
    assert q.sharding == sharding
    assert q.materialize().sharding == sharding
    np.testing.assert_array_equal(q.materialize(), cls.quantize(x).materialize())


@pytest.mark.parametrize(("m", "k"), [(32, 5), (36, 4)], ids=["padded", "blocks"])
def test_columns_that_do_not_split_into_blocks_stay_whole(m: int, k: int):
    A = matrix(RSROperatorBinary, (16, m))
    q = RSROperatorBinary.from_matrix(jax.device_put(A, NamedSharding(mesh(AxisType.Auto), PartitionSpec("x", "y"))), k)
    assert q.codes.sharding.spec == PartitionSpec(None, "x")
    assert q.sharding == NamedSharding(mesh(AxisType.Auto), PartitionSpec("x", None))
    np.testing.assert_array_equal(q.materialize(), A)


@may_materialize
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_explicit_mesh_axes_give_the_dense_product(spec: PartitionSpec):
    A = matrix(RSROperatorTernary, (16, 32))
    v = integers((3, 16)).astype(np.float32)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        q = RSROperatorTernary.from_matrix(A, k=4).with_sharding(spec)
        result = jax.jit(lambda v, q: v @ q)(v, q)
        dense = jax.jit(lambda v, q: v @ q)(v, q.materialize())
    np.testing.assert_array_equal(result, v @ A)
    assert jax.typeof(result).sharding.spec == jax.typeof(dense).sharding.spec


def test_replicated_on_an_explicit_mesh_stays_implicit():
    A = matrix(RSROperatorTernary, (16, 32))
    v = integers((3, 16)).astype(np.float32)
    with jax.set_mesh(mesh(AxisType.Explicit)), materialization_error():
        q = RSROperatorTernary.from_matrix(A, k=4).with_sharding(PartitionSpec())
        np.testing.assert_array_equal(jax.jit(lambda v, q: v @ q)(v, q), v @ A)


@may_materialize
def test_an_operator_on_the_left_has_the_sharding_asked_for():
    q = RSROperatorTernary.from_matrix(matrix(RSROperatorTernary, (16, 32)), k=4)
    v = integers((8, 16)).astype(np.float32)
    numbers = (((0,), (1,)), ((), ()))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        product = implicit(lambda q, v: jax.lax.dot_general(q, v, numbers, out_sharding=PartitionSpec("y", None)))
        result = jax.jit(product)(q.with_sharding(PartitionSpec()), v)
    assert jax.typeof(result).sharding.spec == PartitionSpec("y", None)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shard_map_hands_every_device_its_part(spec: PartitionSpec):
    A = matrix(RSROperatorTernary, (16, 32))
    q = RSROperatorTernary.from_matrix(A, k=4)
    v = integers((3, 16)).astype(np.float32)
    rows, columns = (*spec, None)[:2]

    def product(v: jax.Array, q: Any) -> jax.Array:
        part = v @ q
        return part if rows is None else jax.lax.psum(part, rows)

    mapped = jax.shard_map(
        product,
        mesh=mesh(AxisType.Auto),
        in_specs=(PartitionSpec(None, rows), spec),
        out_specs=PartitionSpec(None, columns),
    )
    with materialization_error():
        np.testing.assert_array_equal(implicit(mapped)(v, q), v @ A)
