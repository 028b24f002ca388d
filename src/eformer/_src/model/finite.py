"""Which arrays of a tree hold NaN or infinity: the parameters, the gradients, or the loss of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from eformer._src.jaximus.array import materialize

from .paths import is_array, is_weight, named_leaves


class Nonfinite(NamedTuple):
    """How many elements of an array are NaN, and how many infinite."""

    nan: int
    infinite: int


def find_nonfinite(tree: object) -> dict[str, Nonfinite]:
    """The floating point arrays of `tree`, dense and quantized, and its floats, that hold NaN or infinity, by path.

    >>> import jax.numpy as jnp
    >>> from eformer.model import find_nonfinite
    >>> find_nonfinite({"loss": jnp.float32(1), "gradients": {"kernel": jnp.array([1, jnp.nan, jnp.inf])}})
    {'gradients.kernel': Nonfinite(nan=1, infinite=1)}
    """
    named = [(path, np.asarray(x) if isinstance(x, (float, np.floating)) else x) for path, x in named_leaves(tree)[0]]
    arrays = {path: leaf for path, leaf in named if is_weight(leaf) and is_array(leaf)}
    if any(isinstance(part, Tracer) for part in jax.tree.leaves(arrays)):
        raise TypeError("values are not known under `jit`: return them from the jitted function, and check these")
    counts = jax.device_get({path: _counted(leaf) for path, leaf in arrays.items()})
    found = {path: Nonfinite(*map(int, count)) for path, count in counts.items()}
    return {path: count for path, count in found.items() if any(count)}


def check_finite(tree: object) -> None:
    """Raise a FloatingPointError that names the arrays of `tree` that hold NaN or infinity; for use outside `jit`."""
    found = find_nonfinite(tree)
    if found:
        some = ", ".join(f"{path!r} ({nan:,} NaN, {inf:,} infinite)" for path, (nan, inf) in list(found.items())[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise FloatingPointError(f"not finite: {some}{more}")


@jax.jit
def _counted(leaf: Any) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(materialize(leaf))
    return jnp.sum(jnp.isnan(x), dtype=jnp.int32), jnp.sum(jnp.isinf(x), dtype=jnp.int32)
