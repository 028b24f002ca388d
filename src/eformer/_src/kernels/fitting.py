"""Scales and offsets with a smaller squared error than those of rounding, by alternating least squares.

Codes are chosen for a scale and an offset; then the line that brings the chosen values nearest to the block gives the
next scale and offset; and so on. Whatever the codes stand for, the sums that the line needs are those of the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

# Measured on blocks of 64 of 19 matrices of two language models, at 2 to 5 bits: moves 1.25 to 1.5 times as long as the
# line's come further than its own, and those from a range a step narrower than the block further than from all of it.
MOVES = 2
LENGTH = 1.4
# By how much the squared error must be less than that of rounding: sums in float32 do not tell smaller differences.
MARGIN = 2.0**-10
LONGEST = 2**13  # elements that are summed one after the other: a sum in float32 is off by less than half of `MARGIN`
# Of rows that are added one by one: how many at most, how many there are if an axis has more, how many elements one has
# at least, and how many one step of the loop adds.
MOST_ROWS, SOME_ROWS, LEAST_ROW, UNROLL = 256, 64, 2**11, 8
RANGE = 2.0**48  # of magnitudes, and one over it: squares neither overflow nor vanish

LEAST_WEIGHT = 1e-3  # of the mean: blocks that no input reached are still rounded well

Line = tuple[jax.Array, jax.Array | None]  # scale and offset of each block
Nearest = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]  # of blocks and a line: the nearest values


def fitted(
    x: jax.Array,
    axes: Sequence[int],
    plain: Line,
    starts: Sequence[Line],
    nearest: Nearest,
    *,
    peak: jax.Array,
    stored: Callable[[jax.Array], jax.Array] = lambda scale: scale,
    weight: jax.Array | None = None,
    moves: int = MOVES,
    in_one_pass: bool = True,
) -> Line:
    """The line for which `nearest` has the smallest squared error: the `plain` one, or one found from `starts`.

    `x` holds blocks over `axes`; lines have length 1 along these axes, as has `peak`, the largest magnitude. `stored`
    rounds as a leaf does; the squared error of an element counts `weight` times, 0 in the padding of blocks. A block
    with a NaN or an infinity keeps its plain line, and so does one of magnitudes beyond 2**48 or below 2**-48. With
    `moves=0` only the `starts` themselves are tried. Temporaries are of the size of `x` at most, however many lines are
    tried.
    """
    usable = (peak > 1 / RANGE) & (peak < RANGE)
    weigh = (lambda each, weight: each) if weight is None else (lambda each, weight: each * weight)
    count = math.prod(x.shape[axis] for axis in axes) if weight is None else sum_of(weight, axes)
    mean = 0 if plain[1] is None else sum_of(weigh(x, weight), axes) / count
    square = sum_of(weigh(x * x, weight), axes) - count * mean**2

    def step(number: jax.Array, state: tuple[Line, Line, jax.Array]) -> tuple[Line, Line, jax.Array]:
        """The line after this one, and the best so far."""
        line, best, least = state
        scale, offset = line

        def terms(x: jax.Array, weight: jax.Array | None) -> tuple[jax.Array, ...]:
            off = x - nearest(x, *line)
            weighed = weigh(off, weight)
            return weighed * off, weighed, weighed * x

        error, total_off, along = sums_of(terms, x, weight, axes, in_one_pass)
        mean_off, across = total_off / count, error
        if offset is not None:
            along, across = along - count * mean_off * mean, across - count * mean_off**2
        # The slope from the nearest values, `x - off`, to `x`, less 1; their spread is the divisor.
        spread = square - 2 * along + across
        slope = jnp.where(spread > 0, (along - across) / jnp.where(spread > 0, spread, 1), 0)
        moved = stored(scale * (1 + LENGTH * slope))
        if offset is not None:
            scaled_codes = mean - mean_off - offset  # their mean
            offset = stored(mean - scaled_codes * (moved / jnp.where(scale == 0, 1, scale)))
        less = (error < least) & usable
        least = jnp.where(less, error, least) * jnp.where(number == 0, 1 - MARGIN, 1)
        return begun(number, (moved, offset)), chosen(less, line, best), least

    def begun(number: jax.Array, line: Line) -> Line:
        """The next of the `starts` after every `moves`, and after the plain line; else `line`."""
        for i, start in enumerate(starts):
            line = chosen(number == i * (moves + 1), start, line)
        return line

    state = plain, plain, jnp.full_like(peak, jnp.inf)
    return lax.fori_loop(0, 1 + len(starts) * (moves + 1), step, state)[1]


def weights(importance: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`importance`, which broadcasts to `shape`, with mean 1; what is of no importance at all counts a little."""
    try:
        fits = jnp.broadcast_shapes(importance.shape, tuple(shape)) == tuple(shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"`importance` of shape {importance.shape} does not broadcast to the array, {tuple(shape)}")
    mean = jnp.mean(importance)
    even = importance.astype(jnp.float32) / jnp.where(mean > 0, mean, 1)
    return jnp.broadcast_to(jnp.maximum(jnp.where(mean > 0, even, 1), LEAST_WEIGHT), shape)


