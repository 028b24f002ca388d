"""AWQ: `scales * (code - zero)`, packed along the outputs in a shuffled order ("gemm"), or along the inputs ("gemv").

AutoAWQ writes 4 bits of both. auto-round writes 5, 6 and 7 bits of "gemm" too, as one string of bits in that order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eformer.ops.quantization import ArrayGrouped

from ._bit_fields import WORD, unpack_dense, unpack_fields
from ._prequantized import Group, Layout, register_layout
from ._qweight import TENSORS, Form, array_like, form_of, number, planes_of

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs, in which of eight codes each is


def _fits(group: Group) -> bool:
    return form_of(group).layout in ("gemm", "gemv")


def _like(group: Group) -> ArrayGrouped:
    form = form_of(group)
    size = _gemv_group_size(group, form) if form.layout == "gemv" else form.inputs // group[".scales"].shape[0]
    middle = 2 ** (form.stored_bits - 1)
    return array_like(group, form, size, has_zero=bool(np.any(_zeros(group, form, form.inputs // size) != middle)))


def _gemv_group_size(group: Group, form: Form) -> int:
    """The size of a group, which shapes do not tell: groups are filled up to a multiple of 8, 16 or 32."""
    size = number(group.config(), "group_size", "q_group_size")
    size = form.inputs if size == -1 else size
    if size is None or size < 1 or form.inputs % size:
        raise group.wrong(
            f"the groups of {form.inputs} inputs have a size that `group_size` in the `quantization_config` of a "
            f"config.json beside the file must say; it says {'nothing' if size is None else size}"
        )
    multiple = 8 * {64: 2, 32: 4}.get(size, 1)
    groups = form.inputs // size
    if group[".scales"].shape[1] != -(-groups // multiple) * multiple:
        raise group.wrong(f"{groups} groups of {size} do not have {group['.scales'].shape[1]} scales")
    return size


def _shuffled(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """`count` codes in each row of words, in the order of outputs."""
    if bits == 4:  # eight outputs are a word
        return unpack_fields(words, bits, -1, count, PLACES)
    codes = unpack_dense(words, bits, count)
    return codes.reshape(len(words), -1, 8)[:, :, PLACES].reshape(len(words), count)


def _zeros(group: Group, form: Form, groups: int) -> np.ndarray:
    """The zero of each output and group, (out, groups)."""
    words = group[".qzeros"].view()
    return unpack_dense(words, 4, groups) if form.layout == "gemv" else _shuffled(words, form.bits, form.out).T


def _read(group: Group, like: ArrayGrouped) -> Mapping[str, np.ndarray]:
    form, words, (_, groups) = form_of(group), group[".qweight"].view(), like.scale.shape

    def codes(start: int, stop: int) -> np.ndarray:
        part = words[:, start * form.bits // WORD : stop * form.bits // WORD]
        return _shuffled(part, form.bits, stop - start).T

    if form.layout == "gemv":  # the bytes of a word are ours
        leaves = {"packed": words.view(np.uint8), "scale": group[".scales"].view()[:, :groups]}
    else:
        leaves = {**planes_of(form, codes), "scale": group[".scales"].view().T}
    return leaves if like.zero is None else {**leaves, "zero": _zeros(group, form, groups)}


register_layout(Layout("awq", "awq", TENSORS, _fits, _like, _read))
