"""Matmuls on TPU with integers of 2 to 8 bits in blocks, with a scale and an offset each.

Decoding makes a bfloat16 of a code by its bits alone: 0x4300 | code is 128 + code. A 32-bit word of codes gives two of
them at a time, in three instructions, so rows come out of order: `order` of them take turns within 128 rows. x, or the
result, is brought into the same order.

With few rows of x the scales are not multiplied into the decoded matrix. Where blocks divide the contracted axis, x
enters the matrix unit once per block, with zeros outside the block, and the scales multiply the sums. Where they divide
the other axis, x is multiplied by the scales of each block, and each column of the result is taken from its block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from eformer.kernels import Matrix

from ._formats import FORMATS, Format, result, scale_and_offset
from ._lanes import LANES, Interpret, deinterleaved, interleaved, permuted_lanes

PART = 256  # rows that are decoded at once: 32 rows of bytes in a plane of one bit
FEW_ROWS = 64
BLOCKS = (16, 32, 64, 128, 256)


class Tiles(NamedTuple):
    """The part of the problem that one grid step covers: rows of x, and rows and columns of values."""

    m: int
    rows: int
    cols: int


class _Plan(NamedTuple):
    """What is known of a call when it is compiled."""

    format: Format
    contracted_axis: int
    packed_axis: int
    block_size: int
    tiles: Tiles
    few_rows: bool
    has_offset: bool

    @property
    def by_bits(self) -> bool:
        return self.format.planes[0] < 8

    @property
    def bias(self) -> int:
        """What a decoded value is more than its code."""
        return 128 if self.by_bits else -128

    @property
    def order(self) -> int:
        """Row `i * order + j` of the matrix is row `j * 128 / order + i` of 128 decoded ones."""
        if not self.by_bits:
            return 1
        return 16 // self.format.planes[0] if self.packed_axis == 0 else 2

    @property
    def operands(self) -> int:
        """Matrices that a tile decodes to, one for each code in a byte along columns."""
        return self.format.codes_per_byte if self.packed_axis == 1 else 1

    @property
    def lanes(self) -> int:
        """Columns of a decoded tile."""
        return self.tiles.cols // self.operands

    @property
    def blocks(self) -> int:
        """Blocks in 128 rows, or in 128 columns of bytes."""
        return max(1, LANES * self.operands // self.block_size)


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
    plan = _Plan(
        format,
        contracted_axis,
        matrix.packed_axis,
        block_size,
        tiles or default_tiles(matrix, m),
        m <= few_rows,
        len(scales) > 1,
    )
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
        functools.partial(_kernel, plan=plan),
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


def _laid_out(scale: jax.Array, plan: _Plan, matrix: Matrix, padded: Sequence[int]) -> jax.Array:
    """Scales or offsets in the order in which the kernel reads them, and 0 behind the end of the matrix.

    They are (count, blocks, cols) or (count, blocks, rows), or with many rows of x (count, rows, blocks).
    """
    axis = plan.packed_axis
    length = (matrix.rows, matrix.cols)[axis]
    if plan.block_size < matrix.block_size:
        repeats = pl.cdiv(min(matrix.block_size, length), plan.block_size)
        scale = jnp.repeat(scale, repeats, 1 + axis)
    blocks, across = padded[axis] // plan.block_size, padded[1 - axis]
    if axis == 0:
        return _padded(scale, {1: blocks, 2: across})
    scale = _padded(scale, {1: across, 2: _round_up(blocks, 8 if plan.few_rows else LANES)})
    scale = scale.reshape(scale.shape[0], -1, LANES // plan.order, plan.order, scale.shape[2])
    if plan.few_rows:
        return jnp.transpose(scale, (0, 4, 1, 3, 2)).reshape(scale.shape[0], -1, across)
    return jnp.swapaxes(scale, 2, 3).reshape(scale.shape[0], across, -1)


def _codes_spec(plan: _Plan, bits: int) -> pl.BlockSpec:
    rows, cols = (size * bits // 8 if axis == plan.packed_axis else size for axis, size in enumerate(plan.tiles[1:]))
    return pl.BlockSpec((None, rows, cols), lambda b, i, j, k: (b, *((k, j) if plan.contracted_axis == 0 else (j, k))))


def _scales_spec(plan: _Plan) -> pl.BlockSpec:
    per_step, across = plan.tiles[1 + plan.packed_axis] // plan.block_size, plan.tiles[2 - plan.packed_axis]
    blocked_is_contracted = plan.packed_axis == plan.contracted_axis
    if plan.packed_axis == 0 or plan.few_rows:
        return pl.BlockSpec(
            (None, per_step, across), lambda b, i, j, k: (b, *((k, j) if blocked_is_contracted else (j, k)))
        )
    return pl.BlockSpec(
        (None, across, LANES),
        lambda b, i, j, k: (b, *((j, k * per_step // LANES) if blocked_is_contracted else (k, j * per_step // LANES))),
    )


def _kernel(x_ref: jax.Ref, *refs: jax.Ref, plan: _Plan) -> None:
    *inputs, out_ref = refs
    planes, scale_refs = inputs[: len(plan.format.planes)], inputs[len(plan.format.planes) :]
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    scale = scale_refs[0][...].astype(jnp.float32)
    offset = scale_refs[1][...].astype(jnp.float32) if plan.has_offset else None
    contracted = 1 - plan.contracted_axis  # of the operand that the matrix is: its rows or its columns
    dims = (((1,), (1 - contracted,)), ((), ()))
    dot = functools.partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    for start in range(0, plan.tiles.rows, PART):
        operands = _decoded(planes, start, plan)
        if plan.contracted_axis == 0:
            x = _in_order(x_ref[0, :, start : start + PART], plan.order)
            if plan.few_rows and plan.packed_axis == 0:
                for at in range(0, PART, LANES):
                    out_ref[0] += _scaled_sums(
                        [x[:, at : at + LANES]],
                        [operands[0][at : at + LANES]],
                        scale,
                        offset,
                        (start + at) // plan.block_size,
                        dot,
                        plan,
                    )
            elif plan.few_rows:
                for at in range(0, plan.lanes, LANES):
                    first = at * plan.operands // plan.block_size
                    rows = slice(start, start + PART)
                    lhs, sums = _scaled_x(x, scale[:, rows], _columns(offset, rows), first, plan)
                    for i, operand in enumerate(operands):
                        out_ref[i, :, at : at + LANES] += _of_blocks(dot(lhs, operand[:, at : at + LANES]), sums, plan)
            else:
                for i, operand in enumerate(_scaled(operands, scale, offset, start, plan)):
                    out_ref[i] += dot(x, operand)
            continue
        for at in range(0, PART, LANES):
            rows, columns = slice(at, at + LANES), slice(start + at, start + at + LANES)
            if plan.few_rows and plan.packed_axis == 1:
                for lanes in (slice(c, c + LANES) for c in range(0, plan.lanes, LANES)):
                    out_ref[0, :, columns] += _scaled_sums(
                        [x_ref[i, :, lanes] for i in range(plan.operands)],
                        [operand[rows, lanes] for operand in operands],
                        scale[:, columns],
                        _columns(offset, columns),
                        lanes.start * plan.operands // plan.block_size,
                        dot,
                        plan,
                    )
            elif plan.few_rows:
                lhs, sums = _scaled_x(x_ref[0], scale, offset, (start + at) // plan.block_size, plan)
                out_ref[0, :, columns] += _of_blocks(dot(lhs, operands[0][rows]), sums, plan)
        if not plan.few_rows:
            columns = slice(start, start + PART)
            for i, operand in enumerate(_scaled(operands, scale, offset, start, plan)):
                out_ref[0, :, columns] += dot(x_ref[i], operand)

    if plan.contracted_axis == 1 and plan.order > 1:

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            out_ref[0] = _in_order(out_ref[0], LANES // plan.order)


def _columns(array: jax.Array | None, columns: slice) -> jax.Array | None:
    return None if array is None else array[:, columns]


def _in_order(x: jax.Array, order: int) -> jax.Array:
    """Of every 128 columns of x, first each `order`-th from column 0 on, then each from column 1 on ..."""
    if order in (1, LANES):
        return x
    taken = _element(lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1), order)
    wide = x.astype(jnp.float32)
    parts = [permuted_lanes(wide[:, at : at + LANES], taken) for at in range(0, x.shape[1], LANES)]
    return jnp.concatenate(parts, 1).astype(x.dtype)


def _element(place: jax.Array, order: int) -> jax.Array:
    """Which of 128 rows of the matrix is at a place of the decoded ones."""
    run = LANES // order
    return ((place & run - 1) * order) + (place >> run.bit_length() - 1)


def _decoded(planes: Sequence[jax.Ref], start: int, plan: _Plan) -> list[jax.Array]:
    """bfloat16 operands (PART, lanes) of the rows from `start` on, each value `code + bias`."""
    if not plan.by_bits:
        words = pltpu.bitcast(planes[0][start : start + PART, :], jnp.int32)
        return [pltpu.bitcast(words ^ jnp.int32(-0x7F7F7F80), jnp.int8).astype(jnp.bfloat16)]
    words = _words_along_rows(planes, start, plan) if plan.packed_axis == 0 else _words_along_columns(planes, start)
    decoded = []
    for i in range(plan.operands):
        parts = [pltpu.bitcast(_two_values(words, i, j, plan), jnp.bfloat16) for j in range(plan.order)]
        run = LANES // plan.order
        runs = [part[at : at + run] for at in range(0, PART // plan.order, run) for part in parts]
        decoded.append(jnp.concatenate(runs, 0))
    return decoded


def _two_values(words: Sequence[jax.Array], operand: int, turn: int, plan: _Plan) -> jax.Array:
    """Words of two bfloat16, from the bits of one code in each half of the words of every plane."""
    found, below = jnp.int32(0x43004300), 0
    for word, bits in zip(words, plan.format.planes, strict=True):
        shift = (bits * turn if plan.packed_axis == 0 else 8 * turn + bits * operand) - below
        moved = word >> shift if shift >= 0 else word << -shift
        found, below = found | moved & jnp.int32(((2**bits - 1) << below) * 0x10001), below + bits
    return jnp.asarray(found)


def _words_along_rows(planes: Sequence[jax.Ref], start: int, plan: _Plan) -> list[jax.Array]:
    """Words of 32 bits of the first plane; and of the second plane, the same codes in the same halves of words."""
    first, *rest = (
        ref[start * bits // 8 : (start + PART) * bits // 8, :]
        for ref, bits in zip(planes, plan.format.planes, strict=True)
    )
    words = [pltpu.bitcast(first, jnp.int32)]
    for plane, bits in zip(rest, plan.format.planes[1:], strict=True):
        half = 16 * bits // plan.format.planes[0]  # bits for half a word of the first plane
        both = plane if half == 4 else pltpu.bitcast(plane, jnp.uint16)
        both = both.astype(jnp.int32)
        words.append(both | both << 16 - half)
    return words


def _words_along_columns(planes: Sequence[jax.Ref], start: int) -> list[jax.Array]:
    """Words of four rows of bytes; in the second plane, the bits for each column of bytes of the first, the lowest."""
    words = [pltpu.bitcast(ref[start : start + PART, :], jnp.int32) for ref in planes]
    if len(words) == 1:
        return words
    first, second = words
    shared = first.shape[1] // second.shape[1]  # columns of bytes that a byte of the second plane serves
    column = lax.broadcasted_iota(jnp.int32, (first.shape[0], LANES), 1)
    spread = []
    for at in range(0, first.shape[1], LANES):
        source, begin = divmod(at // shared, LANES)
        taken = (column >> shared.bit_length() - 1) + begin
        spread.append(permuted_lanes(second[:, source * LANES : (source + 1) * LANES], taken))
    turn = (lax.broadcasted_iota(jnp.int32, first.shape, 1) & shared - 1) * (8 // shared)
    return [first, lax.shift_right_logical(jnp.concatenate(spread, 1), turn)]


def _scaled_sums(
    xs: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    scale: jax.Array,
    offset: jax.Array | None,
    first: int,
    dot: Callable[..., jax.Array],
    plan: _Plan,
) -> jax.Array:
    """The sum of `x @ (scale * (operand - bias) + offset)`; the 128 columns of each x are of blocks from `first` on."""
    m = xs[0].shape[0]
    place = lax.broadcasted_iota(jnp.int32, xs[0].shape, 1)
    block = _block(place, plan)
    apart = [
        jnp.concatenate([jnp.where(block == i, x, jnp.zeros_like(x)) for i in range(plan.blocks)], 0)
        if plan.blocks > 1
        else x
        for x in xs
    ]
    products = functools.reduce(jnp.add, map(dot, apart, operands))
    scales = scale[first : first + plan.blocks]
    shifts = _shift(scales, None if offset is None else offset[first : first + plan.blocks], plan)
    total = [products[i * m : (i + 1) * m] * scales[i : i + 1] for i in range(plan.blocks)]
    if shifts is not None:
        sums = jnp.sum(functools.reduce(jnp.add, (x.astype(jnp.float32) for x in apart)), 1, keepdims=True)
        total += [sums[i * m : (i + 1) * m] * shifts[i : i + 1] for i in range(plan.blocks)]
    return functools.reduce(jnp.add, total)


def _block(place: jax.Array, plan: _Plan) -> jax.Array:
    """The block, among those of 128 decoded rows or columns, of the one at a place."""
    along = _element(place, plan.order) if plan.packed_axis == 0 else place * plan.operands
    return along >> plan.block_size.bit_length() - 1


def _shift(scale: jax.Array, offset: jax.Array | None, plan: _Plan) -> jax.Array | None:
    """What is added to `scale` times a decoded value to give the value of the matrix; None if that is nothing."""
    if offset is not None:
        return offset - plan.bias * scale
    more = plan.bias + plan.format.centre
    return -more * scale if more else None


def _scaled_x(
    x: jax.Array, scale: jax.Array, offset: jax.Array | None, first: int, plan: _Plan
) -> tuple[jax.Array, jax.Array | None]:
    """bfloat16 x times the scales of each block from `first` on, one below the other; and what to add to their dots.

    The bias is taken off the rounded x, as the matrix unit multiplies that.
    """
    wide = x.astype(jnp.float32)
    scaled = [(wide * scale[first + i : first + i + 1]).astype(jnp.bfloat16) for i in range(plan.blocks)]
    more = plan.bias if plan.has_offset else plan.bias + plan.format.centre
    added = [-more * each.astype(jnp.float32) for each in scaled]
    if offset is not None:
        added = [each + wide * offset[first + i : first + i + 1] for i, each in enumerate(added)]
    sums = [jnp.sum(each, 1, keepdims=True) for each in added] if more or plan.has_offset else None
    return jnp.concatenate(scaled, 0), None if sums is None else jnp.concatenate(sums, 0)


def _of_blocks(products: jax.Array, added: jax.Array | None, plan: _Plan) -> jax.Array:
    """(m, 128) of (blocks * m, 128): each column from the rows of its block."""
    products = products if added is None else products + added
    m = products.shape[0] // plan.blocks
    block = _block(lax.broadcasted_iota(jnp.int32, (m, LANES), 1), plan)
    parts = [products[i * m : (i + 1) * m] for i in range(plan.blocks)]
    return functools.reduce(lambda value, i: jnp.where(block == i, parts[i], value), range(1, plan.blocks), parts[0])


def _scaled(
    operands: Sequence[jax.Array], scale: jax.Array, offset: jax.Array | None, start: int, plan: _Plan
) -> list[jax.Array]:
    """The values of the matrix, bfloat16, for decoded rows from `start` on."""
    scales, shift = _of_elements(scale, start, plan), _shift(scale, offset, plan)
    scaled = [operand.astype(jnp.float32) * scales for operand in operands]
    if shift is not None:
        shifts = _of_elements(shift, start, plan)
        scaled = [each + shifts for each in scaled]
    return [each.astype(jnp.bfloat16) for each in scaled]


def _of_elements(scale: jax.Array, start: int, plan: _Plan) -> jax.Array:
    """The scale of each element of an operand, for decoded rows from `start` on."""
    if plan.packed_axis == 0:
        run = LANES // plan.order
        parts = []
        for at in range(start, start + PART, LANES):
            block = lax.broadcasted_iota(jnp.int32, (run, scale.shape[1]), 0) * plan.order >> _log2(plan.block_size)
            rows = [scale[at // plan.block_size + i][None] for i in range(plan.blocks)]
            each = jnp.broadcast_to(rows[0], block.shape)
            for i in range(1, plan.blocks):
                each = jnp.where(block == i, rows[i], each)
            parts += [each] * plan.order
        return jnp.concatenate(parts, 0)
    per_step = plan.tiles.cols // plan.block_size
    step = pl.program_id(2 if plan.contracted_axis == 0 else 3)
    first = (step * per_step) & (LANES - 1) if per_step < LANES else 0
    rows = scale[start : start + PART]
    column = lax.broadcasted_iota(jnp.int32, (PART, LANES), 1)
    parts = []
    for at in range(0, plan.lanes, LANES):
        parts.append(permuted_lanes(rows, ((column + at) * plan.operands >> _log2(plan.block_size)) + first))
    return jnp.concatenate(parts, 1)


def _log2(size: int) -> int:
    return size.bit_length() - 1
