"""What a kernel reads: quantized matrices as they are stored."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A stack of quantized matrices of `rows` x `cols` values; `reference` says what the codes stand for.

    `scales` of "int8" and "ternary": none, or float32 (count, rows or 1, cols or 1). Of "nf4": float32 with an entry
    per block, (count, rows / block_size, cols) or (count, rows, cols / block_size); or those quantized: uint8 codes of
    that shape, float32 (count, one per 256 codes), float32 (count,), and the float32 (256,) that codes stand for.
    """

    format: str  # "int8", "nf4" or "ternary"
    codes: tuple[jax.Array, ...]  # planes of bits, mostly one: (count, rows, cols), shorter along the packed axis
    scales: tuple[jax.Array, ...]
    rows: int
    cols: int
    packed_axis: int = 0
    block_size: int = 2  # of "nf4"

    @property
    def count(self) -> int:
        return self.codes[0].shape[0]
