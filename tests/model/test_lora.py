"""`LoraArray` and what adds, trains and merges it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import explain, implicit, materialization_error
from eformer.model import (
    LoraArray,
    Rule,
    add_lora,
    combine,
    default_rules,
    dequantize,
    drop_lora,
    lora_dropout,
    merge_lora,
    named_leaves,
    partition,
    quantize_model,
)
from eformer.ops.quantization import quantize

ROWS, COLS, RANK = 64, 96, 4


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


BASES: dict[str, Any] = {
    "dense": lambda w: w,
    "nf4": lambda w: quantize(w, format="nf4", axis=-2),
    "int4": lambda w: quantize(w, format="int4", axis=-1),
    "int8": lambda w: quantize(w, format="int8"),
}
every_base = pytest.mark.parametrize("base", list(BASES))


def lora(base: str, *stack: int, dtype: Any = jnp.float32) -> LoraArray:
    w = BASES[base](normal(*stack, ROWS, COLS).astype(dtype))
    scaling = jnp.full(stack, 0.5)
    return LoraArray(w, normal(*stack, ROWS, RANK, seed=1), normal(*stack, RANK, COLS, seed=2), scaling)


# What is done with a weight, and the shape of the other operand.
MATMULS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "x @ q": (lambda x, q: x @ q, (5, ROWS)),
    "x @ q.T": (lambda x, q: x @ q.T, (5, COLS)),
    "q @ x": (lambda x, q: q @ x, (COLS, 3)),
    "q.T @ x": (lambda x, q: q.T @ x, (ROWS, 3)),
    "vector": (lambda x, q: x @ q, (ROWS,)),
    "batch": (lambda x, q: jnp.einsum("btk,kn->btn", x, q), (2, 3, ROWS)),
    "other order": (lambda x, q: jnp.einsum("kn,bk->nb", q, x), (5, ROWS)),
}


@every_base
@pytest.mark.parametrize("use", list(MATMULS))
def test_matmuls_never_build_the_sum(base: str, use: str):
    function, shape = MATMULS[use]
    q, x = lora(base), normal(*shape, seed=3)
    out, expected = jax.jit(implicit(function))(x, q), function(x, q.materialize())
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    # Both sum ROWS or COLS terms and RANK more, in another order.
    bound = 2 * (COLS + RANK) * jnp.finfo(jnp.float32).eps * function(jnp.abs(x), jnp.abs(_largest(q)))
    assert np.all(np.abs(out - expected) <= bound)
    assert explain(function)(x, q).dense_bytes == 0


def _largest(q: LoraArray) -> jax.Array:
    """A bound of every term of `base + scaling * a @ b`."""
    return jnp.abs(dequantize(q.base)) + 0.5 * jnp.abs(q.a) @ jnp.abs(q.b)


@every_base
def test_stacks_are_scanned_and_batched(base: str):
    q, x = lora(base, 3), normal(3, 5, ROWS, seed=3)
    dense = q.materialize()

    def scanned(x: jax.Array, q: Any) -> jax.Array:
        return lax.scan(lambda carry, xq: (carry, xq[0] @ xq[1]), 0, (x, q))[1]

    for function in (scanned, lambda x, q: jnp.einsum("ebk,ekn->ebn", x, q)):
        np.testing.assert_allclose(jax.jit(implicit(function))(x, q), function(x, dense), rtol=1e-4, atol=1e-4)
        assert explain(function)(x, q).dense_bytes == 0


@every_base
def test_experts(base: str):
    q, x, sizes = lora(base, 2), normal(5, ROWS, seed=3), jnp.array([2, 3], jnp.int32)
    out = implicit(lax.ragged_dot)(x, q, sizes)
    np.testing.assert_allclose(out, lax.ragged_dot(x, q.materialize(), sizes), rtol=1e-4, atol=1e-4)
    assert explain(lax.ragged_dot)(x, q, sizes).dense_bytes == 0


@pytest.mark.parametrize("base", ["dense", "int4", "int8"])
def test_rows_of_an_embedding(base: str):
    q, ids = lora(base), jnp.array([[3, 1], [63, -1]])
    np.testing.assert_allclose(implicit(lambda q: q[ids])(q), q.materialize()[ids], rtol=1e-5, atol=1e-5)
    assert explain(lambda q: q[ids])(q).dense_bytes == 0


def test_dtypes_are_those_of_the_dense_weight():
    q = lora("nf4", dtype=jnp.bfloat16)
    assert (q.dtype, q.a.dtype) == (jnp.bfloat16, jnp.float32)
    assert implicit(jnp.matmul)(normal(5, ROWS).astype(jnp.bfloat16), q).dtype == jnp.bfloat16
    cast = implicit(lambda q: q.astype(jnp.float32))(q)
    assert (type(cast), cast.dtype, cast.base.dtype) == (LoraArray, jnp.float32, jnp.float32)


@every_base
def test_gradients_reach_the_update_only(base: str):
    q, x = lora(base), normal(5, ROWS, seed=3)

    def loss(parts: Any, run: Any) -> jax.Array:
        return jnp.sum(jnp.sin(run(dataclasses.replace(q, **parts))))

    parts = {"a": q.a, "b": q.b}
    found = jax.jit(jax.grad(lambda p: loss(p, implicit(lambda q: x @ q))))(parts)
    expected = jax.grad(lambda p: loss(p, lambda q: x @ q.materialize()))(parts)
    for name in parts:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-3)
    if base == "dense":
        of_base = jax.grad(lambda w: jnp.sum(implicit(lambda q: x @ q)(dataclasses.replace(q, base=w))))(q.base)
        assert not np.any(of_base)


def model() -> dict[str, Any]:
    return {
        "embed": {"table": normal(64, 64)},
        "one": {"kernel": normal(64, 128) / 8, "bias": jnp.zeros(128)},
        "two": {"weight": normal(64, 128, seed=1) / 8},  # (out, in)
        "layers": {"kernel": normal(2, 64, 64) / 8},
    }


def apply(params: Any, x: jax.Array) -> jax.Array:
    x = x @ params["one"]["kernel"] + params["one"]["bias"][None]
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ params["two"]["weight"].T, params["layers"]["kernel"])[0]


@pytest.mark.usefixtures("optimized")  # bits are compared
def test_the_update_is_nothing_at_first():
    params = quantize_model(model())
    tree, x = add_lora(params, rank=RANK, key=jax.random.key(0)), normal(5, 64)
    kinds = {path: type(leaf) is LoraArray for path, leaf in named_leaves(tree, lambda x: type(x) is LoraArray)[0]}
    assert {path for path, is_lora in kinds.items() if is_lora} == {"one.kernel", "two.weight", "layers.kernel"}
    assert np.array_equal(implicit(apply)(tree, x), implicit(apply)(params, x))
    # Random where activations come in: (in, rank), and for a weight (out, in) the other factor.
    found = [np.any(part) for q in (tree["one"]["kernel"], tree["two"]["weight"]) for part in (q.a, q.b)]
    assert found == [True, False, False, True]
    assert jax.tree.structure(drop_lora(tree)) == jax.tree.structure(params)


def test_scaling():
    params = quantize_model(model())
    found = {"rank_stabilized": 16 / np.sqrt(4), "alpha": 16 / 4}
    for options, expected in zip(({"rank_stabilized": True}, {}), found.values(), strict=True):
        tree: Any = add_lora(params, rank=4, key=jax.random.key(0), alpha=16, **options)
        np.testing.assert_array_equal(tree["layers"]["kernel"].scaling, np.full(2, expected, np.float32))


def test_training_moves_the_update_alone():
    params = quantize_model(model())
    trained, frozen = partition(add_lora(params, rank=RANK, key=jax.random.key(0)))
    assert {path.rpartition(".")[2] for path, _ in named_leaves(trained)[0]} == {"a", "b"}
    x, y = normal(16, 64), normal(16, 64, seed=5)

    def loss(trained: Any) -> jax.Array:
        return jnp.mean((implicit(apply)(combine(trained, frozen), x) - y) ** 2)

    losses = []
    for _ in range(20):
        value, gradients = jax.jit(jax.value_and_grad(loss))(trained)
        trained = jax.tree.map(lambda p, g: p - 0.3 * g, trained, gradients)
        losses.append(float(value))
    assert losses[-1] < losses[0] * 0.9
    merged = merge_lora(combine(trained, frozen))
    assert abs(float(jnp.mean((implicit(apply)(merged, x) - y) ** 2)) - float(loss(trained))) < 1e-4


def test_adapters_are_switched_without_compiling_again():
    params = quantize_model(model())
    run = jax.jit(implicit(apply))
    for seed in (0, 1):
        tree = add_lora(params, rank=RANK, key=jax.random.key(seed), alpha=4 + seed)
        run(tree, normal(5, 64))
    assert run._cache_size() == 1


def test_what_quantization_lost_is_the_first_update():
    whole = {"kernel": normal(64, 128)}
    params = quantize_model(whole, format="int4")
    full: Any = add_lora(params, rank=64, key=jax.random.key(0), original=whole)
    np.testing.assert_allclose(merge_lora(full)["kernel"], whole["kernel"], atol=1e-5)
    part: Any = add_lora(params, rank=8, key=jax.random.key(0), original=whole)
    values = np.linalg.svd(whole["kernel"] - dequantize(params)["kernel"], compute_uv=False)
    left = np.linalg.norm(whole["kernel"] - merge_lora(part)["kernel"])
    np.testing.assert_allclose(left, np.sqrt(np.sum(values[8:] ** 2)), rtol=1e-4)
    # A dense weight has lost nothing. Were both factors zero, no gradient would ever reach them.
    dense: Any = add_lora(whole, rank=8, key=jax.random.key(0), original=whole, rules=["kernel"])["kernel"]
    assert np.any(dense.a)
    assert not np.any(dense.b)


@pytest.mark.parametrize("format", ["nf4", "int4", "ternary"])
@pytest.mark.parametrize("shape", [(64, 96), (2, 48, 64)], ids=str)
def test_more_steps_bring_base_and_update_nearer(format: str, shape: tuple[int, ...]):
    whole = {"kernel": normal(*shape)}
    options = {"symmetric": True} if format == "int4" else {}
    params = quantize_model(whole, default_rules(format, min_size=0, **options))

    def left(steps: int) -> float:
        tree: Any = add_lora(params, rank=8, key=jax.random.key(0), original=whole, steps=steps)
        assert jax.tree.structure(tree["kernel"].base) == jax.tree.structure(params["kernel"])
        return float(np.linalg.norm(whole["kernel"] - merge_lora(tree)["kernel"]))

    distances = [left(steps) for steps in (1, 2, 5)]
    assert distances == sorted(distances, reverse=True)
    assert distances[2] < distances[0]


def test_dropout():
    q = lora("nf4", 2)
    tree = lora_dropout(
        {"w": dataclasses.replace(q, base=quantize(jnp.zeros((2, ROWS, COLS))))}, 0.25, jax.random.key(1)
    )
    run = jax.jit(implicit(lambda tree, x: jnp.einsum("ebk,ekn->ebn", x, tree["w"])))
    x = jnp.ones((2, 1, ROWS))
    first = run(tree, x)
    assert np.array_equal(first, run(tree, x))  # the key decides
    assert not np.array_equal(first, run(lora_dropout(tree, 0.25, jax.random.key(2)), x))
    # Each element of x is dropped or scaled up: with one `a` per input, the result tells which.
    ones = dataclasses.replace(
        q,
        base=jnp.zeros((2, ROWS, COLS)),
        a=jnp.broadcast_to(jnp.eye(ROWS), (2, ROWS, ROWS)),
        b=jnp.zeros((2, ROWS, COLS)).at[:, :, :ROWS].set(jnp.eye(ROWS)),
    )
    seen = np.asarray(run(lora_dropout({"w": ones}, 0.25, jax.random.key(1)), x))[..., :ROWS] / 0.5
    assert set(np.unique(seen.round(5))) == {0.0, np.float32(4 / 3).round(5)}
    assert abs(np.mean(seen == 0) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / seen.size)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rank": 0}, ValueError, "`rank=0` must be an int of at least 1"),
        ({"rank": 65}, ValueError, r"`rank=65` does not fit 'layers.kernel' \(2, 64, 64\): it can be 64 at most"),
        ({"rules": ["nothing"]}, ValueError, "no matrix matches 'nothing'; matrices are: 'embed.table'"),
        ({"rules": "kernel"}, TypeError, "`rules` must be a sequence of patterns, got one str: put it into a list"),
        ({"rules": lambda path, leaf: True}, TypeError, "got one function: put it into a list"),
        ({"rules": []}, ValueError, "`rules` has no pattern: give one at least, or None for all quantized matrices"),
        ({"steps": 2}, ValueError, "`steps=2` must be an int of at least 1, and more than 1 only with `original`"),
        ({"original": {"embed": {}}}, ValueError, "`original` must be the tree before it was quantized"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], words: str):
    options: dict[str, Any] = {"key": jax.random.key(0), **change}
    with pytest.raises(error, match=words):
        add_lora(quantize_model(model()), **options)


def test_more_errors():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="no matrix is quantized, but perhaps embeddings: give `rules`"):
        add_lora(model(), key=key)
    with pytest.raises(ValueError, match="no matrix is quantized, but perhaps embeddings: give `rules`"):
        add_lora(quantize_model({"embed": {"table": jnp.ones((64, 64))}}, [Rule("", "int8")]), key=key)
    quantized = quantize_model({"kernel": jnp.ones((64, 128))})
    with pytest.raises(
        ValueError, match=r"'kernel' must be a dense array \(64, 128\), and is ArrayGrouped \(64, 128\)"
    ):
        add_lora(quantized, key=key, original=quantized)
    with pytest.raises(ValueError, match=r"'kernel' must be a dense array \(64, 128\), and is .* \(128, 64\)"):
        add_lora(quantized, key=key, original={"kernel": jnp.ones((128, 64))})
    with pytest.raises(ValueError, match="has an update of low rank already"):
        add_lora(add_lora(quantize_model(model()), key=key), key=key)
    with pytest.raises(ValueError, match=r"`a` \(3, 2\) @ `b` \(2, 5\) is no update of a weight \(4, 5\)"):
        LoraArray(jnp.ones((4, 5)), jnp.ones((3, 2)), jnp.ones((2, 5)), jnp.float32(1))
    with pytest.raises(ValueError, match="`rate=1` must be"):
        lora_dropout({}, 1, key)


@pytest.mark.parametrize("form", ["int8", "nf4", "int4"])
def test_a_convolution_keeps_the_base_quantized(form):
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 64, 64))
    adapted = add_lora({"w": quantize(kernel, format=form)}, rank=4, key=jax.random.key(1))["w"]
    adapted = dataclasses.replace(adapted, a=adapted.a + 0.1, b=adapted.b + 0.1)
    x = jax.random.normal(jax.random.key(2), (2, 8, 8, 64))
    convolve = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    with materialization_error():
        found = implicit(convolve)(x, adapted)
    np.testing.assert_allclose(found, convolve(x, adapted.materialize()), rtol=1e-4, atol=1e-2)
