"""`partition` and `combine`: one tree with quantized leaves trains with `jax.grad` and optax."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import implicit
from eformer.model import combine, dequantize_model, named_leaves, partition, quantize_model
from eformer.ops.quantization import QuantizedArray, quantize


def needed(package: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(package, reason=f"{package} is not installed")


def mixed():
    return {
        "kernel": quantize(jnp.ones((64, 64))),
        "norm": [jnp.ones(64), None],
        "steps": jnp.arange(3),
        "half": jnp.ones(2, jnp.bfloat16),
        "name": "words",
        "rate": 0.5,
        "numpy": np.ones(2, np.float32),
        "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
    }


def paths_of(tree):
    return {path for path, _ in named_leaves(tree)[0]}


def test_halves():
    trained, frozen = partition(mixed())
    assert paths_of(trained) == {"norm.0", "half", "numpy", "abstract"}
    assert paths_of(frozen) == {"kernel", "steps", "name", "rate"}
    assert isinstance(frozen["kernel"], QuantizedArray)


def test_a_predicate_chooses_among_what_can_train():
    asked = []

    def trainable(path, leaf):
        asked.append((path, leaf.dtype))
        return path.startswith("norm")

    trained, frozen = partition(mixed(), trainable)
    assert paths_of(trained) == {"norm.0"}
    assert paths_of(frozen) == {"kernel", "steps", "name", "rate", "half", "numpy", "abstract"}
    assert {path for path, _ in asked} == {"norm.0", "half", "numpy", "abstract"}


def test_combine_gives_the_tree_again():
    tree = mixed()
    back = combine(*partition(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    same = [a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True)]
    assert all(same)


@pytest.mark.parametrize(
    ("trained", "frozen", "words"),
    [
        ({"a": 1.0}, {"b": None}, "only the trained one has 'a', only the frozen one has 'b'"),
        ({"a": 1.0}, {"a": 2.0}, "both halves have a leaf 'a'"),
        ({"a": 1.0}, [None], "different trees"),
        ([1.0], (None,), "list and tuple"),
    ],
    ids=["other paths", "same leaf", "other types", "other containers"],
)
def test_halves_that_do_not_fit_raise(trained, frozen, words):
    with pytest.raises(ValueError, match=words):
        combine(trained, frozen)


def linen():
    nn = needed("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(nn.LayerNorm()(nn.Dense(64)(x)))

    model = Model()
    return model.init(jax.random.key(0), jnp.ones((1, 64))), model.apply


def nnx():
    nnx = needed("flax.nnx")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.LayerNorm(64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs))
    return model, lambda model, x: model(x)


def haiku():
    hk = needed("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(64)(hk.LayerNorm(-1, True, True)(hk.Linear(64)(x)))))
    return model.init(jax.random.key(0), jnp.ones((1, 64))), model.apply


def equinox():
    eqx = needed("equinox")
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(64, 64, key=jax.random.key(0)), eqx.nn.Linear(64, 64, key=jax.random.key(1))]
    )
    return model, lambda model, x: jax.vmap(model)(x)


def plain():
    params = {"w": jax.random.normal(jax.random.key(0), (64, 64)) / 8, "b": jnp.zeros(64)}
    return params, lambda params, x: x @ params["w"] + params["b"]


@pytest.mark.parametrize("inside", [True, False], ids=["step inside implicit", "loss inside implicit"])
@pytest.mark.parametrize("make", [plain, linen, nnx, haiku, equinox], ids=lambda make: make.__name__)
def test_a_step_of_optax(make, inside):
    """Under jit; gradients are those of the dense model with respect to the leaves that stayed dense."""
    optax = needed("optax")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        model, apply = make()
        quantized, x = quantize_model(model), jax.random.normal(jax.random.key(2), (4, 64))
        trained, frozen = partition(quantized)
        assert any(isinstance(leaf, QuantizedArray) for _, leaf in named_leaves(frozen)[0])
        optimizer = optax.adam(0.01)

        def loss(trained, frozen):
            return jnp.mean((apply(combine(trained, frozen), x) - 1) ** 2)

        differentiated = loss if inside else implicit(loss)

        def step(trained, frozen, state):
            value, gradients = jax.value_and_grad(differentiated)(trained, frozen)
            updates, state = optimizer.update(gradients, state, trained)
            return optax.apply_updates(trained, updates), state, value, gradients

        run = jax.jit(implicit(step) if inside else step)
        after, state, first, gradients = run(trained, frozen, optimizer.init(trained))
        _, _, second, _ = run(after, frozen, state)
        dense_trained, dense_frozen = partition(dequantize_model(quantized), lambda path, _: path in paths_of(trained))
        expected = jax.jit(jax.grad(loss))(dense_trained, dense_frozen)
    assert second < first
    assert jax.tree.structure(after) == jax.tree.structure(trained)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, expected)
