"""Products with quantized matrices on TPU, decoded tile by tile next to the matrix unit.

Codes are looked up in a register: a vector permutes eight sublanes by index in one instruction (v4 can't, and permutes
lanes). The words that come out hold two neighbours as bfloat16, so where codes are packed along rows they are two rows
of the operand as they lie. Products are of bfloat16 numbers and summed in float32, as JAX does it by default.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eformer.kernels import Matrix, reference

from ._lanes import LANES, deinterleaved, interleaved
from ._scales import beside_product, block_scales, is_outer
from ._tables import VALUES_PER_BYTE, nibble_words
from ._typed import alike, result


class Tiles(NamedTuple):
    """The part of the problem that a step of the grid has: rows of x, and codes."""

    m: int
    rows: int
    cols: int


class _Plan(NamedTuple):
    """All that is known of a call when it is compiled."""

    format: str
    contracted_axis: int
    packed_axis: int
    block_size: int
    shape: tuple[int, ...]  # of the codes
    scale_shape: tuple[int, ...]  # of the blocks' scales
    tiles: Tiles
    scale_after: bool  # blocks' scales multiply products, not the matrix
    sublanes: bool  # permuting them is an instruction
    integer: bool  # x is int8

    @property
    def paired_rows(self) -> int:
        """Rows of the operand in a row of codes."""
        return 2 if self.format != "int8" and self.packed_axis == 0 and not self.scale_before else 1

    @property
    def scale_before(self) -> bool:
        return self.format == "nf4" and not self.scale_after

    @property
    def operands(self) -> int:
        """Matrices that a tile of codes holds."""
        return VALUES_PER_BYTE[self.format] // self.paired_rows

    @property
    def summed_operands(self) -> int:
        return self.operands if self.packed_axis == self.contracted_axis else 1

    @property
    def free_operands(self) -> int:
        return self.operands // self.summed_operands

    @property
    def depth(self) -> int:
        """Of what is summed, in a step, for each operand."""
        return self.tiles.rows * self.paired_rows if self.contracted_axis == 0 else self.tiles.cols

    @property
    def width(self) -> int:
        """Of the result, in a step, for each operand."""
        return self.tiles.cols if self.contracted_axis == 0 else self.tiles.rows * self.paired_rows

    @property
    def sums(self) -> Any:
        return jnp.int32 if self.integer else jnp.float32

    @property
    def ragged(self) -> bool:
        """Whether the last step sums over what is not there."""
        axis = self.contracted_axis
        return self.shape[axis] % self.tiles[1 + axis] != 0


def supports(matrix: Matrix) -> bool:
    """A scale for each element, and blocks that do not fill vectors or tiles, are left to XLA."""
    if matrix.format == "nf4":
        return matrix.block_size in (16, 32, 64, 128, 256)
    return is_outer(matrix)


def default_tiles(matrix: Matrix, m: int) -> Tiles:
    """Large enough that twice as large would save less than 10% of v5e's static cycles."""
    _, rows, cols = matrix.codes[0].shape
    least = max(LANES, 4 * matrix.block_size) if matrix.format == "nf4" else LANES  # eight rows of scales
    return Tiles(
        min(_round_up(m, 8), 512),
        min(max(1024 if matrix.format == "int8" else 512, least), _round_up(rows, least)),
        min(1024 if matrix.format == "int8" else 512, _round_up(cols, LANES)),
    )


