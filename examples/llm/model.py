"""Language models of the Llama, Qwen, Gemma 3 and Mistral families in plain JAX, which know nothing of quantization.

Parameters are a flat dict of dense or quantized arrays with the names of GGUF files and the layout (out, in).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .rope import Rope

Params = Mapping[str, Any]  # dense or quantized arrays, by their names in a GGUF file
# Keys (batch * heads, size, length) and values (batch * heads, length, size) of each layer, as matmuls want them: XLA
# would copy the whole cache for every token to transpose it, or to join axes.
Cache = list[tuple[jax.Array, jax.Array]]
PART = 128  # tokens of a prompt that attend together


class Config(NamedTuple):
    """The sizes of a model, and what else its file says."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rope: Rope
    rope_neighbours: bool  # RoPE turns neighbouring elements of a head together, else an element of each half
    context: int | None  # the longest text that it was trained on, in tokens, if the file says
    window: int = 0  # tokens that layers with a window attend to
    windowed: tuple[bool, ...] = ()  # for each layer whether it has the window; empty: none has
    window_rope: Rope | None = None  # of layers with the window, if it is another one
    query_size: float = 0.0  # queries are divided by its square root; 0: head_size
    embedding_scale: float = 1.0
    gelu: bool = False  # in place of SiLU
    experts: int = 0  # how many experts a token takes, in a mixture of experts
    shares_sum: bool = True  # the weights of these experts sum to 1


class Places(NamedTuple):
    """Where the new tokens stand: the same for every layer."""

    start: jax.Array  # their first entry in the cache
    seen: jax.Array  # (batch, 1, length, capacity): the entries that each of them attends to
    cos: jax.Array  # (batch, 1, length, size / 2): of the angles of RoPE
    sin: jax.Array


