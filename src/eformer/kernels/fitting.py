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
    present: jax.Array | None = None,
) -> Line:
    """The line for which `nearest` has the smallest squared error: the `plain` one, or one found from `starts`.

    `x` holds blocks over `axes`; lines have length 1 along these axes, as has `peak`, the largest magnitude. `stored`
    rounds as a leaf does; `present` is False in the padding of blocks. A block with a NaN or an infinity keeps its
    plain line, and so does one at the ends of the range, where another might overflow or vanish. Temporaries are of the
    size of `x`, however many lines are tried.
    """
    limits = jnp.finfo(peak.dtype)
    usable = (peak > limits.tiny * 2.0**8) & (peak < limits.max * 2.0**-8)
    # To near 1 by a power of two, which changes no digit: squares then neither overflow nor vanish.
    unit = 1 / jnp.clip(lax.reduce_precision(peak, limits.nexp, 0), limits.tiny, 1 / limits.tiny)
    x = x * unit
    count = math.prod(x.shape[axis] for axis in axes) if present is None else sum_of(present.astype(x.dtype), axes)
    mean = 0 if plain[1] is None else sum_of(x, axes) / count
    square = sum_of(x * x, axes) - count * mean**2

    def differences(line: Line) -> jax.Array:
        off = x - nearest(x, *line)
        return off if present is None else jnp.where(present, off, 0)

    def better(line: Line, error: jax.Array, best: Line, least: jax.Array) -> tuple[Line, jax.Array]:
        less = (error < least) & usable
        offset = None if line[1] is None or best[1] is None else jnp.where(less, line[1], best[1])
        return (jnp.where(less, line[0], best[0]), offset), jnp.where(less, error, least)

    def move(_: jax.Array, state: tuple[Line, Line, jax.Array]) -> tuple[Line, Line, jax.Array]:
        line, best, least = state
        (scale, offset), off = line, differences(line)
        error = sum_of(off * off, axes)
        mean_off = 0 if offset is None else sum_of(off, axes) / count
        along = sum_of(off * x, axes) - count * mean_off * mean
        across = error - count * mean_off**2
        # The slope from the nearest values, `x - off`, to `x`, less 1; their spread is the divisor.
        spread = square - 2 * along + across
        slope = jnp.where(spread > 0, (along - across) / jnp.where(spread > 0, spread, 1), 0)
        moved = as_stored(scale * (1 + LENGTH * slope))
        if offset is not None:
            scaled_codes = mean - mean_off - offset  # their mean
            offset = as_stored(mean - scaled_codes * (moved / jnp.where(scale == 0, 1, scale)))
        return (moved, offset), *better(line, error, best, least)

    def as_stored(scale: jax.Array) -> jax.Array:
        return stored(scale / unit) * unit

    def in_units(line: Line) -> Line:
        return line[0] * unit, None if line[1] is None else line[1] * unit

    least = sum_of(differences(in_units(plain)) ** 2, axes) * (1 - MARGIN)
    best = in_units(plain)
    for start in starts:
        line, best, least = lax.fori_loop(0, MOVES, move, (in_units(start), best, least))
        best, least = better(line, sum_of(differences(line) ** 2, axes), best, least)
    scale, offset = best
    if offset is not None and plain[1] is not None:
        offset = jnp.where(usable, offset / unit, plain[1])
    return jnp.where(usable, scale / unit, plain[0]), offset


def sum_of(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return jnp.sum(x, axis=tuple(axes), keepdims=True)
