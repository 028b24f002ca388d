"""Texts that are written side by side: one compiled step for all, and each may begin and end at any time.

All rows share one place in the cache. A text that begins is read by itself and put so that it ends there; a text that
ended leaves room in front, which moving the others takes. A row goes on from the text that it holds, if it is alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer import fuse, implicit

from .guide import Guide
from .model import Cache, Config, Params, empty_cache, hidden, logits
from .sampling import GREEDY, Sampling, choose

PARTS = 16, 64, 256  # tokens of a prompt that are read at once: few shapes are compiled
STEPS = 16  # tokens of each text that a call makes, at most
LEAST = 256  # entries of a cache; it doubles when it is full
NONE = -1  # in place of a token, where a text has ended


class Written(NamedTuple):
    """What the compiled loop carries from token to token, with a row for each text."""

    cache: Cache
    start: jax.Array  # entries of the cache
    token: jax.Array  # (rows,): the last one, which the cache does not hold yet
    done: jax.Array  # (rows,)
    seen: jax.Array  # (rows, vocabulary): the tokens that are in the text
    key: jax.Array


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames="cache")
@fuse
@implicit
def _read(
    params: Params, tokens: jax.Array, start: jax.Array, count: jax.Array, cache: Cache, *, config: Config
) -> tuple[jax.Array, Cache]:
    """The logits (1, vocabulary) after the first `count` of the tokens (1, length), and the cache with all of them.

    What comes after `count` is read over before anything attends to it.
    """
    x, cache = hidden(params, tokens, start, cache, config)
    return logits(params, jax.lax.dynamic_index_in_dim(x, count - 1, axis=1, keepdims=False)), cache


@jax.jit
def _first(
    scores: jax.Array, sampling: Sampling, seen: jax.Array, allowed: jax.Array | None, key: jax.Array
) -> jax.Array:
    return choose(_masked(scores, allowed), sampling, key, seen)


def _masked(scores: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Scores that no other token reaches; without a mask as they are."""
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("config", "ends"), donate_argnames="written")
@fuse
@implicit
def _write(
    params: Params,
    written: Written,
    padding: jax.Array,
    sampling: Sampling,
    count: jax.Array,
    allowed: jax.Array | None,
    *,
    config: Config,
    ends: tuple[int, ...],
) -> tuple[Written, jax.Array]:
    """What is there after `count` tokens more of each text, at most STEPS, and these (rows, STEPS).

    `allowed` (rows, vocabulary) are the tokens that may come next: there is one token more then.
    """

    def more(carry: tuple[jax.Array, Written, jax.Array]) -> jax.Array:
        step, written, _ = carry
        return (step < count) & ~jnp.all(written.done)

    def body(carry: tuple[jax.Array, Written, jax.Array]) -> tuple[jax.Array, Written, jax.Array]:
        step, (cache, start, token, done, seen, key), found = carry
        key, own = jax.random.split(key)
        x, cache = hidden(params, token[:, None], start, cache, config, padding)
        new = choose(_masked(logits(params, x[:, -1]), allowed), sampling, own, seen)
        token = jnp.where(done, token, new)
        found = found.at[:, step].set(jnp.where(done, NONE, token))
        done = done | jnp.isin(token, jnp.asarray(ends, jnp.int32))
        seen = seen.at[jnp.arange(len(token)), token].set(True)
        return step + 1, Written(cache, start + 1, token, done, seen, key), found

    found = jnp.full((len(written.token), STEPS), NONE, jnp.int32)
    _, written, found = jax.lax.while_loop(more, body, (jnp.int32(0), written, found))
    return written, found


@functools.partial(jax.jit, donate_argnames="cache")
def _moved(cache: Cache, by: jax.Array) -> Cache:
    """The cache with all entries `by` places later, or earlier; they go round."""
    return [(jnp.roll(keys, by, axis=2), jnp.roll(values, by, axis=1)) for keys, values in cache]


