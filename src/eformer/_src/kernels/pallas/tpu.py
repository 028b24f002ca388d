"""Matmuls with quantized matrices on TPU, which decode tile by tile next to the matrix unit.

Codes are looked up in a register: a vector permutes eight sublanes by index in one instruction (v4 can't, and permutes
lanes). Each word looked up holds two neighbouring values as bfloat16. So codes packed along rows are two rows of the
operand, laid out as the matrix unit reads them. It multiplies in bfloat16 and sums in float32, as JAX does by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eformer._src.kernels import reference
from eformer._src.kernels.matrix import Matrix

from . import integers as _integers
from .formats import FORMATS, Format, alike, applied_scales, has_kernel, nibble_words, result, scale_and_offset
from .lanes import LANES, Interpret, deinterleaved, interleaved

Tiles = _integers.Tiles  # here of rows and columns of codes
Index = int | jax.Array  # of a block in the grid


class _Plan(NamedTuple):
    """What is known of a call when it is compiled."""

    name: str  # of the format
    contracted_axis: int
    packed_axis: int
    block_size: int
    shape: tuple[int, ...]  # of the codes
    length: int  # of the contracted axis
    scale_shape: tuple[int, ...]  # of the blocks' scales
    tiles: Tiles
    scale_after: bool  # blocks' scales multiply partial sums, not the matrix
    sublanes: bool  # permuting them is an instruction
    integer: bool  # x is int8

    @property
    def format(self) -> Format:
        return FORMATS[self.name]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size // self.format.codes_per_byte

    @property
    def paired_rows(self) -> int:
        """Rows of the operand in a row of codes: words that hold two rows are used as they are."""
        scale_before = self.format.block_scales and not self.scale_after
        return 2 if self.format.table is not None and self.packed_axis == 0 and not scale_before else 1

    @property
    def operands(self) -> int:
        """Matrices that a tile of codes decodes to."""
        return self.format.codes_per_byte // self.paired_rows

    @property
    def contracted_operands(self) -> int:
        return self.operands if self.packed_axis == self.contracted_axis else 1

    @property
    def free_operands(self) -> int:
        return self.operands // self.contracted_operands

    @property
    def depth(self) -> int:
        """Elements of the contracted axis that one grid step covers, per operand."""
        return self.tiles.rows * self.paired_rows if self.contracted_axis == 0 else self.tiles.cols

    @property
    def width(self) -> int:
        """Columns of the result that one grid step covers, per operand."""
        return self.tiles.cols if self.contracted_axis == 0 else self.tiles.rows * self.paired_rows

    @property
    def sums(self) -> np.dtype:
        return np.dtype(np.int32 if self.integer else np.float32)

    @property
    def ragged(self) -> bool:
        """Whether the last step reads codes behind the end of the contracted axis."""
        axis = self.contracted_axis
        return self.shape[axis] % self.tiles[1 + axis] != 0


def supports(matrix: Matrix) -> bool:
    """Blocks that do not fill vectors or tiles are left to XLA."""
    if not has_kernel(matrix):
        return False
    format = FORMATS[matrix.format]
    if format.integer_blocks:
        return _integers.parts_of_blocks(matrix) is not None
    return not format.block_scales or matrix.block_size in _integers.BLOCKS


def default_tiles(matrix: Matrix, m: int) -> Tiles:
    """Large enough that twice as large would save less than 10% of v5e's static cycles."""
    _, rows, cols = matrix.codes[0].shape
    format = FORMATS[matrix.format]
    least = max(LANES, 4 * matrix.block_size) if format.block_scales else LANES  # eight rows of scales
    most = 1024 if format.table is None else 512
    return Tiles(
        min(_round_up(m, 8), 512), min(max(most, least), _round_up(rows, least)), min(most, _round_up(cols, LANES))
    )


