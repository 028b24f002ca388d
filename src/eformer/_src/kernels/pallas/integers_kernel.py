"""The TPU kernel for integers of 2 to 8 bits in blocks.

Decoding makes a bfloat16 of a code by its bits alone: 0x4300 | code is 128 + code. A 32-bit word of codes gives two of
them at a time, in three instructions, so rows come out of order: `order` of them take turns within 128 rows. x, or the
result, is brought into the same order. Codes of 8 bits are converted.

With few rows of x the scales are not multiplied into the decoded matrix. Where blocks divide the contracted axis, x
enters the matrix unit once per block, with zeros outside the block, and the scales multiply the sums. Where they divide
the other axis, x is multiplied by the scales of each block, and each column of the result is taken from its block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .formats import Format
from .lanes import LANES, permuted_lanes

PART = 256  # rows that are decoded at once: 32 rows of bytes in a plane of one bit


class Tiles(NamedTuple):
    """The part of the problem that one grid step covers: rows of x, and rows and columns of values."""

    m: int
    rows: int
    cols: int


class Plan(NamedTuple):
    """What is known of a call when it is compiled."""

    format: Format
    contracted_axis: int
    packed_axis: int
    block_size: int
    tiles: Tiles
    few_rows: bool  # of x: scales multiply x or sums, not the matrix

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
    def sums_blocks(self) -> bool:
        """Whether blocks divide the contracted axis."""
        return self.packed_axis == self.contracted_axis

    @property
    def blocks(self) -> int:
        """Blocks in 128 rows, or in 128 columns of bytes."""
        return max(1, LANES * self.operands // self.block_size)


def kernel(x_ref: jax.Ref, *refs: jax.Ref, plan: Plan) -> None:
    """x (operands or 1, m, depth), planes of codes, scales, maybe offsets; result (operands or 1, m, width)."""
    *inputs, out_ref = refs
    planes, scale_refs = inputs[: len(plan.format.planes)], inputs[len(plan.format.planes) :]
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    levels = [ref[...].astype(jnp.float32) for ref in scale_refs]
    if plan.packed_axis == 1:  # (blocks, rows)
        levels = [_in_order(level, plan.order) for level in levels]
    scale, *offset = levels
    for start in range(0, plan.tiles.rows, PART):
        part = slice(start, start + PART)
        operands = _decoded(planes, start, plan)
        if plan.contracted_axis == 0:
            xs = [_in_order(x_ref[0, :, part], plan.order)]
        else:
            xs = [x_ref[i] for i in range(plan.operands)]
        if plan.few_rows:
            _add_scaled(out_ref, xs, operands, scale, offset, start, plan)
            continue
        for i, operand in enumerate(_scaled(operands, scale, offset, start, plan)):
            if plan.contracted_axis == 0:
                out_ref[i] += _dot(xs[0], operand, plan)
            else:
                for at in range(0, PART, LANES):
                    columns = slice(start + at, start + at + LANES)
                    out_ref[0, :, columns] += _dot(xs[i], operand[at : at + LANES], plan)

    if plan.contracted_axis == 1 and plan.order > 1:

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            out_ref[0] = _in_order(out_ref[0], LANES // plan.order)


def _dot(x: jax.Array, operand: jax.Array, plan: Plan) -> jax.Array:
    dims = (((1,), (plan.contracted_axis,)), ((), ()))
    return lax.dot_general(x, operand, dims, preferred_element_type=jnp.float32)


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
    return ((place & run - 1) * order) + (place >> _log2(run))


def _decoded(planes: Sequence[jax.Ref], start: int, plan: Plan) -> list[jax.Array]:
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


def _two_values(words: Sequence[jax.Array], operand: int, turn: int, plan: Plan) -> jax.Array:
    """Words of two bfloat16, from the bits of one code in each half of the words of every plane."""
    found, below = jnp.int32(0x43004300), 0
    for word, bits in zip(words, plan.format.planes, strict=True):
        shift = (bits * turn if plan.packed_axis == 0 else 8 * turn + bits * operand) - below
        moved = word >> shift if shift >= 0 else word << -shift
        found, below = found | moved & jnp.int32(((2**bits - 1) << below) * 0x10001), below + bits
    return jnp.asarray(found)


def _words_along_rows(planes: Sequence[jax.Ref], start: int, plan: Plan) -> list[jax.Array]:
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
        taken = (column >> _log2(shared)) + begin
        spread.append(permuted_lanes(second[:, source * LANES : (source + 1) * LANES], taken))
    turn = (lax.broadcasted_iota(jnp.int32, first.shape, 1) & shared - 1) * (8 // shared)
    return [first, lax.shift_right_logical(jnp.concatenate(spread, 1), turn)]


def _add_scaled(
    out_ref: jax.Ref,
    xs: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    scale: jax.Array,
    offset: Sequence[jax.Array],
    start: int,
    plan: Plan,
) -> None:
    """Add the products with decoded rows from `start` on, 128 rows or columns along the blocks at a time."""
    every = slice(None)
    for at in range(0, PART if plan.packed_axis == 0 else plan.lanes, LANES):
        few = slice(at, at + LANES)
        if plan.packed_axis == 0:
            rows, lanes, across, first = few, every, every, (start + at) // plan.block_size
        else:
            rows, lanes, across, first = every, few, slice(start, start + PART), at * plan.operands // plan.block_size
        tiles = [operand[rows, lanes] for operand in operands]
        levels = [level[first : first + plan.blocks, across] for level in (scale, *offset)]
        x_tiles = [x[:, rows if plan.contracted_axis == 0 else lanes] for x in xs]
        columns = lanes
        if plan.contracted_axis == 1:
            columns = slice(start + at, start + at + LANES) if plan.packed_axis == 0 else slice(start, start + PART)
        if plan.sums_blocks:
            out_ref[0, :, columns] += _scaled_sums(x_tiles, tiles, levels, plan)
            continue
        scaled, added = _scaled_x(x_tiles[0], levels, plan)
        for i, tile in enumerate(tiles):
            out_ref[i, :, columns] += _of_blocks(_dot(scaled, tile, plan), added, plan)


def _scaled_sums(
    xs: Sequence[jax.Array], operands: Sequence[jax.Array], levels: Sequence[jax.Array], plan: Plan
) -> jax.Array:
    """The sum of `x @ (scale * (operand - bias) + offset)`, with scales and offsets for the blocks of x's columns."""
    m, blocks = xs[0].shape[0], range(plan.blocks)
    block = _block(xs[0].shape, plan)
    apart = [jnp.concatenate([jnp.where(block == i, x, jnp.zeros_like(x)) for i in blocks], 0) for x in xs]
    products = functools.reduce(jnp.add, [_dot(x, operand, plan) for x, operand in zip(apart, operands, strict=True)])
    total = [products[i * m : (i + 1) * m] * levels[0][i : i + 1] for i in blocks]
    shift = _shift(levels, plan)
    if shift is not None:
        sums = jnp.sum(functools.reduce(jnp.add, [x.astype(jnp.float32) for x in apart]), 1, keepdims=True)
        total += [sums[i * m : (i + 1) * m] * shift[i : i + 1] for i in blocks]
    return functools.reduce(jnp.add, total)


