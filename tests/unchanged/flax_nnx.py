"""Modules of Flax NNX, which keep state: caches, statistics, generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .case import Case, Program


def _call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def _x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def _stepwise(function: Callable[..., Any], model: Any, inputs: tuple[Any, ...]) -> Any:
    """Four calls on one module; its state goes from one to the next."""
    from flax import nnx

    step = nnx.jit(function)
    return [step(model, *inputs) for _ in range(4)]


def block() -> Program:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(128, 64, rngs=rngs)
            self.norm = nnx.RMSNorm(64, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 64, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.LinearGeneral(256, 64, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x))
            return self.embed.attend(x + self.down(nnx.gelu(self.up(x))))

    return Program(_call, Block(nnx.Rngs(0)), (jnp.arange(10).reshape(2, 5),))


def cache() -> Program:
    from flax import nnx

    model = nnx.MultiHeadAttention(2, 64, decode=True, rngs=nnx.Rngs(0))
    model.init_cache((1, 6, 64))
    return Program(_call, model, (_x(1, 1, 64),), _stepwise)


def training() -> Program:
    from flax import nnx

    rngs = nnx.Rngs(0)
    layers = nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    return Program(_call, nnx.Sequential(*layers), (_x(8, 64),), _stepwise)


def lora() -> Program:
    from flax import nnx

    return Program(_call, nnx.LoRALinear(64, 128, lora_rank=4, rngs=nnx.Rngs(0)), (_x(3, 64),))


def scanned() -> Program:
    from flax import nnx

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key: jax.Array) -> nnx.Linear:
        return nnx.Linear(64, 64, rngs=nnx.Rngs(key))

    def function(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: x + nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)

    return Program(function, make(jax.random.split(jax.random.key(0), 3)), (_x(2, 64),))


CASES = (
    Case("Flax NNX: Embed, RMSNorm, MultiHeadAttention, Linear", ("flax",), block),
    Case("Flax NNX: MultiHeadAttention with a cache, four steps", ("flax",), cache),
    Case("Flax NNX: BatchNorm and Dropout, four steps", ("flax",), training),
    Case("Flax NNX: LoRALinear", ("flax",), lora),
    Case("Flax NNX: `nnx.scan` over layers of `nnx.vmap`", ("flax",), scanned),
)
