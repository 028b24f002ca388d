"""GPTQ: `scales * (code - zero)`, codes packed down the inputs, as GPTQModel, AutoGPTQ and auto-round write it.

GPTQ, and two layouts of AWQ, keep arrays as `qweight`, `qzeros` and `scales`. Shapes tell which layout it is.

Of an array (out, in), `qweight` has the shape

- (words of in, out) in GPTQ, with `scales` (groups, out),
- (in, words of out) in AWQ's "gemm", with `scales` (groups, out),
- (out, words of in) in AWQ's "gemv", with `scales` (out, groups and padding).

The `scales` of the first two have as many columns as the array has rows, and `qweight` has as many in GPTQ only, so no
shapes are those of both. Small arrays of "gemv" can look like arrays of the others with a scale for eight elements or
for each; then the configuration decides.

There are dialects of GPTQ. Zeros are stored less one ("gptq", or v1) or as they are ("gptq_v2", "gptq_p"). Codes of 3,
5, 6 and 7 bits are one string of bits, or split into planes of 4, 2 and 1 bits ("gptq_p", and 5 to 7 bits of
GPTQModel).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from eformer._src.checkpoint.header import Json
from eformer._src.checkpoint.prequantized.bit_fields import WORD, dense_words, unpack_dense, unpack_fields
from eformer._src.checkpoint.prequantized.layout import Config, Group, Layout, grouped_like, planes_of, register_layout
from eformer._src.checkpoint.prequantized.quantization_config import entries_of
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.permuted import ArrayPermuted
from eformer._src.quantization.stored import array_from_fields

TENSORS = (".qweight", ".qzeros", ".scales")
WORDS = (np.dtype(np.int32), np.dtype(np.uint32))
SCALES = ("float16", "bfloat16", "float32")
ALL_BITS = range(2, 9)
AWQ_BITS = range(4, 8)


@dataclass(frozen=True)
class QweightLayout:
    """What the shapes of a group say: `layout` is "gptq", "gemm" or "gemv", and the array has the shape (out, in)."""

    layout: str
    bits: int
    out: int
    inputs: int

    @property
    def stored_bits(self) -> int:
        """The bits of codes in the array: `ArrayGrouped` has none of 7."""
        return 8 if self.bits == 7 else self.bits


def is_awq(config: Config) -> bool:
    return "awq" in said(config, "quant_method") or "awq" in said(config, "packing_format")


def said(config: Config, *keys: str) -> str:
    """The first of these entries that is text, in lower case; empty if none is."""
    return next((value.lower() for key in keys if isinstance(value := config.get(key), str)), "")


def number(config: Config, *keys: str) -> int | None:
    """The first of these entries that is an integer."""
    return next((value for key in keys if type(value := config.get(key)) is int), None)


def all_said(config: Config, *keys: str) -> list[Json]:
    """These entries of the configuration, and of what it says of single modules."""
    return [value for key, value in entries_of(dict(config)) if key in keys and value is not None]


def form_of(group: Group) -> QweightLayout:
    """The form of a group; raises if its tensors have none, or another than the configuration says, or several."""
    _check_dtypes(group)
    found = list(_forms(group))
    if not found:
        shapes = ", ".join(f"{end[1:]} {list(tensor.shape)}" for end, tensor in group.tensors.items())
        raise group.wrong(f"its tensors fit together neither as GPTQ nor as AWQ: {shapes}")
    config = group.config()
    bits = all_said(config, "bits", "w_bit")
    if bits and not any(form.bits in bits for form in found):
        fitting = " or ".join(str(each) for each in sorted({form.bits for form in found}))
        raise group.wrong(f"its codes have {fitting} bits, and the configuration says {str(bits[0])[:50]}")
    if len({form.layout for form in found}) > 1 and config:
        version = said(config, "version", "checkpoint_format", "format")
        layout = ("gemv" if version == "gemv" else "gemm") if is_awq(config) else "gptq"
        found = [form for form in found if form.layout == layout]
    if len(found) > 1:
        bits = number(config, "bits", "w_bit")
        found = [form for form in found if form.bits == bits]
    if len(found) != 1:
        raise group.wrong(
            "its tensors fit together in several ways, and no `quantization_config` in a config.json beside the file "
            "says by `quant_method`, `bits` and `version` which it is"
        )
    return found[0]


def _check_dtypes(group: Group) -> None:
    qweight, qzeros, scales = (group[end] for end in TENSORS)
    if qweight.dtype == np.int16:
        raise group.wrong(
            "int16 `qweight` is the layout `gemv_fast` of AWQ, interleaved for CUDA, which is not read; save the model "
            'with version "gemm"'
        )
    if qweight.dtype not in WORDS or qzeros.dtype not in WORDS:
        raise group.wrong(f"`qweight` and `qzeros` must be words of 32 bits, got {qweight.dtype} and {qzeros.dtype}")
    if scales.dtype.name not in SCALES:
        raise group.wrong(f"`scales` must be one of {', '.join(SCALES)}, got {scales.dtype}")
    for end in TENSORS:
        if len(group[end].shape) != 2 or 0 in group[end].shape:
            raise group.wrong(f"`{end[1:]}` must be a matrix that is not empty, got {list(group[end].shape)}")
    index = group.get(".g_idx")
    if index is not None and (index.dtype.kind != "i" or len(index.shape) != 1):
        raise group.wrong(f"`g_idx` must be a vector of integers, got {index.dtype}{list(index.shape)}")


def _forms(group: Group) -> Iterator[QweightLayout]:
    (rows, columns), zeros, scales = (group[end].shape for end in TENSORS)
    index = group.get(".g_idx")
    if zeros[0] != scales[0]:
        return
    if scales[1] == columns:
        for bits in ALL_BITS:
            inputs = index.shape[0] if index is not None else rows * WORD // bits
            packed = rows == dense_words(inputs, bits) and zeros[1] == dense_words(columns, bits)
            # Of 3, 5, 6 and 7 bits only multiples of 32 codes are written.
            whole = WORD % bits == 0 or (inputs % WORD == 0 and columns % WORD == 0)
            if packed and whole and scales[0] <= inputs:
                yield QweightLayout("gptq", bits, columns, inputs)
    if index is not None:
        return
    for bits in AWQ_BITS:
        if columns == zeros[1] and scales[1] * bits == columns * WORD and rows % scales[0] == 0:
            yield QweightLayout("gemm", bits, scales[1], rows)
    if scales == (rows, zeros[1] * 8):
        yield QweightLayout("gemv", 4, rows, columns * 8)


def array_like(group: Group, form: QweightLayout, block_size: int, has_zero: bool) -> ArrayGrouped:
    """The array of a form without values: blocks along the inputs, in the dtype of its scales."""
    blocks, dtype = (form.out, -(-form.inputs // block_size)), group[".scales"].dtype
    sizes = all_said(group.config(), "group_size", "q_group_size")
    if sizes and not any(_groups(form.inputs, size) == blocks[1] for size in sizes):
        what = f"it has {blocks[1]} groups of {block_size} inputs"
        raise group.wrong(f"{what}, and the configuration says groups of {str(sizes[0])[:50]}")
    leaves = {"scale": (blocks, dtype), **({"zero": (blocks, np.uint8)} if has_zero else {})}
    return grouped_like((form.out, form.inputs), form.stored_bits, block_size, dtype, leaves)


def _groups(inputs: int, size: Json) -> int | None:
    """How many groups of this size there are; -1 is one group of all."""
    if type(size) is not int or size == 0:
        return None
    return 1 if size < 0 else -(-inputs // size)


PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # bits in each plane of "gptq_p", the lowest first
FORMATS = ("gptq", "gptq_v2", "gptq_p")


# --- the dialect ---


def _is_auto_round(config: Config) -> bool:
    return "auto-round" in said(config, "quant_method")  # "intel/auto-round" in early releases


def _is_gptq(config: Config) -> bool:
    """Whether the configuration is one of GPTQ; AutoGPTQ's own file did not name a method."""
    return bool(config) and (_is_auto_round(config) or said(config, "quant_method") in ("", "gptq"))


