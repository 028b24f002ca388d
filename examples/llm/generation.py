"""Generation: a compiled prefill, then a compiled loop over tokens that comes back to show text.

It runs any model of `model.py` under `implicit`, so its weights may be dense or quantized, and `fuse` makes one call of
the matmuls that share activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer import fuse, implicit

from .model import (
    Cache,
    Config,
    Params,
    Places,
    empty_cache,
    entering,
    hidden,
    layer,
    layer_weights,
    logits,
    normalized,
    places_of,
)
from .sampling import GREEDY, Sampling, choose

STEPS = 16  # tokens that the loop makes before it comes back, at most
BUCKET = 64  # lengths of prompts that are longer, and of the cache, are multiples of it: few shapes are compiled
SHORTEST = 8  # shorter prompts are filled up


class State(NamedTuple):
    """What the loop carries from token to token."""

    cache: Cache
    start: jax.Array  # entries of the cache
    token: jax.Array  # (batch,): the last one, which the cache does not hold yet
    done: jax.Array  # (batch,): whether a text has ended
    padding: jax.Array  # (batch,)
    key: jax.Array


def _following(
    params: Params, x: jax.Array, cache: Cache, length: int, state: State, sampling: Sampling, ends: tuple[int, ...]
) -> State:
    """The state after `length` more tokens; x (batch, width) is the output of all layers at the last one."""
    key, own = jax.random.split(state.key)
    token = choose(logits(params, x), sampling, own)
    done = state.done | jnp.isin(token, jnp.asarray(ends, jnp.int32))
    return State(cache, state.start + length, token, done, state.padding, key)


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
        x, cache = hidden(params, state.token[:, None], state.start, state.cache, config, state.padding)
        state = _following(params, x[:, -1], cache, 1, state, sampling, ends)
        return step + 1, state, found.at[:, step].set(jnp.where(ended, -1, state.token))

    found = jnp.full((len(state.token), STEPS), -1, jnp.int32)
    _, state, found = jax.lax.while_loop(more, body, (jnp.int32(0), state, found))
    return state, found


STATIC = ("config", "sampling", "ends")
advance = jax.jit(fuse(implicit(_advance)), static_argnames=STATIC, donate_argnames="state")


# A short prompt goes through one program for each kind of layer: one for all layers would take longer to load than to
# run. A long prompt goes through that one, which is some percent faster.


@functools.partial(jax.jit, static_argnames=("config", "new_cache", "capacity"))
@implicit
def _begin(
    params: Params,
    tokens: jax.Array,
    padding: jax.Array,
    seed: jax.Array,
    *,
    config: Config,
    new_cache: Callable[[Config, int, int], Cache],
    capacity: int,
) -> tuple[jax.Array, tuple[Places, ...], State]:
    """What the first layer takes, and a state without tokens."""
    start, batch = jnp.int32(0), len(tokens)
    cache = new_cache(config, batch, capacity)
    state = State(cache, start, tokens[:, 0], jnp.zeros(batch, bool), padding, jax.random.key(seed))
    return *entering(params, tokens, start, capacity, config, padding), state


_layer = jax.jit(fuse(implicit(layer)), static_argnames="config", donate_argnames=("x", "entries"))


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
@implicit
def _end(
    params: Params, x: jax.Array, state: State, *, config: Config, sampling: Sampling, ends: tuple[int, ...]
) -> State:
    """The state after a prompt; x (batch, length, width) is the output of the last layer."""
    last = normalized(params, "output_norm", x[:, -1], config)
    return _following(params, last, state.cache, x.shape[1], state, sampling, ends)


def prefill_by_layers(
    params: Params,
    tokens: jax.typing.ArrayLike,
    padding: jax.typing.ArrayLike,
    seed: jax.typing.ArrayLike,
    *,
    new_cache: Callable[[Config, int, int], Cache],
    capacity: int,
    **options: Any,
) -> State:
    """The state after prompts (batch, length), whose first `padding` tokens do not count; its cache has `capacity`."""
    config, rest = options["config"], _rest(params)
    x, places, state = _begin(rest, tokens, padding, seed, config=config, new_cache=new_cache, capacity=capacity)
    cache = []
    for i, entries in enumerate(state.cache):
        x, entries = _layer(layer_weights(params, i), x, entries, places_of(places, i, config), config=config)
        cache.append(entries)
    return _end(rest, x, state._replace(cache=cache), **options)


prefill = jax.jit(prefill_by_layers, static_argnames=(*STATIC, "new_cache", "capacity"))


def compile_layers(
    params: Params,
    *inputs: np.ndarray,
    new_cache: Callable[[Config, int, int], Cache],
    capacity: int,
    **options: Any,
) -> None:
    """Compile the programs of `prefill_by_layers`, for parameters with these shapes."""
    config, rest = options["config"], _rest(params)
    new = {"config": config, "new_cache": new_cache, "capacity": capacity}
    _begin.lower(rest, *inputs, **new).compile()
    x, places, state = _begin.eval_shape(rest, *inputs, **new)
    layers = [layer_weights(params, i) for i in range(config.layers)]
    kinds = {str(jax.tree.flatten(weights)): weights for weights in layers}
    for weights in kinds.values():
        _layer.lower(weights, x, state.cache[0], places[0], config=config).compile()  # a window changes values alone
    _end.lower(rest, x, state, **options).compile()


def _rest(params: Params) -> Params:
    """The parameters that no layer has."""
    return {name: array for name, array in params.items() if not name.startswith("blk.")}


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as one array (batch, length), and the padding in front of each; few lengths are possible."""
    longest = max(map(len, prompts))
    short = max(SHORTEST, 1 << (longest - 1).bit_length())  # a power of two
    width = short if short <= BUCKET else -(-longest // BUCKET) * BUCKET
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    return np.array(rows, np.int32), np.array([width - len(prompt) for prompt in prompts], np.int32)


@dataclass(frozen=True)
class Request:
    """Texts to go on with: up to `count` tokens after each of the prompts, which end at one of the tokens `ends`.

    `new_cache` makes a cache of the model, for a batch and a length: of floating point numbers, or one of `CACHES`.
    """

    config: Config
    prompts: Sequence[Sequence[int]]
    count: int
    sampling: Sampling = GREEDY
    seed: int = 0
    ends: Sequence[int] = ()
    new_cache: Callable[[Config, int, int], Cache] = empty_cache

    def checked(self) -> Request:
        """Itself; a ValueError for prompts that the model can't go on with."""
        if not self.prompts or not all(self.prompts):
            raise ValueError("a prompt is empty: every prompt needs at least one token")
        longest, context = max(map(len, self.prompts)), self.config.context
        if context is not None and longest + self.count > context:
            raise ValueError(
                f"a prompt of {longest} tokens and {self.count} more do not fit into the model's context of {context}"
            )
        self.sampling.checked()
        return self

    def options(self) -> dict[str, Any]:
        """What both compiled programs depend on."""
        return {"config": self.config, "sampling": self.sampling, "ends": tuple(self.ends)}

    def inputs(self) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
        """The arguments of `prefill` besides the parameters."""
        tokens, padding = padded(self.prompts)
        capacity = -(-(tokens.shape[1] + self.count) // BUCKET) * BUCKET
        arrays = tokens, padding, np.array(self.seed % 2**32, np.uint32)
        return arrays, {**self.options(), "new_cache": self.new_cache, "capacity": capacity}

    @staticmethod
    def _short(tokens: np.ndarray) -> bool:
        return tokens.shape[1] <= BUCKET

    def compile(self, like: Params) -> None:
        """Compile what the first token needs, for parameters with these shapes, while their values are still read.

        JAX keeps it for the call.
        """
        arrays, options = self.checked().inputs()
        if self._short(arrays[0]):
            compile_layers(like, *arrays, **options)
        else:
            prefill.lower(like, *arrays, **options).compile()

    def run(self, params: Params) -> Iterator[list[list[int]]]:
        """The tokens, in portions: the first of each text, then more and more at once; without the ends of texts."""
        arrays, options = self.checked().inputs()
        state = (prefill_by_layers if self._short(arrays[0]) else prefill)(params, *arrays, **options)
        yield [[] if token in self.ends else [token] for token in np.asarray(state.token).tolist()]
        made, steps = 1, 1
        while made < self.count and not np.all(state.done):
            steps = min(2 * steps, STEPS)
            state, found = advance(params, state, np.int32(min(steps, self.count - made)), **self.options())
            rows = np.asarray(found).tolist()
            yield [[token for token in row if token >= 0 and token not in self.ends] for row in rows]
            made += steps


def generate(
    params: Params, config: Config, prompts: Sequence[Sequence[int]], count: int, **options: Any
) -> Iterator[list[list[int]]]:
    """What `Request(config, prompts, count, **options)` gives for a model with these parameters."""
    return Request(config, prompts, count, **options).checked().run(params)
