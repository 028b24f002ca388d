"""Making caches: empty ones in place of `jnp.zeros`, and from caches that were filled in floating point."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from eformer._src.cache.quantized_cache import QuantizedCache, float8
from eformer._src.cache.rotation import rotated as _rotated
from eformer._src.quantization.elementwise_layout import LeafwiseArray
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B

BLOCK = 32  # channels that share a scale at 4 bits: 4.5 bits each with it


def _int4(array: jax.Array, axis: int) -> ArrayGrouped:
    return ArrayGrouped.quantize(array, BLOCK, bits=4, axis=axis, symmetric=True, fit=False)


FORMATS: dict[str, Callable[[jax.Array, int], LeafwiseArray]] = {
    "int8": lambda array, axis: Array8B.quantize(array, axis=axis),
    "fp8": float8,
    "int4": _int4,
}
ROTATED = frozenset({"int4"})  # by default


def quantize(array: jax.Array, format: str = "int8", *, axis: int = -1, rotated: bool | None = None) -> QuantizedCache:
    """A cache that holds `array`: `axis` is that of a head's channels, which share a scale at each position.

    "int8" and "fp8" have one scale for all channels of a head at a position, "int4" one for each 32 of them. With
    `rotated`, the default of "int4", channels are multiplied by a Hadamard matrix before they are rounded.

    >>> import jax, jax.numpy as jnp
    >>> from eformer import cache
    >>> keys = jax.random.normal(jax.random.key(0), (2, 8, 100, 64))  # (batch, heads, positions, channels)
    >>> cache.quantize(keys, "int4")
    QuantizedCache(float32[2, 8, 100, 64], 57,600 bytes)
    """
    if format not in FORMATS:
        raise ValueError(f"`format={format!r}` must be one of {', '.join(map(repr, FORMATS))}")
    if not hasattr(array, "dtype"):
        raise TypeError(f"a cache is made of one array, got {type(array).__name__}: keys and values have one each")
    array = jnp.asarray(array)
    _check_floating(array.dtype)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"`axis={axis}` is out of range for a cache of {array.ndim} axes {array.shape}")
    axis, turn = axis % array.ndim - array.ndim, format in ROTATED if rotated is None else rotated
    x = _rotated(array, axis) if turn else array
    return QuantizedCache(FORMATS[format](x, axis).with_dtype(array.dtype), rotated=turn)


def empty(
    shape: Sequence[int],
    dtype: DTypeLike = jnp.float32,
    format: str = "int8",
    *,
    axis: int = -1,
    rotated: bool | None = None,
) -> QuantizedCache:
    """A cache of zeros, in place of `jnp.zeros(shape, dtype)`; the options are those of `quantize`.

    >>> import jax, jax.numpy as jnp
    >>> from eformer import cache, implicit
    >>> keys = cache.empty((1, 3, 4096, 64), jnp.bfloat16)
    >>> @jax.jit
    ... @implicit
    ... def append(keys, new, position):
    ...     return jax.lax.dynamic_update_slice(keys, new, (0, 0, position, 0))
    >>> append(keys, jnp.ones((1, 3, 1, 64), jnp.bfloat16), 7)
    QuantizedCache(bfloat16[1, 3, 4096, 64], 835,584 bytes)
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"`shape` must be a tuple such as (batch, heads, positions, channels), got {shape!r}")
    _check_floating(dtype)
    shape = tuple(map(operator.index, shape))
    if min(shape, default=0) < 0:
        raise ValueError(f"`shape` has a negative length: {shape}")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"`axis={axis}` is out of range for a cache of {len(shape)} axes {shape}")

    def made(array: jax.Array) -> QuantizedCache:
        return quantize(array, format, axis=axis, rotated=rotated)

    # Never dense: the leaves of one head at one position are repeated.
    one = made(jnp.zeros([n if a == axis % len(shape) else 1 for a, n in enumerate(shape)], dtype))
    like: Any = jax.eval_shape(made, jax.ShapeDtypeStruct(shape, dtype))
    leaves = [jnp.broadcast_to(a, b.shape) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(like), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _check_floating(dtype: DTypeLike) -> None:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the dtype of a cache is that of the numbers it stands for, floating point; got {dtype}: `format` says "
            f"how they are stored"
        )
