"""Rules from use: what a function does with each leaf decides, whatever the leaf is called."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from eformer._src.model.uses.find import find_uses
from eformer.jaximus import explain, implicit, materialization_error
from eformer.model import Rule, named_leaves, parse_rule, quantize_model, report, rules_from_use
from eformer.ops.quantization import Array8B, ArrayGrouped, quantize


@pytest.fixture(autouse=True)
def _as_models_expect():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def dense_bytes(function, *args) -> int:
    """What `explain` counts, of abstract arguments."""
    found = []
    jax.eval_shape(lambda *args: found.append(explain(function)(*args)), *args)
    return found[0].dense_bytes


def axis_of(function, shape, *inputs, format="int8", **options):
    """The axis of the rule for one leaf; None if it is kept."""
    (rule,) = rules_from_use(function, struct(*shape), *inputs, format=format, **options)
    axis = rule.options.get("axis")
    assert (axis is None) == (rule.format is None)
    return axis


X = struct(3, 64)
TOKENS = struct(2, 5, dtype=jnp.int32)


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), with_jvp(*tangents)))


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

SUMMED = {
    "matmul": (lambda w, x: x @ w, (64, 96), X, -2),
    "transposed": (lambda w, x: x @ w.T, (96, 64), X, -1),
    "left": (lambda w, x: w @ x.T, (96, 64), X, -1),
    "cast": (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), (64, 96), X, -2),
    "heads": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), (64, 2, 48), X, -3),
    "heads first": (lambda w, x: jnp.einsum("bd,hdk->bhk", x, w), (2, 64, 48), X, -2),
    "reshaped": (lambda w, x: x @ w.reshape(64, 96), (64, 2, 48), X, -3),
    "merged": (lambda w, x: x @ w.reshape(64, 96), (2, 32, 96), X, (-3, -2)),
    "several": (lambda w, x: jnp.einsum("bhk,hkd->bd", x.reshape(3, 2, 32), w), (2, 32, 96), X, (-3, -2)),
    "squeezed": (lambda w, x: x @ w[0], (1, 64, 96), X, -2),
    "sliced": (lambda w, x: x @ w[:, :48], (64, 96), X, -2),
    "layers unrolled": (lambda w, x: [x @ w[i] for i in range(3)], (3, 64, 96), X, -2),
    "layer by index": (lambda w, x: lax.fori_loop(0, 3, lambda i, x: x @ w[i], x), (3, 64, 64), X, -2),
    "scan": (lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w)[0], (3, 64, 64), X, -2),
    "scan, constant": (lambda w, x: lax.scan(lambda x, _: (x @ w, None), x, length=3)[0], (64, 64), X, -2),
    "scan, carried": (
        lambda w, x: lax.scan(lambda c, _: ((c[0] @ c[1], c[1]), None), (x, w), length=3)[0][0],
        (64, 64),
        X,
        -2,
    ),
    "scan in scan": (
        lambda w, x: lax.scan(lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w), x, w)[0],
        (2, 3, 64, 64),
        X,
        -2,
    ),
    "while": (lambda w, x: lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x @ w, x), (64, 64), X, -2),
    "cond": (lambda w, x: lax.cond(jnp.sum(x) > 0, lambda w: x @ w, lambda w: x, w), (64, 64), X, -2),
    "chosen by cond": (lambda w, x: x @ lax.cond(jnp.sum(x) > 0, lambda w: w, lambda w: w, w).T, (96, 64), X, -1),
    "jit": (lambda w, x: jax.jit(lambda x, w: x @ w)(x, w), (64, 96), X, -2),
    "remat": (lambda w, x: jax.checkpoint(lambda x, w: x @ w)(x, w), (64, 96), X, -2),
    "custom_jvp": (lambda w, x: with_jvp(x, w), (64, 96), X, -2),
    "custom_vjp": (lambda w, x: with_vjp(x, w), (64, 96), X, -2),
    "grad": (lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x), (64, 96), X, -2),
    "vmap over x": (lambda w, x: jax.vmap(lambda x: x @ w)(x), (64, 96), X, -2),
    "vmap over w": (lambda w, x: jax.vmap(lambda w: x @ w)(w), (2, 64, 96), X, -2),
    "vmap over the last": (lambda w, x: jax.vmap(lambda w: x @ w, in_axes=2)(w), (64, 96, 2), X, -3),
    "stop_gradient": (lambda w, x: x @ lax.stop_gradient(w), (64, 96), X, -2),
    "barrier": (lambda w, x: jnp.matmul(*lax.optimization_barrier((x, w))), (64, 96), X, -2),
    "split": (lambda w, x: x @ jnp.split(w, 2, axis=1)[1], (64, 96), X, -2),
    "repacked": (lambda w, x: jax.tree.map(lambda w: x @ w, {"a": [w]}), (64, 96), X, -2),
    "columns in parts": (
        lambda w, x: lax.map(lambda i: x @ lax.dynamic_slice(w, (0, i), (64, 32)), jnp.array([0, 32])),
        (64, 64),
        X,
        -2,
    ),
    "embedding": (lambda w, t: w[t], (100, 64), TOKENS, -1),
    "take": (lambda w, t: jnp.take(w, t, axis=0), (100, 64), TOKENS, -1),
    "a token": (lambda w, t: w[t[0, 0]], (100, 64), TOKENS, -1),
    "tied": (lambda w, t: w[t] @ w.T, (100, 64), TOKENS, -1),
    "one-hot": (lambda w, t: jax.nn.one_hot(t, 100) @ w, (100, 64), TOKENS, -2),
}


@pytest.mark.parametrize("case", SUMMED)
def test_blocks_run_along_the_axis_of_the_use(case):
    function, shape, x, expected = SUMMED[case]
    assert axis_of(function, shape, x) == expected


def convolution(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def experts(w, x):
    return lax.ragged_dot(x, w, jnp.array([1, 2]))


@pytest.mark.parametrize(
    ("function", "shape", "x", "axes"),
    [
        (convolution, (3, 3, 64, 32), struct(1, 8, 8, 64), (-4, -3, -2)),
        (experts, (2, 64, 96), X, (-2,)),
        (lambda w, x: x @ lax.stop_gradient(w), (64, 96), X, (-2,)),
        (lambda w, x: jnp.matmul(*lax.optimization_barrier((x, w))), (64, 96), X, (-2,)),
        (lambda w, x: x @ checkpoint_name(-w, "w") * 2, (64, 96), X, (-2,)),
        (lambda w, x: x @ jnp.split(w * 2, 2, axis=1)[1], (64, 96), X, (-2,)),
        (lambda w, x: jnp.einsum("ebd,edf->ebf", x.reshape(2, 3, 64), w), (2, 64, 96), struct(6, 64), (-2,)),
        (lambda w, x: jnp.einsum("bd,bdf->bf", x, w[jnp.array([0, 1, 1])]), (2, 64, 96), X, (-2,)),
    ],
    ids=[
        "convolution",
        "ragged_dot",
        "stop_gradient",
        "barrier",
        "name",
        "split",
        "batch of experts",
        "experts by index",
    ],
)
def test_leaves_are_followed_whatever_the_engine_makes_of_it(function, shape, x, axes):
    (uses,) = find_uses(lambda leaves: function(*leaves), [struct(*shape), x], [0]).values()
    assert [use.axes for use in uses] == [axes]


KEPT = {
    "added": (lambda w, x: x[:, None] + w, (96, 64), X, "it would go dense: used by add"),
    "positions": (lambda w, x: x + w[:3], (96, 64), X, "it would go dense: used by add"),
    "changed first": (lambda w, x: x @ jnp.tanh(w), (64, 96), X, "it would go dense: used by tanh"),
    "returned": (lambda w, x: w, (96, 64), X, "the function does not use it"),
    "unused": (lambda w, x: x, (96, 64), X, "the function does not use it"),
    "small": (lambda w, x: x @ w, (64, 8), X, "fewer than 4,096 elements"),
    "short": (
        lambda w, x: jnp.einsum("bd,dhk->bhk", x[:, :16], w),
        (16, 16, 16),
        X,
        "no axis has 32 elements for a block",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_would_only_go_dense_is_kept_and_the_report_says_why(case):
    function, shape, x, reason = KEPT[case]
    tree = {"w": struct(*shape), "other": struct(64, 96)}
    rules = rules_from_use(lambda tree, x: (function(tree["w"], x), x @ tree["other"]), tree, x)
    assert [(str(rule), rule.reason) for rule in rules][1:] == [("^w$=keep", reason)]
    found = report(tree, quantize_model(tree, rules), rules=rules)
    assert [leaf.reason for leaf in found.leaves if not leaf.quantized] == [reason]
    assert reason in str(found)
    assert f'"reason": "{reason}"' in found.to_json()


def test_the_page_has_the_reasons(tmp_path):
    tree = {"w": struct(64, 96)}
    rules = rules_from_use(lambda tree, x: x @ tree["w"], tree, X)
    page = report(tree, quantize_model(tree, rules), rules=rules).to_html(tmp_path / "page.html").read_text()
    assert "summed over axis -2 by dot_general" in page


def test_the_axis_of_the_most_work_is_taken():
    """Twice along the last axis, once along the other, and the reason says so."""

    def function(w, x):
        return lax.scan(lambda x, _: (x @ w.T, None), x, length=2)[0] + x @ w

    (rule,) = rules_from_use(function, struct(64, 64), X, format="int8")
    assert rule.options["axis"] == -1
    assert "summed over axis -2" in rule.reason
    assert "most of the work is along -1" in rule.reason


def test_a_use_that_goes_dense_beside_one_that_does_not_is_told():
    (rule,) = rules_from_use(lambda w, x: (x @ w, jnp.sum(jnp.exp(w))), struct(64, 96), X)
    assert rule.format == "int4"
    assert rule.reason == "summed over axis -2 by dot_general; goes dense in exp"


@pytest.mark.parametrize("format", ["int8", "nf4", "ternary", "binary"])
def test_nothing_goes_dense(format):
    """Attention and an MLP as Flax and Qwen3 write them, with two axes that are summed over."""

    def model(p, x):
        h = jnp.einsum("btd,dhk->bthk", x, p["query"])
        x = x + jnp.einsum("bthk,hkd->btd", h, p["out"])
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    shapes = {"query": (64, 2, 64), "out": (2, 64, 64), "up": (64, 128), "down": (128, 64)}
    params, x = {name: struct(*shape) for name, shape in shapes.items()}, struct(1, 1, 64)
    quantized = quantize_model(params, function=model, inputs=(x,), format=format)
    with materialization_error():  # a long prompt, though the function was traced on one token
        jax.eval_shape(implicit(model), quantized, struct(2, 40, 64))
    assert dense_bytes(model, quantized, struct(2, 40, 64)) == 0


def test_embeddings_take_a_format_of_their_own():
    params, tokens = {"E": struct(100, 64), "w": struct(64, 96)}, TOKENS

    def model(p, t):
        return p["E"][t] @ p["w"]

    def formats_of(**options):
        return {str(rule) for rule in rules_from_use(model, params, tokens, **options)}

    assert formats_of() == {"^E$=int8,axis=-1", "^w$=int4,axis=-2"}
    assert formats_of(embeddings=None) == {"^E$=keep", "^w$=int4,axis=-2"}
    assert formats_of(embeddings="int4", block_size=32) == {
        "^E$=int4,axis=-1,block_size=32",
        "^w$=int4,axis=-2,block_size=32",
    }


def test_layers_that_are_alike_have_one_rule_and_rules_can_be_written():
    params = {"layers": [{"w": struct(64, 64), "b": struct(64)} for _ in range(3)], "head2": struct(64, 96)}

    def model(p, x):
        for layer in p["layers"]:
            x = x @ layer["w"] + layer["b"]
        return x @ p["head2"]

    rules = rules_from_use(model, params, X)
    written = [str(rule) for rule in rules]
    assert written == [
        "^head2$=int4,axis=-2",
        r"^layers\.\d+\.b$=keep",
        r"^layers\.\d+\.w$=int4,axis=-2",
    ]
    assert [str(parse_rule(text)) for text in written] == written
    assert all(rule.optional for rule in rules)


def test_layers_that_differ_have_rules_of_their_own():
    params = [struct(64, 96), struct(96, 64)]
    rules = rules_from_use(lambda p, x: (x @ p[0], x @ p[1].T), params, X)
    assert [str(rule) for rule in rules] == ["^0$=int4,axis=-2", "^1$=int4,axis=-1"]


def test_given_rules_go_first():
    params = {"a": struct(64, 96), "b": struct(64, 96)}
    quantized = quantize_model(
        params, [Rule("a", "int8", {"axis": 0})], function=lambda p, x: (x @ p["a"], x @ p["b"]), inputs=(X,)
    )
    assert isinstance(quantized["a"], Array8B)
    assert isinstance(quantized["b"], ArrayGrouped)


def test_inputs_without_a_function_raise():
    with pytest.raises(TypeError, match=r"go with a `function` .*: none was given"):
        quantize_model({"a": struct(64, 96)}, inputs=(X,))


def test_an_array_that_occurs_twice_is_quantized_once_for_all_its_uses():
    w = jnp.ones((100, 64))
    params = {"embedding": w, "head": w}
    quantized = quantize_model(params, function=lambda p, t: p["embedding"][t] @ p["head"].T, inputs=(TOKENS,))
    assert quantized["embedding"] is quantized["head"]
    assert isinstance(quantized["head"], Array8B)


def test_fused_weights_are_followed_through_a_concatenation():
    params = {"q": struct(64, 64), "k": struct(64, 128)}
    rules = rules_from_use(lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], axis=1), params, X, format="int8")
    assert [str(rule) for rule in rules] == ["^k$=int8,axis=-2", "^q$=int8,axis=-2"]


def test_leaves_that_are_quantized_already():
    params = {"a": quantize(jnp.ones((64, 64)), axis=0), "b": jnp.ones((64, 96))}
    quantized = quantize_model(params, function=lambda p, x: x @ p["a"] @ p["b"], inputs=(X,), format="int8")
    assert quantized["a"] is params["a"]
    assert quantized["b"].axis == (-2,)


def test_inputs_that_are_no_arrays():
    def function(p, x, how, *, scale=1.0):
        return x @ p["w"] * scale if how == "right" else x @ p["w"].T

    (rule,) = rules_from_use(function, {"w": struct(64, 64), "activation": jnp.tanh}, X, "left")
    assert rule.options["axis"] == -1


def test_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    specs = {"in_specs": (PartitionSpec("model"), PartitionSpec(None, "model")), "out_specs": PartitionSpec()}

    def function(w, x):
        return jax.shard_map(lambda w, x: lax.psum(x @ w, "model"), mesh=mesh, **specs)(w, x)

    assert axis_of(function, (64, 96), X) == -2


def needed(package: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(package, reason=f"{package} is not installed")


JOINED = {
    "tile": lambda p, x: x @ jnp.tile(p["w"], (1, 2)),
    "where": lambda p, x: x @ jnp.where(x[0, 0] > 0, p["w"], p["v"]),
    "select": lambda p, x: x @ lax.select(x[0, 0] > 0, p["w"], p["v"]),
    "cond": lambda p, x: lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: x @ p["v"]),
}


@pytest.mark.parametrize("function", JOINED.values(), ids=JOINED)
@pytest.mark.parametrize("format", ["int8", "nf4", "int4"])
def test_weights_that_are_repeated_or_chosen_are_quantized(format, function):
    params = {"w": struct(64, 128), "v": struct(64, 128)}
    rules = rules_from_use(function, params, X, format=format)
    used = [rule for rule in rules if "does not use" not in rule.reason]
    assert used
    assert all((rule.format, rule.options["axis"]) == (format, -2) for rule in used)
    assert dense_bytes(function, quantize_model(params, rules), X) == 0


def test_weights_chosen_element_by_element_are_kept():
    rules = rules_from_use(
        lambda p, x: x @ jnp.where(p["w"] > 0, p["w"], p["v"]), {"w": struct(64, 128), "v": struct(64, 128)}, X
    )
    assert {rule.format for rule in rules} == {None}


@pytest.mark.parametrize("gathered", [0, 1])
@pytest.mark.parametrize("format", ["int8", "nf4", "int4", "fp8"])
def test_weights_that_devices_gather_are_quantized(format, gathered):
    """Fully sharded, as in FSDP: each device has a part of a weight, and gathers the whole of it for its matmul."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec(*[None] * gathered, "x")

    def body(w, x):
        return x @ lax.all_gather(w, "x", axis=gathered, tiled=True)

    def function(params, x):
        return jax.shard_map(body, mesh=mesh, in_specs=(spec, PartitionSpec("x")), out_specs=PartitionSpec("x"))(
            params["w"], x
        )

    (rule,) = rules_from_use(function, {"w": struct(256, 256)}, struct(4, 256), format=format)
    assert (rule.format, rule.options["axis"]) == (format, -2), rule.reason
    assert dense_bytes(function, quantize_model({"w": struct(256, 256)}, [rule]), struct(4, 256)) == 0


def test_linen_attention_by_use():
    """Names tell (features, heads, features of a head) from a stack by chance only."""
    nn = needed("flax.linen")
    model, x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=64), jnp.ones((1, 5, 64))
    params = jax.eval_shape(functools.partial(model.init, jax.random.key(0)), x)
    rules = rules_from_use(model.apply, params, x, format="int8")
    axes = {rule.pattern: rule.options.get("axis") for rule in rules if rule.format}
    assert axes == {rf"^params\.{n}\.kernel$": -3 for n in ("query", "key", "value")} | {
        r"^params\.out\.kernel$": (-3, -2)
    }


def test_nnx_module_by_use():
    nnx = needed("flax.nnx")
    model = nnx.MultiHeadAttention(2, 64, decode=False, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 5, 64))
    quantized = quantize_model(model, function=lambda model, x: model(x), inputs=(x,), format="int8")
    axes = {path: leaf.axis for path, leaf in named_leaves(quantized)[0] if isinstance(leaf, Array8B)}
    assert axes == {f"{n}.kernel": (-3,) for n in ("query", "key", "value")} | {"out.kernel": (-3, -2)}
