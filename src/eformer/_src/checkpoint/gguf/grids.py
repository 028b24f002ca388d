"""The types IQ1, IQ2 and IQ3 of GGUF as integers in blocks: a code is the point of a grid, with its sign.

The package `gguf` has the grids. A value is `d * factor * scale * code`: a float16 for 256 elements, a power of two of
the type, an odd number for each block, and a code of 5 or 8 bits. All products are exact in float32. Codes take more
bits than in the file, where they are indices of the grids, and a quarter of those of float32 or less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from eformer._src.checkpoint.prequantized.bit_fields import pack_planes, plane_shapes
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.stored import array_from_fields

ELEMENTS = 256  # that share a float16
AT_ONCE = 1 << 8  # blocks: the package's intermediate arrays take several times the memory of the result
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
        for start in range(0, len(blocks), AT_ONCE):
            part = slice(start, start + AT_ONCE)
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
