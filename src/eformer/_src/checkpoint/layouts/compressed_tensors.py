"""Integers of compressed-tensors: `weight_packed` of 1 to 8 bits, and `weight` of int8, with scales and zero points.

A value is `(q - zero_point) * scale` with a signed q, which is stored as `q + 2 ** (bits - 1)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from eformer._src.checkpoint.arrays import AbstractArray
from eformer._src.checkpoint.header import Json, checked_shape
from eformer._src.checkpoint.prequantized.bit_fields import dense_words, unpack_dense, unpack_fields
from eformer._src.checkpoint.prequantized.layout import (
    FLOATS,
    Config,
    Group,
    Layout,
    block_of,
    bytes_of,
    check_said,
    grouped_like,
    planes_of,
    register_layout,
)
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.permuted import ArrayPermuted
from eformer._src.quantization.stored import array_from_fields

KIND = "compressed-tensors"
PACKED, SCALE, SHAPE, ZERO, COLUMNS = (f".weight_{end}" for end in ("packed", "scale", "shape", "zero_point", "g_idx"))
WEIGHT = ".weight"


# --- what the configuration says ---


class WeightSettings(NamedTuple):
    """What the groups of a configuration say of integer weights."""

    bits: frozenset[int]
    sizes: frozenset[int]


def weights_said(config: Callable[[], Config]) -> list[dict[str, Json]]:
    """What the groups of a configuration say of weights."""
    groups = config().get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    given = [(each.get("weights"), each.get("format")) for each in schemes if isinstance(each, dict)]
    return [{**each, **({"format": form} if form else {})} for each, form in given if isinstance(each, dict)]


@functools.lru_cache(maxsize=16)  # by the function, which reads its file once
def _weight_settings(config: Callable[[], Config]) -> WeightSettings:
    ints = [each for each in weights_said(config) if each.get("type", "int") == "int"]
    bits, sizes = ({n for each in ints if type(n := each.get(key)) is int} for key in ("num_bits", "group_size"))
    return WeightSettings(frozenset(bits), frozenset(sizes))


# The formats that arrays may have; others, such as "mixed-precision", say nothing of one.
FORMATS = frozenset(
    f"{name}-quantized" for name in ("pack", "int", "float", "nvfp4-pack", "mxfp4-pack", "mxfp6-pack", "mxfp8")
)


def agrees_with(kind: str, bits: Container[int], name: str) -> Callable[[Group, QuantizedArray], None]:
    """Check that a group of the configuration is of weights of this type and these bits, in blocks as the array has."""

    def check(group: Group, like: QuantizedArray) -> None:
        columns, size = like.shape[-1], _block_size(like)
        facts: dict[str, Callable[[Any], bool]] = {
            "type": lambda said: said == kind,
            "num_bits": lambda said: type(said) is int and said in bits,
            "group_size": lambda said: (
                type(said) is int and (said == size or (size == columns and not 0 < said < size))
            ),
            "format": lambda said: said == name or str(said) not in FORMATS,
        }
        schemes = [{"format": group.config().get("format"), **each} for each in weights_said(group.config)]
        check_said(group, name, schemes or [{"format": group.config().get("format")}], facts)

    return check


def _block_size(like: QuantizedArray) -> int:
    """The elements of a row that share a scale."""
    if isinstance(like, ArrayPermuted):
        return _block_size(cast("QuantizedArray", like.array))
    if isinstance(like, ArrayFloat8) and like.block_shape:
        return like.block_shape[-1]
    return like.block_size if isinstance(like, ArrayGrouped) and like.scale.shape[-1] != 1 else like.shape[-1]


# --- pack-quantized ---


class Packing(NamedTuple):
    """Codes of `bits` bits, one after the other, or as many in each word as it holds whole (until release 0.17)."""

    bits: int
    dense: bool

    def words(self, count: int) -> int:
        return dense_words(count, self.bits) if self.dense else -(-count // (32 // self.bits))

    def unpack(self, words: np.ndarray, count: int, axis: int) -> np.ndarray:
        if self.dense:
            return unpack_dense(words, self.bits, count, axis)
        return unpack_fields(words, self.bits, axis, count)

    @property
    def stored_bits(self) -> int:
        """The bits of codes in our array: it has none of 1 and 7 bits, and holds the same values in 2 and 8."""
        return self.bits if self.bits in PLANES else self.bits + 1


PACKINGS = [Packing(bits, True) for bits in range(1, 9)] + [Packing(bits, False) for bits in (3, 5, 6, 7)]


def _packing(group: Group, count: int) -> Packing:
    """The packing of `count` codes into the words of a row: the only one, of those whose bits the configuration says.

    Where both ways to pack take the same number of words, it is the newer one.
    """
    words, said = group[PACKED].shape[-1], _weight_settings(group.config).bits
    found = [each for each in PACKINGS if each.words(count) == words]
    named = [each for each in found if each.bits in said] if said else found
    chosen = [each for each in named if each.dense] or named
    if len(chosen) == 1:
        return chosen[0]
    bits = " or ".join(map(str, sorted(said)))[:100]
    saying = f"the configuration says {bits}" if said else "no configuration says which"
    fitting = " or ".join(str(bits) for bits in sorted({each.bits for each in found})) or "no number of"
    raise group.wrong(f"{count} codes in {words} words are of {fitting} bits, and {saying}")


def _shape(group: Group) -> tuple[int, ...]:
    """The shape that `weight_shape` says, if the packed words have it along all axes but the last."""
    said, packed = group[SHAPE], group[PACKED].shape
    if said.dtype.kind not in "iu" or said.shape != (len(packed),) or len(packed) < 2:
        raise group.wrong(f"`weight_shape` must be {len(packed)} integers, got {said.dtype}{list(said.shape)}")
    shape = checked_shape([int(size) for size in said.view()])
    if shape is None or shape[:-1] != packed[:-1]:
        raise group.wrong(f"`weight_shape` says {said.view().tolist()}, and `weight_packed` is {list(packed)}")
    return shape


def _scale_shape(group: Group, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales, of as many axes as the array; those of one tensor have one entry."""
    scale = group[SCALE].shape
    if math.prod(scale) == 1:
        return (1,) * len(shape)
    full = (*scale, 1) if len(scale) == len(shape) - 1 else scale
    if len(full) != len(shape):
        raise group.wrong(f"scales {list(scale)} are not those of a weight {list(shape)}")
    return full


