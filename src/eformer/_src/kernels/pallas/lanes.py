"""On TPU, permuting lanes brings x into the order of the codes, and the result back, in a tenth of XLA's cycles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from .formats import result

LANES = 128
ROWS = 256  # of a block
Interpret = bool | pltpu.InterpretParams


def deinterleaved(x: jax.Array, parts: int, run: int, dtype: DTypeLike, interpret: Interpret) -> jax.Array:
    """(count, m, k) as (count, parts, m, k / parts): each part gets `run` elements in turn. 128 * parts divides k."""
    return x[:, None].astype(dtype) if parts == 1 else _moved(x[:, None], parts, run, dtype, interpret)


def interleaved(x: jax.Array, run: int, interpret: Interpret) -> jax.Array:
    """(count, parts, m, k / parts) as (count, m, k): the inverse of `deinterleaved`."""
    parts = x.shape[1]
    return (x if parts == 1 else _moved(x, parts, run, x.dtype, interpret))[:, 0]


def _moved(x: jax.Array, parts: int, run: int, dtype: DTypeLike, interpret: Interpret) -> jax.Array:
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


def _kernel(x_ref: jax.Ref, out_ref: jax.Ref, *, parts: int, run: int) -> None:
    split = x_ref.shape[0] == 1
    bits, run_bits = parts.bit_length() - 1, run.bit_length() - 1
    for group in range(x_ref.shape[2] * x_ref.shape[0] // (parts * LANES)):
        sources = [x_ref[_place(x_ref, group * parts, i, split)].astype(jnp.float32) for i in range(parts)]
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
            out_ref[_place(out_ref, group * parts, i, not split)] = value.astype(out_ref.dtype)


def permuted_lanes(x: jax.Array, index: jax.Array) -> jax.Array:
    """Of x (rows, 128) in 32 bits, in every row the lanes that `index` (rows, 128) says."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _place(ref: jax.Ref, first: int, i: int, along: bool) -> tuple[int, slice, slice]:
    """Where the `i`-th vector of a group is: along the lanes of one operand, or in the `i`-th operand."""
    at = (first + i) * LANES if along else first // ref.shape[0] * LANES
    return (0 if along else i), slice(None), slice(at, at + LANES)
