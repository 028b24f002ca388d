"""`quantize_model` and `dequantize_model` on trees of every kind."""

from __future__ import annotations

import gc
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer.jaximus import implicit
from eformer.model import (
    NonfiniteWarning,
    Rule,
    UnusedRuleWarning,
    default_rules,
    dequantize_model,
    named_leaves,
    quantize_model,
)
from eformer.ops.quantization import Array1B, Array8B, ArrayNF4, QuantizedArray, quantize

ALL = [Rule("", "nf4", {"block_size": 4})]


def normal(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


class Pair(NamedTuple):
    kernel: Any
    bias: Any


class Box:
    """As frameworks wrap parameters: a node with the one attribute `value`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:  # the same in each process, as the names of tests must be
        return f"Box({self.value})"


jax.tree_util.register_pytree_with_keys(
    Box, lambda box: (((jax.tree_util.GetAttrKey("value"), box.value),), None), lambda _, children: Box(*children)
)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"b": 1, "a": [2, (3,)]}, ["a.0", "a.1.0", "b"]),
        (Pair(1, {"x": 2}), ["kernel", "bias.x"]),
        ({"kernel": Box(1)}, ["kernel"]),
        ({"value": 1}, ["value"]),
        (Box(1), ["value"]),
        (5, [""]),
        ({}, []),
    ],
    ids=str,
)
def test_paths(tree, paths):
    assert [path for path, _ in named_leaves(tree)[0]] == paths


@pytest.mark.parametrize(
    "wrap",
    [lambda w: w, lambda w: [w], lambda w: (w, None), lambda w: {"a": {"b": w}}, lambda w: Pair(w, None), Box],
    ids=["leaf", "list", "tuple", "dict", "namedtuple", "box"],
)
def test_the_tree_keeps_its_type(wrap):
    tree = wrap(normal(6, 10))
    quantized = quantize_model(tree, ALL)
    assert type(quantized) is type(tree) or isinstance(quantized, ArrayNF4)
    assert jax.tree.structure(dequantize_model(quantized)) == jax.tree.structure(tree)
    (leaf,) = jax.tree.leaves(quantized, is_leaf=lambda x: isinstance(x, QuantizedArray))
    np.testing.assert_array_equal(leaf.materialize(), quantize(normal(6, 10), "nf4", block_size=4).materialize())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((5, 7), dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)),
        *((shape, jnp.float32) for shape in ((), (5,), (0, 3), (5, 7), (2, 3, 5))),
    ],
    ids=str,
)
def test_shapes_and_dtypes_come_back(shape, dtype):
    x = normal(*shape, dtype=dtype)
    quantized = quantize_model([x], ALL)[0]
    assert isinstance(quantized, ArrayNF4)
    (back,) = dequantize_model([quantized])
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    bound = np.asarray(quantized.error_bound(x), np.float64)
    assert np.all(np.abs(np.asarray(back, np.float64) - np.asarray(x, np.float64)) <= bound)


def test_the_first_rule_decides():
    tree = {"a": normal(6, 10), "b": normal(6, 10), "c": normal(6, 10), "d": normal(6, 10)}
    rules = [Rule("a", None), Rule("a|b", "int8"), Rule("a|b|c", "ternary")]
    quantized = quantize_model(tree, rules)
    assert quantized["a"] is tree["a"]
    assert quantized["d"] is tree["d"]
    assert isinstance(quantized["b"], Array8B)
    assert isinstance(quantized["c"], Array1B)


@pytest.mark.parametrize(
    "leaf",
    [jnp.arange(6), jnp.ones((3, 3), bool), np.arange(3), 2.5, "words", len, jax.random.key(0), jnp.ones(3, complex)],
    ids=str,
)
def test_what_is_no_weight_stays(leaf):
    tree = {"other": leaf, "kernel": normal(6, 10)}
    quantized = quantize_model(tree, ALL)
    assert quantized["other"] is leaf
    assert isinstance(quantized["kernel"], ArrayNF4)


def test_numpy_arrays_are_leaves_too():
    quantized = quantize_model({"w": np.ones((6, 10), np.float32)}, ALL, donate=True)
    assert isinstance(quantized["w"], ArrayNF4)


def test_quantized_leaves_stay():
    tree = {"w": quantize(normal(6, 10), dtype="int8"), "v": normal(6, 10)}
    once = quantize_model(tree, ALL)
    twice = quantize_model(once, ALL)  # nothing to do, and no warning
    assert once["w"] is twice["w"] is tree["w"]
    assert twice["v"] is once["v"]


def test_int8_has_a_scale_per_output_channel():
    tree = {"kernel": normal(64, 96), "weight": normal(96, 64)}
    quantized = quantize_model(tree, format="int8")
    assert quantized["kernel"].scale.shape == (1, 96)
    assert quantized["weight"].scale.shape == (96, 1)


def test_stacked_layers_run_in_a_scan():
    tree = {"up": normal(3, 64, 96) / 8, "down": normal(3, 96, 64, seed=1) / 10}

    def model(params, x):
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params)[0]

    quantized, x = quantize_model(tree), normal(2, 64, seed=2)
    expected = jax.jit(model)(dequantize_model(quantized), x)
    np.testing.assert_allclose(jax.jit(implicit(model))(quantized, x), expected, rtol=1e-4, atol=1e-4)


def test_under_tracing():
    tree = {"w": normal(6, 10)}
    abstract = jax.eval_shape(lambda tree: quantize_model(tree, ALL), tree)
    made = jax.jit(lambda tree: quantize_model(tree, ALL))(tree)
    assert jax.tree.structure(abstract) == jax.tree.structure(made) == jax.tree.structure(quantize_model(tree, ALL))


def test_shards_stay_where_they_are():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x", None))
    w = jax.device_put(normal(64, 64), sharding)
    quantized = quantize_model({"kernel": w})["kernel"]
    assert quantized.sharding == sharding
    np.testing.assert_array_equal(
        quantized.materialize(), quantize_model({"kernel": normal(64, 64)})["kernel"].materialize()
    )


# --- memory ---


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("free", [False, True])
def test_memory_peaks_near_one_copy_when_sources_are_freed(free):
    tree = {f"w{i}": normal(256, 256, seed=i) for i in range(2)}  # each is a look at all that lives, which is slow
    start, dense, seen = live_bytes(), 256 * 256 * 4, []
    quantized = quantize_model(tree, donate=free, progress=lambda path, done, total: seen.append(live_bytes()))
    stored = quantized["w0"].nbytes
    kept = [start + (i + 1) * (stored - dense * free) for i in range(2)]
    assert seen == kept
    assert all(w.is_deleted() == free for w in tree.values())


def test_an_array_that_occurs_twice_is_quantized_once():
    w = normal(6, 10)
    quantized = quantize_model({"a": w, "b": w, "c": normal(6, 10)}, ALL, donate=True)
    assert quantized["a"] is quantized["b"]
    assert quantized["a"] is not quantized["c"]
    assert w.is_deleted()
    dense = dequantize_model(quantized)
    assert dense["a"] is dense["b"]


def test_an_array_that_also_stays_is_not_freed():
    w = normal(6, 10)
    quantized = quantize_model(
        {"a": w, "b": w, "c": w}, [Rule("a", "int8"), Rule("c", "nf4", {"block_size": 4})], donate=True
    )
    assert quantized["b"] is w
    assert not w.is_deleted()
    assert isinstance(quantized["c"], ArrayNF4)


def test_nothing_is_freed_when_a_leaf_cannot_take_its_format():
    tree = {"a": normal(6, 10), "b": normal(6)}
    with pytest.raises(
        ValueError, match=r"'b', float32\[6\], can't be quantized by the rule .*axis -2 is out of range"
    ):
        quantize_model(tree, [Rule("", "nf4", {"axis": -2})], donate=True)
    assert not tree["a"].is_deleted()


# --- progress ---


def test_progress_counts_dense_bytes():
    tree, seen = {"a": normal(6, 10), "b": normal(3, 10, dtype=jnp.bfloat16), "c": jnp.arange(3)}, []
    quantize_model(tree, ALL, progress=lambda *each: seen.append(each))
    assert seen == [("a", 240, 300), ("b", 300, 300)]


def test_a_bar(capsys):
    pytest.importorskip("rich", reason="the bar is drawn by rich, which is not installed")
    quantize_model({"a": normal(6, 10)}, ALL, progress=True)
    assert "240/240 bytes" in capsys.readouterr().out


def test_a_bar_without_rich_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match="needs rich: pip install rich"):
        quantize_model({"a": normal(6, 10)}, ALL, progress=True)


# --- what goes wrong ---


def test_a_rule_that_matches_nothing_warns():
    rules = [Rule("kernel", "int8"), Rule("kernal", "nf4", {"axis": -2}), Rule("ker", None)]
    with pytest.warns(UnusedRuleWarning, match=r"left for kernal=nf4,axis=-2, ker=keep; .*'mlp.kernel'") as caught:
        quantize_model({"mlp": {"kernel": normal(6, 10)}}, rules)
    assert caught[0].filename == __file__


def test_optional_rules_and_defaults_do_not_warn():
    tree = {"a": normal(6, 10), "kernel": normal(64, 64)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_model(tree, [Rule("a", "int8"), Rule("nothing", "nf4", optional=True), *default_rules()])
        quantize_model({"count": jnp.arange(3)})
        quantize_model({})


def test_a_model_that_is_too_small_warns():
    with pytest.warns(UnusedRuleWarning, match=r"quantize nothing: the largest leaf is 'w', float32\[6, 10\].*none"):
        quantize_model({"w": normal(6, 10), "b": normal(10)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": Rule("w", "nf4")}, "must be a format or a sequence of `Rule`s, got Rule .*: put it into a list"),
        ({"rules": 4}, "must be a format or a sequence of `Rule`s, got int 4: options of a format are given by name"),
        ({"rules": "int8", "format": "int4"}, "the format is given twice: the second argument is 'int8', and `format`"),
        ({"rules": ALL, "block_size": 32}, "'block_size' can't be given beside `rules`"),
        ({"free": True}, "`free` is called `donate` here, as in JAX"),
        ({"function": print, "inputs": jnp.ones(3)}, r"must be a tuple .* got float32\[3\]: .*`inputs=\(x,\)`"),
        ({"rules": ["w=nf4"]}, "must hold `Rule`s, got str 'w=nf4': .* and `parse_rule` reads a text"),
        ({"rules": ALL, "progress": 3}, "`progress` must be None, True or a function"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(TypeError, match=message):
        quantize_model({"w": normal(6, 10)}, **arguments)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("form", ["int8", "nf4", "int4", "ternary"])
def test_weights_that_are_not_finite_are_reported(form, bad):
    tree = {"a": {"kernel": jnp.ones((64, 128)).at[3, 4].set(bad)}, "b": {"kernel": jnp.ones((64, 128))}}
    with pytest.warns(NonfiniteWarning, match="'a.kernel' holds .*1 .*becomes NaN") as told:
        quantize_model(tree, format=form)
    assert len(told) == 1
