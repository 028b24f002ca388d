"""`fake_quantize` and `add_lora` in models of all five frameworks, with optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer._src.model.training.lora import named_weights
from eformer.jaximus import implicit
from eformer.model import (
    LoraArray,
    add_lora,
    combine,
    default_rules,
    fake_quantize,
    finalize,
    find_nonfinite,
    partition,
    quantize_model,
)

from .test_frameworks import _as_frameworks_expect as _as_frameworks_expect
from .test_frameworks import needed

WIDTH = 64


def plain() -> tuple[Any, Any]:
    params = {f"layer{i}": {"kernel": jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 8} for i in range(2)}
    return params, lambda params, x: jnp.tanh(x @ params["layer0"]["kernel"]) @ params["layer1"]["kernel"]


def linen() -> tuple[Any, Any]:
    nn = needed("flax.linen")
    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH)])
    return model.init(jax.random.key(0), jnp.ones((1, WIDTH))), model.apply


def with_nnx() -> tuple[Any, Any]:
    nnx = needed("flax.nnx")
    model = nnx.Sequential(
        nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
    )
    graph, params = nnx.split(model)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def with_equinox() -> tuple[Any, Any]:
    eqx = needed("equinox")
    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 1, activation=jnp.tanh, key=jax.random.key(0))
    return model, lambda model, x: jax.vmap(model)(x)


def with_haiku() -> tuple[Any, Any]:
    hk = needed("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(WIDTH)(jnp.tanh(hk.Linear(WIDTH)(x)))))
    return model.init(jax.random.key(0), jnp.ones((1, WIDTH))), model.apply


FRAMEWORKS = (plain, linen, with_nnx, with_equinox, with_haiku)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped momentum": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-1, momentum=0.9)),
    "adafactor": optax.adafactor(1e-2),
}


def train(loss: Any, trained: Any, optimizer: Any) -> tuple[Any, list[float]]:
    @jax.jit
    def step(trained: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, value

    losses, state = [], optimizer.init(trained)
    for _ in range(8):
        trained, state, value = step(trained, state)
        losses.append(float(value))
    assert not find_nonfinite(trained)
    return trained, losses


X = jnp.asarray(np.random.default_rng(0).standard_normal((16, WIDTH)), jnp.float32)
Y = jnp.sin(X[:, ::-1])


@pytest.mark.parametrize("make", FRAMEWORKS)
@pytest.mark.parametrize("activations", [None, "int8"])
def test_fake_quantize(make: Any, activations: str | None):
    params, run = make()
    rules = default_rules("int8", activation_dtype=activations)
    trained, frozen = partition(params)

    def predict(trained: Any) -> jax.Array:
        return implicit(run)(fake_quantize(combine(trained, frozen), rules), X)

    trained, losses = train(lambda trained: jnp.mean((predict(trained) - Y) ** 2), trained, OPTIMIZERS["adamw"])
    assert losses[-1] < losses[0]
    final = finalize(combine(trained, frozen), rules)
    found, expected = jax.jit(predict)(trained), jax.jit(lambda x: implicit(run)(final, x))(X)
    if activations:  # the same kernels
        assert np.array_equal(found, expected)
    else:  # sums of WIDTH terms in another order, twice
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [*((make, "adamw") for make in FRAMEWORKS), *((plain, name) for name in OPTIMIZERS if name != "adamw")],
)
def test_add_lora(make: Any, optimizer: str):
    params, run = make()
    quantized = quantize_model(params, format="nf4")
    adapted = add_lora(quantized, rank=4, key=jax.random.key(0))
    assert sum(type(leaf) is LoraArray for _, leaf in named_weights(adapted)[0]) == 2
    trained, frozen = partition(adapted)

    def loss(trained: Any) -> jax.Array:
        return jnp.mean((implicit(run)(combine(trained, frozen), X) - Y) ** 2)

    _, losses = train(loss, trained, OPTIMIZERS[optimizer])
    assert losses[-1] < losses[0]