def _stored_less(config: Config, bits: int) -> int | None:
    """By how much stored zeros are less than zeros: 1, 0, or None if the configuration does not say it."""
    if _is_auto_round(config):
        packing = said(config, "packing_format", "backend")
        settled = "round" in packing and "awq" not in packing
        return int("gptq" in packing and "gptqmodel" not in packing) if settled else None
    return 0 if _is_planar(config, bits) else {"gptq": 1, "gptq_v2": 0}.get(said(config, "checkpoint_format", "format"))


def _is_planar(config: Config, bits: int) -> bool:
    """Whether codes are split into planes. GPTQModel has no other way for 5, 6 and 7 bits, and auto-round has none."""
    if _is_auto_round(config):
        return False
    return bits in (5, 6, 7) or said(config, "checkpoint_format", "format") == "gptq_p"


def _check_dialect(group: Group, form: QweightLayout) -> None:
    config = group.config()
    for key in ("checkpoint_format", "format"):
        if not isinstance(config.get(key), str | None):
            raise group.wrong(f"`{key}` of the configuration must be text, got {str(config[key])[:50]!r}")
    stated = said(config, "checkpoint_format", "format")
    if _is_gptq(config) and not _is_auto_round(config) and stated and stated not in FORMATS:
        raise group.wrong(
            f"the configuration says that its format is {stated[:50]!r}, which is not read: it must be one of "
            f"{', '.join(map(repr, FORMATS))}"
        )
    if not _is_gptq(config) and WORD % form.bits:
        raise group.wrong(
            f"codes of {form.bits} bits are packed in two ways, and no `quantization_config` in a config.json beside "
            f"the file says by `quant_method` and `checkpoint_format` which it is"
        )


