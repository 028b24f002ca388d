"""A budget: the same bytes, put where errors cost most."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.model import Rule, calibrate, dequantize_model, plan_budget, quantize_model, stored_bytes

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# Errors of `much` move the logits ten times as far as those of `little`.
PARAMS = {"much": normal(128, 64), "little": normal(128, 64), "b": jnp.zeros(64)}
X = [normal(32, 128) for _ in range(4)]
RULES = [Rule("much|little", "int4", {"axis": -2})]
WEIGHTS = sum(leaf.size for leaf in PARAMS.values())


def model(p, x):
    return x @ p["much"] / 10 + x @ p["little"] / 100 + p["b"][None]


def divergence(small) -> float:
    after, before = (jax.nn.log_softmax(model(p, jnp.concatenate(X))) for p in (dequantize_model(small), PARAMS))
    return float(jnp.mean(jnp.sum(jnp.exp(before) * (before - after), axis=-1)))


def planned(budget: float):
    return plan_budget(budget, PARAMS, RULES, function=model, inputs=iter(X))


def bits(rule: Rule) -> int:
    return int(str(rule.format).removeprefix("int"))


@pytest.mark.parametrize("budget", [3.5, 4.5, 5.5])
def test_the_budget_is_kept_and_used(budget):
    plan = planned(budget)
    small = quantize_model(PARAMS, plan)
    assert stored_bytes(small) == plan.size <= budget * WEIGHTS / 8
    assert plan.size > 0.85 * budget * WEIGHTS / 8
    formats = {rule.pattern: bits(rule) for rule in plan}
    assert formats["^much$"] > formats["^little$"]


def test_bytes_are_a_budget_too():
    assert tuple(planned(4.5)) == tuple(planned(4.5 * WEIGHTS / 8))


def test_what_is_told_is_what_it_costs():
    """By eight gradients: to a factor of two."""
    plan = planned(4.5)
    assert 0.5 < divergence(quantize_model(PARAMS, plan)) / plan.cost < 2


def test_better_than_the_same_for_all():
    by_budget = quantize_model(PARAMS, RULES, function=model, inputs=(iter(X),), budget=4.6)
    alike = quantize_model(
        PARAMS, [Rule("much|little", "int4", {"axis": -2, "block_size": 32, "double_quantization": True})]
    )
    assert stored_bytes(by_budget) <= 1.02 * stored_bytes(alike)
    assert divergence(by_budget) < 0.8 * divergence(alike)


def test_without_a_function_statistics_decide():
    p = {"loud": PARAMS["much"], "quiet": PARAMS["little"]}
    statistics = calibrate(lambda p, x: x @ p["loud"] + (x / 100) @ p["quiet"])(p, X[0])
    plan = plan_budget(4.5, p, [Rule("", "int4", {"axis": -2})], statistics=statistics)
    formats = {rule.pattern: bits(rule) for rule in plan}
    assert formats["^loud$"] > formats["^quiet$"]


def test_the_curve_falls_and_the_plan_prints():
    plan = planned(4.5)
    sizes, costs = zip(*plan.curve(6), strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(costs) == sorted(costs, reverse=True)
    assert "bits a weight" in repr(plan)
    assert len(repr(plan).splitlines()) == 6


def test_too_small_a_budget_is_refused():
    with pytest.raises(ValueError, match=r"`budget=1` is too small.*at least"):
        planned(1)