def matmul(
    x: jax.Array,
    matrix: Matrix,
    contracted_axis: int,
    *,
    tiles: Tiles | None = None,
    scale_after: bool | None = None,
    sublanes: bool = True,
    round_x: bool = False,
    interpret: Any = False,
) -> jax.Array:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k).

    With `round_x`, if the matrix is "int8", the rows of x become int8 too, and the sums of integers are exact.
    """
    count, m, _ = x.shape
    scales, out_scale, x_scale = (), None, None
    if matrix.format == "nf4":
        scales = (block_scales(matrix),)
    else:
        x, out_scale = beside_product(x, matrix, contracted_axis)
    if round_x and matrix.format == "int8":
        x, x_scale = reference.encode_int8(x, (2,))
        x_scale, out_scale = x_scale if out_scale is None else x_scale * out_scale, None
    if scale_after is None:
        scale_after = m <= 64
    plan = _Plan(
        matrix.format,
        contracted_axis,
        matrix.packed_axis,
        matrix.block_size,
        matrix.codes[0].shape[1:],
        scales[0].shape[1:] if scales else (),
        tiles or default_tiles(matrix, m),
        scale_after and matrix.packed_axis == 0 == contracted_axis and matrix.block_size >= 32,
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
    x = _padded(x, {1: grid[1] * plan.tiles.m, 2: grid[3] * plan.depth * plan.summed_operands})
    x = deinterleaved(x, plan.summed_operands, run, x.dtype if plan.integer else jnp.bfloat16, interpret)
    operands, specs = [x, *matrix.codes], [_x_spec(plan), _codes_spec(plan)]
    if plan.format != "int8":
        table = alike(x, _tables(plan))
        operands.append(table)
        specs.append(pl.BlockSpec(table.shape, lambda *_: (0, 0)))
    if scales:
        operands.append(scales[0])
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
        name=f"{plan.format}_matmul",
    )(*operands)
    width = (matrix.rows, matrix.cols)[1 - contracted_axis]
    out = interleaved(out, run, interpret)[:, :m, :width]
    return out if x_scale is None else out.astype(jnp.float32) * x_scale


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    return jnp.pad(x, [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)])


def _tables(plan: _Plan) -> jax.Array:
    words = nibble_words(plan.format)
    if plan.sublanes:
        return jnp.asarray(np.broadcast_to(words.reshape(32, 1), (32, LANES)))
    return jnp.asarray(np.pad(words, ((0, 6), (0, LANES - 16))))


def _x_spec(plan: _Plan) -> pl.BlockSpec:
    return pl.BlockSpec((None, plan.summed_operands, plan.tiles.m, plan.depth), lambda b, i, j, k: (b, 0, i, k))


def _codes_spec(plan: _Plan) -> pl.BlockSpec:
    def index(b: Any, i: Any, j: Any, k: Any) -> Any:
        del i
        return (b, k, j) if plan.contracted_axis == 0 else (b, j, k)

    return pl.BlockSpec((None, plan.tiles.rows, plan.tiles.cols), index)


def _scales_spec(plan: _Plan) -> pl.BlockSpec:
    bytes_per_block = plan.block_size // 2
    if plan.packed_axis == 0:
        return _with_block(plan, (plan.tiles.rows // bytes_per_block, plan.tiles.cols))
    per_vector = LANES * bytes_per_block

    def index(b: Any, i: Any, j: Any, k: Any) -> Any:
        del i
        row, col = (k, j) if plan.contracted_axis == 0 else (j, k)
        return b, row, lax.div(col * plan.tiles.cols, per_vector)

    return pl.BlockSpec((None, plan.tiles.rows, LANES), index)


def _with_block(plan: _Plan, block: tuple[int, int]) -> pl.BlockSpec:
    return pl.BlockSpec((None, *block), _codes_spec(plan).index_map)


def _kernel(x_ref: Any, codes_ref: Any, *refs: Any, plan: _Plan, scaled: bool) -> None:
    *inputs, out_ref = refs
    out_scale_ref = inputs.pop() if scaled else None
    table = inputs[0][...] if plan.format != "int8" else None
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    scales = _block_scales(inputs[1], plan) if plan.format == "nf4" else None
    # Parts that fill the depth, or the width, of a matrix unit.
    part = plan.tiles.rows if plan.format == "int8" else LANES // plan.paired_rows
    for start in range(0, plan.tiles.rows, part):
        codes = codes_ref[start : start + part, :]
        at = slice(start * plan.paired_rows, (start + part) * plan.paired_rows)
        if plan.format == "int8":
            decoded = [codes if plan.integer else codes.astype(jnp.bfloat16)]
        else:
            decoded = _decoded(codes, table, scales, start, plan)
        for i, operand in enumerate(decoded):
            summed, free = (i, 0) if plan.summed_operands > 1 else (0, i)
            if plan.contracted_axis == 1:
                out_ref[free, :, at] += lax.dot_general(
                    x_ref[summed], operand, (((1,), (1,)), ((), ())), preferred_element_type=plan.sums
                )
            elif plan.scale_after and plan.format == "nf4":
                out_ref[free] += _dot_by_block(x_ref[summed, :, at], operand, scales, start, plan)
            else:
                out_ref[free] += jnp.dot(x_ref[summed, :, at], operand, preferred_element_type=plan.sums)

    if out_scale_ref is not None:

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            out_ref[...] *= out_scale_ref[...]


def _beyond(shape: tuple[int, ...], count: int, per_step: int, axis: int) -> Any:
    """Where a block of `shape` lies behind the `count` entries that its array has along `axis`."""
    return lax.broadcasted_iota(jnp.int32, shape, axis) + pl.program_id(3) * per_step >= count


def _block_scales(ref: Any, plan: _Plan) -> Any:
    """The scales of a tile, 0 where there are none: what is read there is anything, and x is 0."""
    scales = ref[...]
    if not plan.ragged:
        return scales
    axis = plan.contracted_axis
    if plan.packed_axis == 1 == axis:  # the block may serve several steps
        per_vector = LANES * plan.block_size // 2
        first = lax.div(pl.program_id(3) * plan.tiles.cols, per_vector) * LANES
        beyond = lax.broadcasted_iota(jnp.int32, scales.shape, 1) + first >= plan.scale_shape[1]
    else:
        beyond = _beyond(scales.shape, plan.scale_shape[axis], scales.shape[axis], axis)
    return jnp.where(beyond, 0.0, scales)


def _decoded(codes: Any, table: Any, scales: Any, start: int, plan: _Plan) -> list[Any]:
    signed = pltpu.bitcast(codes, jnp.int8).astype(jnp.int32)
    if plan.format == "ternary" and plan.ragged:
        axis = plan.contracted_axis
        count = plan.shape[axis] - (start if axis == 0 else 0)
        signed = jnp.where(_beyond(signed.shape, count, plan.tiles[1 + axis], axis), 0, signed)
    high, low = _looked_up(signed, table, plan.sublanes)
    words = [high | low] if plan.format == "nf4" else [low, high]
    if plan.paired_rows == 2:
        return [pltpu.bitcast(word, jnp.bfloat16) for word in words]
    halves = [half for word in words for half in (word << 16, word & ~0xFFFF)]
    values = [lax.bitcast_convert_type(half, jnp.float32) for half in halves]
    if scales is not None:
        scale = _per_code(scales, codes.shape, start, plan)
        values = [value * scale for value in values]
    return [value.astype(jnp.bfloat16) for value in values]


def _looked_up(signed: Any, table: Any, sublanes: bool) -> tuple[Any, Any]:
    """The words of the high and the low half of each byte."""
    if not sublanes:
        return tuple(
            _permuted_lanes(jnp.broadcast_to(table[i : i + 1], (signed.shape[0], LANES)), (signed >> shift) & 15)
            for i, shift in ((0, 4), (1, 0))
        )
    rows, cols = signed.shape
    byte = signed.reshape(rows // 8, 8, cols)
    parts = jnp.concatenate([table] * (cols // LANES), 1).reshape(4, 1, 8, cols)
    below, above, low_below, low_above = (jnp.broadcast_to(parts[i], byte.shape) for i in range(4))
    high = jnp.where(byte < 0, _permuted(above, (byte >> 4) & 7), _permuted(below, (byte >> 4) & 7))
    low = jnp.where((byte & 8) != 0, _permuted(low_above, byte & 7), _permuted(low_below, byte & 7))
    return high.reshape(signed.shape), low.reshape(signed.shape)


def _permuted(table: Any, index: Any) -> Any:
    return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")


def _permuted_lanes(table: Any, index: Any) -> Any:
    parts = [
        jnp.take_along_axis(table, index[:, at : at + LANES], axis=1, mode="promise_in_bounds")
        for at in range(0, index.shape[1], LANES)
    ]
    return jnp.concatenate(parts, 1)


def _per_code(scales: Any, shape: tuple[int, int], start: int, plan: _Plan) -> Any:
    """The scale of each byte's block; of the bytes of a tile from row `start` on."""
    per_block = plan.block_size // 2
    rows, cols = shape
    if plan.packed_axis == 0:
        same = min(per_block, rows)
        return jnp.concatenate(
            [
                jnp.broadcast_to(scales[row // per_block][None], (same, cols))
                for row in range(start, start + rows, same)
            ],
            0,
        )
    per_step = plan.tiles.cols // per_block
    step = pl.program_id(2 if plan.contracted_axis == 0 else 3)
    first = (step * per_step) & (LANES - 1) if per_step < LANES else 0
    index = (lax.broadcasted_iota(jnp.int32, shape, 1) >> per_block.bit_length() - 1) + first
    return _permuted_lanes(scales[start : start + rows], index)


def _dot_by_block(x: Any, operand: Any, scales: Any, start: int, plan: _Plan) -> Any:
    """`x @ (operand * scales)` of 128 rows: x once for each block, 0 elsewhere, so that a product keeps them apart."""
    m, depth = x.shape
    first = 2 * start // plan.block_size
    blocks = max(1, depth // plan.block_size)
    if blocks == 1:
        return jnp.dot(x, operand, preferred_element_type=jnp.float32) * scales[first : first + 1]
    block = lax.broadcasted_iota(jnp.int32, x.shape, 1) >> plan.block_size.bit_length() - 1
    apart = jnp.concatenate([jnp.where(block == i, x, jnp.zeros_like(x)) for i in range(blocks)], 0)
    products = jnp.dot(apart, operand, preferred_element_type=jnp.float32)
    return sum(products[i * m : (i + 1) * m] * scales[first + i : first + i + 1] for i in range(blocks))