def _grouped_like(group: Group, shape: tuple[int, ...], bits: int, zero: tuple[int, ...] | None) -> ArrayGrouped:
    scale, dtype = _scale_shape(group, shape), group[SCALE].dtype
    leaves = {"scale": (scale, dtype)} if zero is None else {"scale": (scale, dtype), "zero": (zero, np.uint8)}
    block = block_of(group, shape[-1], scale[-1], _weight_settings(group.config).sizes) if scale[-1] != 1 else shape[-1]
    return grouped_like(shape, bits, block, dtype, leaves)


def _rows_like(group: Group, shape: tuple[int, ...]) -> Array8B:
    """Codes of int8 with a scale for each row, or one; float32, which holds them all, is what kernels read."""
    scale = _scale_shape(group, shape)
    leaves = {"scale": jax.ShapeDtypeStruct(scale, np.float32), "weight": jax.ShapeDtypeStruct(shape, np.int8)}
    axes = tuple(axis - len(shape) for axis, size in enumerate(scale) if size == 1)
    return array_from_fields(Array8B, {**leaves, "axis": axes, "dtype": group[SCALE].dtype})


def _row_scales(group: Group, like: Array8B) -> np.ndarray:
    return group[SCALE].view().reshape(like.scale.shape).astype(np.float32)


def _packed_like(group: Group) -> ArrayGrouped | ArrayPermuted | Array8B:
    shape = _shape(group)
    packing = _packing(group, shape[-1])
    like = _grouped_like(group, shape, packing.stored_bits, _zero_shape(group, shape, packing))
    order = _order(group, like)
    if order is not None:
        positions = jax.ShapeDtypeStruct(order.shape, order.dtype)
        return array_from_fields(ArrayPermuted, {"array": like, "order": positions, "dtype": like.dtype})
    rows = packing.bits == 8 and like.zero is None and like.scale.shape[-1] == 1
    return _rows_like(group, shape) if rows else like


def _order(group: Group, like: ArrayGrouped) -> np.ndarray | None:
    """The order that puts the columns of each group side by side; None if they are, which -1 means, too."""
    columns, count = group.get(COLUMNS), like.shape[-1]
    if columns is None:
        return None
    if columns.dtype != np.int32 or columns.shape != (count,):
        raise group.wrong(f"`weight_g_idx` must be int32[{count}], got {columns.dtype}{list(columns.shape)}")
    groups, wanted = columns.view(), np.arange(count) // like.block_size
    if np.any(groups == -1) or np.array_equal(groups, wanted):
        return None
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if not np.array_equal(groups[order], wanted):
        raise group.wrong(f"`weight_g_idx` must name each group for {like.block_size} columns, from 0 on")
    return order


def _zero_shape(group: Group, shape: tuple[int, ...], packing: Packing) -> tuple[int, ...] | None:
    """The shape of zero points: packed along the output axis for groups and channels, plain int8 for a whole tensor."""
    zero, scale = group.get(ZERO), _scale_shape(group, shape)
    if zero is None:
        return None
    if zero.dtype == np.int8 and math.prod(zero.shape) == math.prod(scale):
        return scale
    full = (*shape[:-1], scale[-1])
    if zero.dtype == np.int32 and zero.shape == (*shape[:-2], packing.words(shape[-2]), scale[-1]):
        return full
    wanted = f"int32{[*shape[:-2], packing.words(shape[-2]), scale[-1]]} or int8{list(scale)}"
    raise group.wrong(
        f"`weight_zero_point` of {packing.bits} bits must be {wanted}, got {zero.dtype}{list(zero.shape)}"
    )


