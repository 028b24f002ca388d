"""How the next token is chosen from its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LEAST = -64.0  # of the logarithm of a probability divided by the largest: a token below it is never chosen
HALVINGS = 32  # of the interval from LEAST to 0, in the search for a limit


class Sampling(NamedTuple):
    """How the next token is chosen: the likeliest at temperature 0, else at random among the tokens that are kept.

    `top_k` keeps the K most likely tokens (0: all), `top_p` the fewest of these with this probability together,
    and `min_p` those with at least this part of the probability of the likeliest. Before that, logits of tokens that
    are in the text are divided by `repetition` if they are positive, and multiplied by it if not.

    The fields are numbers, or arrays (batch, 1) with a number for each text.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition: Any = 1.0

    def checked(self) -> Sampling:
        """Itself; a ValueError for numbers that mean nothing."""
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"temperature and top_k must be at least 0, top_p above 0 and at most 1; got {self}")
        if not (0 <= self.min_p <= 1 and self.repetition > 0):
            raise ValueError(f"min_p must be from 0 to 1, and repetition above 0; got {self}")
        return self


GREEDY = Sampling()


def choose(scores: jax.Array, sampling: Sampling, key: jax.Array, seen: jax.Array | None = None) -> jax.Array:
    """Tokens (batch,) chosen by their logits (batch, vocabulary); `seen`, of that shape, are those in the text."""
    if seen is not None:
        repeated = jnp.where(scores > 0, scores / sampling.repetition, scores * sampling.repetition)
        scores = jnp.where(seen, repeated, scores)
    if isinstance(sampling.temperature, jax.Array):
        cold, likeliest = sampling.temperature[:, 0] == 0, _likeliest(scores)
        return jax.lax.cond(
            jnp.all(cold), lambda: likeliest, lambda: jnp.where(cold, likeliest, _drawn(scores, sampling, key))
        )
    return _likeliest(scores) if sampling.temperature == 0 else _drawn(scores, sampling, key)


def _likeliest(scores: jax.Array) -> jax.Array:
    # As `argmax`, which XLA's CPU backend does not vectorize: 0.15 instead of 0.65 ms for 150,000 logits.
    best = scores == jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(best, jnp.arange(scores.shape[-1]), scores.shape[-1] - 1), axis=-1).astype(jnp.int32)


def _drawn(scores: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    temperature, top_k, top_p, min_p = (
        jnp.broadcast_to(jnp.asarray(each, jnp.float32), (len(scores), 1)) for each in sampling[:4]
    )
    scores = scores / jnp.where(temperature == 0, 1, temperature)
    scores = jnp.maximum(scores - jnp.max(scores, axis=-1, keepdims=True), LEAST)
    # Numbers of tokens and their probabilities, not their order: a sort would take longer than a layer.
    count = jnp.where(top_k == 0, jnp.float32(scores.shape[-1]), top_k)
    limit = _limit(
        scores, lambda kept: jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.float32) <= count, jnp.any(top_k > 0)
    )
    likely = jnp.where(scores >= limit, jnp.exp(scores), 0)
    wanted = top_p * jnp.sum(likely, axis=-1, keepdims=True)

    def has_less(kept: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept, likely, 0), axis=-1, keepdims=True) < wanted

    limit = jnp.maximum(limit, _limit(scores, has_less, jnp.any(top_p < 1), above=False))
    limit = jnp.maximum(limit, jnp.maximum(jnp.log(min_p), LEAST))
    return jax.random.categorical(key, jnp.where(scores >= limit, scores, -jnp.inf)).astype(jnp.int32)


def _limit(
    scores: jax.Array, holds: Callable[[jax.Array], jax.Array], needed: jax.Array, *, above: bool = True
) -> jax.Array:
    """The limit (batch, 1) from which on `holds(scores >= limit)` is true, or just below it; LEAST if not `needed`."""
    ends = jnp.full((len(scores), 1), LEAST), jnp.zeros((len(scores), 1))

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        is_true = holds(scores >= middle)
        return jnp.where(is_true, low, middle), jnp.where(is_true, middle, high)

    def search() -> jax.Array:
        low, high = jax.lax.fori_loop(0, HALVINGS, halve, ends)
        return jnp.where(holds(scores >= ends[0]), ends[0], high if above else low)

    return jax.lax.cond(needed, search, lambda: ends[0])
