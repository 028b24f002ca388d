"""Models of the frameworks run on quantized weights with their own code: the examples, and what else frameworks do."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import implicit, materialization_error
from eformer.model import Rule, dequantize_model, named_leaves, quantize_model, report
from eformer.ops.quantization import ArrayGrouped, QuantizedArray

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
PACKAGES = {
    "plain": "jax",
    "with_linen": "flax",
    "with_nnx": "flax",
    "with_equinox": "equinox",
    "with_haiku": "haiku",
    "with_keras": "keras",
}
# Of a 256-wide float32 product or softmax; a kernel may add in another order than the dense product.
TOLERANCE = 256 * 2.0**-23 * 4


@pytest.fixture(autouse=True)
def _as_frameworks_expect():
    """JAX's own settings: the frameworks' code promotes ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def needed(package: str):
    """The package; the test is skipped where it is not installed. What it warns of at import is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(package, reason=f"the framework {package} is not installed")


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PACKAGES.keys()


@pytest.mark.parametrize("name", PACKAGES)
def test_example(name, capsys, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    needed(PACKAGES[name])
    with materialization_error():  # no quantized weight is made dense for want of a rule
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    found = re.fullmatch(rf"{name.removeprefix('with_')}: ([\d,]+) -> ([\d,]+) bytes, max error (\S+)\n", out)
    assert found, out
    before, after = (int(number.replace(",", "")) for number in found.groups()[:2])
    assert after < before / 2
    assert float(found[3]) < TOLERANCE


def paths_of(tree, kind=QuantizedArray):
    return {path for path, leaf in named_leaves(tree)[0] if isinstance(leaf, kind)}


def assert_runs(function, quantized, *args):
    """On quantized weights as on those made dense."""
    expected = function(dequantize_model(quantized), *args)
    np.testing.assert_allclose(implicit(function)(quantized, *args), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_linen_scan_over_layers():
    nn = needed("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(64)(nn.tanh(x)), None

    layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    x = jnp.ones((3, 64))
    quantized = quantize_model(layers.init(jax.random.key(0), x, None))
    assert paths_of(quantized) == {"params.Dense_0.kernel"}
    assert quantized["params"]["Dense_0"]["kernel"].shape == (2, 64, 64)
    with materialization_error():
        y, _ = jax.jit(implicit(layers.apply))(quantized, x, None)
    expected, _ = jax.jit(layers.apply)(dequantize_model(quantized), x, None)
    np.testing.assert_allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_linen_computes_in_bfloat16():
    nn = needed("flax.linen")
    dense, x = nn.Dense(64, use_bias=False, dtype=jnp.bfloat16), jax.random.normal(jax.random.key(1), (3, 64))
    quantized = quantize_model(dense.init(jax.random.key(0), x))
    with materialization_error():
        y = jax.jit(implicit(dense.apply))(quantized, x)
    kernel = dequantize_model(quantized)["params"]["kernel"]
    assert y.dtype == jnp.bfloat16
    # Half a step (2**-9) for x and for the result; a kernel may use the weights as they are, or round them too.
    bound = 2.0**-8 * (3 / 2) * (jnp.abs(x) @ jnp.abs(kernel))
    assert jnp.all(jnp.abs(y.astype(jnp.float32) - x @ kernel) <= bound)


def test_linen_boxes_keep_their_names():
    nn = needed("flax.linen")
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    dense, x = nn.Dense(64, kernel_init=init), jnp.ones((3, 64))
    params = dense.init(jax.random.key(0), x)
    quantized = quantize_model(params, [Rule(r"kernel$", "nf4", {"axis": -2})])
    assert isinstance(quantized["params"]["kernel"], nn.Partitioned)
    assert quantized["params"]["kernel"].names == ("in", "out")
    assert paths_of(quantized) == {"params.kernel"}
    assert_runs(lambda params, x: dense.apply(nn.unbox(params), x), quantized, x)


def test_nnx_modules_states_and_graphs():
    nnx = needed("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, 64, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(64, 64, use_bias=False, rngs=rngs)])
            self.norm = nnx.LayerNorm(64, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.layers[0](self.norm(self.first(x))))

    model, x = Model(nnx.Rngs(0)), jnp.ones((3, 64))
    model.eval()
    quantized = quantize_model(model)
    assert type(quantized) is Model
    assert isinstance(quantized.first.kernel, nnx.Param)
    assert paths_of(quantized) == {"first.kernel", "layers.0.kernel"}
    assert not paths_of(model)  # the module given is as it was
    assert_runs(lambda model, x: model(x), quantized, x)

    expected = implicit(lambda model, x: model(x))(quantized, x)
    by_nnx = nnx.jit(implicit(lambda model, x: model(x)))(quantized, x)
    np.testing.assert_allclose(by_nnx, expected, rtol=TOLERANCE, atol=TOLERANCE)
    graph, state = nnx.split(model)
    state = quantize_model(state)
    assert paths_of(state) == paths_of(quantized)
    merged = jax.jit(implicit(lambda state, x: nnx.merge(graph, state)(x)))(state, x)
    np.testing.assert_allclose(merged, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert report(model, quantized).bytes_after < report(model, model).bytes_after / 3


def test_nnx_arrays_that_are_tied_stay_so():
    nnx = needed("flax.nnx")

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(64, 64, rngs=rngs)
            self.b = nnx.Linear(64, 64, rngs=rngs)
            self.b.kernel = self.a.kernel

    quantized = quantize_model(Tied(nnx.Rngs(0)))
    first, second = (leaf for path, leaf in named_leaves(quantized)[0] if path.endswith("kernel"))
    assert first is second


def test_equinox_modules_with_what_is_no_array():
    eqx = needed("equinox")
    model = eqx.nn.MLP(64, 64, 64, depth=1, key=jax.random.key(0))
    quantized = quantize_model(model)
    assert type(quantized) is eqx.nn.MLP
    assert paths_of(quantized) == {"layers.0.weight", "layers.1.weight"}
    assert quantized.activation is model.activation
    assert [leaf.axis for _, leaf in named_leaves(quantized)[0] if isinstance(leaf, ArrayGrouped)] == [-1, -1]
    x = jnp.ones((3, 64))
    assert_runs(lambda model, x: jax.vmap(model)(x), quantized, x)


def test_equinox_gradients_reach_what_is_dense():
    eqx = needed("equinox")
    quantized = quantize_model(eqx.nn.MLP(64, 64, 64, depth=1, key=jax.random.key(0)))

    def loss(bias, model, x):
        model = eqx.tree_at(lambda model: model.layers[0].bias, model, bias)
        return jnp.sum(model(x) ** 2)

    bias, x = quantized.layers[0].bias, jnp.ones(64)
    gradient = jax.grad(implicit(loss))(bias, quantized, x)
    expected = jax.grad(loss)(bias, dequantize_model(quantized), x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_optax_trains_the_leaves_that_stayed():
    optax = needed("optax")
    params = {"kernel": jax.random.normal(jax.random.key(0), (64, 64)) / 8, "bias": jnp.zeros(64)}
    quantized, x = quantize_model(params), jnp.ones((3, 64))
    frozen, trained = quantized["kernel"], {"bias": quantized["bias"]}
    optimizer = optax.sgd(0.1)
    state = optimizer.init(trained)

    def loss(trained, kernel):
        return jnp.mean((x @ kernel + trained["bias"] - 1) ** 2)

    gradients = jax.grad(implicit(loss))(trained, frozen)
    updates, state = optimizer.update(gradients, state, trained)
    after = optax.apply_updates(trained, updates)
    assert implicit(loss)(after, frozen) < implicit(loss)(trained, frozen)
