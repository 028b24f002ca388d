"""Equinox, Haiku, diffrax, Hugging Face's Flax models, and what comes with JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .case import Case, Program


def _x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def _filtered(function: Callable[..., Any], model: Any, inputs: tuple[Any, ...]) -> Any:
    import equinox as eqx

    return eqx.filter_jit(function)(model, *inputs)


def equinox_mlp() -> Program:
    import equinox as eqx

    model = eqx.nn.MLP(64, 64, 128, depth=2, key=jax.random.key(0))
    return Program(lambda model, x: jax.vmap(model)(x), model, (_x(3, 64),), _filtered)


def equinox_attention() -> Program:
    import equinox as eqx

    model = eqx.nn.MultiheadAttention(2, 64, key=jax.random.key(0))
    return Program(lambda model, x: model(x, x, x), model, (_x(6, 64),), _filtered)


def equinox_lstm() -> Program:
    import equinox as eqx

    def function(cell: Any, x: jax.Array) -> jax.Array:
        start = (jnp.zeros(64), jnp.zeros(64))
        (h, _), _ = lax.scan(lambda carry, each: (cell(each, carry), None), start, x)
        return h

    return Program(function, eqx.nn.LSTMCell(64, 64, key=jax.random.key(0)), (_x(5, 64),), _filtered)


def haiku_transformer() -> Program:
    import haiku as hk

    def block(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(128, 64)(tokens)
        normed = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.MultiHeadAttention(2, 32, w_init=hk.initializers.VarianceScaling())(normed, normed, normed)
        return x + hk.nets.MLP([128, 64])(x)

    model, tokens = hk.without_apply_rng(hk.transform(block)), jnp.arange(6)
    return Program(model.apply, jax.jit(model.init)(jax.random.key(0), tokens), (tokens,))


def haiku_lstm() -> Program:
    import haiku as hk

    def unrolled(x: jax.Array) -> jax.Array:
        core = hk.LSTM(64)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    model, x = hk.without_apply_rng(hk.transform(unrolled)), _x(5, 2, 64)
    return Program(model.apply, jax.jit(model.init)(jax.random.key(0), x), (x,))


def diffrax_ode() -> Program:
    import diffrax
    import equinox as eqx

    def function(field: Any, y: jax.Array) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: field(y))
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), t0=0.0, t1=1.0, dt0=0.25, y0=y).ys

    return Program(function, eqx.nn.MLP(64, 64, 64, depth=1, key=jax.random.key(0)), (_x(64),), _filtered)


def bert() -> Program:
    from transformers import BertConfig, FlaxBertModel

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    return _hugging_face(FlaxBertModel, BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes))


def gpt2() -> Program:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    return _hugging_face(
        FlaxGPT2LMHeadModel, GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    )


def _hugging_face(kind: Any, config: Any) -> Program:
    model, tokens = kind(config, _do_init=False), jnp.arange(10).reshape(2, 5)
    params = jax.jit(lambda key: model.init_weights(key, (1, 5)))(jax.random.key(0))
    return Program(lambda params, tokens: model(tokens, params=params)[0], params, (tokens,))


def stax() -> Program:
    from jax.example_libraries import stax as s

    init, apply = s.serial(s.Dense(128), s.Relu, s.FanOut(2), s.parallel(s.Dense(64), s.Identity), s.FanInConcat())
    x = _x(3, 64)
    return Program(apply, init(jax.random.key(0), x.shape)[1], (x,))


CASES = (
    Case("Equinox: MLP under `vmap`", ("equinox",), equinox_mlp),
    Case("Equinox: MultiheadAttention", ("equinox",), equinox_attention),
    Case("Equinox: LSTMCell under `lax.scan`", ("equinox",), equinox_lstm),
    Case("Haiku: Embed, LayerNorm, MultiHeadAttention, MLP", ("haiku",), haiku_transformer),
    Case("Haiku: LSTM with `dynamic_unroll`", ("haiku",), haiku_lstm),
    Case("diffrax: a neural ODE, Tsit5", ("diffrax", "equinox"), diffrax_ode),
    Case("Hugging Face transformers: FlaxBertModel", ("transformers", "flax"), bert),
    Case("Hugging Face transformers: FlaxGPT2LMHeadModel", ("transformers", "flax"), gpt2),
    Case("JAX: `example_libraries.stax`", ("jax",), stax),
)
