"""Arrays kept as `qweight`, `qzeros` and `scales`: GPTQ, and two layouts of AWQ. Their shapes tell which it is.

Of an array (out, in), `qweight` has the shape

- (words of in, out) in GPTQ, with `scales` (groups, out),
- (in, words of out) in AWQ's "gemm", with `scales` (groups, out),
- (out, words of in) in AWQ's "gemv", with `scales` (out, groups and padding).

The `scales` of the first two have as many columns as the array has rows, and `qweight` has as many in GPTQ only, so no
shapes are those of both. Small arrays of "gemv" can look like arrays of the others with a scale for eight elements or
for each; then the configuration decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eformer._src.checkpoint.header import Json
from eformer._src.quantization.formats.grouped import ArrayGrouped

from .bit_fields import WORD, dense_words
from .grouped_like import grouped_like
from .layout import Config, Group
from .quantization_config import entries_of

TENSORS = (".qweight", ".qzeros", ".scales")
WORDS = (np.dtype(np.int32), np.dtype(np.uint32))
SCALES = ("float16", "bfloat16", "float32")
ALL_BITS = range(2, 9)
AWQ_BITS = range(4, 8)


@dataclass(frozen=True)
class Form:
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


def form_of(group: Group) -> Form:
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


def _forms(group: Group) -> Iterator[Form]:
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
                yield Form("gptq", bits, columns, inputs)
    if index is not None:
        return
    for bits in AWQ_BITS:
        if columns == zeros[1] and scales[1] * bits == columns * WORD and rows % scales[0] == 0:
            yield Form("gemm", bits, scales[1], rows)
    if scales == (rows, zeros[1] * 8):
        yield Form("gemv", 4, rows, columns * 8)


def array_like(group: Group, form: Form, block_size: int, has_zero: bool) -> ArrayGrouped:
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
