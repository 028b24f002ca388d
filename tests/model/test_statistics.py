"""`quantize_model(statistics=...)`: scales and codes with which products, and not only weights, are near."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.model import (
    Rule,
    Statistics,
    UncalibratedWarning,
    calibrate,
    default_rules,
    dequantize_model,
    parse_rule,
    quantize_model,
    rules_from_use,
)
from eformer.ops.quantization import find_format, formats, quantize

RNG = np.random.default_rng(0)
CHANNELS, OUTPUTS = 96, 64
FORMATS = [form.name for form in formats()]


def options_of(name: str, axis: int) -> dict[str, object]:
    known = next(form for form in formats() if form.name == name).options
    return {**({"axis": axis} if "axis" in known else {}), **({"scale": "channel"} if "scale" in known else {})}


def uneven_inputs(count: int = 400) -> jax.Array:
    """Correlated, and some channels much larger than others."""
    mixed = RNG.normal(size=(count, CHANNELS)) @ RNG.normal(size=(CHANNELS, CHANNELS)) / CHANNELS**0.5
    return jnp.asarray(mixed * np.exp(RNG.normal(size=CHANNELS)), jnp.float32)


X = uneven_inputs()
W = jnp.asarray(RNG.normal(size=(CHANNELS, OUTPUTS)), jnp.float32)


def product(p, x):
    return x @ p["w"]


def transposed(p, x):
    return x @ p["w"].T


def scanned(p, x):
    return jax.lax.scan(lambda _, w: (None, x @ w), None, p["w"])[1]


def batched(p, x):
    return jnp.einsum("bc,ecn->ebn", x, p["w"])


USES = {
    "in, out": (product, W, -2),
    "out, in": (transposed, W.T, -1),
    "layers": (scanned, jnp.stack([W, W[::-1]]), -2),
    "experts": (batched, jnp.stack([W, W[::-1]]), -2),
    "heads": (lambda p, x: jnp.einsum("bc,chk->bhk", x, p["w"]), W.reshape(CHANNELS, 8, 8), -3),
}


def lost(function, small, dense, x=X) -> float:
    return float(jnp.sum((function({"w": small.materialize()}, x) - function({"w": dense}, x)) ** 2))


@pytest.mark.parametrize("name", FORMATS)
def test_each_step_is_better_on_inputs_that_were_not_seen(name):
    w, rules = {"w": W}, [Rule("w", name, options_of(name, -2))]
    statistics = calibrate(product, second_moments=True)(w, X[:300])
    rounded = quantize_model(w, rules)["w"]
    weighed = quantize_model(w, rules, statistics=statistics)["w"]
    chosen = quantize_model(w, rules, statistics=statistics, method="gptq")["w"]
    errors = [lost(product, each, W, X[300:]) for each in (rounded, weighed, chosen)]
    assert errors[2] < errors[1] <= errors[0]
    fits = "fit" in find_format(name).options and name != "binary"  # whose one scale is the mean magnitude
    assert (errors[1] < errors[0]) == fits
    # The codes alone are others.
    assert jax.tree.structure(chosen) == jax.tree.structure(weighed)
    assert {a.dtype for a in jax.tree.leaves(chosen)} == {a.dtype for a in jax.tree.leaves(weighed)}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["int4", "int3", "nf4", "fp8"])
def test_gptq_of_any_layout(use, name):
    function, w, axis = USES[use]
    statistics = calibrate(function, second_moments=True)({"w": w}, X)
    rules = [Rule("w", name, options_of(name, axis))]
    weighed = quantize_model({"w": w}, rules, statistics=statistics)["w"]
    chosen = quantize_model({"w": w}, rules, statistics=statistics, method="gptq")["w"]
    assert chosen.shape == w.shape
    assert lost(function, chosen, w) < 0.8 * lost(function, weighed, w)


def test_gptq_is_the_same_whatever_the_layout():
    """Of the same weights (in, out), (out, in), in heads, and as the first of a stack."""
    found = {}
    for use, (function, w, axis) in USES.items():
        statistics = calibrate(function, second_moments=True)({"w": w}, X)
        made = quantize_model({"w": w}, [Rule("w", "int4", {"axis": axis})], statistics=statistics, method="gptq")["w"]
        dense = made.materialize()
        found[use] = dense.T if use == "out, in" else dense[0] if dense.shape[0] == 2 else dense.reshape(W.shape)
    for each in found.values():  # a float32 sum may lie on either side of a threshold
        assert float(jnp.mean(each != found["in, out"])) < 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_packed_as_formats_unpack_them(name):
    """`_coded` writes what decoding reads, for each code at each place."""
    q = quantize(jnp.tile(W, (1, 8)), format=name, **options_of(name, -2))
    count = 2 ** q._code_bits()
    codes = jnp.asarray(np.arange(q.size).reshape(q.shape) % count, jnp.uint8)
    tables = np.stack([np.asarray(q._coded(jnp.full(q.shape, c, jnp.uint8)).decode()) for c in range(count)])
    expected = np.take_along_axis(tables, np.asarray(codes, np.int64)[None], axis=0)[0]
    np.testing.assert_array_equal(q._coded(codes).decode(), expected)


def test_channels_that_never_came_are_rounded():
    x = X.at[:, 10:20].set(0)
    statistics = calibrate(product, second_moments=True)({"w": W}, x)
    q = quantize_model({"w": W}, [Rule("w", "int4", {"axis": -2})], statistics=statistics, method="gptq")["w"]
    assert float(jnp.max(jnp.abs(q.materialize() - W))) < float(jnp.max(jnp.abs(W)))


def test_the_method_is_an_option_of_rules():
    rule = parse_rule("w=int4,axis=-2,method=gptq")
    assert rule.method == "gptq"
    assert dict(rule.options) == {"axis": -2}
    assert parse_rule(str(rule)) == rule
    assert {each.method for each in default_rules("int4", method="gptq") if each.format} == {"gptq"}
    (used,) = rules_from_use(product, {"w": W}, X, format="int4", method="gptq", min_size=1)
    assert (used.method, used.format) == ("gptq", "int4")
    with pytest.raises(ValueError, match="method='magic'"):
        Rule("w", "int4", method="magic")


def test_errors_and_warnings_are_words():
    rules = [Rule("w", "int4", {"axis": -2})]
    with pytest.raises(ValueError, match="needs `calibrate"):
        quantize_model({"w": W}, rules, method="gptq")
    plain = calibrate(product)({"w": W}, X)
    with pytest.raises(ValueError, match=r"'w'.*no second moment"):
        quantize_model({"w": W}, rules, method="gptq", statistics=plain)
    with pytest.raises(ValueError, match=r"another model.*'w'.*\(96, 64\) there"):
        quantize_model({"w": W[:50]}, rules, statistics=plain)
    with pytest.raises(ValueError, match="not in this model"):
        quantize_model({"v": W}, [Rule("v", "int4")], statistics=plain)
    with pytest.raises(TypeError, match="what `calibrate` returned"):
        quantize_model({"w": W}, rules, statistics={"w": 1})
    few = calibrate(product, second_moments=True)({"w": W}, X[:5])
    with pytest.warns(UncalibratedWarning, match="fewer inputs than channels"):
        quantize_model({"w": W}, rules, statistics=few, method="gptq")
    more = calibrate(lambda p, x: x @ p["w"])({"w": W, "v": W + 1}, X)
    with pytest.warns(UncalibratedWarning, match=r"'v' \(the function does not use it\)"):
        quantize_model({"w": W, "v": W + 1}, [Rule("w|v", "int4", {"axis": -2})], statistics=more)


def test_statistics_without_a_use_change_nothing():
    rules = [Rule("w", "int4", {"axis": -2})]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedWarning)
        found = quantize_model({"w": W}, rules, statistics=Statistics({}, {"w": "not looked at"}))["w"]
    np.testing.assert_array_equal(found.materialize(), quantize_model({"w": W}, rules)["w"].materialize())


def deep(p, tokens):
    x = p["embed"][tokens]
    for i in range(3):
        x = x + jnp.tanh(jax.jit(lambda x, w: x @ w.T)(x, p["layers"][i]))
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["stack"])
    return x @ p["embed"].T


def deep_model():
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(RNG.normal(size=shape), jnp.float32)

    p = {"embed": normal(100, 64), "layers": [normal(64, 64) / 8 for _ in range(3)], "stack": normal(2, 64, 64) / 8}
    rules = [Rule("embed", "int8", {"axis": -1}), Rule("layers", "int3", {"axis": -1})]
    rules.append(Rule("stack", "int3", {"axis": -2}))
    batches = [jnp.asarray(RNG.integers(0, 100, (2, 64))) for _ in range(4)]
    return p, rules, batches, jnp.asarray(RNG.integers(0, 100, (8, 64)))


def divergence(after, before) -> float:
    a, b = jax.nn.log_softmax(after), jax.nn.log_softmax(before)
    return float(jnp.mean(jnp.sum(jnp.exp(b) * (b - a), axis=-1)))


def test_in_order_leaves_are_told_as_the_function_uses_them():
    p, rules, batches, held_out = deep_model()
    statistics = calibrate(deep, second_moments=True)(p, iter(batches))
    told = []
    at_once = quantize_model(p, rules, statistics=statistics, method="gptq")
    in_turn = quantize_model(
        p,
        rules,
        function=deep,
        inputs=(iter(batches),),
        statistics=statistics,
        method="gptq",
        sequential=True,
        progress=lambda *each: told.append(each[0]),
    )
    assert told == ["embed", "layers.0", "layers.1", "layers.2", "stack"]
    assert jax.tree.structure(in_turn) == jax.tree.structure(at_once)
    rounded, found = (quantize_model(p, rules), in_turn)
    errors = [divergence(deep(dequantize_model(q), held_out), deep(p, held_out)) for q in (rounded, found)]
    assert errors[1] < 0.8 * errors[0]


def test_in_order_each_leaf_sees_the_inputs_of_what_is_there_by_then():
    """The second of two layers is as if it were calibrated with the first one quantized."""
    p = {"a": W, "b": jnp.asarray(RNG.normal(size=(OUTPUTS, 32)), jnp.float32)}
    rules = [Rule("a", "int2", {"axis": -2}), Rule("b", "int4", {"axis": -2})]

    def two(p, x):
        return jnp.tanh(x @ p["a"] / 8) @ p["b"]

    options = {"function": two, "inputs": (iter([X[:200], X[200:]]),)}
    found = quantize_model(p, rules, method="gptq", sequential=True, **options)
    half = {**p, "a": found["a"]}
    statistics = calibrate(two, second_moments=True)(half, X)
    expected = quantize_model(half, rules[1:], statistics=statistics, method="gptq")["b"]
    assert float(jnp.mean(found["b"].materialize() != expected.materialize())) < 0.02


def test_sequential_says_what_it_needs():
    rules = [Rule("w", "int4", {"axis": -2})]
    with pytest.raises(TypeError, match="`sequential` go with a `function`"):
        quantize_model({"w": W}, rules, method="gptq", sequential=True)
    with pytest.raises(ValueError, match="same shapes, got 2 kinds"):
        quantize_model({"w": W}, rules, function=product, inputs=(iter([X, X[:3]]),), method="gptq", sequential=True)
