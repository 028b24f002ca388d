"""Learned step sizes: what is trained is what runs, and gradients are those of the paper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.quantization.learned_scales import initial_scale, straight_through_with_scale
from eformer.model import Rule, default_rules, fake_quantize, finalize, init_scales

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {"axis": -2}),
    "int2": ("int2", {"axis": -2, "symmetric": True, "block_size": 64}),
    "int3 of blocks that are cut": ("int3", {"axis": -1, "symmetric": True, "block_size": 40}),
    "int4": ("int4", {"axis": -2, "symmetric": True, "block_size": 32}),
    "int8_grouped": ("int8_grouped", {"symmetric": True}),
    "ternary": ("ternary", {"scale": "channel"}),
    "ternary, one scale": ("ternary", {"scale": "tensor"}),
}
every_format = pytest.mark.parametrize("name", list(FORMATS))


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@every_format
@pytest.mark.parametrize("shape", [(70, 36), (2, 64, 40)], ids=str)
def test_the_weights_of_the_forward_pass_are_those_of_the_final_model(name: str, shape: tuple[int, ...]):
    format, options = FORMATS[name]
    tree, rules = {"kernel": normal(*shape)}, [Rule("kernel", format, options)]
    scales = {path: scale * 0.9 for path, scale in init_scales(tree, rules).items()}
    trained = jax.jit(lambda tree, scales: fake_quantize(tree, rules, scales=scales))(tree, scales)
    final: Any = finalize(tree, rules, scales=scales)["kernel"]
    assert type(final) is type(finalize(tree, rules)["kernel"])
    assert np.array_equal(trained["kernel"], final.materialize())
    np.testing.assert_allclose(final.scale.astype(jnp.float32), scales["kernel"], rtol=2.0**-8)  # bfloat16


@every_format
def test_gradients_are_those_of_the_paper(name: str):
    """Of equations 3 and 5, computed here with one scale per element."""
    format, options = FORMATS[name]
    x, upstream = normal(70, 36), normal(70, 36, seed=1)
    options = Rule("w", format, options).options_for("w", x)
    scale = initial_scale(x, format, **options) * 0.5
    found = jax.grad(lambda x, s: jnp.sum(upstream * straight_through_with_scale(x, s, format, **options)), (0, 1))

    q: Any = finalize({"w": x}, [Rule("w", format, options)], scales={"w": scale})["w"]
    per_element, pull = jax.vjp(lambda s: _spread(q, s), q.scale.astype(jnp.float32))
    most: int = {"ternary": 1, "int8": 127}.get(format) or 2 ** (q.bits - 1) - 1
    least = -most if format in ("ternary", "int8") else -most - 1
    unit = x / per_element
    inside = (unit >= least) & (unit <= most)
    slope = jnp.where(inside, jnp.round(unit) - unit, jnp.where(unit > most, most, least).astype(jnp.float32))
    factor = 1 / np.sqrt(x.size / scale.size * most)
    of_x, of_scale = found(x, scale)
    assert np.array_equal(of_x, jnp.where(inside, upstream, 0))
    assert 0 < np.mean(np.asarray(inside)) < 1
    expected = pull(upstream * slope)[0] * factor
    np.testing.assert_allclose(of_scale, expected, rtol=1e-4, atol=1e-4)


def _spread(q: Any, scale: jax.Array) -> jax.Array:
    if not hasattr(q, "block_size"):
        return jnp.broadcast_to(scale, q.shape)
    axis = q.axis % q.ndim
    return jax.lax.slice_in_dim(jnp.repeat(scale, q.block_size, axis), 0, q.shape[axis], axis=axis)


def test_training_the_scales_lowers_the_loss():
    tree, x = {"kernel": normal(64, 64)}, normal(128, 64, seed=1)
    rules = default_rules("int2", symmetric=True, block_size=64)
    scales = init_scales(tree, rules)
    target = x @ tree["kernel"]

    @jax.jit
    def loss(scales: Any) -> jax.Array:
        return jnp.mean((x @ fake_quantize(tree, rules, scales=scales)["kernel"] - target) ** 2)

    before = loss(scales)
    for _ in range(20):
        scales = jax.tree.map(lambda s, g: s - 0.1 * g, scales, jax.grad(loss)(scales))
    assert loss(scales) < before


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_is_not_hidden(bad: float):
    tree, rules = {"kernel": normal(64, 4).at[3, 2].set(bad)}, [Rule("kernel", "int8", {"axis": -2})]
    final: Any = finalize(tree, rules, scales={"kernel": jnp.ones((1, 4))})
    found = final["kernel"].materialize()
    assert np.array_equal(np.isnan(found), np.broadcast_to([False, False, True, False], (64, 4)))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([Rule("kernel", "nf4")], "'kernel'.*the scales of 'nf4' with .*can't be learned"),
        ([Rule("kernel", "int4")], "with learned scales are 'int8'"),
        ([Rule("kernel", "ternary")], "can't be learned"),
        ([Rule("kernel", "binary", {"scale": "channel"})], "can't be learned"),
        ([], "the rules quantize no leaf"),
    ],
)
def test_formats_without_a_scale_to_learn(rules: list[Rule], words: str):
    with pytest.raises(ValueError, match=words):
        init_scales({"kernel": normal(64, 64)}, rules)


def test_scales_of_another_tree():
    tree, rules = {"kernel": normal(64, 64)}, [Rule("kernel", "int8", axis=-1)]
    with pytest.raises(ValueError, match="`scales` has 'other', which no rule quantizes here"):
        fake_quantize(tree, rules, scales={"other": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"`scale` \(3,\) is none of float32\[64, 64\] in 'int8', which has \(64, 1\)"):
        finalize(tree, rules, scales={"kernel": jnp.ones(3)})
