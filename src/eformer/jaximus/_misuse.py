"""Errors for those who hand an implicit array to what can only take it apart: derivatives and optimizers.

`jax.grad` and Optax see a tree, reach its integer codes, and fail in their own words or train nonsense. They flatten
the tree first, so this is asked whenever a function of `jax.tree` flattens an array. Where JAX or Optax rename their
functions, their own error is what people see.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import jax.numpy as jnp
from jax import tree_util as jtu

TREE_FUNCTIONS = jtu.tree_map.__globals__  # of the module that has them all
getframe = sys._getframe
_WAYS_OUT = (
    "`eformer.model.partition` takes a tree apart into what is trained and what is frozen, and "
    "`eformer.ops.quantization.straight_through` trains through the rounding of a dense weight"
)


def check_flattened(name: str, leaves: Iterable[Any], frame: FrameType | None) -> None:
    """Raise if the function behind `frame`, one of `jax.tree`, is about to differentiate or optimize integer leaves."""
    while frame is not None and frame.f_globals["__name__"].startswith("jax._src.tree"):
        frame = frame.f_back
    if frame is None:
        return
    module, function = frame.f_globals["__name__"], frame.f_code.co_name
    differentiates = module.startswith("jax.") and function in ("value_and_grad_f", "jacfun")
    optimizes = module.startswith("optax.") and "mask" not in module
    if not (differentiates or optimizes) or frame.f_locals.get("allow_int", False):
        return
    if function == "apply_updates" and not _moves_integers(frame.f_locals):
        return
    if any(map(_is_integer, leaves)):
        what = "differentiated" if differentiates else f"given to Optax's `{function}`"
        raise TypeError(f"an {name} cannot be {what}: its codes are integers. {_WAYS_OUT}")


def _is_integer(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", jnp.float32), jnp.integer)


def _moves_integers(arguments: Mapping[str, Any]) -> bool:
    """Whether `apply_updates` would add fractions to integers; zeros of their own dtype do no harm."""
    params, updates = (jtu.tree_leaves(arguments.get(name)) for name in ("params", "updates"))
    return any(_is_integer(p) and not _is_integer(u) for p, u in zip(params, updates, strict=False))
