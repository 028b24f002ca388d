"""The scales and offsets of a quantized array as float32 numbers that are trained, and the array with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._src.quantization.formats.grouped import SMALL, ArrayGrouped

from .base import Leaves, QuantizedArray
from .elementwise_layout import LeafwiseArray

TRAINED = (jnp.float32, jnp.bfloat16, jnp.float16)


def scales_of(q: QuantizedArray) -> Leaves:
    """By name, as float32: what codes are multiplied by, and what is added to them. Codes are not among them."""
    if isinstance(q, ArrayGrouped) and q.scale.dtype in SMALL:  # in two levels: as one
        levels = {name: q._level(name) for name in q._scale_fields}
        return {name: level for name, level in levels.items() if level is not None}
    codes = q._code_fields if isinstance(q, LeafwiseArray) else ()
    leaves = {name: getattr(q, name) for name in q._data_fields if name not in codes}
    floats = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.dtype in TRAINED}
    return {name: leaf.astype(jnp.float32) for name, leaf in floats.items()}


def with_scales(q: Any, scales: Mapping[str, jax.Array]) -> Any:
    """`q` with these `scales`, rounded as it stores them."""
    if isinstance(q, ArrayGrouped) and q.scale.dtype in SMALL:
        return q._replaced(**{name: leaf for level in scales for name, leaf in _two_levels(q, level, scales[level])[0]})
    return q._replaced(**{name: scale.astype(getattr(q, name).dtype) for name, scale in scales.items()})


def dense_with_scales(q: Any, scales: Mapping[str, jax.Array]) -> jax.Array:
    """`with_scales(q, scales).materialize()`, whose gradient passes straight through the rounding of scales."""

    def stored(name: str, scale: jax.Array) -> jax.Array:
        if isinstance(q, ArrayGrouped) and q.scale.dtype in SMALL:
            rounded = _two_levels(q, name, scale)[1]
        else:
            rounded = scale.astype(getattr(q, name).dtype).astype(jnp.float32)
        return scale + lax.stop_gradient(rounded - scale)

    rounded = {name: stored(name, scale) for name, scale in scales.items()}
    single = {"scale_scale": None, "offset_scale": None, "superblock_size": 0}
    small = isinstance(q, ArrayGrouped) and q.scale.dtype in SMALL
    return q._replaced(**rounded, **(single if small else {})).decode().astype(q.dtype)


def _two_levels(q: ArrayGrouped, name: str, level: jax.Array) -> tuple[list[tuple[str, jax.Array]], jax.Array]:
    """The leaves of a level of scales that is stored as integers, and what they are read as; their factors stay."""
    leaf, factor = getattr(q, name), getattr(q, f"{name}_scale")
    steps = q._replaced(**{name: jnp.ones_like(leaf)})._level(name)
    assert steps is not None
    largest = jnp.iinfo(leaf.dtype).max
    nearest = jnp.round(level / jnp.where(steps == 0, 1, steps))
    small = jnp.clip(nearest, -largest if leaf.dtype == jnp.int8 else 0, largest)
    return [(name, small.astype(leaf.dtype)), (f"{name}_scale", factor)], small * steps
