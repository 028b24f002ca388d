"""Quantized matrices of every kind that is stored, and their values by the reference."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from eformer.kernels import Matrix, reference


def int8(w: jax.Array, axis: tuple[int, ...]) -> Matrix:
    codes, scale = reference.encode_int8(w, axis)
    return Matrix("int8", (codes,), (scale,), *w.shape[1:])


def nf4(w: jax.Array, axis: int, block_size: int) -> Matrix:
    packed, absmax = reference.encode_nf4(w, block_size, axis)
    return Matrix("nf4", (packed,), (absmax,), *w.shape[1:], packed_axis=axis - 1, block_size=block_size)


def nested_nf4(w: jax.Array, axis: int, block_size: int) -> Matrix:
    single = nf4(w, axis, block_size)
    codes, nested, offset = reference.encode_dynamic(single.scales[0].reshape(w.shape[0], -1))
    codes = codes.reshape(single.scales[0].shape)
    scales = (codes, nested, offset, jnp.asarray(reference.dynamic_map()))
    return replace(single, scales=scales, scale_names=("scale", "nested", "mean", "map"))


def ternary(w: jax.Array, axis: int, scale_axes: tuple[int, ...] | None) -> Matrix:
    values = jnp.clip(jnp.round(w), -1, 1)
    scales = () if scale_axes is None else (reference.mean_magnitude(w, values, scale_axes),)
    return Matrix("ternary", (reference.pack_ternary(values, axis),), scales, *w.shape[1:], packed_axis=axis - 1)


def oracle(matrix: Matrix) -> jax.Array:
    """The values, by the reference."""
    length = (matrix.rows, matrix.cols)[matrix.packed_axis]
    axis, scales = matrix.packed_axis + 1, matrix.scales
    if matrix.format == "int8":
        return reference.decode_int8(matrix.codes[0], scales[0])
    if matrix.format == "ternary":
        values = reference.unpack_ternary(matrix.codes[0], axis, length)
        return values * scales[0] if scales else values
    if len(scales) > 1:
        flat = scales[0].reshape(matrix.count, -1)
        scales = (reference.decode_dynamic(flat, *scales[1:3]).reshape(scales[0].shape),)
    return reference.decode_nf4(matrix.codes[0], scales[0], matrix.block_size, axis, length)


FORMATS = {
    "int8 per row": lambda w: int8(w, (2,)),
    "int8 per column": lambda w: int8(w, (1,)),
    "int8 per matrix": lambda w: int8(w, (1, 2)),
    "int8 per element": lambda w: int8(w, ()),
    **{f"nf4 {b} along {a}": lambda w, a=a, b=b: nf4(w, a, b) for a in (1, 2) for b in (2, 6, 20, 32, 64, 128)},
    "nf4 nested along 1": lambda w: nested_nf4(w, 1, 64),
    "nf4 nested along 2": lambda w: nested_nf4(w, 2, 64),
    "ternary": lambda w: ternary(w, 1, None),
    "ternary per column": lambda w: ternary(w, 1, (1,)),
    "ternary per matrix": lambda w: ternary(w, 1, (1, 2)),
    "ternary along 2": lambda w: ternary(w, 2, (1,)),
}