@functools.partial(jax.jit, donate_argnames="cache")
def _put(cache: Cache, one: Cache, row: jax.Array, start: jax.Array) -> Cache:
    """The cache with that of one text in a row, from the entry `start` on."""
    return [
        (
            jax.lax.dynamic_update_slice(keys, own_keys, (row * len(own_keys), 0, start)),
            jax.lax.dynamic_update_slice(values, own_values, (row * len(own_values), start, 0)),
        )
        for (keys, values), (own_keys, own_values) in zip(cache, one, strict=True)
    ]


class Engine:
    """A model and the texts that it writes: `begin` one in a free row, and `write` the next tokens of all.

    A text takes up to `longest` tokens, the prompt included.
    """

    def __init__(
        self, params: Params, config: Config, ends: Sequence[int], *, rows: int = 1, longest: int = 4096, seed: int = 0
    ) -> None:
        self.longest = min(longest, config.context or longest)
        self._params, self._config, self._ends, self._rows = params, config, tuple(ends), rows
        out = params.get("output.weight", params["token_embd.weight"])
        self._vocabulary = out.shape[0]
        self._texts: list[list[int]] = [[] for _ in range(rows)]  # the tokens of each row
        self._held = [0] * rows  # how many of these tokens the cache has
        self._padding = np.zeros(rows, np.int32)
        self._sampling = [GREEDY] * rows
        self._seen = np.zeros((rows, self._vocabulary), bool)
        self._live = np.zeros(rows, bool)
        self._guides: dict[int, Guide] = {}
        self._cache, self._start = empty_cache(config, rows, LEAST), 0
        self._key = jax.random.key(seed % 2**32)

    def free(self) -> list[int]:
        """The rows in which no text is written."""
        return np.flatnonzero(~self._live).tolist()

    def begin(
        self, row: int, tokens: Sequence[int], sampling: Sampling = GREEDY, guide: Guide | None = None
    ) -> tuple[int, int]:
        """Read a text into a row. The result is the next token, and how many tokens were read.

        A guide says which tokens may follow. If the row is the only one, tokens that it has already are not read again.
        """
        if not 0 < len(tokens) < self.longest:
            raise ValueError(
                f"the text has {len(tokens)} tokens; it must have some, and fewer than {self.longest}: there is no room"
            )
        if self._live[row]:
            raise ValueError(f"in row {row} a text is written; `end` ends it")
        alone = self._rows == 1
        kept = self._common(row, tokens) if alone else 0
        scores, cache = self._scores(tokens, kept, self._cache if alone else None)
        if alone:
            self._cache, self._start = cache, len(tokens)
        else:
            self._place(row, cache, len(tokens))
        seen = np.zeros(self._vocabulary, bool)
        seen[list(tokens)] = True
        self._key, own = jax.random.split(self._key)
        allowed = None if guide is None else guide.allowed()[None]
        token = int(_first(scores, _batched([sampling]), seen[None], allowed, own)[0])
        seen[token] = True
        self._texts[row], self._held[row], self._seen[row] = [*tokens, token], len(tokens), seen
        self._sampling[row], self._live[row] = sampling, token not in self._ends
        if guide is not None and self._live[row]:
            guide.take(token)
            self._guides[row] = guide
        return token, len(tokens) - kept

    def write(self, count: int = 1) -> dict[int, list[int]]:
        """The next tokens of each text that is written, at most `count`. One that reaches `longest` ends."""
        rows = np.flatnonzero(self._live).tolist()
        if not rows:
            return {}
        longest = max(len(self._texts[row]) for row in rows)
        count = 1 if self._guides else max(1, min(count, STEPS, self.longest - longest))
        self._make_room(count)
        token = np.array([text[-1] if text else 0 for text in self._texts], np.int32)
        state = Written(self._cache, jnp.int32(self._start), token, ~self._live, self._seen, self._key)  # pyright: ignore[reportArgumentType]  # NumPy's
        options = {"config": self._config, "ends": self._ends}
        state, found = _write(
            self._params, state, self._padding, _batched(self._sampling), np.int32(count), self._allowed(), **options
        )
        self._cache, self._key, self._seen = state.cache, state.key, np.array(state.seen)
        self._start = int(state.start)
        new = {
            row: [token for token in tokens if token != NONE] for row, tokens in enumerate(np.asarray(found).tolist())
        }
        for row in rows:
            self._held[row] = len(self._texts[row]) + max(0, len(new[row]) - 1)
            self._texts[row] += new[row]
            if row in self._guides and new[row][-1] not in self._ends:
                self._guides[row].take(new[row][-1])
            if new[row][-1] in self._ends or len(self._texts[row]) >= self.longest:
                self.end(row)
        return {row: new[row] for row in rows}

    def end(self, row: int) -> None:
        """Write no more of the text in this row."""
        self._live[row] = False
        self._guides.pop(row, None)

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def _allowed(self) -> np.ndarray | None:
        """The tokens that may come next in each row; None where no text has a guide."""
        if not self._guides:
            return None
        found = np.ones((self._rows, self._vocabulary), bool)
        for row, guide in self._guides.items():
            found[row] = guide.allowed()
        return found

    def is_written(self, row: int) -> bool:
        return bool(self._live[row])

    def _common(self, row: int, tokens: Sequence[int]) -> int:
        """How many tokens the cache has already; the last one of `tokens` is read in any case."""
        held = self._texts[row][: self._held[row]]
        same = next(
            (i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), min(len(held), len(tokens))
        )
        return min(same, len(tokens) - 1)

    def _scores(self, tokens: Sequence[int], kept: int, cache: Cache | None) -> tuple[jax.Array, Cache]:
        """The logits after a text, and the cache with all of it; `kept` tokens, the first, are in the cache before."""
        sizes = _sizes(len(tokens) - kept)
        room = kept + sum(sizes)
        now = self._grown(cache or empty_cache(self._config, 1, LEAST), room)
        scores, at = jnp.zeros(()), kept
        for size in sizes:
            part = tokens[at : at + size]
            padded = np.array([[*part, *[0] * (size - len(part))]], np.int32)
            scores, now = _read(self._params, padded, np.int32(at), np.int32(len(part)), now, config=self._config)
            at += len(part)
        return scores, now

    def _place(self, row: int, one: Cache, length: int) -> None:
        """Put the cache of a text into its row, so that it ends where the next token of all rows goes."""
        if not self._live.any():
            self._start = 0
        later = max(0, length - self._start)
        need = self._start + later - length + one[0][0].shape[-1]
        self._cache = self._grown(self._cache, need)
        if later:
            self._move(later)
        self._padding[row] = self._start - length
        self._cache = _put(self._cache, one, np.int32(row), np.int32(self._start - length))

    def _move(self, by: int) -> None:
        self._cache, self._start = _moved(self._cache, np.int32(by)), self._start + by
        self._padding += by

    def _make_room(self, count: int) -> None:
        """For `count` tokens more."""
        if self._start + count <= self._cache[0][0].shape[-1]:
            return
        first = int(self._padding[self._live].min())
        if first:
            self._move(-first)
            self._padding = np.maximum(self._padding, 0)
        self._cache = self._grown(self._cache, self._start + count)

    @staticmethod
    def _grown(cache: Cache, room: int) -> Cache:
        more = _capacity(room) - cache[0][0].shape[-1]
        if more <= 0:
            return cache
        return [
            (jnp.pad(keys, ((0, 0), (0, 0), (0, more))), jnp.pad(values, ((0, 0), (0, more), (0, 0))))
            for keys, values in cache
        ]


def _sizes(length: int) -> list[int]:
    """The sizes of the parts in which `length` tokens are read."""
    most = PARTS[-1]
    rest = length % most
    return [most] * (length // most) + [size for size in PARTS if size >= rest][: rest > 0]


def _capacity(room: int) -> int:
    """The least that a cache has for this many entries: a power of two."""
    return max(LEAST, 1 << (room - 1).bit_length())


def _batched(each: Sequence[Sampling]) -> Sampling:
    """The settings of all rows as arrays (rows, 1)."""
    return Sampling(*(jnp.asarray(np.array(numbers, np.float32)[:, None]) for numbers in zip(*each, strict=True)))
