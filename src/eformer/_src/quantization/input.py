"""What can be quantized: floating point, and integers where nothing of them is lost, for they may be counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from eformer._src.jaximus.array import ImplicitArray

Made = TypeVar("Made", bound=ImplicitArray)


def checked_array(array: Any) -> jax.Array:
    """`array` as a JAX array without gradient; a TypeError unless it is floating point or integer."""
    if isinstance(array, ImplicitArray):
        array = array.materialize()
    if not hasattr(array, "dtype"):
        raise TypeError(f"quantize takes an array, got {type(array).__name__}; {_instead(array)}")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"only floating point and integer arrays can be quantized, got {array.dtype}")
    if jnp.issubdtype(array.dtype, jnp.floating):
        return lax.stop_gradient(jnp.asarray(array))
    if isinstance(array, jax.Array):
        return array
    with jax.ensure_compile_time_eval():  # integers are looked at, where they can be seen
        return jnp.asarray(array)


def _instead(array: object) -> str:
    """What to do with something that is no array."""
    if isinstance(array, (str, os.PathLike)):
        return "`load` reads a checkpoint, and `quantize_checkpoint` quantizes one on disk"
    if array is None:
        return "there is nothing to quantize"
    leaves = jax.tree.leaves(array)
    if leaves and all(hasattr(leaf, "dtype") for leaf in leaves):
        return "`quantize_model` takes a tree of arrays"
    return "`jnp.asarray` makes one"


def normalized_axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """`axis`, an int or several, as a sorted tuple of negative ints: leading axes may come and go."""
    axes = (axis,) if isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) else axis
    if not isinstance(axes, (tuple, list)) or not all(
        isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes
    ):
        raise TypeError(f"`axis` must be an int or a tuple of ints, got {axis!r}")
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"axis {a} is out of range for an array of {ndim} axes")
    found = sorted(a if a < 0 else a - ndim for a in map(int, axes))
    if len(set(found)) < len(found):
        raise ValueError(f"`axis={axis}` names an axis twice (the array has {ndim} axes)")
    return tuple(found)


def as_floats(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.integer) else x


def without_loss(make: Callable[[jax.Array], Made], x: jax.Array, name: str, exact_up_to: int = 0) -> Made:
    """The quantized array `make(x)`; a ValueError if `x` holds integers that it does not hold exactly.

    Under tracing, where values can't be seen, the dtype decides: the format holds integers up to `exact_up_to` exactly,
    and every integer of the dtype must be among them.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return make(x)
    insist = f"`{name}` of `w.astype(jnp.float32)` rounds them all the same"
    if isinstance(x, Tracer):
        info = jnp.iinfo(x.dtype)
        if not -exact_up_to <= int(info.min) <= int(info.max) <= exact_up_to:
            raise ValueError(
                f"`{name}` takes integers that it holds exactly, and not all of {x.dtype} are, whose values are not "
                f"known under tracing; {insist}"
            )
        return make(x)
    with jax.ensure_compile_time_eval():
        made = make(x)
        error = float(_error(x, made.materialize()))
    if error:
        raise ValueError(
            f"`{name}` can't hold these integers exactly: {x.dtype}{list(x.shape)} would be off by up to {error:g}; "
            f"{insist}"
        )
    return made


@jax.jit
def _error(x: jax.Array, dense: jax.Array) -> jax.Array:
    """The largest difference, and 0 if there is none at all: rounding may hide some of it, but never all."""
    same = dense.astype(x.dtype)
    off = jnp.abs(dense.astype(jnp.float32) - x.astype(jnp.float32))
    exact = (same == x) & (same.astype(dense.dtype) == dense)
    return jnp.max(jnp.where(exact, 0, jnp.maximum(off, jnp.finfo(jnp.float32).tiny)), initial=0)
