"""`fake_quantize` and `finalize`: what is trained is what runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.model import Rule, default_rules, dequantize, fake_quantize, finalize, quantize_model
from eformer.ops.quantization import formats

FORMATS = [*((form.name, {}) for form in formats()), ("ternary", {"scale": "absmean"})]


def params() -> dict[str, Any]:
    draw = np.random.default_rng(0).standard_normal
    return {
        "kernel": jnp.asarray(draw((64, 80)) / 8, jnp.float32),
        "layers": {"kernel": jnp.asarray(draw((2, 80, 80)) / 9, jnp.float32)},
        "bias": jnp.zeros(80),
    }


X = jnp.asarray(np.random.default_rng(1).standard_normal((4, 64)), jnp.float32)


def apply(tree: Any, x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ tree["kernel"] + tree["bias"][None])
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, tree["layers"]["kernel"])[0]


@pytest.mark.parametrize(("format", "options"), FORMATS, ids=str)
def test_the_weights_of_the_forward_pass_are_those_of_the_final_model(format: str, options: dict[str, Any]):
    tree, rules = params(), default_rules(format, **options)
    trained = jax.jit(lambda tree: fake_quantize(tree, rules))(tree)
    final = finalize(tree, rules)
    for found, expected in zip(jax.tree.leaves(trained), jax.tree.leaves(dequantize(final)), strict=True):
        assert np.array_equal(found, expected)


def test_gradients_pass_as_if_nothing_was_rounded():
    tree = params()
    rounded = jax.tree.map(jnp.asarray, dequantize(quantize_model(tree, format="int4")))

    def loss(tree: Any, **options: Any) -> jax.Array:
        return jnp.sum(apply(fake_quantize(tree, format="int4", **options), X) ** 2)

    found = jax.jit(jax.grad(loss))(tree)
    expected = jax.grad(lambda tree: jnp.sum(apply(tree, X) ** 2))(rounded)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5)
    frozen = jax.grad(lambda tree: loss(tree, freeze=["^kernel", "bias"]))(tree)
    assert [bool(np.any(each)) for each in (frozen["kernel"], frozen["bias"])] == [False, False]
    assert np.any(frozen["layers"]["kernel"])


@pytest.mark.parametrize(
    "transform", [jax.checkpoint, lambda f: lambda tree, x: jax.vmap(f, (None, 0))(tree, x[:, None])[:, 0], jax.jit]
)
def test_inside_other_transformations(transform: Any):
    def run(tree: Any, x: jax.Array) -> jax.Array:
        return apply(fake_quantize(tree, format="nf4"), x)

    out = jax.grad(lambda tree: jnp.sum(transform(run)(tree, X)))(params())
    expected = jax.grad(lambda tree: jnp.sum(run(tree, X)))(params())
    np.testing.assert_allclose(out["kernel"], expected["kernel"], rtol=1e-4, atol=1e-5)


def test_mixing():
    tree = params()

    @jax.jit
    def kernel(mix: jax.Array) -> jax.Array:
        return fake_quantize(tree, format="int2", mix=mix)["kernel"]

    rounded = dequantize(finalize(tree, format="int2"))["kernel"]
    assert np.array_equal(kernel(0.0), tree["kernel"])
    assert np.array_equal(kernel(1.0), rounded)
    np.testing.assert_allclose(kernel(0.25), 0.75 * tree["kernel"] + 0.25 * rounded, rtol=1e-5, atol=1e-6)
    assert np.array_equal(
        jax.grad(lambda w: jnp.sum(fake_quantize({"kernel": w}, format="int2", mix=0.5)["kernel"]))(tree["kernel"]),
        np.ones((64, 80)),
    )


def test_rules_choose():
    tree = params()
    rules = (Rule("layers", "ternary", {"scale": "channel"}), *default_rules("int8"))
    found, final = fake_quantize(tree, rules), finalize(tree, rules)
    assert np.array_equal(found["layers"]["kernel"], final["layers"]["kernel"].materialize())
    assert found["bias"] is tree["bias"]


def test_a_quantized_leaf_is_not_trained():
    with pytest.raises(TypeError, match="'kernel' is quantized already, and can't be trained"):
        fake_quantize(quantize_model(params()))
