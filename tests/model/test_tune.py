"""`tune`: outputs nearer to the reference's, with the same codes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.quantization.trained import scales_of, with_scales
from eformer.model import compare_outputs, default_rules, dequantize_model, quantize_model, tune
from eformer.ops.quantization import formats

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(64, 32)), jnp.float32), "b": jnp.ones(32), "n": jnp.arange(3)}
X = [jnp.asarray(RNG.normal(size=(1024, 64)), jnp.float32) for _ in range(3)]


def model(p, x):
    return x @ p["w"] + p["b"][None]


def divergence(small, x) -> float:
    after, before = (jax.nn.log_softmax(model(p, x)) for p in (dequantize_model(small), PARAMS))
    return float(jnp.mean(jnp.sum(jnp.exp(before) * (before - after), axis=-1)))


TRAINED = [
    *[(form.name, {}) for form in formats() if form.name != "mxfp4"],
    ("int3", {"double_quantization": True}),
    ("int3", {"double_quantization": True, "symmetric": True}),
    ("nf4", {"double_quantization": True}),
]


@pytest.mark.parametrize(("name", "options"), TRAINED)
def test_outputs_are_nearer_and_codes_the_same(name, options):
    small = quantize_model(PARAMS, default_rules(name, min_size=1, **options))
    tuned = tune(model, small, X[:2], reference=PARAMS, epochs=20)
    assert divergence(tuned, X[2]) < divergence(small, X[2])
    assert jax.tree.structure(tuned) == jax.tree.structure(small)
    before, after = small["w"], tuned["w"]
    assert [leaf.dtype for leaf in jax.tree.leaves(before)] == [leaf.dtype for leaf in jax.tree.leaves(after)]
    for field in type(before)._code_fields:
        np.testing.assert_array_equal(getattr(before, field), getattr(after, field))
    np.testing.assert_array_equal(tuned["n"], small["n"])


@pytest.mark.parametrize(("name", "options"), TRAINED)
def test_scales_can_be_taken_and_put_back(name, options):
    q = quantize_model(PARAMS, default_rules(name, min_size=1, **options))["w"]
    again = with_scales(q, scales_of(q))
    np.testing.assert_allclose(again.materialize(), q.materialize(), rtol=2.0**-20)


def test_any_loss_and_any_leaves():
    small = quantize_model(PARAMS, default_rules("int4", min_size=1))
    only = tune(
        model,
        small,
        X[0],
        reference=PARAMS,
        loss=lambda after, before: jnp.mean((after - before) ** 2),
        trainable=lambda path, leaf: path == "b",
        epochs=5,
    )
    np.testing.assert_array_equal(only["w"].materialize(), small["w"].materialize())
    assert jnp.any(only["b"] != small["b"])


def test_under_scan_and_jit():
    p = {"w": jnp.stack([PARAMS["w"][:, :32] @ PARAMS["w"][:, :32].T / 64] * 3)}

    def deep(p, x):
        return jax.jit(lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0])(p, x)

    small = quantize_model(p, default_rules("int3", block_size=64))  # whose scales are not rounded to 8 bits
    told = []
    tuned = tune(deep, small, X[:2], reference=p, epochs=5, progress=lambda *each: told.append(each))
    errors = [float(jnp.mean((deep(dequantize_model(q), X[2]) - deep(p, X[2])) ** 2)) for q in (small, tuned)]
    assert errors[1] < errors[0]
    assert [each[1:] for each in told] == [(i + 1, 10) for i in range(10)]


def test_errors_are_words():
    small = quantize_model(PARAMS, default_rules("int4", min_size=1))
    with pytest.raises(ValueError, match="no inputs"):
        tune(model, small, [], reference=PARAMS)
    with pytest.raises(ValueError, match="give a `loss`"):
        tune(lambda p, x: jnp.sum(model(p, x)), small, X[0], reference=PARAMS)
    with pytest.raises(ValueError, match="nothing to tune"):
        tune(model, small, X[0], reference=PARAMS, trainable=lambda path, leaf: False)
    with pytest.raises(ValueError, match="smaller `learning_rate`"):
        tune(model, small, X[0] * jnp.nan, reference=PARAMS)


def test_outputs_are_compared_as_by_hand():
    small = quantize_model(PARAMS, default_rules("int3", min_size=1))
    found = compare_outputs(model, PARAMS, small, X[:2], each_leaf=True)
    np.testing.assert_allclose(found.divergence, np.mean([divergence(small, x) for x in X[:2]]), rtol=1e-4)
    assert found.alone == {"w": found.divergence}
    after, before = (np.concatenate([model(p, x) for x in X[:2]]) for p in (dequantize_model(small), PARAMS))
    assert found.same == pytest.approx(np.mean(after.argmax(-1) == before.argmax(-1)))
    error = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert found.relative_error == pytest.approx(error, rel=1e-4)
    assert "divergence of it alone" in str(found)
