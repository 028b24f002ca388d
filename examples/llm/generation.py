"""Generation: a compiled prefill, then a compiled loop over tokens that comes back to show text.

It runs any model of `model.py` under `implicit`, so its weights may be dense or quantized, and `fuse` makes one call of
the matmuls that share activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer import fuse, implicit

from .model import Cache, Config, Params, empty_cache, hidden, logits

STEPS = 16  # tokens that the loop makes before it comes back, at most
BUCKET = 64  # lengths of long prompts and of the cache are multiples of it, so that few shapes are compiled
SHORTEST = 16  # shorter prompts are filled up


class Sampling(NamedTuple):
    """How the next token is chosen: the likeliest at temperature 0, else at random among those that are left.

    `top_k` keeps so many of the likeliest (0: all), and `top_p` the fewest of them that have this probability together.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def checked(self) -> Sampling:
        """Itself; a ValueError for values that mean nothing."""
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"temperature and top_k must be at least 0, top_p above 0 and at most 1; got {self}")
        return self


GREEDY = Sampling()


class State(NamedTuple):
    """What the loop carries from token to token."""

    cache: Cache
    start: jax.Array  # entries of the cache
    token: jax.Array  # (batch,): the last one, which the cache does not hold yet
    done: jax.Array  # (batch,): whether a text has ended
    padding: jax.Array  # (batch,)
    key: jax.Array


def choose(scores: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Tokens (batch,) chosen by their logits (batch, vocabulary)."""
    if sampling.temperature == 0:
        # As `argmax`, which XLA's CPU backend does not vectorize: 0.15 instead of 0.65 ms for 150,000 logits.
        best = scores == jnp.max(scores, axis=-1, keepdims=True)
        return jnp.min(jnp.where(best, jnp.arange(scores.shape[-1]), scores.shape[-1] - 1), axis=-1)
    scores = scores / sampling.temperature
    count = min(sampling.top_k or scores.shape[-1], scores.shape[-1])
    if count == scores.shape[-1] and sampling.top_p == 1:
        return jax.random.categorical(key, scores).astype(jnp.int32)
    scores, tokens = jax.lax.top_k(scores, count)  # the likeliest first
    likely = jax.nn.softmax(scores, axis=-1)
    before = jnp.cumsum(likely, axis=-1) - likely
    chosen = jax.random.categorical(key, jnp.where(before < sampling.top_p, scores, -jnp.inf))
    return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _next(
    params: Params, tokens: jax.Array, state: State, config: Config, sampling: Sampling, ends: tuple[int, ...]
) -> State:
    """The state after `tokens` (batch, length), with the token chosen that follows them."""
    x, cache = hidden(params, tokens, state.start, state.cache, config, state.padding)
    key, own = jax.random.split(state.key)
    token = choose(logits(params, x[:, -1]), sampling, own)
    done = state.done | jnp.isin(token, jnp.asarray(ends, jnp.int32))
    return State(cache, state.start + tokens.shape[1], token, done, state.padding, key)


def _prefill(
    params: Params,
    tokens: jax.Array,
    padding: jax.Array,
    key: jax.Array,
    cache: Cache,
    *,
    config: Config,
    sampling: Sampling,
    ends: tuple[int, ...],
) -> State:
    """The state after prompts (batch, length), whose first `padding` tokens do not count; the cache is empty."""
    state = State(cache, jnp.int32(0), tokens[:, 0], jnp.zeros(len(tokens), bool), padding, key)
    return _next(params, tokens, state, config, sampling, ends)


def _advance(
    params: Params, state: State, count: jax.Array, *, config: Config, sampling: Sampling, ends: tuple[int, ...]
) -> tuple[State, jax.Array]:
    """The state after `count` tokens more, at most STEPS, and these (batch, STEPS); -1 where a text has ended."""

    def more(carry: tuple[jax.Array, State, jax.Array]) -> jax.Array:
        step, state, _ = carry
        return (step < count) & ~jnp.all(state.done)

    def body(carry: tuple[jax.Array, State, jax.Array]) -> tuple[jax.Array, State, jax.Array]:
        step, state, found = carry
        ended = state.done
        state = _next(params, state.token[:, None], state, config, sampling, ends)
        return step + 1, state, found.at[:, step].set(jnp.where(ended, -1, state.token))

    found = jnp.full((len(state.token), STEPS), -1, jnp.int32)
    _, state, found = jax.lax.while_loop(more, body, (jnp.int32(0), state, found))
    return state, found


STATIC = ("config", "sampling", "ends")
prefill = jax.jit(fuse(implicit(_prefill)), static_argnames=STATIC, donate_argnames="cache")
advance = jax.jit(fuse(implicit(_advance)), static_argnames=STATIC, donate_argnames="state")


def padded(prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
    """The prompts as one array (batch, length), and the padding in front of each; few lengths are possible."""
    longest = max(map(len, prompts))
    short = max(SHORTEST, 1 << (longest - 1).bit_length())  # a power of two
    width = short if short <= BUCKET else -(-longest // BUCKET) * BUCKET
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    return jnp.asarray(rows, jnp.int32), jnp.asarray([width - len(prompt) for prompt in prompts], jnp.int32)


def generate(
    params: Params,
    config: Config,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    ends: Sequence[int] = (),
    new_cache: Callable[[Config, int, int], Cache] = empty_cache,
) -> Iterator[list[list[int]]]:
    """Up to `count` tokens after each of the prompts, in portions: the first token of each, then more and more at once.

    A text ends at one of the tokens `ends`, which is not given. `new_cache` makes a cache of the model, for a batch and
    a length: of floating point numbers, or `empty_int8_cache`.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty: every prompt needs at least one token")
    longest = max(map(len, prompts))
    if config.context is not None and longest + count > config.context:
        raise ValueError(
            f"a prompt of {longest} tokens and {count} more do not fit into the model's context of {config.context}"
        )
    tokens, padding = padded(prompts)
    options = {"config": config, "sampling": sampling.checked(), "ends": tuple(ends)}
    cache = new_cache(config, len(prompts), -(-(tokens.shape[1] + count) // BUCKET) * BUCKET)
    state = prefill(params, tokens, padding, jax.random.key(seed), cache, **options)
    yield [[] if token in ends else [token] for token in np.asarray(state.token).tolist()]
    made, steps = 1, 1
    while made < count and not np.all(state.done):
        steps = min(2 * steps, STEPS)
        state, found = advance(params, state, jnp.int32(min(steps, count - made)), **options)
        yield [[token for token in row if token >= 0 and token not in ends] for row in np.asarray(found).tolist()]
        made += steps
