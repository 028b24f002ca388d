"""MXFP4 and NVFP4: `ArrayGrouped` of 4-bit floating point (E2M1) codes, with scales of 8 bits for each short block."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from eformer._src.kernels import float4
from eformer._src.quantization.base import Leaves
from eformer._src.quantization.registry import register_format
from eformer._src.quantization.validation import a_bool

from .grouped import ArrayGrouped


def quantize_mxfp4(
    array: jax.Array,
    block_size: int = 32,
    *,
    axis: int = -1,
    fit: bool = False,
    use_kernel: bool = True,
    importance: jax.Array | None = None,
) -> ArrayGrouped:
    """`array` in MXFP4: a power of two for each block of 32, as OCP's "Microscaling Formats (MX) 1.0" rounds.

    The largest element of a block, over the power of two, is in [4, 8); what is over 6 becomes 6. With `fit` a block
    takes the power above or below instead where its squared error is smaller, in which an element counts as much as its
    `importance`. It takes 4.25 bits an element.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import quantize
    >>> quantize(jnp.array([7.0, -2.5, 0.25, 1.75]), format="mxfp4").materialize()
    Array([ 6., -2.,  0.,  2.], dtype=float32)
    """
    return _quantize("mxfp4", _encode_mxfp4, array, block_size, axis, fit, use_kernel, importance)


def quantize_nvfp4(
    array: jax.Array,
    block_size: int = 16,
    *,
    axis: int = -1,
    fit: bool = False,
    use_kernel: bool = True,
    importance: jax.Array | None = None,
) -> ArrayGrouped:
    """`array` in NVFP4: an E4M3 scale for each block of 16, times a float32 for each matrix.

    The largest element of a block has the code of 6, as far as E4M3 can tell its scale; the largest of a matrix has
    the largest scale, 448. `fit` searches for scales of blocks with a smaller squared error, in which an element counts
    as much as its `importance`. It takes 4.5 bits an
    element.
    """
    return _quantize("nvfp4", _encode_nvfp4, array, block_size, axis, fit, use_kernel, importance)


def _quantize(
    name: str,
    encode: Callable[..., Leaves],
    array: jax.Array,
    block_size: int,
    axis: int,
    fit: bool,
    use_kernel: bool,
    importance: jax.Array | None,
) -> ArrayGrouped:
    a_bool("fit", fit)
    fields = {"bits": 4, "block_size": block_size, "codebook": "e2m1", "use_kernel": use_kernel}
    fit = fit or importance is not None
    encode = functools.partial(encode, block_size=block_size, fit=fit, importance=importance)
    return ArrayGrouped._quantized(name, array, axis, encode, **fields)


@functools.partial(jax.jit, static_argnames=("axis", "block_size", "fit"))
def _encode_mxfp4(x: jax.Array, axis: int, block_size: int, fit: bool, importance: jax.Array | None) -> Leaves:
    packed, scale = float4.encode_mxfp4(x, block_size, axis, fit, importance)
    return {"packed": packed, "scale": scale}


@functools.partial(jax.jit, static_argnames=("axis", "block_size", "fit"))
def _encode_nvfp4(x: jax.Array, axis: int, block_size: int, fit: bool, importance: jax.Array | None) -> Leaves:
    packed, scale, scale_scale = float4.encode_nvfp4(x, block_size, axis, fit, importance)
    return {"packed": packed, "scale": scale, "scale_scale": scale_scale}


register_format("mxfp4", ArrayGrouped, quantize_mxfp4)
register_format("nvfp4", ArrayGrouped, quantize_nvfp4)
