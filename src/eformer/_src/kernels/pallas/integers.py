"""Matmuls on TPU with integers of 2 to 8 bits in blocks, with a scale and an offset each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eformer._src.kernels.matrix import Matrix

from .formats import FORMATS, result, scale_and_offset
from .integers_kernel import PART, Plan, Tiles, kernel
from .lanes import LANES, Interpret, deinterleaved, interleaved

FEW_ROWS = 64  # of x, for which scales multiply x or sums
MOST_ROWS = 256  # that enter the matrix unit for that, counting each block
BLOCKS = (16, 32, 64, 128, 256)


def parts_of_blocks(matrix: Matrix) -> int | None:
    """The largest of `BLOCKS` that divides blocks; None if there is none."""
    if matrix.block_size >= (matrix.rows, matrix.cols)[matrix.packed_axis]:
        return BLOCKS[-1]  # there is one block
    return max((size for size in BLOCKS if matrix.block_size % size == 0), default=None)


def default_tiles(matrix: Matrix, m: int, most: tuple[int, int] = (1024, 512)) -> Tiles:
    """Tiles of up to `most` rows and columns of codes, as far as whole bytes and vectors of scales allow."""
    format, axis, blocks = FORMATS[matrix.format], matrix.packed_axis, 8 * (parts_of_blocks(matrix) or 1)
    if axis == 0:
        least, most = (max(PART, blocks), LANES), most
    else:
        least, most = (PART, max(8 * LANES // min(format.planes), blocks)), (most[1], most[0])
    sizes = zip(least, most, (matrix.rows, matrix.cols), strict=True)
    rows, cols = (min(max(most, unit), _round_up(size, unit)) for unit, most, size in sizes)
    return Tiles(min(_round_up(m, 8), 512), rows, cols)


def matmul(
    x: jax.Array,
    matrix: Matrix,
    contracted_axis: int,
    *,
    tiles: Tiles | None = None,
    few_rows: int = FEW_ROWS,
    interpret: Interpret = False,
) -> jax.Array:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k)."""
    count, m, _ = x.shape
    format, shape = FORMATS[matrix.format], (matrix.rows, matrix.cols)
    block_size = parts_of_blocks(matrix)
    assert block_size is not None
    scales = [leaf for leaf in scale_and_offset(matrix) if leaf is not None]
    tiles = tiles or default_tiles(matrix, m)
    plan = Plan(format, contracted_axis, matrix.packed_axis, block_size, tiles, few_rows=m <= few_rows)
    if tiles.m * plan.blocks > MOST_ROWS:
        plan = plan._replace(few_rows=False)
    steps = [pl.cdiv(size, tile) for size, tile in zip(shape, plan.tiles[1:], strict=True)]
    grid = (count, pl.cdiv(m, plan.tiles.m), steps[1 - contracted_axis], steps[contracted_axis])
    padded = [n * tile for n, tile in zip(steps, plan.tiles[1:], strict=True)]
    apart = plan.operands if contracted_axis == 1 else 1
    x = _padded(x, {1: grid[1] * plan.tiles.m, 2: padded[contracted_axis]})
    x = deinterleaved(x, apart, 1, jnp.bfloat16, interpret)
    depth = plan.tiles.rows if contracted_axis == 0 else plan.lanes
    x_spec = pl.BlockSpec((None, apart, plan.tiles.m, depth), lambda b, i, j, k: (b, 0, i, k))
    repeated = [_laid_out(leaf, plan, matrix, padded) for leaf in scales]
    width, together = (plan.lanes, plan.operands) if contracted_axis == 0 else (plan.tiles.rows, 1)
    out = pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid=grid,
        in_specs=[x_spec, *(_codes_spec(plan, bits) for bits in format.planes), *[_scales_spec(plan)] * len(scales)],
        out_specs=pl.BlockSpec((None, together, plan.tiles.m, width), lambda b, i, j, k: (b, 0, i, j)),
        out_shape=result(x, (count, together, grid[1] * plan.tiles.m, grid[2] * width), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name=f"{matrix.format}_matmul",
    )(x, *matrix.codes, *repeated)
    return interleaved(out, 1, interpret)[:, :m, : shape[1 - contracted_axis]]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    return jnp.pad(x, [(0, max(0, sizes.get(axis, size) - size)) for axis, size in enumerate(x.shape)])


def _laid_out(scale: jax.Array, plan: Plan, matrix: Matrix, padded: Sequence[int]) -> jax.Array:
    """Scales or offsets as the kernel reads them: (count, blocks, rows or cols), 0 behind the end of the matrix."""
    axis = plan.packed_axis
    scale = scale if axis == 0 else jnp.swapaxes(scale, 1, 2)
    # A vector has eight rows of float32, and 16 of bfloat16.
    if scale.dtype == jnp.float16 or plan.tiles[1 + axis] // plan.block_size % 16:
        scale = scale.astype(jnp.float32)
    if plan.block_size < matrix.block_size:
        length = min(matrix.block_size, (matrix.rows, matrix.cols)[axis])
        scale = jnp.repeat(scale, pl.cdiv(length, plan.block_size), 1)
    return _padded(scale, {1: padded[axis] // plan.block_size, 2: padded[1 - axis]})


def _codes_spec(plan: Plan, bits: int) -> pl.BlockSpec:
    rows, cols = (size * bits // 8 if axis == plan.packed_axis else size for axis, size in enumerate(plan.tiles[1:]))
    return pl.BlockSpec((None, rows, cols), lambda b, i, j, k: (b, *((k, j) if plan.contracted_axis == 0 else (j, k))))


def _scales_spec(plan: Plan) -> pl.BlockSpec:
    blocks, across = plan.tiles[1 + plan.packed_axis] // plan.block_size, plan.tiles[2 - plan.packed_axis]
    return pl.BlockSpec((None, blocks, across), lambda b, i, j, k: (b, *((k, j) if plan.sums_blocks else (j, k))))
