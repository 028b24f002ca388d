"""Codes of RSR operators, checked and made: the bits of `k` columns of a row in one integer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from eformer._src.kernels import reference
from eformer._src.quantization.input import checked_array
from eformer._src.quantization.validation import an_int

MAX_K = 16  # the table of `2**k` sums of a block outgrows every cache soon after


def check_k(name: str, k: Any) -> None:
    an_int(name, k)
    if not 1 <= k <= MAX_K:
        raise ValueError(f"`{name}={k}` must be from 1 to {MAX_K}: it is the number of columns, so of bits, in a code")


def code_dtype(k: int) -> np.dtype:
    return np.dtype(np.uint8 if k <= 8 else np.uint16)


def checked_matrix(A: ArrayLike) -> jax.Array:
    x = checked_array(A)
    if x.ndim != 2:
        raise ValueError(f"an RSR operator is made of a matrix, got an array of shape {x.shape}; vmap makes a stack")
    return x


def checked_integers(A: ArrayLike, smallest: int) -> jax.Array:
    x = checked_matrix(A)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"`from_matrix` takes an integer matrix, int32 or int8, got {x.dtype}; `quantize` takes floats")
    if not _hold(x, lambda x: _within(x, smallest, 1)):
        allowed = "{0, 1}" if smallest == 0 else "{-1, 0, 1}"
        raise ValueError(f"the matrix must have values in {allowed}, got some from {np.min(x)} to {np.max(x)}")
    return x


def check_no_nan(x: jax.Array) -> None:
    if not _hold(x, lambda x: ~jnp.any(jnp.isnan(x))):
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
    if not _hold(given, lambda x: jnp.array_equal(x, jax.nn.one_hot(jnp.argmax(x, -1), 2**k, dtype=x.dtype))):
        raise ValueError("`one_hot_maps` must be one-hot: a single 1 along the last axis, and else 0")
    return jnp.argmax(given, axis=-1).astype(code_dtype(k))


def checked_codes(codes: jax.Array, k: int) -> jax.Array:
    """Codes (..., num_blocks, n) as the unsigned dtype of `k` bits; a ValueError if one has more."""
    if codes.ndim < 2 or not jnp.issubdtype(codes.dtype, jnp.integer):
        raise ValueError(f"codes are integers of shape (num_blocks, n), got {codes.dtype}{list(codes.shape)}")
    if not _hold(codes, lambda x: _within(x, 0, 2**k - 1)):
        raise ValueError(f"codes for `k={k}` are from 0 to {2**k - 1}, got {np.min(codes)} to {np.max(codes)}")
    return codes.astype(code_dtype(k))


def _hold(x: jax.Array, condition: Callable[[jax.Array], bool | jax.Array]) -> bool:
    """Whether the values of `x` meet the condition, or can't be seen."""
    if isinstance(x, Tracer):
        return True
    with jax.ensure_compile_time_eval():
        return bool(condition(x))


def _within(x: jax.Array, smallest: int, largest: int) -> bool:
    return smallest <= int(jnp.min(x, initial=0)) and int(jnp.max(x, initial=0)) <= largest


@functools.partial(jax.jit, static_argnums=(1, 2))
def encode(x: jax.Array, k: int, sign: int) -> jax.Array:
    """The codes of where `x`, a matrix, has that sign."""
    return reference.encode_rsr(x > 0 if sign > 0 else x < 0, k)
