"""Which GGUF types hold which quantized classes. A class without a codec is not written to GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic

import numpy as np

from eformer._src.checkpoint.arrays import Item, Like, Q
from eformer._src.compat.rsr import RSROperatorBinary, RSROperatorTernary
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.nf4 import ArrayNF4
from eformer._src.quantization.formats.ternary import Array1B

from .blocks import TYPES
from .encode import ENCODERS
from .grids import GRIDS
from .grouped import GROUPED


@dataclass(frozen=True)
class GgufCodec(Generic[Q]):
    """How arrays of one quantized class are stored as blocks of one GGUF type, such as "Q4_0".

    Blocks are `uint8[count, bytes]`, in the order of the array's elements. `encode(q)` gives the blocks of an array;
    without it, the array is dequantized and rounded to the nearest values of the type. `decode(blocks, shape)` gives an
    array of NumPy leaves, and `like(shape)` the same without values; without them, the blocks are read as float32.
    `leaf(name, blocks)` may take the place of `decode`: it gives the entries of one leaf for any of the blocks, (count,
    entries), as many for each along the last axis. Then the array is read in pieces, and each device reads its own.
    `separate(blocks, out)` may do the same faster: it writes the entries of all leaves in the dict `out` at once.
    `fits(q)` says of an array without values whether the type holds its layout.
    """

    block_type: str
    array_type: type[Q]
    encode: Callable[[Q], np.ndarray] | None = None
    decode: Callable[[np.ndarray, tuple[int, ...]], Q] | None = None
    like: Callable[[tuple[int, ...]], Q] | None = None
    fits: Callable[[Q], bool] = lambda q: True
    leaf: Callable[[str, np.ndarray], np.ndarray] | None = None
    separate: Callable[[np.ndarray, Mapping[str, np.ndarray]], None] | None = None

    def fill(self, blocks: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Write the entries of the leaves in `out`, (count, entries) each, for the blocks (count, bytes)."""
        if self.separate is not None:
            return self.separate(blocks, out)
        assert self.leaf is not None
        for name, entries in out.items():
            entries[...] = self.leaf(name, blocks).reshape(entries.shape)
        return None

    @property
    def reads(self) -> bool:
        """Whether it keeps blocks quantized."""
        return self.decode is not None or self.leaf is not None


MANY = 4  # types that a message does not list
CODECS: dict[tuple[str, type[QuantizedArray]], GgufCodec] = {}


def register_gguf_codec(codec: GgufCodec) -> None:
    """Use `codec` for its class from now on.

    Of several codecs for a class, the first that fits an array writes it; of several for a type, the last reads it.
    """
    kind, cls = codec.block_type, codec.array_type
    own = codec.encode is not None or codec.reads
    known = [form.name for form in TYPES.values() if form.elements > 1] if own else list(ENCODERS)
    if kind not in known:
        raise ValueError(f"the block type {kind!r} of a codec must be one of {', '.join(known)}")
    if codec.reads != (codec.like is not None):
        raise ValueError("`decode` or `leaf` goes with `like`: the layout of an array is known before it is read")
    if (kind, cls) in CODECS:
        raise ValueError(f"there is a codec of {kind} for {cls.__name__} already")
    CODECS[kind, cls] = codec


def reader_of(kind: str) -> GgufCodec:
    """The codec that keeps blocks of this type quantized; one that reads nothing if they are read as float32."""
    readers = (codec for codec in reversed(CODECS.values()) if codec.block_type == kind and codec.reads)
    return next(readers, GgufCodec(kind, QuantizedArray))


def writer_of(item: Item, instead: str | None = None) -> GgufCodec:
    """The codec that writes a quantized array; a ValueError if there is none, which may say what would do `instead`."""
    cls = type(item.like)
    codecs = [codec for codec in CODECS.values() if codec.array_type is cls]
    found = next((codec for codec in codecs if codec.fits(item.like)), None)
    if found is not None:
        return found
    kinds = " or ".join(codec.block_type for codec in codecs)
    some = f"{kinds} does not hold" if len(codecs) < MANY else "no type of GGUF holds"
    why = f"{some} this layout of it" if codecs else "GGUF has no codec for it"
    instead = instead or "`dequantize()` it first, or say by `type` which type it is to be rounded to"
    raise ValueError(f"{item.name!r} is a {cls.__name__}, and {why}: {instead}")


def encoder_of(kind: str, like: Like) -> Callable[[QuantizedArray], np.ndarray] | None:
    """The function that gives the blocks of a quantized array as they are; None if it has to be dequantized."""
    codec = CODECS.get((kind, type(like))) if isinstance(like, QuantizedArray) else None
    return codec.encode if codec is not None and codec.fits(like) else None


def _has_scale_per_row(q: Array1B) -> bool:
    return q.scale is None or q.scale.shape[-1:] == (1,)


# GGUF has no type with one scale per row, nor one with NF4's values. Q8_0 is the nearest, if someone asks for it: it
# moves each element by at most 1/254 of the largest of its 32. TQ2_0 holds ternary values as they are.
for _codec in (
    GgufCodec("TQ2_0", Array1B, fits=_has_scale_per_row),
    GgufCodec("Q8_0", Array1B, fits=lambda q: not _has_scale_per_row(q)),
    *(GgufCodec("Q8_0", cls) for cls in (Array8B, ArrayNF4, RSROperatorBinary, RSROperatorTernary)),
    *(
        GgufCodec(
            name,
            ArrayGrouped,
            form.encode,
            like=form.like,
            fits=form.fits,
            leaf=form.read,
            separate=form.separate,
        )
        for name, form in GROUPED.items()
    ),
    *(
        GgufCodec(name, ArrayGrouped, like=form.like, decode=form.decode, fits=lambda q: False)
        for name, form in GRIDS.items()
    ),
):
    register_gguf_codec(_codec)
