"""AWQ: `scales * (code - zero)`, packed along the outputs in a shuffled order ("gemm"), or along the inputs ("gemv").

AutoAWQ writes 4 bits of both. auto-round writes 5, 6 and 7 bits of "gemm" too, as one string of bits in that order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eformer._src.checkpoint.layouts.gptq import TENSORS, QweightLayout, array_like, form_of, number
from eformer._src.checkpoint.prequantized.bit_fields import WORD, pack_planes, plane_shapes, unpack_dense, unpack_fields
from eformer._src.checkpoint.prequantized.layout import AT_ONCE, Group, Layout, register_layout
from eformer._src.quantization.formats.grouped import ArrayGrouped

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs, in which of eight codes each is


def _fits(group: Group) -> bool:
    return form_of(group).layout in ("gemm", "gemv")


def _like(group: Group) -> ArrayGrouped:
    form = form_of(group)
    size = _gemv_group_size(group, form) if form.layout == "gemv" else form.inputs // group[".scales"].shape[0]
    middle = 2 ** (form.stored_bits - 1)
    return array_like(group, form, size, has_zero=bool(np.any(_zeros(group, form, form.inputs // size) != middle)))


def _gemv_group_size(group: Group, form: QweightLayout) -> int:
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


def _zeros(group: Group, form: QweightLayout, groups: int) -> np.ndarray:
    """The zero of each output and group, (out, groups)."""
    words = group[".qzeros"].view()
    return unpack_dense(words, 4, groups) if form.layout == "gemv" else _shuffled(words, form.bits, form.out).T


def _read(group: Group, like: ArrayGrouped) -> Mapping[str, np.ndarray]:
    form, (_, groups), scales = form_of(group), like.scale.shape, group[".scales"].view()
    if form.layout == "gemv":  # the bytes of a word are ours
        leaves = {"packed": group[".qweight"].view().view(np.uint8), "scale": scales[:, :groups]}
    else:
        leaves = {**_planes(group[".qweight"].view(), form), "scale": scales.T}
    return leaves if like.zero is None else {**leaves, "zero": _zeros(group, form, groups)}


def _planes(words: np.ndarray, form: QweightLayout) -> dict[str, np.ndarray]:
    """The planes of the array (out, in) from words (in, words of out), some outputs at a time."""
    shapes = plane_shapes((form.out, form.inputs), form.stored_bits)
    planes = {name: np.empty(shape, np.uint8) for name, shape in shapes.items()}
    step = max(AT_ONCE // form.inputs // WORD, 1) * WORD
    for start in range(0, form.out, step):
        stop = min(start + step, form.out)
        part = words[:, start * form.bits // WORD : stop * form.bits // WORD]
        if form.bits == 4 and form.inputs % 2 == 0:
            _merge_nibbles(part.view(np.uint32), planes["packed"][start:stop])
            continue
        codes = _shuffled(part, form.bits, stop - start).T
        for name, plane in pack_planes(codes, form.stored_bits).items():
            planes[name][start:stop] = plane
    return planes


def _merge_nibbles(words: np.ndarray, packed: np.ndarray) -> None:
    """Fill `packed` (outputs, in / 2) from words (in, outputs / 8) without unpacking, in a tenth of the time."""
    low, high, four = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0), np.uint32(4)
    first, second = words[0::2], words[1::2]
    even, odd = first & low | (second & low) << four, first >> four & low | second & high
    for at, part in ((0, even), (4, odd)):
        # Fields 0, 2, 4 and 6 are the bytes of `even`, and hold the first four outputs of PLACES.
        of_words = part.view(np.uint8).reshape(len(part), -1, 4)
        packed.reshape(-1, 8, len(part))[:, PLACES[at : at + 4]] = of_words.transpose(1, 2, 0)


register_layout(Layout("awq", "awq", TENSORS, _fits, _like, _read, may_have=(".g_idx",)))