def _unpacked_zeros(group: Group, packing: Packing, like: ArrayGrouped) -> np.ndarray:
    if group[ZERO].dtype == np.int8:
        return _int8_zeros(group, packing.bits, like)
    return packing.unpack(group[ZERO].view(), like.shape[-2], -2)


def _int8_zeros(group: Group, bits: int, like: ArrayGrouped) -> np.ndarray:
    assert like.zero is not None
    zero = group[ZERO].view().astype(np.int16) + 2 ** (bits - 1)
    if np.any((zero < 0) | (zero > 255)):
        raise group.wrong(f"`weight_zero_point` has values that {bits} bits do not reach")
    return zero.astype(np.uint8).reshape(like.zero.shape)


def _read_packed(
    group: Group, like: ArrayGrouped | ArrayPermuted | Array8B
) -> Mapping[str, np.ndarray | QuantizedArray]:
    if isinstance(like, Array8B):
        weight = bytes_of(group[PACKED], like.shape[-1]) ^ np.uint8(128)
        return {"weight": weight.view(np.int8), "scale": _row_scales(group, like)}
    if isinstance(like, ArrayGrouped):
        return _leaves(group, like, None)
    assert isinstance(like.array, ArrayGrouped)
    order = _order(group, like.array)
    leaves = _leaves(group, like.array, order)
    return {"array": array_from_fields(ArrayGrouped, {**vars(like.array), **leaves}), "order": np.asarray(order)}


def _leaves(group: Group, like: ArrayGrouped, order: np.ndarray | None) -> dict[str, np.ndarray]:
    packing = _packing(group, like.shape[-1])
    made = {"scale": group[SCALE].view().reshape(like.scale.shape)}
    if like.zero is not None:
        made["zero"] = _unpacked_zeros(group, packing, like)
    if packing.dense and packing.bits in (2, 4, 8) and order is None:  # the bytes are ours already
        return {**made, "packed": bytes_of(group[PACKED], like.packed.shape[-1])}
    # Centred codes of one more bit are larger by half of what they were centred at.
    shift = 2 ** (packing.stored_bits - 1) - 2 ** (packing.bits - 1) if like.zero is None else 0

    def codes(words: np.ndarray) -> np.ndarray:
        found = packing.unpack(words, like.shape[-1], -1) + np.uint8(shift)
        return found if order is None else found[:, order]

    return {**made, **planes_of(like, group[PACKED].view(), codes)}


# --- int-quantized ---


def _is_int8(group: Group) -> bool:
    weight, scale, zero = group[WEIGHT], group[SCALE], group.get(ZERO)
    plain = zero is None or (zero.dtype == np.int8 and math.prod(zero.shape) == math.prod(scale.shape))
    return weight.dtype == np.int8 and len(weight.shape) >= 2 and scale.dtype in FLOATS and plain


def _int8_like(group: Group) -> Array8B | ArrayGrouped:
    shape = group[WEIGHT].shape
    scale = _scale_shape(group, shape)
    if group.get(ZERO) is not None or scale[-1] != 1:
        return _grouped_like(group, shape, 8, None if group.get(ZERO) is None else scale)
    return _rows_like(group, shape)


def _read_int8(group: Group, like: Array8B | ArrayGrouped) -> dict[str, np.ndarray]:
    weight = group[WEIGHT]
    if isinstance(like, Array8B):
        return {"weight": weight.view(), "scale": _row_scales(group, like)}
    scale = group[SCALE].view().reshape(like.scale.shape)
    made = {"packed": bytes_of(weight, weight.shape[-1]) ^ np.uint8(128), "scale": scale}
    return made if like.zero is None else {**made, "zero": _int8_zeros(group, 8, like)}


# --- the layouts ---


def _is_packed(group: Group) -> bool:
    return group[PACKED].dtype == np.int32 and group[SCALE].dtype in FLOATS


def _refuse(group: Group) -> AbstractArray:
    raise group.wrong("weights with sparsity are not read here: let compressed-tensors decompress them, and save again")


register_layout(
    Layout(
        KIND,
        "pack-quantized",
        (PACKED, SCALE, SHAPE),
        _is_packed,
        _packed_like,
        _read_packed,
        (ZERO, COLUMNS),
        agrees=agrees_with("int", range(1, 9), "pack-quantized"),
    )
)
register_layout(
    Layout(
        KIND,
        "int-quantized",
        (SCALE, WEIGHT),
        _is_int8,
        _int8_like,
        _read_int8,
        (ZERO,),
        agrees=agrees_with("int", range(1, 9), "int-quantized"),
    )
)
for _name, _needs in (("marlin-24", (".scale_packed", PACKED, ".meta")), ("sparse", (".bitmask", ".compressed"))):
    register_layout(Layout(KIND, _name, _needs, lambda group: True, _refuse, lambda group, like: {}))
