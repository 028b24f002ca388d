"""Calls of the native core through XLA's foreign function interface.

The core is compiled when the package is installed with a C++ compiler at hand; without it everything works, in XLA's
own operations, and a warning says once why it is slower.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from eformer._warnings import warn
from eformer.kernels._matrix import Matrix


class SlowerWithoutCore(UserWarning):
    """The native core is not there, so that matmuls on CPU take several times as long."""


@functools.cache
def _core() -> ModuleType | None:
    """The extension module with its calls known to XLA, or None where it was not compiled."""
    try:
        from . import _native  # pyright: ignore[reportAttributeAccessIssue]  # compiled, with no source to read
    except ImportError:
        warn(
            "eformer was installed without its native core, so that matmuls with quantized arrays on CPU are several "
            "times slower than they could be; installing it again with a C++ compiler at hand builds it",
            SlowerWithoutCore,
        )
        return None
    for name, handler in _native.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return _native


_use_core = jax.make_user_context(default_value=True)


def use_core(value: bool) -> AbstractContextManager[None]:
    """In `with use_core(False):` products are made of XLA's own operations, as if there were no core."""
    if not isinstance(value, bool):
        raise TypeError(f"use_core takes True or False, got {value!r}")
    return _use_core(value)


def is_available() -> bool:
    """Whether the core was compiled, and is not switched off; if it was not, says so once."""
    return _use_core.value and _core() is not None


def instruction_sets() -> tuple[str, ...]:
    """What the core can use on this processor, the best first: "amx", "avx512_vnni", "avx512", "avx2", "portable"."""
    core = _core()
    return () if core is None else core.instruction_sets()


_instruction_set = jax.make_user_context(default_value="")


def instruction_set(name: str) -> AbstractContextManager[None]:
    """In `with instruction_set("avx2"):` the core uses it, instead of the best that the processor has."""
    if name not in instruction_sets():
        raise ValueError(f"this processor can run {', '.join(map(repr, instruction_sets()))}, not {name!r}")
    return _instruction_set(name)


def _attributes(matrix: Matrix) -> dict[str, Any]:
    """What `csrc/problem.h` checks beside the buffers."""
    return {
        "format": matrix.format,
        "rows": matrix.rows,
        "cols": matrix.cols,
        "packed_axis": matrix.packed_axis,
        "block_size": matrix.block_size,
        "instruction_set": _instruction_set.value,
    }


def matmul(
    x: jax.Array, matrix: Matrix, contracted_axis: int, *, round_x: bool = False, round_values: bool = False
) -> jax.Array:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`, of x (count, m, k) in any float of at most 32 bits.

    The sums and the result are float32. With `round_x`, one row of x may be rounded to 8 bits where that is faster;
    with `round_values`, the values of the matrix to bfloat16, if x is bfloat16.
    """
    width = matrix.cols if contracted_axis == 0 else matrix.rows
    call = jax.ffi.ffi_call("eformer_matmul", jax.ShapeDtypeStruct((*x.shape[:2], width), jnp.float32))
    rounding = {"round_x": round_x, "round_values": round_values}
    return call(x, *matrix.codes, *matrix.scales, contracted_axis=contracted_axis, **rounding, **_attributes(matrix))


def decode(matrix: Matrix) -> jax.Array:
    """The values, float32 (count, rows, cols)."""
    call = jax.ffi.ffi_call(
        "eformer_decode", jax.ShapeDtypeStruct((matrix.count, matrix.rows, matrix.cols), jnp.float32)
    )
    return call(*matrix.codes, *matrix.scales, **_attributes(matrix))


def segment_matmul(x: jax.Array, codes: tuple[jax.Array, ...], k: int) -> jax.Array:
    """Float32 x (count, rows, n) times the bits of codes[0] (count, blocks, n), less those of codes[1] if there is one.

    Each code is `k` bits, for `k` columns of the result (count, rows, blocks * k), the highest first.
    """
    count, rows, _ = x.shape
    result = jax.ShapeDtypeStruct((count, rows, codes[0].shape[1] * k), jnp.float32)
    return jax.ffi.ffi_call("eformer_segments", result)(x, *codes, k=k)