def forward(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Logits (batch, length, vocabulary) of what follows each of the tokens (batch, length)."""
    return logits(params, hidden(params, tokens, jnp.int32(0), empty_cache(config, *tokens.shape), config)[0])


def empty_cache(config: Config, batch: int, length: int) -> Cache:
    """A cache for up to `length` tokens."""
    heads, size = batch * config.kv_heads, config.head_size
    return [(jnp.zeros((heads, size, length)), jnp.zeros((heads, length, size))) for _ in range(config.layers)]


def hidden(
    params: Params,
    tokens: jax.Array,
    start: jax.Array,
    cache: Cache,
    config: Config,
    padding: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """The output (batch, length, width) of the last layer, and the cache with the tokens (batch, length) added.

    The tokens come after `start` others. The first `padding` (batch,) entries of each row only make all rows equally
    long: no token attends to them, and positions are counted from there.
    """
    padding = jnp.zeros(len(tokens), jnp.int32) if padding is None else padding
    x, places = entering(params, tokens, start, cache[0][0].shape[-1], config, padding)
    after = []
    for i, entries in enumerate(cache):
        x, entries = layer(layer_weights(params, i), x, entries, places_of(places, i, config), config)
        after.append(entries)
    return normalized(params, "output_norm", x, config), after


def entering(
    params: Params, tokens: jax.Array, start: jax.Array, capacity: int, config: Config, padding: jax.Array
) -> tuple[jax.Array, tuple[Places, ...]]:
    """What the first layer takes: the embedded tokens, and where they stand in a cache of `capacity` entries.

    The second of the places, if there is one, is for layers with a window.
    """
    entries = start + jnp.arange(tokens.shape[1])
    places = [_places(params, entries, padding, capacity, start, config)]
    if any(config.windowed):
        places.append(
            _windowed(_places(params, entries, padding, capacity, start, config, windowed=True), entries, config)
        )
    x = params["token_embd.weight"][tokens]
    return x if config.embedding_scale == 1 else x * config.embedding_scale, tuple(places)


def places_of(places: tuple[Places, ...], i: int, config: Config) -> Places:
    """Those for a layer."""
    return places[1] if config.windowed and config.windowed[i] else places[0]


def _windowed(places: Places, entries: jax.Array, config: Config) -> Places:
    key = jnp.arange(places.seen.shape[-1])[None, None, None]
    return places._replace(seen=places.seen & (key > entries[None, None, :, None] - config.window))


def layer_weights(params: Params, i: int) -> Params:
    """The parameters of a layer, by their names without its number."""
    return {name.removeprefix(f"blk.{i}."): params[name] for name in params if name.startswith(f"blk.{i}.")}


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Logits of the next token from what `hidden` gives; many models use the embedding for the output, too."""
    return _dense(params, "output" if "output.weight" in params else "token_embd", x)


@functools.partial(jax.jit, static_argnames="config")  # traced once, not for every layer
def layer(
    weights: Params, x: jax.Array, entries: tuple[jax.Array, jax.Array], places: Places, config: Config
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What a layer makes of x (batch, length, width), and its entries of the cache with the new tokens added."""
    y = normalized(weights, "attn_norm", x, config)
    query, key, value = (_heads(_dense(weights, name, y), config) for name in ("attn_q", "attn_k", "attn_v"))
    query, key = (
        _rotated(normalized(weights, name, each, config) if f"{name}.weight" in weights else each, places, config)
        for name, each in (("attn_q_norm", query), ("attn_k_norm", key))
    )
    if config.query_size:  # attention divides by the square root of the size of a head
        query = query * (config.head_size / config.query_size) ** 0.5
    keys = jax.lax.dynamic_update_slice(entries[0], _joined(key).mT, (0, 0, places.start))
    values = jax.lax.dynamic_update_slice(entries[1], _joined(value), (0, places.start, 0))
    y = _dense(weights, "attn_output", _attention(query, keys, values, places.seen))
    x = x + (normalized(weights, "post_attention_norm", y, config) if "post_attention_norm.weight" in weights else y)
    y = normalized(weights, "ffn_norm", x, config)
    y = _mixed(weights, y, config) if "ffn_gate_inp.weight" in weights else _feed_forward(weights, y, config)
    y = normalized(weights, "post_ffw_norm", y, config) if "post_ffw_norm.weight" in weights else y
    return x + y, (keys, values)


def _feed_forward(weights: Params, x: jax.Array, config: Config) -> jax.Array:
    act = functools.partial(jax.nn.gelu, approximate=True) if config.gelu else jax.nn.silu
    return _dense(weights, "ffn_down", act(_dense(weights, "ffn_gate", x)) * _dense(weights, "ffn_up", x))


def _mixed(weights: Params, x: jax.Array, config: Config) -> jax.Array:
    """A mixture of experts: each token takes the likeliest few, and an expert that no token takes is not read."""
    scores = jax.nn.softmax(_dense(weights, "ffn_gate_inp", x), axis=-1)
    best, chosen = jax.lax.top_k(scores, config.experts)
    if config.shares_sum:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    shares = jnp.sum(best[..., None] * jax.nn.one_hot(chosen, scores.shape[-1]), axis=-2)

    def add(total: jax.Array, expert: tuple[jax.Array, Params]) -> tuple[jax.Array, None]:
        share, own = expert
        part = jax.lax.cond(
            jnp.any(share > 0), lambda: share[..., None] * _feed_forward(own, x, config), lambda: jnp.zeros_like(x)
        )
        return total + part, None

    experts = {f"{name}.weight": weights[f"{name}_exps.weight"] for name in ("ffn_gate", "ffn_up", "ffn_down")}
    return jax.lax.scan(add, jnp.zeros_like(x), (jnp.moveaxis(shares, -1, 0), experts))[0]


def _attention(query: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """(batch, length, heads * size). Entries that a part of a long prompt can't see, being later, are left out."""
    length, capacity = seen.shape[2:]
    if length <= PART:
        return _attended(query, keys, values, seen)
    parts = []
    for first in range(0, length, PART):
        part, end = slice(first, first + PART), capacity - max(0, length - first - PART)
        parts.append(_attended(query[:, :, part], keys[..., :end], values[:, :end], seen[:, :, part, :end]))
    return jnp.concatenate(parts, axis=1)


def _attended(query: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array) -> jax.Array:
    """(batch, length, heads * size); heads of `query` that share a head of keys are rows of one matmul."""
    batch, heads, length, size = query.shape
    shared = query.reshape(len(keys), -1, size) / size**0.5
    scores = jnp.where(seen, (shared @ keys).reshape(batch, heads, length, -1), -1e30)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1).reshape(*shared.shape[:2], 1)
    mixed = weights.reshape(*shared.shape[:2], -1) @ values / total  # fewer divisions than for the weights
    return mixed.reshape(query.shape).swapaxes(1, 2).reshape(batch, length, -1)


def _heads(x: jax.Array, config: Config) -> jax.Array:
    """(batch, length, heads * size) as (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], -1, config.head_size).swapaxes(1, 2)


def _joined(x: jax.Array) -> jax.Array:
    """(batch, heads, length, size) as (batch * heads, length, size)."""
    return x.reshape(-1, *x.shape[2:])


def _places(
    params: Params,
    entries: jax.Array,
    padding: jax.Array,
    capacity: int,
    start: jax.Array,
    config: Config,
    *,
    windowed: bool = False,
) -> Places:
    """Of tokens that are the `entries` (length,) of the cache."""
    rope = config.window_rope if windowed and config.window_rope is not None else config.rope
    key = jnp.arange(capacity)[None, None, None]
    seen = (key <= entries[None, None, :, None]) & (key >= padding[:, None, None, None])
    frequencies = jnp.asarray(rope.frequencies(config.head_size))
    if "rope_freqs.weight" in params:
        frequencies = frequencies / params["rope_freqs.weight"]
    angles = jnp.arange(capacity, dtype=jnp.float32)[:, None] * frequencies
    positions = (entries[None] - padding[:, None])[:, None]
    # Looked up: XLA would compute cosines and sines again in each layer, for each head.
    cos, sin = (rope.amplitude * each(angles) for each in (jnp.cos, jnp.sin))
    return Places(start, seen, cos[positions], sin[positions])


def _rotated(x: jax.Array, places: Places, config: Config) -> jax.Array:
    """RoPE of x (batch, heads, length, size): pairs of elements as complex numbers, turned by their position."""
    axis = -1 if config.rope_neighbours else -2  # the axis of a pair, in heads seen as pairs
    shape = (-1, 2) if config.rope_neighbours else (2, config.head_size // 2)
    real, imaginary = jnp.moveaxis(x.reshape(*x.shape[:-1], *shape), axis, 0)
    turned = (real * places.cos - imaginary * places.sin, real * places.sin + imaginary * places.cos)
    return jnp.stack(turned, axis).reshape(x.shape)


def _dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def normalized(params: Params, name: str, x: jax.Array, config: Config) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.epsilon) * params[f"{name}.weight"]
