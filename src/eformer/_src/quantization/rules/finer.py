"""Movements that would cut a superblock: the same array without scales of scales can be cut at every block."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive

from eformer._src.jaximus.rules import register
from eformer._src.jaximus.trace import implicit
from eformer._src.quantization.elementwise_layout import LeafwiseArray

MOVEMENTS = (
    *("slice", "dynamic_slice", "dynamic_update_slice", "split", "unstack", "gather", "reshape", "rev"),
    *("concatenate", "stack", "tile", "pad", "select_n"),
)


def finer(primitive: Primitive, *operands: jax.Array | LeafwiseArray, **params: Any) -> Any:
    """The same movement of arrays in finer parts, where the rules before this one declined."""
    cut = [each._finer() if isinstance(each, LeafwiseArray) else each for each in operands]
    if all(new is old for new, old in zip(cut, operands, strict=True)):
        return NotImplemented
    return implicit(primitive.bind)(*cut, **params)


for _name in MOVEMENTS:
    register(_name, precedence=-1)(finer)