def _scaled_x(x: jax.Array, levels: Sequence[jax.Array], plan: Plan) -> tuple[jax.Array, jax.Array | None]:
    """bfloat16 x times the scales of each block, one below the other; and what to add to their products.

    The bias is taken off with the rounded x, which is what the matrix unit multiplies.
    """
    wide, (scale, *offset) = x.astype(jnp.float32), levels
    scaled = [(wide * scale[i : i + 1]).astype(jnp.bfloat16) for i in range(plan.blocks)]
    more = plan.bias + (0 if offset else plan.format.centre)
    if not more:
        return jnp.concatenate(scaled, 0), None
    added = [-more * each.astype(jnp.float32) for each in scaled]
    if offset:
        added = [each + wide * offset[0][i : i + 1] for i, each in enumerate(added)]
    return jnp.concatenate(scaled, 0), jnp.concatenate([jnp.sum(each, 1, keepdims=True) for each in added], 0)


def _of_blocks(products: jax.Array, added: jax.Array | None, plan: Plan) -> jax.Array:
    """(m, 128) of (blocks * m, 128): each column from the rows of its block."""
    products = products if added is None else products + added
    m = products.shape[0] // plan.blocks
    block = _block((m, LANES), plan)
    parts = [products[i * m : (i + 1) * m] for i in range(plan.blocks)]
    return functools.reduce(lambda value, i: jnp.where(block == i, parts[i], value), range(1, plan.blocks), parts[0])


def _block(shape: tuple[int, ...], plan: Plan) -> jax.Array:
    """For 128 decoded rows or columns, laid along the columns of `shape`: the block that each is in."""
    place = lax.broadcasted_iota(jnp.int32, shape, 1)
    along = _element(place, plan.order) if plan.packed_axis == 0 else place * plan.operands
    return along >> _log2(plan.block_size)


def _shift(levels: Sequence[jax.Array], plan: Plan) -> jax.Array | None:
    """What is added to `scale` times a decoded value to give the value of the matrix; None if that is nothing."""
    scale, *offset = levels
    if offset:
        return offset[0] - plan.bias * scale
    more = plan.bias + plan.format.centre
    return -more * scale if more else None


def _scaled(
    operands: Sequence[jax.Array], scale: jax.Array, offset: Sequence[jax.Array], start: int, plan: Plan
) -> list[jax.Array]:
    """The values of the matrix, bfloat16, for decoded rows from `start` on."""
    scales, shift = _of_elements(scale, start, plan), _shift([scale, *offset], plan)
    scaled = [operand.astype(jnp.float32) * scales for operand in operands]
    if shift is not None:
        shifts = _of_elements(shift, start, plan)
        scaled = [each + shifts for each in scaled]
    return [each.astype(jnp.bfloat16) for each in scaled]


def _of_elements(level: jax.Array, start: int, plan: Plan) -> jax.Array:
    """The scale, or offset, of each element of an operand, for decoded rows from `start` on."""
    if plan.packed_axis == 0:
        parts = []
        shape = (LANES // plan.order, level.shape[1])
        block = lax.broadcasted_iota(jnp.int32, shape, 0) * plan.order >> _log2(plan.block_size)
        for at in range(start, start + PART, LANES):
            rows = [level[at // plan.block_size + i][None] for i in range(plan.blocks)]
            each = jnp.broadcast_to(rows[0], shape)
            for i in range(1, plan.blocks):
                each = jnp.where(block == i, rows[i], each)
            parts += [each] * plan.order
        return jnp.concatenate(parts, 0)
    rows = level[:, start : start + PART]
    filled = jnp.concatenate([rows, jnp.zeros((LANES - rows.shape[0], PART), rows.dtype)], 0).T
    block = lax.broadcasted_iota(jnp.int32, (PART, plan.lanes), 1) * plan.operands >> _log2(plan.block_size)
    taken = [block[:, at : at + LANES] for at in range(0, plan.lanes, LANES)]
    return jnp.concatenate([permuted_lanes(filled, each) for each in taken], 1)


def _log2(size: int) -> int:
    return size.bit_length() - 1
