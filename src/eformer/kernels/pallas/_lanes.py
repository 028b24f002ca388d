"""Values of x, or of the result, in the order in which bytes hold them, and back: on TPU, by permuting lanes.

XLA takes ten times as many cycles to move single lanes about.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ._typed import result

LANES = 128
ROWS = 256  # of a block


def deinterleaved(x: jax.Array, parts: int, run: int, dtype: Any, interpret: Any) -> jax.Array:
    """(count, m, k) as (count, parts, m, k / parts): runs of `run` go to each part in turn. 128 * parts divides k."""
    return x[:, None].astype(dtype) if parts == 1 else _moved(x[:, None], parts, run, dtype, interpret)


def interleaved(x: jax.Array, run: int, interpret: Any) -> jax.Array:
    """The inverse."""
    parts = x.shape[1]
    return (x if parts == 1 else _moved(x, parts, run, x.dtype, interpret))[:, 0]


def _moved(x: jax.Array, parts: int, run: int, dtype: Any, interpret: Any) -> jax.Array:
    count, given, m, k = x.shape
    made = parts // given
    groups = k * given // (parts * LANES)
    together = next(n for n in (4, 2, 1) if groups % n == 0)
    rows = min(m, ROWS)

    def spec(operands: int) -> pl.BlockSpec:
        lanes = together * LANES * parts // operands
        return pl.BlockSpec((None, operands, rows, lanes), lambda b, i, j: (b, 0, i, j))

    return pl.pallas_call(
        functools.partial(_kernel, parts=parts, run=run),
        grid=(count, pl.cdiv(m, rows), groups // together),
        in_specs=[spec(given)],
        out_specs=spec(made),
        out_shape=result(x, (count, made, m, k * given // made), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="moved_lanes",
    )(x)


def _kernel(x_ref: Any, out_ref: Any, *, parts: int, run: int) -> None:
    split = x_ref.shape[0] == 1
    bits, run_bits = parts.bit_length() - 1, run.bit_length() - 1
    for group in range(x_ref.shape[2] * x_ref.shape[0] // (parts * LANES)):
        sources = [_vector(x_ref, group * parts, i, split).astype(jnp.float32) for i in range(parts)]
        lane = lax.broadcasted_iota(jnp.int32, sources[0].shape, 1)
        for i in range(parts):
            if split:
                at = ((lane >> run_bits) << (run_bits + bits)) + i * run + (lane & (run - 1))
                source, at = at >> 7, at & (LANES - 1)
            else:
                place = lane + i * LANES
                source = (place >> run_bits) & (parts - 1)
                at = ((place >> (run_bits + bits)) << run_bits) + (place & (run - 1))
            found = [jnp.take_along_axis(s, at, axis=1, mode="promise_in_bounds") for s in sources]
            value = functools.reduce(
                lambda value, j: jnp.where(source == j, found[j], value), range(1, parts), found[0]
            )
            _store(out_ref, group * parts, i, not split, value.astype(out_ref.dtype))


def _vector(ref: Any, first: int, i: int, along: bool) -> Any:
    """Of a group's vectors the `i`-th: one of many in a row, or of as many operands."""
    at = (first + i) * LANES if along else first // ref.shape[0] * LANES
    return ref[0 if along else i, :, at : at + LANES]


def _store(ref: Any, first: int, i: int, along: bool, value: Any) -> None:
    at = (first + i) * LANES if along else first // ref.shape[0] * LANES
    ref[0 if along else i, :, at : at + LANES] = value
