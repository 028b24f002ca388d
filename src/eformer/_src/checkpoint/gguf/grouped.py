"""The types of GGUF that an `ArrayGrouped` holds as they are: which bytes of a block are which leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from eformer._src.kernels import cpu
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields

from . import planes
from .blocks import IDS, TYPES
from .planes import BITS, FLOAT16, INT8, MINUS_FLOAT16, QUARTERS, Part, nibbles

LEAVES = ("packed", "high", "scale", "zero", "offset", "scale_scale", "offset_scale")
AT_ONCE = 1 << 17  # bytes of blocks: intermediate arrays stay in cache


@dataclass(frozen=True)
class GroupedType:
    """A GGUF type as an ArrayGrouped: `leaves` has the first byte, the byte after the last, and the part for each."""

    name: str
    bits: int
    block_size: int
    leaves: Mapping[str, tuple[int, int, Part]]
    codebook: str = "integer"

    def like(self, shape: tuple[int, ...]) -> ArrayGrouped:
        """The array of this shape, without values."""
        elements = TYPES[IDS[self.name]].elements
        leaves = {
            leaf: jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // elements * self._entries(leaf)), part.dtype)
            for leaf, (_, _, part) in self.leaves.items()
        }
        superblock = elements if "scale_scale" in self.leaves else 0
        statics = {"block_size": self.block_size, "superblock_size": superblock, "codebook": self.codebook}
        return array_from_fields(ArrayGrouped, {**leaves, **statics, "bits": self.bits, "dtype": np.dtype(np.float32)})

    def _entries(self, leaf: str) -> int:
        """How many entries of a leaf a block has."""
        elements = TYPES[IDS[self.name]].elements
        if leaf in ("packed", "high"):
            return elements * PLANES[self.bits][leaf == "high"] // 8
        return 1 if leaf in ("scale_scale", "offset_scale") else elements // self.block_size

    def read(self, leaf: str, blocks: np.ndarray) -> np.ndarray:
        """The entries of a leaf, (blocks, entries)."""
        start, stop, part = self.leaves[leaf]
        # As one item a block: NumPy copies items faster than rows of bytes.
        data = blocks[:, start:stop].view(f"V{stop - start}").copy().view(np.uint8)
        return part.read(data)

    def separate(self, blocks: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Write the entries of some leaves, (blocks, entries) each, in one pass over the blocks where the core can."""
        moves = []
        for leaf, entries in out.items():
            start, stop, part = self.leaves[leaf]
            if part.move in cpu.moves():
                moves.append((part.move, start, stop - start, entries))
                continue
            step = AT_ONCE // blocks.shape[1]
            for first in range(0, len(blocks), step):
                entries[first : first + step] = self.read(leaf, blocks[first : first + step])
        cpu.separate(blocks, moves)

    def fits(self, q: ArrayGrouped) -> bool:
        """Whether blocks of this type hold the layout of `q`; not every value of its scales, nor of `zero`."""
        if self.name == "TQ1_0":  # TQ2_0 holds the same, and this package does not write it
            return False
        if q.ndim == 0 or q.shape[-1] % TYPES[IDS[self.name]].elements:
            return False
        like = self.like(q.shape)
        statics = ("bits", "block_size", "superblock_size", "codebook", "axis")
        return all(getattr(q, name) == getattr(like, name) for name in statics) and _kinds(q) == _kinds(like)

    def encode(self, q: ArrayGrouped) -> np.ndarray:
        """The blocks of an array that `fits`; a ValueError if a scale or a zero is none of this type."""
        return self.joined({leaf: np.ascontiguousarray(getattr(q, leaf)) for leaf in self.leaves})

    def joined(self, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """The blocks that have the entries of these leaves."""
        form = TYPES[IDS[self.name]]
        count = leaves["packed"].size // self._entries("packed")
        out, step = np.zeros((count, form.bytes), np.uint8), AT_ONCE // form.bytes
        for leaf, (start, stop, part) in self.leaves.items():
            entries = leaves[leaf].reshape(count, self._entries(leaf))
            for first in range(0, count, step):
                values = entries[first : first + step]
                data = part.write(values)
                out[first : first + step, start:stop] |= data
                if leaf in ("scale", "offset", "zero") and part.read(data).tobytes() != values.tobytes():
                    raise ValueError(f"{self.name} does not have each `{leaf}` of {values.min()} to {values.max()}")
        return out


def _kinds(q: ArrayGrouped) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The leaves that an array has, their shapes and dtypes."""
    found = {name: getattr(q, name) for name in LEAVES}
    return {name: (leaf.shape, np.dtype(leaf.dtype)) for name, leaf in found.items() if leaf is not None}


def _k_quant(first: int) -> dict[str, tuple[int, int, Part]]:
    """The scales and minima at the head of a Q4_K or Q5_K block, and its 4-bit codes from byte `first`."""
    scales = {"scale_scale": (0, 2, FLOAT16), "scale": (4, 16, planes.K_SCALES)}
    minima = {"offset_scale": (2, 4, MINUS_FLOAT16), "offset": (4, 16, planes.K_MINIMA)}
    return {**scales, **minima, "packed": (first, first + 128, nibbles(32))}


def _halves(count: int) -> dict[str, tuple[int, int, Part]]:
    """Float16 scales of blocks, and offsets if there are two."""
    return {leaf: (2 * i, 2 * i + 2, FLOAT16) for i, leaf in enumerate(("scale", "offset")[:count])}


_FOUR, _ZERO = nibbles(16), {"zero": (0, 1, planes.ONES)}
# x = scale * (value - zero) + offset, the arithmetic of ggml; https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
GROUPED: dict[str, GroupedType] = {
    form.name: form
    for form in (
        GroupedType("Q8_0", 8, 32, {**_halves(1), "packed": (2, 34, planes.SIGNED)}),
        GroupedType("Q4_0", 4, 32, {**_halves(1), "packed": (2, 18, _FOUR)}),
        GroupedType("Q4_1", 4, 32, {**_halves(2), "packed": (4, 20, _FOUR)}),
        GroupedType("Q5_0", 5, 32, {**_halves(1), "high": (2, 6, planes.BYTES), "packed": (6, 22, _FOUR)}),
        GroupedType("Q5_1", 5, 32, {**_halves(2), "high": (4, 8, planes.BYTES), "packed": (8, 24, _FOUR)}),
        GroupedType("Q4_K", 4, 32, _k_quant(16)),
        GroupedType("Q5_K", 5, 32, {**_k_quant(48), "high": (16, 48, BITS)}),
        GroupedType(
            "Q6_K",
            6,
            16,
            {
                "packed": (0, 128, nibbles(64)),
                "high": (128, 192, QUARTERS),
                "scale": (192, 208, INT8),
                "scale_scale": (208, 210, FLOAT16),
            },
        ),
        GroupedType(
            "Q3_K",
            3,
            16,
            {
                "high": (0, 32, BITS),
                "packed": (32, 96, QUARTERS),
                "scale": (96, 108, planes.Q3_SCALES),
                "scale_scale": (108, 110, FLOAT16),
            },
        ),
        GroupedType(
            "Q2_K",
            2,
            16,
            {
                "scale": (0, 16, planes.LOW_NIBBLES),
                "offset": (0, 16, planes.HIGH_NIBBLES),
                "packed": (16, 80, QUARTERS),
                "scale_scale": (80, 82, FLOAT16),
                "offset_scale": (82, 84, MINUS_FLOAT16),
            },
        ),
        GroupedType("IQ4_NL", 4, 32, {**_halves(1), "packed": (2, 18, _FOUR)}, codebook="iq4_nl"),
        GroupedType(
            "IQ4_XS",
            4,
            32,
            {"scale_scale": (0, 2, FLOAT16), "scale": (2, 8, planes.IQ4_SCALES), "packed": (8, 136, _FOUR)},
            codebook="iq4_nl",
        ),
        GroupedType("MXFP4", 4, 32, {"scale": (0, 1, planes.EXPONENTS), "packed": (1, 17, planes.e2m1(16))}, "e2m1"),
        GroupedType("NVFP4", 4, 16, {"scale": (0, 4, planes.UNSIGNED_E4M3), "packed": (4, 36, planes.e2m1(8))}, "e2m1"),
        GroupedType("Q1_0", 2, 128, {"scale": (0, 2, FLOAT16), "packed": (2, 18, planes.SIGNS), **_ZERO}),
        GroupedType("Q2_0", 2, 64, {"scale": (0, 2, FLOAT16), "packed": (2, 18, planes.BYTES), **_ZERO}),
        GroupedType("TQ2_0", 2, 256, {"packed": (0, 64, QUARTERS), "scale": (64, 66, FLOAT16), **_ZERO}),
        GroupedType("TQ1_0", 2, 256, {"packed": (0, 52, planes.TRITS), "scale": (52, 54, FLOAT16), **_ZERO}),
    )
}
