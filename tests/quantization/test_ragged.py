"""`ragged_dot` with quantized experts, and their rows by gather: mixtures of experts end to end."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eformer._src.kernels import cpu
from eformer._src.quantization.matmul import ragged
from eformer.jaximus import MaterializationWarning, explain, implicit, is_implicit, materialization_error, materialize
from eformer.ops.quantization import ArrayNF4, quantize

from .cases import Case, assert_product, assert_same, example, f64, name, normal

EXPERTS = [
    Case.of("int8", axis=-2),
    Case.of("int8", axis=(-3, -2, -1)),
    Case.of("nf4", block_size=4, axis=-2),
    Case.of("nf4", block_size=4, double_quantization=True),
    Case.of("ternary", scale="channel"),
    Case.of("binary"),
]
every_expert = pytest.mark.parametrize("case", EXPERTS, ids=str)
SHAPE = (4, 10, 6)  # experts, K, N


def ragged_f64(x: Any, w: Any, sizes: Any) -> np.ndarray:
    """`lax.ragged_dot` by its definition, in float64."""
    out = np.zeros((x.shape[0], w.shape[2]))
    ends = np.cumsum(sizes)
    for start, end, matrix in zip(ends - np.asarray(sizes), ends, f64(w), strict=True):
        out[start:end] = f64(x)[start:end] @ matrix
    return out


def strictly(function: Any) -> Any:
    def call(*args: Any) -> Any:
        with materialization_error():
            return jax.jit(implicit(function))(*args)

    return call


def assert_ragged(out: Any, x: Any, w: Any, sizes: Any) -> None:
    exact, magnitude = ragged_f64(x, w, sizes), ragged_f64(jnp.abs(x), jnp.abs(w), sizes)
    operands = max(float(jnp.finfo(a.dtype).eps) for a in (x, w, out))
    eps = float(jnp.finfo(jnp.float32).eps) * x.shape[1] + 2 * operands
    np.testing.assert_array_less(np.abs(f64(out) - exact), magnitude * eps + 1e-30)


# Groups that fill blocks, cut them, are empty, and leave rows over.
SIZES = [(3, 4, 2, 2), (11, 0, 0, 0), (0, 0, 0, 11), (0, 5, 0, 3), (0, 0, 0, 0), (1, 1, 1, 1)]


@every_expert
def test_each_group_by_its_own_matrix(case):
    q, dense = example(case, SHAPE)
    x, sizes = normal((11, 10), seed=1), jnp.array([3, 0, 5, 2])
    assert_ragged(strictly(lax.ragged_dot)(x, q, sizes), x, dense, sizes)


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_of_every_size(sizes, rows, monkeypatch):
    monkeypatch.setattr(ragged, "BLOCK_ROWS", rows)
    q, dense = example(Case.of("int8", axis=-2), SHAPE)
    x = normal((11, 10), seed=1)
    out = strictly(lambda x, q, sizes: lax.ragged_dot(x, q, sizes))(x, q, jnp.array(sizes))
    assert_ragged(out, x, dense, sizes)
    assert out.shape == (11, 6)


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "asked"),
    [
        (jnp.bfloat16, jnp.bfloat16, None),
        (jnp.bfloat16, jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.float32, None),
        (jnp.int8, jnp.float32, None),
    ],
    ids=name,
)
def test_dtypes_are_those_of_dense_experts(x_dtype, dtype, asked):
    q, dense = example(Case.of("int8", axis=-2), SHAPE, dtype)
    x, sizes = normal((11, 10), seed=1).astype(x_dtype), jnp.array([3, 0, 5, 2])
    run = functools.partial(lax.ragged_dot, preferred_element_type=asked)
    out = strictly(run)(x, q, sizes)
    assert out.dtype == jax.eval_shape(run, x, dense, sizes).dtype
    assert_ragged(out, x.astype(jnp.float32), dense, sizes)


@pytest.mark.parametrize("outside", [True, False], ids=["grad of implicit", "implicit of grad"])
@pytest.mark.parametrize("case", EXPERTS[:3:2], ids=str)
def test_gradient_of_the_rows(case, outside):
    q, dense = example(case, SHAPE)
    x, sizes, ct = normal((11, 10), seed=1), jnp.array([3, 0, 5, 2]), normal((11, 6), seed=2)
    loss = lambda x, w: jnp.sum(lax.ragged_dot(x, w, sizes) * ct)  # noqa: E731
    gradient = jax.grad(implicit(loss)) if outside else implicit(jax.grad(loss))
    with materialization_error():
        out = jax.jit(gradient)(x, q)
    assert_ragged(out, ct, jnp.swapaxes(dense, 1, 2), sizes)
    _, tangent = jax.jvp(lambda x: implicit(loss)(x, q), (x,), (x,))
    np.testing.assert_allclose(tangent, implicit(loss)(x, q), rtol=1e-5)  # it is linear


def test_vmap_over_rows():
    q, dense = example(Case.of("int8", axis=-2), SHAPE)
    x, sizes = normal((3, 11, 10), seed=1), jnp.array([3, 0, 5, 2])
    with materialization_error():
        out = jax.vmap(lambda x: implicit(lax.ragged_dot)(x, q, sizes))(x)
    assert_ragged(out[2], x[2], dense, sizes)


def test_vmap_over_groups_too():
    q, dense = example(Case.of("int8", axis=-2), SHAPE)
    x, sizes = normal((2, 11, 10), seed=1), jnp.array([[3, 0, 5, 2], [0, 11, 0, 0]])
    with materialization_error():
        out = jax.vmap(lambda x, sizes: implicit(lax.ragged_dot)(x, q, sizes))(x, sizes)
    assert_ragged(out[0], x[0], dense, sizes[0])
    assert_ragged(out[1], x[1], dense, sizes[1])


def test_general_numbers():
    """Ragged rows that are not the first axis, and experts that are not the first of theirs."""
    numbers = lax.RaggedDotDimensionNumbers((((0,), (2,)), ((), ())), [2], [1])
    q, dense = example(Case.of("int8", axis=-1), (6, 4, 10))
    x, sizes = normal((10, 2, 11), seed=1), jnp.array([3, 0, 5, 2])
    run = lambda x, q: lax.ragged_dot_general(x, q, sizes, numbers)  # noqa: E731
    out, shape = strictly(run)(x, q), jax.eval_shape(run, x, dense)
    assert (out.shape, out.dtype) == (shape.shape, shape.dtype)
    assert_ragged(out[1], x[:, 1].T, jnp.transpose(dense, (1, 2, 0)), sizes)


def test_without_the_core():
    q, dense = example(Case.of("nf4", block_size=4), SHAPE)
    x, sizes = normal((11, 10), seed=1), jnp.array([3, 0, 5, 2])
    with cpu.use_core(False):
        assert_ragged(strictly(lax.ragged_dot)(x, q, sizes), x, dense, sizes)


def test_blocks_across_experts_are_told():
    q = quantize(normal(SHAPE), dtype="nf4", block_size=4, axis=0)
    x, sizes = normal((11, 10), seed=1), jnp.array([3, 0, 5, 2])
    assert explain(lax.ragged_dot)(x, q, sizes).dense_bytes == 4 * q.size
    with pytest.warns(MaterializationWarning, match="ragged_dot"):
        assert_ragged(implicit(lax.ragged_dot)(x, q, sizes), x, q.materialize(), sizes)


# --- gathers of experts ---


@every_expert
def test_gathered_experts_stay_quantized(case):
    get = lambda q, i: q[i]  # noqa: E731
    q, dense = example(case, SHAPE)
    ids, x = jnp.array([2, 0, 2]), normal((3, 1, 10), seed=1)
    assert is_implicit(implicit(get)(q, ids))
    assert_same(implicit(get)(q, ids), dense[ids])
    assert explain(lambda x, q, i: x @ get(q, i))(x, q, ids).dense_bytes == 0
    numbers = (((2,), (1,)), ((0,), (0,)))
    assert_product(strictly(lambda x, q, i: x @ get(q, i))(x, q, ids), x, dense[ids], numbers)


@every_expert
def test_expert_that_is_not_there_is_nan_as_dense(case):
    q, dense = example(case, SHAPE)
    ids = jnp.array([1, 4, -5])
    take = lambda q: jnp.take(q, ids, axis=0)  # noqa: E731
    np.testing.assert_array_equal(f64(implicit(take)(q).materialize()), f64(take(dense)))


def test_rows_of_a_table_are_decoded():
    """What an embedding lookup asks for is rows, and these are no dense copy of the table."""
    q, dense = example(Case.of("int8"), (20, 8))
    ids = jnp.array([[1, 19], [0, 3]])
    out = strictly(lambda q: q[ids])(q)
    assert not is_implicit(out)
    assert_same(out, dense[ids])
    assert explain(lambda q: q[ids])(q).dense_bytes == 0


# --- a layer ---

TOKENS, WIDTH, HIDDEN, TOP = 12, 16, 24, 2


def mixture(x: jax.Array, router: jax.Array, up: Any, down: Any) -> jax.Array:
    """A layer of experts as it is written for dense weights: routed, sorted, multiplied by group, put back."""
    experts = up.shape[0]
    weights, chosen = lax.top_k(jax.nn.softmax(x @ router), TOP)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=experts)
    rows = x[order // TOP]
    hidden = jax.nn.silu(lax.ragged_dot(rows, up, sizes))
    out = lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(out * weights[..., None], axis=1)


@pytest.fixture(scope="module")
def layer():
    x, router = normal((TOKENS, WIDTH)), normal((WIDTH, 4), seed=1)
    up = quantize(normal((4, WIDTH, HIDDEN), seed=2), dtype="nf4", block_size=8, axis=-2)
    down = quantize(normal((4, HIDDEN, WIDTH), seed=3), dtype="int8", axis=-2)
    return x, router, up, down


def test_mixture_of_experts(layer):
    def with_gradient(x: jax.Array, *weights: Any) -> Any:
        return mixture(x, *weights), jax.grad(lambda x: jnp.sum(mixture(x, *weights)))(x)

    with jax.numpy_rank_promotion("allow"):
        out, gradient = strictly(with_gradient)(*layer)
        expected, dense = jax.jit(with_gradient)(*materialize(layer))
        assert explain(with_gradient)(*layer).dense_bytes == 0
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(gradient, dense, atol=1e-3)


def test_mixture_of_experts_over_devices(layer):
    """Each device has its own experts and adds up what they give to the rows that are theirs."""
    x, router, up, down = layer
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,))

    def local(x: jax.Array, router: jax.Array, up: Any, down: Any) -> jax.Array:
        scores = jax.nn.softmax(x @ router)
        first = lax.axis_index("e") * up.shape[0]
        chosen = jnp.argmax(scores, axis=-1) - first
        mine = jnp.where((chosen >= 0) & (chosen < up.shape[0]), chosen, up.shape[0])
        order = jnp.argsort(mine)  # those of other devices come last, beyond all groups
        sizes = jnp.bincount(mine, length=up.shape[0] + 1)[:-1]
        out = lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x[order], up, sizes)), down, sizes)
        return lax.psum(out[jnp.argsort(order)], "e")

    def one(x: jax.Array, router: jax.Array, up: Any, down: Any) -> jax.Array:
        chosen = jnp.argmax(jax.nn.softmax(x @ router), axis=-1)
        hidden = jax.nn.silu(jnp.einsum("tk,tkn->tn", x, up[chosen]))
        return jnp.einsum("tk,tkn->tn", hidden, down[chosen])

    layer_of = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("e"), P("e")), out_specs=P())
    expected = one(x, router, up.materialize(), down.materialize())
    np.testing.assert_allclose(strictly(layer_of)(*layer), expected, atol=1e-4)
    np.testing.assert_allclose(strictly(one)(*layer), expected, atol=1e-4)
    assert explain(layer_of)(*layer).dense_bytes == 0


@pytest.mark.usefixtures("optimized")
def test_experts_are_not_copied():
    """Neither the program of a layer nor its gradient holds the dense experts."""
    x, w = jnp.zeros((128, 256)), jnp.zeros((8, 256, 512))
    q = ArrayNF4.quantize(w, axis=-2)
    run = lambda x, q: lax.ragged_dot(x, q, jnp.full((8,), 16))  # noqa: E731
    program = jax.jit(implicit(run)).lower(x, q).compile()
    assert program.memory_analysis().temp_size_in_bytes < w.nbytes / 4
    gradient = jax.grad(implicit(lambda x, q: jnp.sum(run(x, q) ** 2)))
    assert jax.jit(gradient).lower(x, q).compile().memory_analysis().temp_size_in_bytes < w.nbytes / 2
