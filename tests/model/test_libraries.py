"""What Flax, Keras and Equinox do with arrays apart from calling JAX: scopes, bytes, variables."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import implicit, materialization_error, quantize, quantize_model
from eformer._src.jaximus import libraries
from eformer.checkpoint import load, save
from eformer.jaximus import MaterializationWarning
from eformer.ops.quantization import formats

X = np.ones((2, 32), np.float32)


def dense_layer(form: str = "nf4") -> tuple[Any, Any, Any]:
    """A module of Linen, its parameters quantized, and what it gives."""
    nn = pytest.importorskip("flax.linen")
    module = nn.Dense(64)
    params = jax.tree.map(jnp.asarray, module.init(jax.random.key(0), X))
    params["params"]["kernel"] = quantize(params["params"]["kernel"], format=form)
    dense = {"params": {**params["params"], "kernel": params["params"]["kernel"].materialize()}}
    return module, params, module.apply(dense, X)


class Held:
    def __init__(self, module: Any, params: Any) -> None:
        self.module, self.params = module, params

    def forward(self, x: Any) -> Any:
        return self.module.apply(self.params, x)


def calling(bound: Any) -> Any:
    return lambda x: bound(x)


CLOSURES = {
    "closure": lambda module, params: lambda x: module.apply(params, x),
    "method": lambda module, params: Held(module, params).forward,
    "bound": lambda module, params: module.bind(params),
    "bound, in a function": lambda module, params: calling(module.bind(params)),
    "helper": lambda module, params: lambda x: (lambda y: module.apply(params, y))(x),
}


@pytest.mark.parametrize("wrap", [implicit, lambda f: jax.jit(implicit(f))], ids=["eager", "jit"])
@pytest.mark.parametrize("close", CLOSURES.values(), ids=CLOSURES)
@pytest.mark.parametrize("form", ["int4", "int8", "nf4", "ternary", "fp8"])  # one of each class
def test_linen_takes_parameters_from_a_closure(form, close, wrap):
    module, params, expected = dense_layer(form)
    with materialization_error():
        found = wrap(close(module, params))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_linen_refuses_a_parameter_of_another_shape():
    module, params, _ = dense_layer()
    errors = pytest.importorskip("flax.errors")
    with pytest.raises(errors.ScopeParamShapeError, match=r"\(32, 64\)"):
        implicit(lambda x: module.apply(params, x[:, :16]))(X)


@pytest.mark.parametrize("form", formats(), ids=str)
def test_bytes_of_flax_hold_quantized_arrays(form):
    serialization = pytest.importorskip("flax.serialization")
    tree = {"w": quantize(jax.random.normal(jax.random.key(0), (32, 48)), format=form.name), "b": X}
    data = serialization.to_bytes(tree)
    like = {"w": quantize(jnp.ones((32, 48)), format=form.name), "b": np.zeros_like(X)}
    back = serialization.from_bytes(like, data)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(tree)))
    np.testing.assert_array_equal(back["w"].materialize(), tree["w"].materialize())


def test_bytes_of_flax_for_another_array_are_refused():
    serialization = pytest.importorskip("flax.serialization")
    data = serialization.to_bytes({"w": quantize(jnp.ones((32, 48)), format="nf4", block_size=16)})
    with pytest.raises(ValueError, match=r"is not that of this ArrayNF4.*block_size=16.*block_size=8"):
        serialization.from_bytes({"w": quantize(jnp.ones((32, 48)), format="nf4", block_size=8)}, data)


def told(function: Any, monkeypatch: Any) -> list[str]:
    monkeypatch.setattr(libraries, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
        function()
    return [str(w.message) for w in caught if w.category is MaterializationWarning]


def test_nnx_outside_implicit_warns_once(monkeypatch):
    nnx = pytest.importorskip("flax.nnx")
    model = quantize_model(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), format="nf4")
    (message,) = told(lambda: model(jnp.ones((1, 64))), monkeypatch)
    assert "flax makes a dense copy of ArrayNF4" in message
    assert "`implicit(f)`" in message
    assert told(lambda: implicit(lambda model, x: model(x))(model, jnp.ones((1, 64))), monkeypatch) == []


def test_a_variable_of_keras_warns_once(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    variable, q = keras.Variable(jnp.zeros((64, 64))), quantize(jnp.ones((64, 64)), format="nf4")
    (message,) = told(lambda: variable.assign(q), monkeypatch)
    assert "keras makes a dense copy of ArrayNF4" in message


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, np.array], ids=["np", "jnp", "array"])
def test_whoever_asks_for_a_dense_array_is_not_warned(convert, monkeypatch):
    assert told(lambda: convert(quantize(jnp.ones((64, 64)), format="nf4")), monkeypatch) == []


def test_a_module_of_equinox_with_functions_is_saved_and_loaded(tmp_path):
    eqx = pytest.importorskip("equinox")
    model = quantize_model(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), format="nf4")
    other = quantize_model(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(1)), format="nf4")
    save(tmp_path / "model.safetensors", model)
    back = load(tmp_path / "model.safetensors", like=other)
    run = implicit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(back, jnp.ones(64)), run(model, jnp.ones(64)))
    assert back.activation is other.activation
