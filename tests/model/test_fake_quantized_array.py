"""Activations rounded in training as they are in the final model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer._src.kernels import cpu
from eformer.jaximus import implicit
from eformer.model import FakeQuantizedArray, Rule, default_rules, dequantize, fake_quantize, finalize, init_scales
from eformer.ops.quantization import quantize

FORMATS = ("int8", "int4", "nf4", "ternary")


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def params() -> dict[str, Any]:
    return {
        "kernel": normal(64, 80) / 8,
        "layers": {"kernel": normal(2, 80, 80, seed=1) / 9},
        "weight": normal(48, 80, seed=2) / 9,
        "bias": jnp.zeros(80),
    }


def apply(tree: Any, x: jax.Array) -> jax.Array:
    x = jnp.tanh(jnp.einsum("bk,kn->bn", x, tree["kernel"]) + tree["bias"][None])
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, tree["layers"]["kernel"])[0]
    return x @ tree["weight"].T


X = normal(4, 64, seed=3)


@pytest.mark.usefixtures("optimized")  # bits are compared
@pytest.mark.parametrize("format", FORMATS)
def test_the_forward_pass_is_that_of_the_final_model(format: str):
    tree, rules = params(), default_rules(format, activation_dtype="int8", min_size=0)
    trained = jax.jit(lambda tree: implicit(apply)(fake_quantize(tree, rules), X))(tree)
    final = finalize(tree, rules)
    assert np.array_equal(trained, jax.jit(implicit(apply))(final, X))
    if cpu.is_available():  # x is rounded indeed
        assert not np.array_equal(trained, jax.jit(apply)(dequantize(final), X))


def test_gradients_are_those_without_rounding_of_activations():
    tree, rules = params(), default_rules("int8", activation_dtype="int8", min_size=0)
    w, x, upstream = tree["kernel"], X, normal(4, 80, seed=4)
    q = finalize(tree, rules)["kernel"]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(upstream * implicit(jnp.matmul)(x, fake_quantize({**tree, "kernel": w}, rules)["kernel"]))

    of_w, of_x = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    np.testing.assert_allclose(of_w, x.T @ upstream, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x, upstream @ q.materialize().T, rtol=1e-5, atol=1e-5)


def test_gradients_of_quantized_arrays_are_not_rounded():
    q, ct = quantize(normal(64, 80), format="int8", axis=0, activation_dtype="int8"), normal(4, 80, seed=4)
    found = jax.jit(lambda x: jax.vjp(lambda x: x @ q, x)[1](ct)[0])(X)
    bound = 2 * 80 * jnp.finfo(jnp.float32).eps * (jnp.abs(ct) @ jnp.abs(q.materialize()).T)
    assert np.all(np.abs(found - ct @ q.materialize().T) <= bound)


@pytest.mark.usefixtures("optimized")  # bits are compared
def test_learned_scales_mixing_and_freezing():
    tree, rules = params(), default_rules("int8", activation_dtype="int8", min_size=0)
    scales = init_scales(tree, rules)

    @jax.jit
    def run(mix: jax.Array) -> jax.Array:
        return implicit(apply)(fake_quantize(tree, rules, scales=scales, mix=mix), X)

    assert np.array_equal(run(1.0), jax.jit(implicit(apply))(finalize(tree, rules, scales=scales), X))
    np.testing.assert_allclose(run(0.0), apply(tree, X), rtol=1e-5, atol=1e-5)

    def loss(tree: Any) -> jax.Array:
        return jnp.sum(implicit(apply)(fake_quantize(tree, rules, freeze=["^kernel"]), X))

    gradients = jax.grad(loss)(tree)
    assert [bool(np.any(gradients[name])) for name in ("kernel", "weight")] == [False, True]


def test_experts_and_movements():
    tree, rules = {"kernel": normal(3, 64, 80)}, [Rule("kernel", "int8", {"axis": -2, "activation_dtype": "int8"})]
    trained, final = fake_quantize(tree, rules)["kernel"], finalize(tree, rules)["kernel"]
    x, sizes = normal(6, 64), jnp.array([1, 2, 3], jnp.int32)
    assert np.array_equal(implicit(lax.ragged_dot)(x, trained, sizes), implicit(lax.ragged_dot)(x, final, sizes))
    part = implicit(lambda q: q[1].astype(jnp.bfloat16))(trained)
    assert (type(part), part.shape, part.dtype) == (FakeQuantizedArray, (64, 80), jnp.bfloat16)
    assert part.quantized.dtype == jnp.bfloat16
    assert np.array_equal(implicit(lambda q: jnp.sum(q))(trained), jnp.sum(trained.weight))