# --- zeros ---


def _zeros(group: Group, form: QweightLayout) -> np.ndarray:
    """The zero of each group and output, (groups, out), as uint8.

    One more than 2**bits - 1 is 0. In words of whole fields it also adds one to the next field: GPTQModel subtracts and
    adds ones to whole words, so this gives the zeros that it had before it wrote them.
    """
    words, bits, config = group[".qzeros"].view().view(np.uint32), form.bits, group.config()
    planar, less = _is_planar(config, bits), _stored_less(config, bits)
    stored = _codes(words, bits, form.out, planar)
    if less is None or config.get("sym") is not False:
        less = _less_if_symmetric(group, stored, bits, less)
    if less is None and not _is_gptq(config):
        raise group.wrong(
            "nothing says whether its zeros are stored less one: a config.json beside the file must have a "
            '`quantization_config` with `checkpoint_format`, "gptq" if they are and "gptq_v2" if not'
        )
    if less == 0:  # None of GPTQ is 1: releases that did not write `checkpoint_format` knew only "gptq"
        return stored
    if WORD % bits:
        return stored + np.uint8(1) & np.uint8(2**bits - 1)
    ones = np.uint32((2**WORD - 1) // (2**bits - 1))
    return _codes(words + ones, bits, form.out, planar)


def _less_if_symmetric(group: Group, stored: np.ndarray, bits: int, less: int | None) -> int | None:
    """`less` as `qzeros` tell it: symmetric codes have the zero 2**(bits - 1) throughout. Raises if it is another."""
    middle, first = 2 ** (bits - 1), int(stored[0, 0])
    if first not in (middle - 1, middle) or np.any(stored != first):
        return less
    if less not in (None, middle - first):
        formats = ("gptq_v2", "gptq") if less else ("gptq", "gptq_v2")
        raise group.wrong(
            f"all its zeros are stored as {first}, which is the middle of {bits} bits in {formats[0]!r}, and the "
            f"configuration says {formats[1]!r}; put {formats[0]!r} as `checkpoint_format` into `quantization_config` "
            f"of config.json, or `sym` as false if zeros of {first + (less or 0)} are meant"
        )
    return middle - first


# --- groups ---


def _grouping(group: Group, form: QweightLayout) -> tuple[int, np.ndarray | None]:
    """How many inputs a group has, and the order that puts the inputs of each group side by side, if they are not."""
    index, groups, inputs = group.get(".g_idx"), group[".scales"].shape[0], form.inputs
    if index is None:
        return _group_size(group, inputs, groups), None
    of_input = index.view().astype(np.int64)
    of_input = np.where(of_input < 0, of_input + groups, of_input)
    if np.any((of_input < 0) | (of_input >= groups)):
        raise group.wrong(f"`g_idx` names groups that are none of the {groups}")
    order = None if np.all(np.diff(of_input) >= 0) else np.argsort(of_input, kind="stable").astype(np.int32)
    found = of_input if order is None else of_input[order]
    size = int(np.searchsorted(found, 1))
    if not size or not np.array_equal(found, np.arange(inputs) // size) or -(-inputs // size) != groups:
        raise group.wrong(
            f"`g_idx` must give each of the {groups} groups the same number of inputs, the last may have less"
        )
    return size, order


def _group_size(group: Group, inputs: int, groups: int) -> int:
    """The inputs of a group, without a `g_idx` that says them."""
    stated = number(group.config(), "group_size", "q_group_size")
    if groups == 1:
        return inputs
    if stated is not None and stated > 0 and -(-inputs // stated) == groups:
        return stated
    size = inputs // groups
    if inputs % groups or size & (size - 1):
        raise group.wrong(
            f"{groups} groups of {inputs} inputs may have any of several sizes, and no `group_size` in the "
            f"`quantization_config` of a config.json beside the file says which"
        )
    return size


# --- reading ---


def _codes(words: np.ndarray, bits: int, count: int, planar: bool) -> np.ndarray:
    """`count` codes in each row of words, as uint8."""
    if not planar or WORD % bits == 0:  # these have one plane
        return unpack_dense(words, bits, count)
    blocks = words.reshape(len(words), -1, bits)
    codes, start = np.zeros((len(words), count), np.uint8), 0
    for width in PLANES[bits]:
        plane = blocks[:, :, start : start + width].reshape(len(words), -1)
        codes |= unpack_fields(plane, width, -1, count) << np.uint8(start)
        start += width
    return codes


def _planes(group: Group, like: ArrayGrouped, bits: int, order: np.ndarray | None) -> dict[str, np.ndarray]:
    """The planes of `like`, whose inputs are in this order."""
    words, planar = group[".qweight"].view().T, _is_planar(group.config(), bits)
    if WORD % bits == 0 and order is None:  # the bytes of a word are ours
        return {"packed": np.ascontiguousarray(words).view(np.uint8)[:, : like.packed.shape[1]]}

    def codes(rows: np.ndarray) -> np.ndarray:
        found = _codes(rows, bits, like.shape[1], planar)
        return found if order is None else found[:, order]

    return planes_of(like, words, codes)


def _fits(group: Group) -> bool:
    return form_of(group).layout == "gptq"


def _like(group: Group) -> QuantizedArray:
    form = form_of(group)
    _check_dialect(group, form)
    size, order = _grouping(group, form)
    middle = 2 ** (form.stored_bits - 1)
    like = array_like(group, form, size, has_zero=bool(np.any(_zeros(group, form) != middle)))
    if order is None:
        return like
    positions = jax.ShapeDtypeStruct(order.shape, order.dtype)
    return array_from_fields(ArrayPermuted, {"array": like, "order": positions, "dtype": like.dtype})


def _read(group: Group, like: ArrayGrouped | ArrayPermuted) -> Mapping[str, np.ndarray | QuantizedArray]:
    form, array = form_of(group), like.array if isinstance(like, ArrayPermuted) else like
    assert isinstance(array, ArrayGrouped)
    _, order = _grouping(group, form)
    leaves = {**_planes(group, array, form.bits, order), "scale": group[".scales"].view().T}
    if array.zero is not None:
        leaves["zero"] = _zeros(group, form).T
    if order is None:
        return leaves
    return {"array": array_from_fields(ArrayGrouped, {**vars(array), **leaves}), "order": order}


register_layout(Layout("gptq", "gptq", TENSORS, _fits, _like, _read, may_have=(".g_idx",)))
