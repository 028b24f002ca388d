"""Codes of RSR operators, checked and made: the bits of `k` columns of a row in one integer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from eformer.kernels import reference

from ._input import checked_array

MAX_K = 16  # the table of `2**k` sums of a block outgrows every cache soon after


def check_k(name: str, k: object) -> None:
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"`{name}` must be an int, got {type(k).__name__} {k!r}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"`{name}={k}` must be from 1 to {MAX_K}: it is the number of columns, so of bits, in a code")


def code_dtype(k: int) -> np.dtype:
    return np.dtype(np.uint8 if k <= 8 else np.uint16)


def checked_dtype(dtype: DTypeLike) -> np.dtype:
    found = jax.dtypes.canonicalize_dtype(dtype)
    if not (jnp.issubdtype(found, jnp.floating) or jnp.issubdtype(found, jnp.integer)):
        raise TypeError(f"an RSR operator is floating point or integer, got {found}")
    return found


def checked_matrix(A: ArrayLike) -> jax.Array:
    x = checked_array(A)
    if x.ndim != 2:
        raise ValueError(f"an RSR operator is made of a matrix, got an array of shape {x.shape}; vmap makes a stack")
    return x


def checked_integers(A: ArrayLike, smallest: int) -> jax.Array:
    x = checked_matrix(A)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"`from_matrix` takes an integer matrix, int32 or int8, got {x.dtype}; `quantize` takes floats")
    if not _hold(_all_within, x, smallest, 1):
        allowed = "{0, 1}" if smallest == 0 else "{-1, 0, 1}"
        raise ValueError(f"the matrix must have values in {allowed}, got some from {np.min(x)} to {np.max(x)}")
    return x


def check_no_nan(x: jax.Array) -> None:
    if not _hold(_no_nan, x):
        raise ValueError("the matrix, or its standard deviation, is NaN: an RSR operator has no code for that")


def codes_of_maps(maps: ArrayLike, k: int) -> jax.Array:
    """The codes of one-hot maps (num_blocks, n, 2**k), or of codes that stand in their place."""
    given = jnp.asarray(maps)
    if given.ndim == 2 and jnp.issubdtype(given.dtype, jnp.integer):
        return checked_codes(given, k)
    if given.ndim != 3 or given.shape[-1] != 2**k:
        raise ValueError(
            f"`one_hot_maps` must have shape (num_blocks, n, {2**k}) for `k={k}`, or be integers, the codes, of shape "
            f"(num_blocks, n); got {given.dtype}{list(given.shape)}"
        )
    if not _hold(_one_hot, given):
        raise ValueError("`one_hot_maps` must be one-hot: a single 1 along the last axis, and else 0")
    return checked_codes(jnp.argmax(given, axis=-1).astype(jnp.uint16), k)


def checked_codes(codes: jax.Array, k: int) -> jax.Array:
    """Codes (..., num_blocks, n) as the unsigned dtype of `k` bits; a ValueError if one has more."""
    if codes.ndim < 2 or not jnp.issubdtype(codes.dtype, jnp.integer):
        raise ValueError(f"codes are integers of shape (num_blocks, n), got {codes.dtype}{list(codes.shape)}")
    info = jnp.iinfo(codes.dtype)
    if not 0 <= info.min < info.max < 2**k and not _hold(_all_within, codes, 0, 2**k - 1):
        raise ValueError(f"codes for `k={k}` are from 0 to {2**k - 1}, got {np.min(codes)} to {np.max(codes)}")
    return codes.astype(code_dtype(k))


def _hold(condition: Callable[..., jax.Array], x: jax.Array, *args: int) -> bool:
    """Whether the values of `x` meet the condition, or can't be seen."""
    if isinstance(x, Tracer):
        return True
    with jax.ensure_compile_time_eval():
        return bool(condition(x, *args))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _all_within(x: jax.Array, smallest: int, largest: int) -> jax.Array:
    info = jnp.iinfo(x.dtype)
    return jnp.all((x >= max(smallest, int(info.min))) & (x <= min(largest, int(info.max))))


@jax.jit
def _no_nan(x: jax.Array) -> jax.Array:
    return ~jnp.any(jnp.isnan(x))


@jax.jit
def _one_hot(maps: jax.Array) -> jax.Array:
    ones, zeros = maps == jnp.ones((), maps.dtype), maps == jnp.zeros((), maps.dtype)
    return jnp.all(ones | zeros) & jnp.all(jnp.sum(ones, -1, dtype=jnp.int32) == 1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def encode(x: jax.Array, k: int, sign: int) -> jax.Array:
    """The codes of where `x`, a matrix, has that sign."""
    return reference.encode_rsr(x > 0 if sign > 0 else x < 0, k)


decode = jax.jit(reference.decode_rsr, static_argnums=(1, 2))
ternary = jax.jit(reference.ternary)
