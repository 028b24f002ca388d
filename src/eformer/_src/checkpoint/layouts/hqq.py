"""HQQ: `(code - zero) * scale` in groups along the rows, with zeros in floating point.

The array, (out, in), is cut into groups, one under the other. Codes of the same column are packed into a byte from
equal parts of these rows, the first part in the highest bits; of 3 bits, ten are in a word of 32 bits. The tensors
beside them say the shape, the bits, and the size of groups.
"""

from __future__ import annotations

import math

import numpy as np

from eformer._src.checkpoint.header import Tensor, checked_shape
from eformer._src.checkpoint.prequantized.layout import FLOATS, Group, Layout, grouped_like, planes_of, register_layout
from eformer._src.quantization.formats.grouped import ArrayGrouped

CODES, SCALE, ZERO = ".W_q", ".scale", ".zero"
SAID = (".nbits", ".group_size", ".axis", ".shape")
MORE = """
    .packing .unpack_view_dtype .view_as_float .quant_scale .quant_zero .compute_dtype .offload_meta
    .encoded_state_dict .stores_quant_config .channel_wise .optimize .round_zero
"""
PER_ITEM = {8: 1, 4: 2, 2: 4, 1: 8, 3: 10}  # codes in a byte, or of 3 bits in a word


def _number(group: Group, end: str) -> int:
    tensor = group[end]
    if tensor.dtype.kind not in "iub" or math.prod(tensor.shape) != 1:
        raise group.wrong(f"`{end[1:]}` must be an integer, got {tensor.dtype}{list(tensor.shape)}")
    return int(tensor.view().reshape(()))


def _like(group: Group) -> ArrayGrouped:
    bits, size, axis = (_number(group, end) for end in SAID[:3])
    shape = checked_shape(group[".shape"].view().tolist()) if group[".shape"].dtype.kind in "iu" else None
    if axis != 1 or bits not in PER_ITEM:
        raise group.wrong(
            f"HQQ with {bits} bits and groups along axis {axis} is not read: axis 1 is, of 1 to 4 or 8 bits"
        )
    if any(end in group.tensors and _number(group, end) for end in (".quant_scale", ".quant_zero")):
        raise group.wrong("HQQ with scales or zeros that are quantized themselves is not read")
    if shape is None or len(shape) != 2 or size < 1 or shape[1] % size or not shape[0] * shape[1]:
        raise group.wrong(f"groups of {size} do not divide the rows of {group['.shape'].view().tolist()}")
    groups, item = shape[0] * shape[1] // size, 4 if bits == 3 else 1
    codes, scale, zero = group[CODES], group[SCALE], group[ZERO]
    if codes.nbytes != -(-groups // PER_ITEM[bits]) * size * item:
        raise group.wrong(f"{list(shape)} codes of {bits} bits in groups of {size} do not take {codes.nbytes} bytes")
    if scale.dtype not in FLOATS or zero.dtype not in FLOATS or {math.prod(t.shape) for t in (scale, zero)} != {groups}:
        raise group.wrong(f"`scale` and `zero` must be {groups} floats, got {list(scale.shape)} and {list(zero.shape)}")
    entries = (shape[0], shape[1] // size)
    stored = 2 if bits == 1 else bits
    if _are_codes(zero, bits):
        return grouped_like(
            shape, stored, size, scale.dtype, {"scale": (entries, scale.dtype), "zero": (entries, np.uint8)}
        )
    if scale.dtype.itemsize > 2 or zero.dtype.itemsize > 2:  # products of these would be rounded
        raise group.wrong("HQQ with zeros of float32 that are no whole numbers is not read: save it in 16 bits")
    floats = {"scale": (entries, np.float32), "offset": (entries, np.float32)}
    return grouped_like(shape, stored, size, scale.dtype, floats)


def _are_codes(zero: Tensor, bits: int) -> bool:
    """Whether all zeros are whole numbers that a code may be: else an offset takes their place."""
    values = zero.view()
    return bool(np.all((values >= 0) & (values < 2**bits) & (values == np.round(values.astype(np.float32)))))


def _read(group: Group, like: ArrayGrouped) -> dict[str, np.ndarray]:
    bits, size = _number(group, ".nbits"), _number(group, ".group_size")
    items = group[CODES].raw().view(np.uint32 if bits == 3 else np.uint8).reshape(-1, size)
    first = PER_ITEM[bits] - 1
    parts = [(items >> (bits * (first - i)) & (2**bits - 1)).astype(np.uint8) for i in range(first + 1)]
    codes = np.concatenate(parts)[: like.size // size]
    scale, zero = (group[end].view().reshape(like.scale.shape) for end in (SCALE, ZERO))
    made = planes_of(like, codes.reshape(like.shape), lambda rows: rows)
    if like.offset is None:
        return {**made, "scale": scale, "zero": zero.astype(np.uint8)}
    # The product of two numbers of 16 bits is exact in float32, and so is that of a code: rounded once, as HQQ's own.
    scale, zero = scale.astype(np.float32), zero.astype(np.float32)
    with np.errstate(all="ignore"):
        return {**made, "scale": scale, "offset": -zero * scale}


register_layout(
    Layout("hqq", "hqq", (CODES, SCALE, ZERO, *SAID), lambda group: True, _like, _read, tuple(MORE.split()))
)
