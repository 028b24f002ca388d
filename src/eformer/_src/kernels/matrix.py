"""Quantized matrices as they are stored, which is what kernels read."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A stack of quantized matrices of `rows` x `cols` values; `reference` and `grouped` say what the codes stand for.

    `codes` are the planes of the format's codes, mostly one: (count, rows, cols), shorter along the packed axis.
    `scale_names` says what each of the `scales` is. Of "int8" and "ternary": none, or "scale", float32 (count, rows or
    1, cols or 1). Of formats with blocks, where `blocks` is (count, rows / block_size, cols) or (count, rows,
    cols / block_size): "scale" of that shape; then "scale_scale", shared by `superblock_size` values along the packed
    axis or by all along an axis; then "zero", or "offset" and "offset_scale". Of "nf4" a float32 "scale" alone, or
    quantized: uint8 codes as "scale", "nested", float32 (count, one per 256 codes), "mean", float32 (count,), and
    "map", the float32 (256,) that codes stand for. `csrc/ffi/problem.h` lists the dtypes.
    """

    format: str
    codes: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...]
    rows: int
    cols: int
    packed_axis: int = 0
    block_size: int = 2  # of formats with a scale for each block
    superblock_size: int = 0
    scale_names: tuple[str, ...] = ("scale",)  # may be longer than `scales`

    @property
    def count(self) -> int:
        return self.codes[0].shape[0]
