"""A run that is stopped and resumed is the uninterrupted one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer.checkpoint import CheckpointError, load, save
from eformer.jaximus import implicit
from eformer.model import (
    add_lora,
    combine,
    default_rules,
    fake_quantize,
    init_scales,
    lora_dropout,
    partition,
    quantize_model,
)

STEPS = 5
RULES = default_rules("int4", symmetric=True, min_size=0)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = {"one": {"kernel": normal(48, 32) / 7}, "two": {"kernel": normal(32, 48, seed=1) / 6}}
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS)))


def predict(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["one"]["kernel"]) @ params["two"]["kernel"]


def qlora() -> tuple[Any, Callable[[Any, jax.Array, jax.Array], jax.Array]]:
    quantized = quantize_model(PARAMS, RULES)
    trained, frozen = partition(add_lora(quantized, rank=4, key=jax.random.key(0)))

    def loss(trained: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean((implicit(predict)(lora_dropout(combine(trained, frozen), 0.1, key), x) - x) ** 2)

    return trained, loss


def qat() -> tuple[Any, Callable[[Any, jax.Array, jax.Array], jax.Array]]:
    """With learned scales, and a schedule from dense to rounded weights by the count of the optimizer."""
    trained = {"params": PARAMS, "scales": init_scales(PARAMS, RULES)}

    def loss(trained: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        mix = jax.random.uniform(key)
        return jnp.mean(
            (predict(fake_quantize(trained["params"], RULES, scales=trained["scales"], mix=mix), x) - x) ** 2
        )

    return trained, loss


def start(trained: Any) -> dict[str, Any]:
    return {"trained": trained, "optimizer": optimizer.init(trained), "key": jax.random.key(7), "steps": 0}


def stepper(loss: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    @jax.jit
    def step(state: dict[str, Any]) -> dict[str, Any]:
        key, of_data, of_loss = jax.random.split(state["key"], 3)
        x = jax.random.normal(of_data, (8, 48))
        gradients = jax.grad(loss)(state["trained"], x, of_loss)
        updates, after = optimizer.update(gradients, state["optimizer"], state["trained"])
        trained = optax.apply_updates(state["trained"], updates)
        return {"trained": trained, "optimizer": after, "key": key, "steps": state["steps"] + 1}

    return step


def by_safetensors(path: Path, state: Any, like: Any) -> Any:
    return load(save(path / "state.safetensors", state), like=like)


def by_orbax(path: Path, state: Any, like: Any) -> Any:
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", like)


@pytest.mark.filterwarnings("ignore")  # Orbax's own
@pytest.mark.parametrize("way", [by_safetensors, by_orbax])
@pytest.mark.parametrize("run", [qlora, qat])
def test_a_resumed_run_is_the_uninterrupted_one(run: Any, way: Any, tmp_path: Path):
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        trained, loss = run()
        step = stepper(loss)
        state, states = start(trained), []
        for _ in range(STEPS):
            states.append(state)
            state = step(state)
        for stopped in (0, 3):
            resumed = way(tmp_path / str(stopped), states[stopped], start(trained))
            assert jax.tree.structure(resumed) == jax.tree.structure(states[stopped])
            for _ in range(stopped, STEPS):
                resumed = step(resumed)
            for found, expected in zip(*map(jax.tree.leaves, map(stored, (resumed, state))), strict=True):
                assert np.array_equal(found, expected)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "key": jax.random.key_data(state["key"])}


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_keys(generator: str, tmp_path: Path):
    keys = jax.random.split(jax.random.key(3, impl=generator), 2)
    file = save(tmp_path / "keys.safetensors", {"keys": keys})
    for like in (keys, jax.eval_shape(lambda: keys)):
        found = load(file, like={"keys": like})["keys"]
        assert found.dtype == keys.dtype
        assert np.array_equal(jax.random.key_data(found), jax.random.key_data(keys))
    assert load(file)["keys"].dtype == jnp.uint32
    with pytest.raises(CheckpointError, match="its shape is"):
        load(file, like={"keys": jax.random.key(0)})