def matmul(
    x: jax.Array,
    matrix: Matrix,
    contracted_axis: int,
    *,
    tiles: Tiles | None = None,
    scale_after: bool = True,
    sublanes: bool = True,
    round_x: bool = False,
    interpret: Interpret = False,
) -> jax.Array:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k).

    With `round_x`, if the codes are int8 values, each row of x is rounded to int8 too, and sums of integers are exact.
    """
    count, m, length = x.shape
    format = FORMATS[matrix.format]
    if format.integer_blocks:
        few_rows = _integers.FEW_ROWS if scale_after else 0
        return _integers.matmul(x, matrix, contracted_axis, tiles=tiles, few_rows=few_rows, interpret=interpret)
    scales = scale_and_offset(matrix)[0].astype(jnp.float32) if format.block_scales else None
    x, out_scale = applied_scales(x, matrix, contracted_axis)
    x_scale = None
    if round_x and format.table is None:
        x, x_scale = reference.encode_int8(x, (2,))
        x_scale, out_scale = x_scale if out_scale is None else x_scale * out_scale, None
    plan = _Plan(
        matrix.format,
        contracted_axis,
        matrix.packed_axis,
        matrix.block_size,
        matrix.codes[0].shape[1:],
        length,
        () if scales is None else scales.shape[1:],
        tiles or default_tiles(matrix, m),
        scale_after and m <= 64 and matrix.packed_axis == 0 == contracted_axis and matrix.block_size >= 32,
        sublanes,
        x_scale is not None,
    )
    grid = (
        count,
        pl.cdiv(m, plan.tiles.m),
        pl.cdiv(plan.shape[1 - contracted_axis], plan.tiles[2 - contracted_axis]),
        pl.cdiv(plan.shape[contracted_axis], plan.tiles[1 + contracted_axis]),
    )
    run = plan.paired_rows
    x = _padded(x, {1: grid[1] * plan.tiles.m, 2: grid[3] * plan.depth * plan.contracted_operands})
    x = deinterleaved(x, plan.contracted_operands, run, x.dtype if plan.integer else jnp.bfloat16, interpret)
    x_spec = pl.BlockSpec((None, plan.contracted_operands, plan.tiles.m, plan.depth), lambda b, i, j, k: (b, 0, i, k))
    operands, specs = [x, matrix.codes[0]], [x_spec, _spec(plan, *plan.tiles[1:])]
    if format.table is not None:
        table = alike(x, _tables(plan))
        operands.append(table)
        specs.append(pl.BlockSpec(table.shape, lambda *_: (0, 0)))
    if scales is not None:
        operands.append(scales)
        specs.append(_scales_spec(plan))
    if out_scale is not None:
        width = grid[2] * plan.width * plan.free_operands
        out_scale = _padded(out_scale, {2: width}).reshape(count, 1, -1, plan.free_operands, run)
        operands.append(jnp.moveaxis(out_scale, 3, 1).reshape(count, plan.free_operands, 1, -1))
        specs.append(pl.BlockSpec((None, plan.free_operands, 1, plan.width), lambda b, i, j, k: (b, 0, 0, j)))
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan, scaled=out_scale is not None),
        grid=grid,
        in_specs=specs,
        out_specs=pl.BlockSpec((None, plan.free_operands, plan.tiles.m, plan.width), lambda b, i, j, k: (b, 0, i, j)),
        out_shape=result(x, (count, plan.free_operands, grid[1] * plan.tiles.m, grid[2] * plan.width), plan.sums),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name=f"{plan.name}_matmul",
    )(*operands)
    width = (matrix.rows, matrix.cols)[1 - contracted_axis]
    out = interleaved(out, run, interpret)[:, :m, :width]
    return out if x_scale is None else out.astype(jnp.float32) * x_scale


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    return jnp.pad(x, [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)])


def _tables(plan: _Plan) -> np.ndarray:
    words = nibble_words(plan.name)
    if plan.sublanes:
        return np.broadcast_to(words.reshape(32, 1), (32, LANES))
    return np.pad(words, ((0, 6), (0, LANES - 16)))


def _spec(plan: _Plan, rows: int, cols: int, block: Callable[[Index], Index] = lambda col: col) -> pl.BlockSpec:
    """Blocks of codes or scales (rows, cols), one for each grid step; `block` gives the column of blocks for a step."""

    def index(b: Index, i: Index, j: Index, k: Index) -> tuple[Index, Index, Index]:
        del i
        row, col = (k, j) if plan.contracted_axis == 0 else (j, k)
        return b, row, block(col)

    return pl.BlockSpec((None, rows, cols), index)


def _scales_spec(plan: _Plan) -> pl.BlockSpec:
    rows, cols = plan.tiles[1:]
    if plan.packed_axis == 0:
        return _spec(plan, rows // plan.bytes_per_block, cols)
    return _spec(plan, rows, LANES, lambda col: lax.div(col * cols, LANES * plan.bytes_per_block))


def _kernel(x_ref: jax.Ref, codes_ref: jax.Ref, *refs: jax.Ref, plan: _Plan, scaled: bool) -> None:
    *inputs, out_ref = refs
    out_scale_ref = inputs.pop() if scaled else None
    table = None if plan.format.table is None else inputs[0][...]
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    scales = _scales_of_tile(inputs[1], plan) if plan.format.block_scales else None
    # Parts that fill the depth, or the width, of a matrix unit.
    part = plan.tiles.rows if table is None else LANES // plan.paired_rows
    for start in range(0, plan.tiles.rows, part):
        codes = codes_ref[start : start + part, :]
        at = slice(start * plan.paired_rows, (start + part) * plan.paired_rows)
        if table is None:
            decoded = [codes if plan.integer else codes.astype(jnp.bfloat16)]
        else:
            decoded = _decoded(codes, table, scales, start, plan)
        for i, operand in enumerate(decoded):
            contracted, free = (i, 0) if plan.contracted_operands > 1 else (0, i)
            if plan.contracted_axis == 1:
                out_ref[free, :, at] += lax.dot_general(
                    x_ref[contracted], operand, (((1,), (1,)), ((), ())), preferred_element_type=plan.sums
                )
            elif plan.scale_after and scales is not None:
                out_ref[free] += _dot_by_block(x_ref[contracted, :, at], operand, scales, start, plan)
            else:
                out_ref[free] += jnp.dot(x_ref[contracted, :, at], operand, preferred_element_type=plan.sums)

    if out_scale_ref is not None:

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            out_ref[...] *= out_scale_ref[...]


def _scales_of_tile(ref: jax.Ref, plan: _Plan) -> jax.Array:
    """The scales of a tile, 0 behind the end of the contracted axis: memory there holds anything, and x is 0."""
    scales = ref[...]
    if not plan.ragged:
        return scales
    axis = plan.contracted_axis
    first = pl.program_id(3) * scales.shape[axis]
    if plan.packed_axis == 1 == axis:  # one block of scales may serve several steps
        first = lax.div(pl.program_id(3) * plan.tiles.cols, LANES * plan.bytes_per_block) * LANES
    return jnp.where(lax.broadcasted_iota(jnp.int32, scales.shape, axis) + first < plan.scale_shape[axis], scales, 0.0)


def _without_padding(byte: jax.Array, start: int, plan: _Plan) -> jax.Array:
    """The bytes of a tile from row `start` on, with code 0 behind the end of the contracted axis."""
    axis, format = plan.contracted_axis, plan.format
    whole, codes = divmod(plan.length, format.codes_per_byte if plan.packed_axis == axis else 1)
    if not plan.ragged and not codes:
        return byte
    kept = sum(format.mask << shift for shift in format.shifts[:codes])  # bits of the byte that has padding
    first = pl.program_id(3) * plan.tiles[1 + axis] + (start if axis == 0 else 0)
    at = lax.broadcasted_iota(jnp.int32, byte.shape, axis) + first
    return jnp.where(at < whole, byte, jnp.where(at == whole, byte & kept, 0))


def _decoded(codes: jax.Array, table: jax.Array, scales: jax.Array | None, start: int, plan: _Plan) -> list[jax.Array]:
    """The bfloat16 operands that the bytes of a tile from row `start` on decode to."""
    signed = pltpu.bitcast(codes, jnp.int8).astype(jnp.int32)
    if plan.format.has_nan:
        signed = _without_padding(signed, start, plan)
    high, low = _looked_up(signed, table, plan.sublanes)
    words = [high | low] if plan.format.codes_per_byte == 2 else [low, high]
    if plan.paired_rows == 2:
        return [pltpu.bitcast(word, jnp.bfloat16) for word in words]
    halves = [half for word in words for half in (word << 16, word & ~0xFFFF)]
    values = [lax.bitcast_convert_type(half, jnp.float32) for half in halves]
    if scales is not None:
        scale = _scale_of_bytes(scales, codes.shape, start, plan)
        values = [value * scale for value in values]
    return [value.astype(jnp.bfloat16) for value in values]


def _looked_up(signed: jax.Array, table: jax.Array, sublanes: bool) -> tuple[jax.Array, jax.Array]:
    """The words that the high and the low nibble of each byte select."""
    if not sublanes:
        high, low = (jnp.broadcast_to(table[i : i + 1], (signed.shape[0], LANES)) for i in (0, 1))
        return _permuted_lanes(high, (signed >> 4) & 15), _permuted_lanes(low, signed & 15)
    rows, cols = signed.shape
    byte = signed.reshape(rows // 8, 8, cols)
    parts = jnp.concatenate([table] * (cols // LANES), 1).reshape(4, 1, 8, cols)
    below, above, low_below, low_above = (jnp.broadcast_to(parts[i], byte.shape) for i in range(4))
    high = jnp.where(byte < 0, _permuted(above, (byte >> 4) & 7), _permuted(below, (byte >> 4) & 7))
    low = jnp.where((byte & 8) != 0, _permuted(low_above, byte & 7), _permuted(low_below, byte & 7))
    return high.reshape(signed.shape), low.reshape(signed.shape)


def _permuted(table: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")


def _permuted_lanes(table: jax.Array, index: jax.Array) -> jax.Array:
    parts = [_permuted(table, index[:, at : at + LANES]) for at in range(0, index.shape[1], LANES)]
    return jnp.concatenate(parts, 1)


def _scale_of_bytes(scales: jax.Array, shape: tuple[int, ...], start: int, plan: _Plan) -> jax.Array:
    """The scale of each byte's block, for the bytes of a tile from row `start` on."""
    per_block = plan.bytes_per_block
    rows, cols = shape
    if plan.packed_axis == 0:
        same = min(per_block, rows)
        firsts = range(start, start + rows, same)
        return jnp.concatenate([jnp.broadcast_to(scales[row // per_block][None], (same, cols)) for row in firsts], 0)
    per_step = plan.tiles.cols // per_block
    step = pl.program_id(2 if plan.contracted_axis == 0 else 3)
    first = (step * per_step) & (LANES - 1) if per_step < LANES else 0
    index = (lax.broadcasted_iota(jnp.int32, shape, 1) >> per_block.bit_length() - 1) + first
    return _permuted_lanes(scales[start : start + rows], index)


def _dot_by_block(x: jax.Array, operand: jax.Array, scales: jax.Array, start: int, plan: _Plan) -> jax.Array:
    """`x @ (operand * scales)` of 128 rows, in one matmul: x is repeated for each block, with 0 outside the block."""
    m, depth = x.shape
    first = start // plan.bytes_per_block
    blocks = max(1, depth // plan.block_size)
    if blocks == 1:
        return jnp.dot(x, operand, preferred_element_type=jnp.float32) * scales[first : first + 1]
    block = lax.broadcasted_iota(jnp.int32, x.shape, 1) >> plan.block_size.bit_length() - 1
    apart = jnp.concatenate([jnp.where(block == i, x, jnp.zeros_like(x)) for i in range(blocks)], 0)
    sums = jnp.dot(apart, operand, preferred_element_type=jnp.float32)
    parts = [sums[i * m : (i + 1) * m] * scales[first + i : first + i + 1] for i in range(blocks)]
    return functools.reduce(jnp.add, parts)
