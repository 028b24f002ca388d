"""Integers are quantized where nothing of them is lost: as often as weights, they are counts and indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

Made = TypeVar("Made", bound=Any)


def as_floats(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.integer) else x


def without_loss(make: Callable[[jax.Array], Made], x: jax.Array, name: str, all_up_to: int = 0) -> Made:
    """`make(x)`, a quantized array; of integers, a ValueError unless it holds them exactly.

    Where values can be seen, these decide. Under tracing they can't, and the dtype does: each of its values must be
    within `all_up_to`, up to which the format holds any integers exactly.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return make(x)
    insist = f"`{name}` of `w.astype(jnp.float32)` rounds them all the same"
    if isinstance(x, Tracer):
        info = jnp.iinfo(x.dtype)
        if not -all_up_to <= int(info.min) <= int(info.max) <= all_up_to:
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
    """The largest difference, and 0 for none at all: rounding may hide some, but never all of it."""
    same = dense.astype(x.dtype)
    off = jnp.abs(dense.astype(jnp.float32) - x.astype(jnp.float32))
    exact = (same == x) & (same.astype(dense.dtype) == dense)
    return jnp.max(jnp.where(exact, 0, jnp.maximum(off, jnp.finfo(jnp.float32).tiny)), initial=0)
