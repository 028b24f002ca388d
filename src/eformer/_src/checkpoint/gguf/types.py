"""The types of GGUF: how many bytes hold the 32 or 256 elements of a block, and which bytes are which leaf.

An `ArrayGrouped` holds most types as they are. IQ1, IQ2 and IQ3 have indices of grids, which the package `gguf` has;
they are read as integers in blocks: a code is the point of a grid, with its sign. A value is `d * factor * scale *
code`: a float16 for 256 elements, a power of two of the type, an odd number for each block, and a code of 5 or 8 bits.
All products are exact in float32. Codes take more bits than in the file, and a quarter of those of float32 or less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from eformer._src.checkpoint.gguf import planes
from eformer._src.checkpoint.gguf.planes import BITS, FLOAT16, INT8, MINUS_FLOAT16, QUARTERS, BlockField, nibbles
from eformer._src.checkpoint.header import DTYPES
from eformer._src.checkpoint.prequantized.bit_fields import pack_planes, plane_shapes
from eformer._src.kernels import cpu
from eformer._src.kernels.grouped import PLANES
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields


class Type(NamedTuple):
    """A tensor type: its name, and the elements and bytes of one block."""

    name: str
    elements: int
    bytes: int


# Number, name, elements and bytes of a block. The numbers are from the specification
# (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), the sizes from the package `gguf`.
_TABLE = """
    0 F32 1 4; 1 F16 1 2; 2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24;
    8 Q8_0 32 34; 9 Q8_1 32 40; 10 Q2_K 256 84; 11 Q3_K 256 110; 12 Q4_K 256 144; 13 Q5_K 256 176;
    14 Q6_K 256 210; 15 Q8_K 256 292; 16 IQ2_XXS 256 66; 17 IQ2_XS 256 74; 18 IQ3_XXS 256 98; 19 IQ1_S 256 50;
    20 IQ4_NL 32 18; 21 IQ3_S 256 110; 22 IQ2_S 256 82; 23 IQ4_XS 256 136; 24 I8 1 1; 25 I16 1 2;
    26 I32 1 4; 27 I64 1 8; 28 F64 1 8; 29 IQ1_M 256 56; 30 BF16 1 2; 34 TQ1_0 256 54;
    35 TQ2_0 256 66; 39 MXFP4 32 17; 40 NVFP4 64 36; 41 Q1_0 128 18; 42 Q2_0 64 18
