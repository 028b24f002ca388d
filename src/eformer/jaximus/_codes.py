"""Codes are no numbers: functions that map over the leaves of a tree must not calculate with them.

`jax.grad` and Optax take a tree apart to calculate with its leaves: that is refused at once. What another function does
with leaves shows when an array is put together from its results: `_calculated.py` compares them with the leaves before,
to which arrays keep weak references. Neither adds anything to a program that is compiled, or to a call of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer

from ._types import Leaf, Tree

TREE_FUNCTIONS = jtu.tree_map.__globals__  # of the module that has them all
_TREE_MODULES = frozenset({TREE_FUNCTIONS["__name__"], jax.tree.map.__module__})
MAPPED = (
    "a function that maps over leaves, such as `jax.tree.map`, has changed it. In `eformer.jaximus`, "
    "`tree_map_with_implicit` maps over whole arrays, and `tree_cast`, `tree_norm`, `tree_average` and `tree_size` do "
    "what people most often want"
)


class Origin(str):
    """The leaves that an array was made of, referred to weakly.

    All are equal, so that they don't tell the structures of trees apart; and a `str`, which is compared without Python,
    because every compiled call compares structures.
    """

    leaves: tuple[weakref.ref[Any], ...] = ()

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Origin:
        origin = cls()
        if all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
            origin.leaves = tuple(map(weakref.ref, leaves))
        return origin

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()


def is_code(leaf: Leaf) -> bool:
    """Whether the leaf is of integers, or of floating point in one byte, which no optimizer's steps can move."""
    dtype = getattr(leaf, "dtype", jnp.float32)
    return jnp.issubdtype(dtype, jnp.integer) or (
        jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    )


def outside_tree_functions(frame: FrameType | None) -> FrameType | None:
    """The frame that called the functions of `jax.tree` which end in `frame`."""
    while frame is not None and frame.f_globals["__name__"] in _TREE_MODULES:
        frame = frame.f_back
    return frame


def check_taken_apart(name: str, leaves: Sequence[Leaf], frame: FrameType | None, without_codes: bool) -> None:
    """Raise if the caller of `frame`, a function of `jax.tree`, is about to differentiate or optimize codes.

    `jax.grad` and Optax flatten a tree first. Without this they fail in their own words, or train nonsense: the scales
    alone, of an array whose codes were taken out before (`without_codes`).
    """
    frame = outside_tree_functions(frame)
    if frame is None:
        return
    module, function = frame.f_globals["__name__"], frame.f_code.co_name
    differentiates = function in ("value_and_grad_f", "jacfun") and module.startswith("jax.")
    # `MultiSteps._do_update` chooses between two states of an optimizer, which may be quantized.
    optimizes = module.startswith("optax.") and "mask" not in module and function != "_do_update"
    if not (differentiates or optimizes) or frame.f_locals.get("allow_int", False):
        return
    if function == "apply_updates" and not _moves_codes(frame.f_locals):
        return
    if any(map(is_code, leaves)) or (without_codes and any(leaf is not None for leaf in leaves)):
        what = "differentiated" if differentiates else f"given to Optax's `{function}`"
        raise TypeError(
            f"an {name} cannot be {what}: its codes are no numbers to train. `eformer.model.partition` takes a tree "
            f"apart into what is trained and what is frozen, `eformer.model.add_lora` adds an update to train, and "
            f"`eformer.ops.quantization.straight_through` trains through the rounding of a dense weight"
        )


def _moves_codes(arguments: Mapping[str, Tree]) -> bool:
    """Whether `apply_updates` would add fractions or other codes to codes; zeros of the same dtype do no harm.

    Under `jit` updates have no values yet, and those of a code's dtype are taken for zeros.
    """
    params, updates = (jtu.tree_leaves(arguments.get(name)) for name in ("params", "updates"))
    return any(is_code(p) and not (is_code(u) and _may_be_zero(u)) for p, u in zip(params, updates, strict=False))


def _may_be_zero(leaf: Leaf) -> bool:
    has_values = isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, Tracer)
    return not (has_values and np.any(np.asarray(leaf) != 0))
