"""Modules of Flax Linen, as its users put them together."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .case import Case, Program

TOKENS = np.arange(10).reshape(2, 5)


def _of(module: Any, *inputs: Any, **kwargs: Any) -> Program:
    params = jax.jit(lambda key: module.init(key, *inputs, **kwargs))(jax.random.key(0))
    return Program(lambda params, *inputs: module.apply(params, *inputs, **kwargs), params, inputs)


def _x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def tied() -> Program:
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(128, 64)
            x = embed(tokens)
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
            return embed.attend(x)

    return _of(Model(), TOKENS)


def attention() -> Program:
    import flax.linen as nn

    return _of(nn.MultiHeadDotProductAttention(num_heads=4), _x(2, 8, 128))


def convolution() -> Program:
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(64, (1, 1))(x)))
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(64, (3, 3))(x)))
            return nn.Dense(64)(x.mean((1, 2)))

    module, x = Model(), _x(2, 8, 8, 64)
    params = jax.jit(module.init)(jax.random.key(0), x)
    return Program(lambda params, x: module.apply(params, x, mutable=["batch_stats"]), params, (x,))


def scanned() -> Program:
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return x + nn.Dense(64)(nn.tanh(nn.Dense(128)(x))), None

    layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return _of(layers(), _x(2, 64), None)


def lstm() -> Program:
    import flax.linen as nn

    return _of(nn.RNN(nn.OptimizedLSTMCell(64)), _x(2, 5, 64))


CASES = (
    Case("Flax Linen: Embed, LayerNorm, Dense, `attend`", ("flax",), tied),
    Case("Flax Linen: MultiHeadDotProductAttention", ("flax",), attention),
    Case("Flax Linen: Conv, BatchNorm with `mutable`", ("flax",), convolution),
    Case("Flax Linen: `nn.scan` over `nn.remat`", ("flax",), scanned),
    Case("Flax Linen: RNN of OptimizedLSTMCell", ("flax",), lstm),
)
