"""Language models of the Llama and Qwen2 families from GGUF files, in plain JAX: the code knows no quantization.

`benchmarks/gguf_model.py` and `benchmarks/quality.py` run it under `implicit`, on weights as they are in the file. They
keep their names, and the layout (out, in).

    python examples/language_model.py model.gguf 785 6722 315 9625 374
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eformer import implicit
from eformer.checkpoint import load, open_checkpoint

Params = Mapping[str, Any]  # dense or quantized arrays, by their names in the file
Cache = dict[str, jax.Array]  # keys and values of each layer, (batch, length, heads, size)

# Which elements of a head RoPE turns together: neighbours, or an element of each half.
NEIGHBOURS = {"llama": True, "qwen2": False}


class Config(NamedTuple):
    """The sizes of a model, and what else its metadata says."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rope_base: float
    rope_neighbours: bool


def read_config(metadata: Mapping[str, Any]) -> Config:
    """The configuration in the metadata of a GGUF file; a ValueError for a model that this code does not run."""
    family = metadata.get("general.architecture")
    if family not in NEIGHBOURS:
        raise ValueError(f"the model is of the family {family!r}; this code runs {', '.join(NEIGHBOURS)}")
    given = {name.removeprefix(f"{family}."): value for name, value in metadata.items()}
    heads, width = given["attention.head_count"], given["embedding_length"]
    size = given.get("attention.key_length", width // heads)
    scaling = given.get("rope.scaling.type", "none")
    if given.get("rope.dimension_count", size) != size or scaling != "none" or "expert_count" in given:
        raise ValueError("this code runs models without experts, with plain RoPE over whole heads")
    return Config(
        layers=given["block_count"],
        heads=heads,
        kv_heads=given.get("attention.head_count_kv", heads),
        head_size=size,
        epsilon=given["attention.layer_norm_rms_epsilon"],
        rope_base=given.get("rope.freq_base", 10000.0),
        rope_neighbours=NEIGHBOURS[family],
    )


def load_model(path: str | Path) -> tuple[Params, Config]:
    """The weights of a GGUF file, quantized as they are there, and the configuration for `forward` and `step`."""
    with open_checkpoint(path) as checkpoint:
        config = read_config(checkpoint.metadata)
    return load(path, flat=True), config


def forward(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Logits (batch, length, vocabulary) of what follows each of the tokens (batch, length)."""
    return step(params, tokens, jnp.int32(0), empty_cache(config, *tokens.shape), config)[0]


def empty_cache(config: Config, batch: int, length: int) -> Cache:
    """A cache for up to `length` tokens."""
    shape = (batch, length, config.kv_heads, config.head_size)
    return {f"blk.{i}.{part}": jnp.zeros(shape) for i in range(config.layers) for part in ("key", "value")}


def step(params: Params, tokens: jax.Array, start: jax.Array, cache: Cache, config: Config) -> tuple[jax.Array, Cache]:
    """Logits for tokens (batch, length) that come after `start` others, and the cache with them in it."""
    cache = dict(cache)
    x = params["token_embd.weight"][tokens]
    for i in range(config.layers):
        name = f"blk.{i}"
        x = x + _attention(params, name, _normalized(params, f"{name}.attn_norm", x, config), start, cache, config)
        x = x + _mlp(params, name, _normalized(params, f"{name}.ffn_norm", x, config))
    x = _normalized(params, "output_norm", x, config)
    output = "output" if "output.weight" in params else "token_embd"
    return _dense(params, output, x), cache


def _attention(params: Params, name: str, x: jax.Array, start: jax.Array, cache: Cache, config: Config) -> jax.Array:
    batch, length, _ = x.shape
    positions = start + jnp.arange(length)
    query = _heads(_dense(params, f"{name}.attn_q", x), config.heads)
    query = _rotated(query, positions, params, config)
    new = {
        "key": _rotated(_heads(_dense(params, f"{name}.attn_k", x), config.kv_heads), positions, params, config),
        "value": _heads(_dense(params, f"{name}.attn_v", x), config.kv_heads),
    }
    for part, entries in new.items():
        place = (0, start, 0, 0)
        cache[f"{name}.{part}"] = jax.lax.dynamic_update_slice(cache[f"{name}.{part}"], entries, place)
    key, value = cache[f"{name}.key"], cache[f"{name}.value"]
    seen = jnp.arange(key.shape[1])[None, :] <= positions[:, None]
    mixed = jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])
    return _dense(params, f"{name}.attn_output", mixed.reshape(batch, length, -1))


def _mlp(params: Params, name: str, x: jax.Array) -> jax.Array:
    gate = jax.nn.silu(_dense(params, f"{name}.ffn_gate", x))
    return _dense(params, f"{name}.ffn_down", gate * _dense(params, f"{name}.ffn_up", x))


def _heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def _rotated(x: jax.Array, positions: jax.Array, params: Params, config: Config) -> jax.Array:
    """RoPE of x (batch, length, heads, size): pairs of elements as complex numbers, turned by their position."""
    half = config.head_size // 2
    frequencies = config.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if "rope_freqs.weight" in params:
        frequencies = frequencies / params["rope_freqs.weight"]
    angles = (positions.astype(jnp.float32)[:, None] * frequencies[None, :])[None, :, None, :]
    axis = -1 if config.rope_neighbours else -2  # the axis of a pair, in heads seen as pairs
    shape = (half, 2) if config.rope_neighbours else (2, half)
    real, imaginary = jnp.moveaxis(x.reshape(*x.shape[:-1], *shape), axis, 0)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], axis).reshape(x.shape)


def _dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def _normalized(params: Params, name: str, x: jax.Array, config: Config) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.epsilon) * params[f"{name}.weight"]


def greedy(params: Params, prompt: list[int], count: int, config: Config) -> list[int]:
    """The `count` likeliest tokens after `prompt`, one at a time."""
    run = jax.jit(implicit(functools.partial(step, config=config)), donate_argnums=3)
    cache = empty_cache(config, 1, len(prompt) + count)
    tokens, found = jnp.asarray([prompt], jnp.int32), list(prompt)
    for _ in range(count):
        logits, cache = run(params, tokens, jnp.int32(len(found) - tokens.shape[1]), cache)
        tokens = jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32)
        found.append(int(tokens[0, 0]))
    return found[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("tokens", type=int, nargs="+", help="the numbers of the tokens of a text")
    parser.add_argument("--count", type=int, default=16, help="tokens to add (16)")
    args = parser.parse_args()
    params, config = load_model(args.model)
    print(*greedy(params, args.tokens, args.count, config))


if __name__ == "__main__":
    main()
