"""How well a model predicts a text: its perplexity; and how far two models are apart on it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer import implicit

from .model import Config, Params, forward

TEXT = Path(__file__).with_name("text.txt")  # prose that was written for this purpose
LEAST = 16  # tokens of a program
WINDOW = 512  # tokens; each window is a text of its own


class Apart(NamedTuple):
    """Two models on the same text."""

    perplexities: tuple[float, float]
    divergence: float  # of Kullback and Leibler, from the first to the second, in nats: the mean over all tokens
    same: float  # the share of tokens at which both have the same likeliest one
    tokens: int


def apart(first: Params, second: Params, configs: tuple[Config, Config], tokens: Sequence[int], window: int) -> Apart:
    """How far the second model is from the first, over whole windows of the text."""
    found = []
    for each in _windows(tokens, window):
        before, after = (_predicted(p, each, config) for p, config in zip((first, second), configs, strict=True))
        found.append(_compared(before, after, each[:, 1:]))
    losses, others, divergence, same = np.mean(np.array(found), axis=0).tolist()
    return Apart((math.exp(losses), math.exp(others)), divergence, same, len(found) * (window - 1))


@functools.partial(jax.jit, static_argnames="config")
def _predicted(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Logarithms of the probabilities of what follows each of the tokens but the last."""
    return jax.nn.log_softmax(implicit(forward)(params, tokens[:, :-1], config))


@jax.jit
def _compared(before: jax.Array, after: jax.Array, next_tokens: jax.Array) -> jax.Array:
    losses = [-jnp.mean(jnp.take_along_axis(each, next_tokens[..., None], axis=-1)) for each in (before, after)]
    divergence = jnp.mean(jnp.sum(jnp.exp(before) * (before - after), axis=-1))
    same = jnp.mean(jnp.argmax(before, -1) == jnp.argmax(after, -1))
    return jnp.stack([*losses, divergence, same])


def _windows(tokens: Sequence[int], window: int) -> list[jax.Array]:
    whole = np.asarray(tokens[: len(tokens) // window * window], np.int32).reshape(-1, 1, window)
    if not len(whole):
        raise ValueError(f"the text has {len(tokens)} tokens, and a window takes {window}")
    return list(map(jnp.asarray, whole))


def log_likelihood(
    params: Params, config: Config, context: Sequence[int], following: Sequence[int]
) -> tuple[float, bool]:
    """The logarithm of the probability of the tokens `following` after `context`, and whether each is the likeliest."""
    if not context or not following:
        raise ValueError("a context and what follows it need at least one token each")
    tokens = [*context, *following]
    size = max(LEAST, 1 << (len(tokens) - 1).bit_length())  # few lengths are compiled; what comes later changes nothing
    padded = np.zeros((1, size + 1), np.int32)
    padded[0, : len(tokens)] = tokens
    found = np.asarray(_predicted(params, jnp.asarray(padded), config))[0, len(context) - 1 : len(tokens) - 1]
    chosen = found[np.arange(len(following)), following]
    return float(chosen.sum()), bool(np.all(found.argmax(-1) == following))


def perplexity(params: Params, config: Config, tokens: Sequence[int], window: int = WINDOW) -> float:
    """Perplexity over whole windows; tokens after the last window do not count."""
    windows = _windows(tokens, window)
    loss = sum(float(_loss(params, each, config)) for each in windows)
    return math.exp(loss / (len(windows) * (window - 1)))


@functools.partial(jax.jit, static_argnames="config")
def _loss(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    found = jax.nn.log_softmax(implicit(forward)(params, tokens[:, :-1], config))
    return -jnp.sum(jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1))
