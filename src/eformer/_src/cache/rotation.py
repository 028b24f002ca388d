"""Rotation by Hadamard matrices: it spreads the few large channels of a head over all, which few bits hold better."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def rotation_size(length: int) -> int:
    """The longest run of channels that a Hadamard matrix rotates and that divides `length`: a power of two."""
    return length & -length


@functools.lru_cache(maxsize=16)
def hadamard(size: int) -> np.ndarray:
    """The orthonormal symmetric Hadamard matrix of a power of two: its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def widened(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def rotated(x: jax.Array, axis: int) -> jax.Array:
    """`x`, `widened`, with each run of `rotation_size` elements along `axis` times a Hadamard matrix."""
    x, length = widened(x), x.shape[axis]
    size = rotation_size(length)
    last = jnp.moveaxis(x, axis, -1)
    runs = last.reshape(*last.shape[:-1], length // size, size)
    turned = lax.dot_general(
        runs,
        jnp.asarray(hadamard(size), x.dtype),
        (((runs.ndim - 1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    return jnp.moveaxis(turned.reshape(last.shape), -1, axis)
