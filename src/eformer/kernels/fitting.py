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
    moves: int = MOVES,
) -> Line:
    """The line for which `nearest` has the smallest squared error: the `plain` one, or one found from `starts`.

    `x` holds blocks over `axes`; lines have length 1 along these axes, as has `peak`, the largest magnitude. `stored`
    rounds as a leaf does; `present` is False in the padding of blocks. A block with a NaN or an infinity keeps its
    plain line, and so does one at the ends of the range, where another might overflow or vanish. With `moves=0` only the
    `starts` themselves are tried. Temporaries are of the size of `x`, however many lines are tried.
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

    def step(number: jax.Array, state: tuple[Line, Line, jax.Array]) -> tuple[Line, Line, jax.Array]:
        """The line after this one, and the best so far. Always three sums: XLA on CPU vectorizes no lone one."""
        line, best, least = state
        (scale, offset), off = line, differences(line)
        error = sum_of(off * off, axes)
        mean_off = sum_of(off, axes) / count
        along = sum_of(off * x, axes)
        across = error
        if offset is not None:
            along, across = along - count * mean_off * mean, across - count * mean_off**2
        # The slope from the nearest values, `x - off`, to `x`, less 1; their spread is the divisor.
        spread = square - 2 * along + across
        slope = jnp.where(spread > 0, (along - across) / jnp.where(spread > 0, spread, 1), 0)
        moved = as_stored(scale * (1 + LENGTH * slope))
        if offset is not None:
            scaled_codes = mean - mean_off - offset  # their mean
            offset = as_stored(mean - scaled_codes * (moved / jnp.where(scale == 0, 1, scale)))
        less = (error < least) & usable
        least = jnp.where(less, error, least) * jnp.where(number == 0, 1 - MARGIN, 1)
        return begun(number, (moved, offset)), chosen(less, out_of_units(line), best), least

    def begun(number: jax.Array, line: Line) -> Line:
        """The next of the `starts` after every `moves`, and after the plain line; else `line`."""
        for i, start in enumerate(starts):
            line = chosen(number == i * (moves + 1), in_units(start), line)
        return line

    def as_stored(scale: jax.Array) -> jax.Array:
        return stored(scale / unit) * unit

    def in_units(line: Line) -> Line:
        return line[0] * unit, None if line[1] is None else line[1] * unit

    def out_of_units(line: Line) -> Line:
        return line[0] / unit, None if line[1] is None else line[1] / unit

    state = in_units(plain), plain, jnp.full_like(peak, jnp.inf)
    return lax.fori_loop(0, 1 + len(starts) * (moves + 1), step, state)[1]


def chosen(where: jax.Array, line: Line, other: Line) -> Line:
    (scale, offset), (other_scale, other_offset) = line, other
    either = None if offset is None or other_offset is None else jnp.where(where, offset, other_offset)
    return jnp.where(where, scale, other_scale), either


def sum_of(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return jnp.sum(x, axis=tuple(axes), keepdims=True)
