"""Types of a kernel's operands and results, which in `shard_map` say along which axes of a mesh they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def result(x: jax.Array, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Differs where `x` does."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=jax.typeof(x).mat)


def alike(x: jax.Array, constant: jax.Array) -> jax.Array:
    """The constant as if it differed where `x` does."""
    varying = tuple(sorted(jax.typeof(x).mat.varying))
    return lax.pcast(constant, varying, to="varying") if varying else constant