def chosen(where: jax.Array, line: Line, other: Line) -> Line:
    (scale, offset), (other_scale, other_offset) = line, other
    either = None if offset is None or other_offset is None else jnp.where(where, offset, other_offset)
    return jnp.where(where, scale, other_scale), either


def sums_of(
    terms: Callable[[jax.Array, jax.Array | None], tuple[jax.Array, ...]],
    x: jax.Array,
    weight: jax.Array | None,
    axes: Sequence[int],
    in_one_pass: bool,
) -> list[jax.Array]:
    """The sums of each of the `terms` over `axes`, if possible without any of them in memory as a whole.

    XLA on CPU would write them and read them again for each sum, which takes twice as long. But along the last axis it
    does not vectorize several sums at once, so that is for terms that are quickly computed: `in_one_pass`.
    """
    if not axes:  # an element is a block of its own
        return list(terms(x, weight))
    axis, length, last = axes[0] % x.ndim, x.shape[axes[0]], x.ndim - 1
    rows = length if length <= MOST_ROWS else SOME_ROWS
    if len(axes) == 1 and axis == last and length <= LONGEST and in_one_pass:
        found = terms(x, weight)
        zeros = (jnp.zeros((), x.dtype),) * len(found)
        found = lax.reduce(found, zeros, lambda a, b: tuple(map(jnp.add, a, b)), (axis,))
        return [jnp.expand_dims(each, axis) for each in found]
    if len(axes) > 1 or axis == last or length % rows or x.size < rows * LEAST_ROW:
        return [sum_of(each, axes) for each in terms(x, weight)]

    def of_row(row: jax.Array | int) -> list[jax.Array]:
        some = None if weight is None else _every(weight, rows, row, axis)
        return list(terms(_every(x, rows, row, axis), some))

    sums = lax.fori_loop(1, rows, lambda row, sums: list(map(jnp.add, sums, of_row(row))), of_row(0), unroll=UNROLL)
    return [sum_of(each, axes) for each in sums]


def _every(x: jax.Array, rows: int, row: jax.Array | int, axis: int) -> jax.Array:
    """Every `rows`-th row of `x` from `row` on: if `axis` is cut over devices, each of them has some."""
    if x.shape[axis] == rows:
        return lax.dynamic_index_in_dim(x, row, axis)
    split = x.reshape(*x.shape[:axis], x.shape[axis] // rows, rows, *x.shape[axis + 1 :])
    return lax.dynamic_index_in_dim(split, row, axis + 1, keepdims=False)


def sum_of(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return jnp.sum(x, axis=tuple(axes), keepdims=True)
