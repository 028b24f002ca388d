"""Which kernel multiplies, on the device that a program is compiled for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import jax

from eformer.kernels import Matrix

from . import _choice

PLATFORMS = ("tpu", "cuda", "rocm")


class Device(NamedTuple):
    """What JAX calls a platform, and a kind of its devices; None if that is not known."""

    platform: str
    kind: str | None = None


_int8_activations = jax.make_user_context(default_value=False)


def int8_activations(value: bool) -> AbstractContextManager[None]:
    """In `with int8_activations(True):` TPUs multiply int8 weights with x rounded to int8, row by row: off by 1% or so."""
    if not isinstance(value, bool):
        raise TypeError(f"int8_activations takes True or False, got {value!r}")
    return _int8_activations(value)


def matmul(x: jax.Array, matrix: Matrix, contracted_axis: int, device: Device) -> jax.Array | None:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k).

    None where there is no kernel, or XLA's own program is better.
    """
    if 0 in x.shape or 0 in matrix.codes.shape:
        return None
    if device.platform != "tpu":
        from . import gpu  # imports Triton's side of Pallas

        return gpu.matmul(x, matrix, contracted_axis) if gpu.supports(matrix) else None
    from . import tpu

    chip = _choice.CHIPS.get(device.kind or "")
    integer = _int8_activations.value and matrix.format == "int8"
    faster = integer or _choice.kernel_is_faster(matrix, contracted_axis, x.shape[1], chip)
    if not faster or not tpu.supports(matrix):
        return None
    sublanes = _choice.permutes_sublanes(chip)
    return tpu.matmul(x, matrix, contracted_axis, sublanes=sublanes, int8_activations=integer)
