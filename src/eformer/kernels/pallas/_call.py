"""Which kernel multiplies, on the device that a program is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import jax

from eformer.kernels import Matrix

from . import _choice

PLATFORMS = ("tpu", "cuda", "rocm")


class Device(NamedTuple):
    """What JAX calls a platform, and a kind of its devices; None if that is not known."""

    platform: str
    kind: str | None = None


def matmul(
    x: jax.Array, matrix: Matrix, contracted_axis: int, device: Device, *, round_x: bool = False
) -> jax.Array | None:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k).

    None where there is no kernel, or XLA's own program is better. With `round_x`, x may be rounded to 8 bits.
    """
    if 0 in x.shape or 0 in matrix.codes[0].shape:
        return None
    if device.platform != "tpu":
        from . import gpu  # imports Triton's side of Pallas

        return gpu.matmul(x, matrix, contracted_axis) if gpu.supports(matrix) else None
    from . import tpu

    chip = _choice.CHIPS.get(device.kind or "")
    round_x = round_x and matrix.format == "int8" and chip != "v4"  # which multiplies no int8
    faster = round_x or _choice.kernel_is_faster(matrix, contracted_axis, x.shape[1], chip)
    if not faster or not tpu.supports(matrix):
        return None
    sublanes = _choice.permutes_sublanes(chip)
    return tpu.matmul(x, matrix, contracted_axis, sublanes=sublanes, round_x=round_x)
