"""Quantized matrices of every kind that is stored, and their values by the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._src.kernels import grouped, reference
from eformer._src.kernels.matrix import Matrix


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


def in_blocks(w: jax.Array, axis: int, name: str, block_size: int, kind: str) -> Matrix:
    """Random codes for the shape of `w`, with scales as `kind` says: "zero", "offset", "two levels" or "scale"."""
    rng, shape = np.random.default_rng(block_size), w.shape
    bits = int(name[4:]) if name.startswith("uint") else 4
    codes = jnp.asarray(rng.integers(0, 2**bits, shape, dtype=np.uint8))
    blocks, superblocks = (
        tuple(-(-n // grain) if i == axis else n for i, n in enumerate(shape)) for grain in (block_size, 4 * block_size)
    )
    numbers = [jnp.asarray(rng.standard_normal(blocks), jnp.float32) for _ in range(2)]
    factors = [jnp.asarray(rng.standard_normal(superblocks), jnp.float16) for _ in range(2)]
    small = [jnp.asarray(rng.integers(-50, 50, blocks), jnp.int8), jnp.asarray(rng.integers(0, 64, blocks), jnp.uint8)]
    scales = {
        "scale": {"scale": numbers[0]},
        "zero": {"scale": numbers[0].astype(jnp.float16), "zero": small[1] & jnp.uint8(2**bits - 1)},
        "offset": {"scale": numbers[0].astype(jnp.bfloat16), "offset": numbers[1].astype(jnp.bfloat16)},
        "two levels": {
            "scale": small[0],
            "scale_scale": factors[0],
            "offset": small[1],
            "offset_scale": factors[1],
        },
        "float8": {"scale": numbers[0].astype(jnp.float8_e4m3fn), "scale_scale": numbers[1][:, :1, :1]},
    }[kind]
    return Matrix(
        name,
        tuple(grouped.pack_codes(codes, bits, axis)),
        tuple(scales.values()),
        *shape[1:],
        packed_axis=axis - 1,
        block_size=block_size,
        superblock_size=4 * block_size,
        scale_names=tuple(scales),
    )


def levels(matrix: Matrix) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The scales, the zeros and the offsets of blocks, as float32."""
    named = dict(zip(matrix.scale_names, matrix.scales, strict=True))
    axis = matrix.packed_axis + 1

    def level(name: str) -> jax.Array | None:
        if name not in named:
            return None
        wide, factor = named[name].astype(jnp.float32), named.get(f"{name}_scale")
        if factor is None:
            return wide
        if factor.shape[axis] == 1:
            return wide * factor.astype(jnp.float32)
        return reference.scale_blocks(
            wide, factor.astype(jnp.float32), matrix.superblock_size // matrix.block_size, axis
        )

    scale = level("scale")
    assert scale is not None
    return scale, level("zero"), level("offset")


def decoded_blocks(matrix: Matrix) -> jax.Array:
    bits, axis = (int(matrix.format[4:]) if matrix.format.startswith("uint") else 4), matrix.packed_axis + 1
    codes = grouped.unpack_codes(matrix.codes, bits, axis, (matrix.rows, matrix.cols)[matrix.packed_axis])
    scale, zero, offset = levels(matrix)
    if matrix.format in grouped.CODEBOOKS:
        values = jnp.asarray(grouped.CODEBOOKS[matrix.format])[codes]
    else:
        centred = zero is None and offset is None
        values = codes.astype(jnp.float32) - (2 ** (bits - 1) if centred else 0)
    return grouped.decode_blocks(values, scale, zero, offset, matrix.block_size, axis)


def magnitudes(matrix: Matrix, values: np.ndarray) -> np.ndarray:
    """How large the terms of a sum are that stand for a value: those of blocks are scaled codes, and offsets."""
    if "scale" not in matrix.scale_names or matrix.format not in BOUNDS:
        return np.abs(values)
    scale, zero, offset = (None if each is None else np.abs(np.asarray(each)) for each in levels(matrix))
    assert scale is not None
    of_blocks = 2 * BOUNDS[matrix.format] * scale if zero is None else scale * (2 * BOUNDS[matrix.format] + zero)
    of_blocks = of_blocks if offset is None else of_blocks + offset
    axis = matrix.packed_axis + 1
    return np.repeat(of_blocks, matrix.block_size, axis)[:, : matrix.rows, : matrix.cols]


def float8(w: jax.Array, axis: tuple[int, ...], dtype: Any = jnp.float8_e4m3fn) -> Matrix:
    codes, scale = reference.encode_float8(w, axis, {}, dtype)
    return Matrix("e4m3" if dtype == jnp.float8_e4m3fn else "e5m2", (codes,), (scale,), *w.shape[1:])