"""
TYPES: dict[int, Type] = {
    int(number): Type(name, int(elements), int(size))
    for number, name, elements, size in map(str.split, _TABLE.split(";"))
}
IDS: dict[str, int] = {kind.name: number for number, kind in TYPES.items()}

# Types without blocks are named as in safetensors.
PLAIN: dict[str, np.dtype] = {form.name: DTYPES[form.name] for form in TYPES.values() if form.elements == 1}

# Types that files had once; their numbers are not used again.
GONE = {
    **dict(zip((4, 5), ("Q4_2", "Q4_3"), strict=True)),
    **dict(zip((31, 32, 33), ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"), strict=True)),
    **dict(zip((36, 37, 38), ("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"), strict=True)),
}


LEAVES = ("packed", "high", "scale", "zero", "offset", "scale_scale", "offset_scale")
AT_ONCE = 1 << 17  # bytes of blocks: intermediate arrays stay in cache


@dataclass(frozen=True)
class GroupedType:
    """A GGUF type as an ArrayGrouped: `leaves` has the first byte, the byte after the last, and the part for each."""

    name: str
    bits: int
    block_size: int
    leaves: Mapping[str, tuple[int, int, BlockField]]
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


def _k_quant(first: int) -> dict[str, tuple[int, int, BlockField]]:
    """The scales and minima at the head of a Q4_K or Q5_K block, and its 4-bit codes from byte `first`."""
    scales = {"scale_scale": (0, 2, FLOAT16), "scale": (4, 16, planes.K_SCALES)}
    minima = {"offset_scale": (2, 4, MINUS_FLOAT16), "offset": (4, 16, planes.K_MINIMA)}
    return {**scales, **minima, "packed": (first, first + 128, nibbles(32))}


def _halves(count: int) -> dict[str, tuple[int, int, BlockField]]:
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


ELEMENTS = 256  # that share a float16
GRID_BLOCKS_AT_ONCE = 1 << 8  # blocks: the package's intermediate arrays take several times the memory of the result
ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)
Scales = Callable[[np.ndarray], np.ndarray]  # from blocks (n, bytes) to uint8 (n, scales)


@dataclass(frozen=True)
class GridType:
    """`scales` gives the number s of each block, for the scale 2 * s + 1."""

    name: str
    bits: int
    block_size: int
    factor: float
    scales: Scales

    def like(self, shape: tuple[int, ...]) -> ArrayGrouped:
        """The array of this shape, without values."""
        *rows, row = shape
        leaves = {**plane_shapes(shape, self.bits), "scale": (*rows, row // self.block_size)}
        structs = {name: jax.ShapeDtypeStruct(tuple(size), np.uint8) for name, size in leaves.items()}
        structs["scale_scale"] = jax.ShapeDtypeStruct((*rows, row // ELEMENTS), np.float32)
        statics = {"bits": self.bits, "block_size": self.block_size, "superblock_size": ELEMENTS}
        return array_from_fields(ArrayGrouped, {**structs, **statics, "dtype": np.dtype(np.float32)})

    def decode(self, blocks: np.ndarray, shape: tuple[int, ...]) -> ArrayGrouped:
        import gguf  # pyright: ignore[reportMissingImports]  # an extra

        like, kind = self.like(shape), gguf.GGMLQuantizationType[self.name]
        made = {name: np.empty((len(blocks), *_rest(leaf, len(blocks))), leaf.dtype) for name, leaf in _leaves(like)}
        for start in range(0, len(blocks), GRID_BLOCKS_AT_ONCE):
            part = slice(start, start + GRID_BLOCKS_AT_ONCE)
            piece = np.array(blocks[part])
            scale = 2 * self.scales(piece) + 1
            with np.errstate(all="ignore"):  # it may be a NaN that signals
                made["scale_scale"][part] = self._without_d(piece) * np.float32(self.factor)
            made["scale"][part] = scale
            steps = gguf.quants.dequantize(piece, kind).reshape(*scale.shape, -1) / self.factor / scale[..., None]
            codes = (steps.astype(np.int16) + 2 ** (self.bits - 1)).astype(np.uint8).reshape(len(piece), -1)
            for name, plane in pack_planes(codes, self.bits).items():
                made[name][part] = plane
        leaves = {name: made[name].reshape(leaf.shape) for name, leaf in _leaves(like)}
        return array_from_fields(ArrayGrouped, {**vars(like), **leaves})

    def _without_d(self, blocks: np.ndarray) -> np.ndarray:
        """The float16 of each block, (n, 1); blocks get 1 in its place, so that no other value is lost by it."""
        if self.name != "IQ1_M":
            found = blocks[:, :2].copy().view(np.float16)
            blocks[:, :2] = ONE
            return found.astype(np.float32)
        words = blocks[:, -8:].copy().view(np.uint16)  # it is in the highest bits of these, four in each
        shifts = np.array([0, 4, 8, 12], np.uint16)
        found = np.bitwise_or.reduce((words >> 12) << shifts, axis=1, keepdims=True).view(np.float16)
        words = words & 0x0FFF | ((ONE.view(np.uint16) >> shifts) << 12).astype(np.uint16)
        blocks[:, -8:] = words.view(np.uint8)
        return found.astype(np.float32)


def _leaves(like: ArrayGrouped) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    return [(name, leaf) for name, leaf in vars(like).items() if isinstance(leaf, jax.ShapeDtypeStruct)]


def _rest(leaf: jax.ShapeDtypeStruct, blocks: int) -> tuple[int]:
    return (leaf.size // max(blocks, 1),)


def _nibbles(first: int, stop: int) -> Scales:
    """Two in each byte, the first in the low half."""
    return lambda blocks: np.stack([blocks[:, first:stop] & 15, blocks[:, first:stop] >> 4], 2).reshape(len(blocks), -1)


def _words(dtype: type, first: int, stop: int, step: int, shift: int, mask: int) -> Scales:
    """The bits from `shift` on of every `step`-th word."""

    def scales(blocks: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(blocks[:, first:stop]).view(dtype)[:, step - 1 :: step]
        return (words >> dtype(shift) & dtype(mask)).astype(np.uint8)

    return scales


def _of_iq1_m(blocks: np.ndarray) -> np.ndarray:
    words = blocks[:, -8:].copy().view(np.uint16)[..., None] >> np.array([0, 3, 6, 9], np.uint16)
    return (words & 7).astype(np.uint8).reshape(len(blocks), -1)


GRIDS = {
    form.name: form
    for form in (
        GridType("IQ2_XXS", 8, 32, 1 / 8, _words(np.uint32, 2, 66, 2, 28, 15)),
        GridType("IQ2_XS", 8, 16, 1 / 8, _nibbles(66, 74)),
        GridType("IQ2_S", 8, 16, 1 / 8, _nibbles(74, 82)),
        GridType("IQ3_XXS", 8, 32, 1 / 4, _words(np.uint32, 66, 98, 1, 28, 15)),
        GridType("IQ3_S", 5, 32, 1.0, _nibbles(106, 110)),
        GridType("IQ1_S", 5, 32, 1 / 8, _words(np.uint16, 34, 50, 1, 12, 7)),
        GridType("IQ1_M", 5, 16, 1 / 8, _of_iq1_m),
    )
}
