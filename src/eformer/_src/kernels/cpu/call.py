"""Calls of the native core through XLA's foreign function interface.

Installing the package compiles the core if there is a C++ compiler. Without it the same results come from XLA's own
operations, and a warning says once why they are slower.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer._src.kernels.matrix import Matrix
from eformer._src.user_warnings import warn

from .library import Library, library


class SlowerWithoutCore(UserWarning):
    """The native core was not compiled, so matmuls on CPU take several times as long."""


@functools.cache
def _core() -> Library | None:
    """The library, with its handlers registered with XLA, or None if it was not compiled."""
    core = library()
    if core is None:
        warn(
            "eformer was installed without its native core, so that matmuls with quantized arrays on CPU are several "
            "times slower than they could be; installing it again with a C++ compiler at hand builds it",
            SlowerWithoutCore,
        )
        return None
    for name, address in core.handlers().items():
        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return core


_use_core = jax.make_user_context(default_value=True)


def use_core(value: bool) -> AbstractContextManager[None]:
    """In `with use_core(False):` matmuls use XLA's own operations, as if there were no core."""
    if not isinstance(value, bool):
        raise TypeError(f"use_core takes True or False, got {value!r}")
    return _use_core(value)


def core_is_on() -> bool:
    """Whether the core is not switched off."""
    return _use_core.value


def is_available() -> bool:
    """Whether the core was compiled and is not switched off. Warns once if it was not compiled."""
    return _use_core.value and _core() is not None


@functools.cache
def formats() -> tuple[str, ...]:
    """The formats that the core was compiled with: one for each header in `csrc/formats`."""
    core = _core()
    return () if core is None else core.names("formats")


def supports(matrix: Matrix) -> bool:
    """Whether `matmul` and `decode` take this matrix: the core is available and knows its format."""
    return is_available() and matrix.format in formats()


def instruction_sets() -> tuple[str, ...]:
    """The processor's own, the best first: of "amx", "avx512_vnni", "avx512", "avx2_vnni", "avx2" and "portable"."""
    core = _core()
    return () if core is None else core.names("instruction_sets")


_instruction_set = jax.make_user_context(default_value="")


def instruction_set(name: str) -> AbstractContextManager[None]:
    """In `with instruction_set("avx2"):` the core uses AVX2 instead of the best that the processor has."""
    if name not in instruction_sets():
        raise ValueError(f"this processor can run {', '.join(map(repr, instruction_sets()))}, not {name!r}")
    return _instruction_set(name)


def _attributes(matrix: Matrix) -> dict[str, str | int]:
    """The attributes that `csrc/ffi/problem.h` checks together with the buffers."""
    return {
        "format": matrix.format,
        "rows": matrix.rows,
        "cols": matrix.cols,
        "packed_axis": matrix.packed_axis,
        "block_size": matrix.block_size,
        "superblock_size": matrix.superblock_size,
        "scale_names": " ".join(matrix.scale_names[: len(matrix.scales)]),
        "instruction_set": _instruction_set.value,
    }


def matmul(
    x: jax.Array, matrix: Matrix, contracted_axis: int, *, round_x: bool = False, round_values: bool = False
) -> jax.Array:
    """x (count, m, k) @ matrix (count, k, n), or @ matrix.T for `contracted_axis=1`, as float32 (count, m, n).

    x is float32, bfloat16 or float16. `round_x` lets the core round x to 8 bits where it sums integers;
    `round_values` lets it round the values of the matrix to bfloat16 if x is bfloat16.
    """
    width = matrix.cols if contracted_axis == 0 else matrix.rows
    call = jax.ffi.ffi_call("eformer_matmul", jax.ShapeDtypeStruct((*x.shape[:2], width), jnp.float32))
    rounding = {"round_x": round_x, "round_values": round_values}
    return call(x, *matrix.codes, *matrix.scales, contracted_axis=contracted_axis, **rounding, **_attributes(matrix))


class Matmul(NamedTuple):
    """One of the matmuls that share x."""

    matrix: Matrix
    contracted_axis: int
    round_x: bool
    round_values: bool
    # The stack behind each buffer of the matrix, `codes` first, or None where there is none: see `matmuls`.
    stacks: tuple[jax.Array | None, ...]