def float8_blocks(w: jax.Array, axis: int, block_size: int, dtype: Any = jnp.float8_e4m3fn) -> Matrix:
    codes, scale = reference.encode_float8(w, (), {axis: block_size}, dtype)
    name = "e4m3_blocks" if dtype == jnp.float8_e4m3fn else "e5m2_blocks"
    return Matrix(name, (codes,), (scale,), *w.shape[1:], packed_axis=axis - 1, block_size=block_size)


def integers(w: jax.Array, axis: int, block_size: int, bits: int, symmetric: bool = False) -> Matrix:
    codes, scales = grouped.encode(w, bits, block_size, axis, symmetric, jnp.float32, fit=False)
    planes = tuple(grouped.pack_codes(codes, bits, axis))
    sizes = {"rows": w.shape[1], "cols": w.shape[2], "packed_axis": axis - 1, "block_size": block_size}
    return Matrix(f"uint{bits}", planes, tuple(scales.values()), **sizes, scale_names=tuple(scales))


def from_codebook(w: jax.Array, axis: int, block_size: int, name: str) -> Matrix:
    """Of the values of `integers`, whatever they are."""
    single = integers(w, axis, block_size, 4, symmetric=True)
    return replace(single, format=name)


def made(make: Callable[[jax.Array], Matrix], w: np.ndarray) -> tuple[Matrix, np.ndarray]:
    """A matrix for `w`, and its values: as one program, which is compiled faster than its steps."""
    matrices: list[Matrix] = []

    @jax.jit
    def encode(w: jax.Array) -> Any:
        matrices.append(make(w))
        return matrices[0].codes, matrices[0].scales, oracle(matrices[0])

    codes, scales, values = encode(w)
    return replace(matrices[0], codes=codes, scales=scales), np.asarray(values)


def oracle(matrix: Matrix) -> jax.Array:
    """The values, by the reference."""
    if matrix.format in BOUNDS:
        return decoded_blocks(matrix)
    length = (matrix.rows, matrix.cols)[matrix.packed_axis]
    axis, scales = matrix.packed_axis + 1, matrix.scales
    if matrix.format == "int8":
        return reference.decode_int8(matrix.codes[0], scales[0])
    if matrix.format.startswith("e"):
        blocks = {axis: matrix.block_size} if matrix.format.endswith("_blocks") else {}
        return reference.decode_float8(matrix.codes[0], scales[0], blocks)
    if matrix.format == "ternary":
        values = reference.unpack_ternary(matrix.codes[0], axis, length)
        return values * scales[0] if scales else values
    if len(scales) > 1:
        flat = scales[0].reshape(matrix.count, -1)
        scales = (reference.decode_dynamic(flat, *scales[1:3]).reshape(scales[0].shape),)
    return reference.decode_nf4(matrix.codes[0], scales[0], matrix.block_size, axis, length)


# The largest value of a code, of formats with offsets.
BOUNDS = {f"uint{bits}": 2**bits for bits in grouped.PLANES} | {"e2m1": 6, "iq4_nl": 127}
IN_BLOCKS = [  # and the axes along which they are packed
    ("uint2", 16, "offset", (1,)),
    ("uint2", 32, "zero", (1, 2)),
    ("uint3", 16, "two levels", (2,)),
    ("uint4", 64, "offset", (1, 2)),
    ("uint4", 32, "two levels", (2,)),
    ("uint4", 5, "zero", (1,)),
    ("uint5", 32, "zero", (2,)),
    ("uint6", 16, "two levels", (1, 2)),
    ("uint8", 24, "scale", (1,)),
    ("e2m1", 16, "float8", (2,)),
    ("iq4_nl", 32, "offset", (1,)),
]
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
    "e4m3 per row": lambda w: float8(w, (2,)),
    "e5m2 per matrix": lambda w: float8(w, (1, 2), jnp.float8_e5m2),
    "e4m3 128 along 1": lambda w: float8_blocks(w, 1, 128),
    "e4m3 6 along 2": lambda w: float8_blocks(w, 2, 6),
    "e5m2 64 along 2": lambda w: float8_blocks(w, 2, 64, jnp.float8_e5m2),
    **{
        f"{name} {size} {kind} along {a}": functools.partial(in_blocks, axis=a, name=name, block_size=size, kind=kind)
        for name, size, kind, axes in IN_BLOCKS
        for a in axes
    },
}
