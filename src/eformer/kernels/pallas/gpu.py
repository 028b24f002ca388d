"""Products with quantized matrices on GPU, through Triton: each program decodes the tiles it multiplies.

Bytes that hold several of the values that are summed are multiplied with every other value of x, or every fourth; those
that hold several columns of the result give every other column.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from eformer.kernels import Matrix, reference

from ._scales import beside_product, block_scales, is_outer
from ._tables import VALUES_PER_BYTE
from ._typed import alike, result


class Tiles(NamedTuple):
    """Rows of x, and bytes along the axes that are summed and free; powers of two, 16 at least for tensor cores."""

    m: int
    k: int
    n: int


class _Plan(NamedTuple):
    """All that is known of a call when it is compiled."""

    format: str
    contracted_axis: int
    packed_axis: int
    block_size: int
    sizes: tuple[int, int, int]  # m, and bytes along the summed and the free axis
    values: tuple[int, int]  # along the summed and the free axis
    tiles: Tiles
    splits: int  # of the sum, to keep all processors busy
    scaled: bool

    @property
    def summed(self) -> int:
        """Values of a byte along the summed axis."""
        return VALUES_PER_BYTE[self.format] if self.packed_axis == self.contracted_axis else 1

    @property
    def free(self) -> int:
        return VALUES_PER_BYTE[self.format] // self.summed


def supports(matrix: Matrix) -> bool:
    """A scale for each element is left to XLA."""
    return matrix.format == "nf4" or is_outer(matrix)


WARPS = 8


def default_tiles(matrix: Matrix, contracted_axis: int, m: int) -> Tiles:
    """Small enough that nothing spills on A100 and H100: `tests/accelerators` looks at what ptxas says."""
    if m <= 16:
        return Tiles(16, 32, 64)
    several = matrix.packed_axis == contracted_axis and matrix.format != "int8"  # values of x for a byte
    return Tiles(64, 16 if several else 32, 64)


def matmul(
    x: jax.Array, matrix: Matrix, contracted_axis: int, *, tiles: Tiles | None = None, interpret: bool = False
) -> jax.Array:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k).

    Products are of bfloat16 numbers if x is bfloat16, else of float32 numbers at JAX's default precision.
    """
    count, m, k = x.shape
    tiles = tiles or default_tiles(matrix, contracted_axis, m)
    scales, scaled = [], False
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    if matrix.format == "nf4":
        scales = [block_scales(matrix)]
    else:
        x, out_scale = beside_product(x, matrix, contracted_axis)
        scales, scaled = ([], False) if out_scale is None else ([out_scale[:, 0]], True)
    n_bytes, k_bytes = matrix.codes[0].shape[2 - contracted_axis], matrix.codes[0].shape[1 + contracted_axis]
    n = matrix.cols if contracted_axis == 0 else matrix.rows
    programs = count * pl.cdiv(m, tiles.m) * pl.cdiv(n_bytes, tiles.n)
    # Some 256 programs fill a GPU; each takes 4 steps at least.
    splits = max(1, min(256 // programs, k_bytes // (4 * tiles.k)))
    plan = _Plan(
        matrix.format,
        contracted_axis,
        matrix.packed_axis,
        matrix.block_size,
        (m, k_bytes, n_bytes),
        (k, n),
        tiles,
        splits,
        scaled,
    )
    tables = {"nf4": [reference.NF4_CODES], "ternary": [reference.TERNARY_CODES], "int8": []}[matrix.format]
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(count * splits, pl.cdiv(m, tiles.m), pl.cdiv(n_bytes, tiles.n)),
        out_shape=result(x, (count, splits, m, n), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
        name=f"{plan.format}_matmul",
    )(x.astype(dtype), *matrix.codes, *(alike(x, jnp.asarray(table)) for table in tables), *scales)
    return out[:, 0] if splits == 1 else jnp.sum(out, 1)


def _kernel(x_ref: Any, codes_ref: Any, *refs: Any, plan: _Plan) -> None:
    *inputs, out_ref = refs
    table_ref = inputs.pop(0) if plan.format != "int8" else None
    count, split = lax.div(pl.program_id(0), plan.splits), lax.rem(pl.program_id(0), plan.splits)
    rows = pl.program_id(1) * plan.tiles.m + jnp.arange(plan.tiles.m)
    cols = pl.program_id(2) * plan.tiles.n + jnp.arange(plan.tiles.n)
    m, k_bytes, n_bytes = plan.sizes
    steps = pl.cdiv(k_bytes, plan.tiles.k)
    per_split = pl.cdiv(steps, plan.splits)

    def step(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        depth = i * plan.tiles.k + jnp.arange(plan.tiles.k)
        inside = (depth < k_bytes)[:, None] & (cols < n_bytes)[None, :]
        values = _decoded(codes_ref, table_ref, inputs, count, depth, cols, inside, plan)
        added = list(sums)
        for place, value in enumerate(values):
            summed, free = (place, 0) if plan.summed > 1 else (0, place)
            at = depth * plan.summed + summed
            x = plgpu.load(
                x_ref.at[count, rows[:, None], at[None, :]],
                mask=(rows < m)[:, None] & (at < plan.values[0])[None, :],
                other=0.0,
            )
            added[free] += jnp.dot(x, value.astype(x.dtype), preferred_element_type=jnp.float32)
        return tuple(added)

    zero = jnp.zeros((plan.tiles.m, plan.tiles.n), jnp.float32)
    first = split * per_split
    sums = lax.fori_loop(first, jnp.minimum(first + per_split, steps), step, (zero,) * plan.free)
    for place, total in enumerate(sums):
        at = cols * plan.free + place
        inside = at < plan.values[1]
        if plan.scaled:
            total *= plgpu.load(inputs[0].at[count, at], mask=inside, other=0.0)[None, :]
        plgpu.store(
            out_ref.at[count, split, rows[:, None], at[None, :]], total, mask=(rows < m)[:, None] & inside[None, :]
        )


def _decoded(
    codes_ref: Any, table_ref: Any, scales: list[Any], count: Any, depth: Any, cols: Any, inside: Any, plan: _Plan
) -> list[Any]:
    """The values of the bytes of a tile, by their place in a byte: float32 (k, n); 0 where there is none."""
    down, across = depth[:, None], cols[None, :]
    at = (down, across) if plan.contracted_axis == 0 else (across, down)
    codes = plgpu.load(codes_ref.at[count, at[0], at[1]], mask=inside, other=0).astype(jnp.int32)
    if plan.format == "int8":
        return [codes.astype(jnp.float32)]
    if plan.format == "ternary":
        return [plgpu.load(table_ref.at[(codes >> 2 * i) & 3]) for i in range(4)]
    per_block = plan.block_size // 2
    block = [axis if i != plan.packed_axis else lax.div(axis, per_block) for i, axis in enumerate(at)]
    scale = plgpu.load(scales[0].at[count, block[0], block[1]], mask=inside, other=0.0)
    return [plgpu.load(table_ref.at[nibble]) * scale for nibble in ((codes >> 4) & 15, codes & 15)]