def matmuls(x: jax.Array, all_of: Sequence[Matmul], index: jax.Array) -> list[jax.Array]:
    """`matmul` of x (count, m, k) with each matrix, to the bit, in one call: x is rounded or copied once for all.

    A buffer of a matrix may be the slice `index` of a stack: `count` of its entries, from `index * count` on. Given
    that stack, the core reads it in place, and the slice is never made.
    """
    buffers, is_stack = [], []
    for each in all_of:
        for buffer, stack in zip((*each.matrix.codes, *each.matrix.scales), each.stacks, strict=True):
            buffers.append(buffer if stack is None else stack)
            is_stack.append(stack is not None)
    given = [_attributes(each.matrix) for each in all_of]
    together = {name: np.array([each[name] for each in given], np.int64) for name in _NUMBERS}
    own = {name: np.array([getattr(each, name) for each in all_of], np.int64) for name in _OWN_NUMBERS}
    widths = [each.matrix.cols if each.contracted_axis == 0 else each.matrix.rows for each in all_of]
    call = jax.ffi.ffi_call(
        "eformer_matmuls", [jax.ShapeDtypeStruct((*x.shape[:2], width), jnp.float32) for width in widths]
    )
    found = call(
        x,
        index,
        *buffers,
        format=" ".join(each.matrix.format for each in all_of),
        scale_names=";".join(str(each["scale_names"]) for each in given),
        instruction_set=_instruction_set.value,
        buffer_count=np.array([len(each.stacks) for each in all_of], np.int64),
        is_stack=np.array(is_stack, np.int64),
        **together,
        **own,
    )
    return list(found)


_NUMBERS = ("rows", "cols", "packed_axis", "block_size", "superblock_size")  # of `_attributes`
_OWN_NUMBERS = ("contracted_axis", "round_x", "round_values")  # of `Matmul`


def loop_name(matrix: Matrix, contracted_axis: int, x_rows: int, *, round_x: bool = False) -> str:
    """Which of the core's loops multiplies `x_rows` rows of finite float32 x with the matrix, or with its transpose.

    `docs/cpu-kernels.md` lists them. Only the format and the shape decide, and the instruction set.
    """
    return _loop(matrix, contracted_axis, x_rows, round_x)[0]


def why_not_rounded(matrix: Matrix, contracted_axis: int, x_rows: int) -> str:
    """Why `x_rows` rows of finite x are not rounded for this matrix where they may be; "" if they are."""
    return _loop(matrix, contracted_axis, x_rows, True)[1]


def _loop(matrix: Matrix, contracted_axis: int, x_rows: int, round_x: bool) -> tuple[str, str]:
    core = _core()
    if core is None:
        raise ValueError("eformer was installed without its native core, so no loop of it multiplies")
    sizes = (x_rows, matrix.rows, matrix.cols, matrix.packed_axis, contracted_axis, matrix.block_size)
    name, _, why = core.loop(matrix.format, _instruction_set.value, sizes, round_x).partition("\n")
    return name, why


def decode(matrix: Matrix) -> jax.Array:
    """The values of the matrix as float32 (count, rows, cols)."""
    values = jax.ShapeDtypeStruct((matrix.count, matrix.rows, matrix.cols), jnp.float32)
    return jax.ffi.ffi_call("eformer_decode", values)(*matrix.codes, *matrix.scales, **_attributes(matrix))


def segment_matmul(x: jax.Array, codes: tuple[jax.Array, ...], k: int) -> jax.Array:
    """Float32 x (count, rows, n) @ the bits of codes[0] (count, blocks, n), minus those of codes[1] if given.

    A code holds the bits of `k` columns, the first in its highest bit. The result is (count, rows, blocks * k).
    """
    count, rows, _ = x.shape
    result = jax.ShapeDtypeStruct((count, rows, codes[0].shape[1] * k), jnp.float32)
    return jax.ffi.ffi_call("eformer_segments", result)(x, *codes, k=k)
