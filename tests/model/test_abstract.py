"""Models without values: quantized too, laid out as they will be, to compile for and to load into."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eformer.checkpoint import load, save
from eformer.jaximus import implicit
from eformer.model import Rule, dequantize_model, named_leaves, quantize_model, report, stored_bytes
from eformer.ops.quantization import QuantizedArray

RULES = {
    "int8": Rule("w", "int8", {"axis": -2}),
    "nf4": Rule("w", "nf4", {"axis": -2, "block_size": 32}),
    "nested": Rule("w", "nf4", {"double_quantization": True}),
    "ternary": Rule("w", "ternary", {"scale": "channel"}),
    "binary": Rule("w", "binary"),
}


def init():
    return {"w": jax.random.normal(jax.random.key(0), (128, 64)), "b": jnp.zeros(64), "steps": jnp.arange(3)}


def model(params, x):
    return x @ params["w"] + params["b"][None]


def kind(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


@pytest.mark.parametrize("rule", RULES)
def test_abstract_as_concrete(rule):
    """The same types, static fields and leaves."""
    abstract, concrete = quantize_model(jax.eval_shape(init), [RULES[rule]]), quantize_model(init(), [RULES[rule]])
    assert isinstance(abstract["w"], QuantizedArray)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    assert kind(abstract) == kind(concrete)
    assert stored_bytes(abstract) == stored_bytes(concrete)
    assert kind(dequantize_model(abstract)) == kind(dequantize_model(concrete))


@pytest.mark.parametrize("rule", ["int8", "nested"])
def test_compiled_ahead_of_time(rule):
    x = jnp.ones((2, 128))
    abstract = quantize_model(jax.eval_shape(init), [RULES[rule]])
    compiled = jax.jit(implicit(model)).lower(abstract, x).compile()
    concrete = quantize_model(init(), [RULES[rule]])
    np.testing.assert_array_equal(compiled(concrete, x), jax.jit(implicit(model))(concrete, x))


@pytest.mark.parametrize("spec", [("model", None), ("data", "model"), ()], ids=str)
@pytest.mark.parametrize("rule", ["int8", "nested", "ternary"])
def test_shardings_are_those_of_the_quantized_leaves(rule, spec):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    w = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=sharding)
    abstract = quantize_model({"w": w}, [RULES[rule]])
    concrete = quantize_model({"w": jax.device_put(init()["w"], sharding)}, [RULES[rule]])
    same = jax.tree.map(lambda a, c: c.sharding.is_equivalent_to(a.sharding, c.ndim), abstract, concrete)
    assert all(jax.tree.leaves(same))
    dense = dequantize_model(abstract)["w"]
    assert dense.sharding.is_equivalent_to(sharding, 2)


def test_a_checkpoint_is_loaded_into_it(tmp_path):
    """Each device reads its part, as the abstract model says."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    save(tmp_path / "model.safetensors", quantize_model({"w": init()["w"]}, [RULES["nf4"]]))
    like = quantize_model({"w": jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=sharding)}, [RULES["nf4"]])
    loaded = load(tmp_path / "model.safetensors", like=like)
    assert kind(loaded) == kind(like)
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), loaded, like)
    assert all(jax.tree.leaves(same))


def test_the_report_has_sizes_and_no_errors():
    tree = jax.eval_shape(init)
    found = report(tree, quantize_model(tree, [RULES["int8"]]))
    (leaf,) = found.quantized
    assert (leaf.path, leaf.error) == ("w", None)
    assert leaf.bytes_after < leaf.bytes_before / 3


def test_what_cannot_be_quantized_raises_in_words():
    with pytest.raises(ValueError, match="'w', float32\\[128, 64\\], can't be quantized by the rule"):
        quantize_model(jax.eval_shape(init), [Rule("w", "int8", {"axis": 5})])


def test_nnx_module_without_values():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    abstract = nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    by_name, by_use = quantize_model(abstract), quantize_model(abstract, function=lambda m, x: m(x), inputs=(x,))
    expected = quantize_model(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    assert type(by_use) is nnx.Linear
    assert kind(by_use) == kind(by_name)
    assert kind(by_use)[1] == kind(expected)[1]
    assert [path for path, leaf in named_leaves(by_use)[0] if isinstance(leaf, QuantizedArray)] == ["kernel"]
    jax.jit(implicit(lambda m, x: m(x))).lower(by_use, x)
