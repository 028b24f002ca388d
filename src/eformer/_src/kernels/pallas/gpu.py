"""Matmuls with quantized matrices on GPU, through Triton: each program decodes the tiles it multiplies.

A byte may hold several codes along the contracted axis: each place in the byte is multiplied with its own columns of x.
Or it holds several codes along the free axis: each place gives its own columns of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from eformer._src.kernels.matrix import Matrix

from .formats import FORMATS, Format, alike, applied_scales, has_kernel, result, scale_and_offset

supports = has_kernel
WARPS = 8


class Tiles(NamedTuple):
    """Rows of x, and bytes along the contracted and the free axis: powers of two, at least 16 for tensor cores."""

    m: int
    k: int
    n: int


class _Plan(NamedTuple):
    """What is known of a call when it is compiled."""

    format: Format
    contracted_axis: int
    packed_axis: int
    block_size: int
    sizes: tuple[int, int, int]  # m, and bytes along the contracted and the free axis
    values: tuple[int, int]  # along the contracted and the free axis
    tiles: Tiles
    splits: int  # parts of the contracted axis, to keep all processors busy

    @property
    def contracted_per_byte(self) -> int:
        return self.format.codes_per_byte if self.packed_axis == self.contracted_axis else 1

    @property
    def free_per_byte(self) -> int:
        return self.format.codes_per_byte // self.contracted_per_byte


def default_tiles(matrix: Matrix, contracted_axis: int, m: int) -> Tiles:
    """Small enough that nothing spills on A100 and H100: `tests/accelerators` compiles them with ptxas."""
    if m <= 16:
        return Tiles(16, 32, 64)
    per_byte = FORMATS[matrix.format].codes_per_byte
    if matrix.packed_axis == contracted_axis:
        return Tiles(64, 16 if per_byte > 1 else 32, 64)
    return Tiles(64, 32, 64 if per_byte <= 2 else 32)


def matmul(x: jax.Array, matrix: Matrix, contracted_axis: int, *, interpret: bool = False) -> jax.Array:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k).

    It multiplies in bfloat16 if x is bfloat16, else in float32 at JAX's default precision.
    """
    count, m, k = x.shape
    tiles = default_tiles(matrix, contracted_axis, m)
    format = FORMATS[matrix.format]
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    x, out_scale = applied_scales(x, matrix, contracted_axis)
    n_bytes, k_bytes = matrix.codes[0].shape[2 - contracted_axis], matrix.codes[0].shape[1 + contracted_axis]
    n = matrix.cols if contracted_axis == 0 else matrix.rows
    programs = count * pl.cdiv(m, tiles.m) * pl.cdiv(n_bytes, tiles.n)
    # About 256 programs fill a GPU; each takes at least 4 steps.
    splits = max(1, min(256 // programs, k_bytes // (4 * tiles.k)))
    plan = _Plan(
        format,
        contracted_axis,
        matrix.packed_axis,
        matrix.block_size,
        (m, k_bytes, n_bytes),
        (k, n),
        tiles,
        splits,
    )
    table = None if format.table is None else alike(x, format.table)
    # Scales of blocks or of columns: no format has both.
    scales = scale_and_offset(matrix) if format.block_scales else (None if out_scale is None else out_scale[:, 0],)
    optional = [each for each in (table, *scales) if each is not None]
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(count * splits, pl.cdiv(m, tiles.m), pl.cdiv(n_bytes, tiles.n)),
        out_shape=result(x, (count, splits, m, n), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
        name=f"{matrix.format}_matmul",
    )(x.astype(dtype), *matrix.codes, *optional)
    return out[:, 0] if splits == 1 else jnp.sum(out, 1)


def _kernel(x_ref: jax.Ref, *refs: jax.Ref, plan: _Plan) -> None:
    *inputs, out_ref = refs
    planes = [inputs.pop(0) for _ in plan.format.planes]
    table_ref = None if plan.format.table is None else inputs.pop(0)
    count, split = lax.div(pl.program_id(0), plan.splits), lax.rem(pl.program_id(0), plan.splits)
    rows = pl.program_id(1) * plan.tiles.m + jnp.arange(plan.tiles.m)
    cols = pl.program_id(2) * plan.tiles.n + jnp.arange(plan.tiles.n)
    m, k_bytes, _ = plan.sizes
    k, n = plan.values
    steps = pl.cdiv(k_bytes, plan.tiles.k)
    per_split = pl.cdiv(steps, plan.splits)
    padded = k % plan.contracted_per_byte != 0

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        depth = i * plan.tiles.k + jnp.arange(plan.tiles.k)
        values = _decoded(planes, table_ref, inputs, count, depth, cols, plan)
        added = list(sums)
        for place, value in enumerate(values):
            contracted, free = (place, 0) if plan.contracted_per_byte > 1 else (0, place)
            at = depth * plan.contracted_per_byte + contracted
            x = plgpu.load(
                x_ref.at[count, rows[:, None], at[None, :]],
                mask=(rows < m)[:, None] & (at < k)[None, :],
                other=0.0,
            )
            if padded and plan.format.has_nan:
                value = jnp.where((at < k)[:, None], value, 0.0)
            added[free] += jnp.dot(x, value.astype(x.dtype), preferred_element_type=jnp.float32)
        return tuple(added)

    zero = jnp.zeros((plan.tiles.m, plan.tiles.n), jnp.float32)
    first = split * per_split
    sums = lax.fori_loop(first, jnp.minimum(first + per_split, steps), step, (zero,) * plan.free_per_byte)
    for place, total in enumerate(sums):
        at = cols * plan.free_per_byte + place
        if inputs and not plan.format.block_scales:  # a scale per column
            total *= plgpu.load(inputs[0].at[count, at], mask=at < n, other=0.0)[None, :]
        plgpu.store(
            out_ref.at[count, split, rows[:, None], at[None, :]], total, mask=(rows < m)[:, None] & (at < n)[None, :]
        )


def _decoded(
    planes: Sequence[jax.Ref],
    table_ref: jax.Ref | None,
    scales: Sequence[jax.Ref],
    count: jax.Array,
    depth: jax.Array,
    cols: jax.Array,
    plan: _Plan,
) -> list[jax.Array]:
    """float32 (k, n) for each place in a byte: the values of a tile. Bytes outside the matrix count as 0."""
    _, k_bytes, n_bytes = plan.sizes
    format, down, across = plan.format, depth[:, None], cols[None, :]
    inside = (down < k_bytes) & (across < n_bytes)
    at = (down, across) if plan.contracted_axis == 0 else (across, down)

    def load(ref: jax.Ref, shared: int) -> jax.Array:
        """Of a leaf with an entry for `shared` bytes of the first plane along the packed axis."""
        entry = [lax.div(axis, shared) if i == plan.packed_axis and shared > 1 else axis for i, axis in enumerate(at)]
        return plgpu.load(ref.at[count, entry[0], entry[1]], mask=inside, other=0)

    byte = load(planes[0], 1).astype(jnp.int32)
    if format.table is None and not format.block_scales:
        return [byte.astype(jnp.float32)]
    codes = [(byte >> shift) & format.mask for shift in format.shifts]
    below = format.planes[0]
    for ref, bits in zip(planes[1:], format.planes[1:], strict=True):
        shared = format.planes[0] // bits
        turn = lax.rem(at[plan.packed_axis], shared) * (8 // shared)
        rest = load(ref, shared).astype(jnp.int32) >> turn
        codes = [code | ((rest >> bits * i) & 2**bits - 1) << below for i, code in enumerate(codes)]
        below += bits
    if table_ref is not None:
        values = [plgpu.load(table_ref.at[code]) for code in codes]
    else:
        centre = 0 if len(scales) > 1 else format.centre
        values = [(code - centre).astype(jnp.float32) for code in codes]
    if not format.block_scales:
        return values
    scale, *offset = (load(ref, plan.block_size // format.codes_per_byte).astype(jnp.float32) for ref in scales)
    return [value * scale + offset[0] if offset else value * scale for value in values]
