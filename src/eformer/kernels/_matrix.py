"""Quantized matrices as they are stored, which is what kernels read."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A stack of quantized matrices of `rows` x `cols` values; `reference` says what the codes stand for.

    `codes` are the planes of the format's codes, mostly one: (count, rows, cols), shorter along the packed axis.
    `scales` of "int8" and "ternary": none, or float32 (count, rows or 1, cols or 1). Of "nf4", one for each block:
    float32 (count, rows / block_size, cols) or (count, rows, cols / block_size); or quantized: uint8 codes of that
    shape, float32 (count, one per 256 codes), float32 offsets (count,), and the float32 (256,) that codes stand for.
    """

    format: str
    codes: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...]
    rows: int
    cols: int
    packed_axis: int = 0
    block_size: int = 2  # of formats with a scale for each block

    @property
    def count(self) -> int:
        return self.codes[0].shape[0]
