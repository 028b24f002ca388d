"""Where the axes of a leaf go in operations that only move its elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

Axes = tuple[frozenset[int], ...]  # for each axis of a value, the axes of the leaf that it runs along
_NONE: frozenset[int] = frozenset()


def type_of(var: Var | Literal) -> ShapedArray:
    return cast(ShapedArray, var.aval)


def unchanged(axes: Axes, eqn: JaxprEqn) -> Axes:
    del eqn
    return axes


def _squeeze(axes: Axes, eqn: JaxprEqn) -> Axes:
    gone = {axis % len(axes) for axis in eqn.params["dimensions"]}
    return tuple(each for axis, each in enumerate(axes) if axis not in gone)


def _unstack(axes: Axes, eqn: JaxprEqn) -> Axes:
    at = eqn.params["axis"] % len(axes)
    return (*axes[:at], *axes[at + 1 :])


def _broadcast(axes: Axes, eqn: JaxprEqn) -> Axes:
    came_from = {new: old for old, new in enumerate(eqn.params["broadcast_dimensions"])}
    return tuple(axes[came_from[new]] if new in came_from else _NONE for new in range(len(eqn.params["shape"])))


def _reshape(axes: Axes, eqn: JaxprEqn) -> Axes:
    """An axis of stride s and length n covers the strides from s to s * n; axes whose ranges overlap share elements."""
    old, new = _covered(type_of(eqn.invars[0]).shape), _covered(type_of(eqn.outvars[0]).shape)
    return tuple(
        _NONE.union(*(axes[i] for i, (low, high) in enumerate(old) if max(low, start) < min(high, stop)))
        for start, stop in new
    )


def _covered(shape: Sequence[int]) -> list[tuple[int, int]]:
    return [(math.prod(shape[axis + 1 :]), math.prod(shape[axis:])) for axis in range(len(shape))]


def _dynamic_slice(axes: Axes, eqn: JaxprEqn) -> Axes:
    sizes = zip(axes, eqn.params["slice_sizes"], type_of(eqn.invars[0]).shape, strict=True)
    return tuple(each if taken > 1 or taken == size else _NONE for each, taken, size in sizes)


def _gather(axes: Axes, eqn: JaxprEqn) -> Axes:
    numbers, sliced = eqn.params["dimension_numbers"], _dynamic_slice(axes, eqn)
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = iter([each for axis, each in enumerate(sliced) if axis not in gone])
    offsets = set(numbers.offset_dims)
    return tuple(next(kept) if axis in offsets else _NONE for axis in range(len(type_of(eqn.outvars[0]).shape)))


def _all_gather(axes: Axes, eqn: JaxprEqn) -> Axes:
    at = eqn.params["all_gather_dimension"]
    return axes if eqn.params["tiled"] else (*axes[:at], _NONE, *axes[at:])


# How many operands, the first ones, say only where elements go, of operations that move those of all the others.
CHOOSING = {"concatenate": 0, "select_n": 1}

Movement = Callable[[Axes, JaxprEqn], Axes]

_KEEPING_AXES = (
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient", "name", "neg", "rev", "pad"),
    *("slice", "split", "concatenate", "tile", "select_n", "sharding_constraint", "reshard", "mesh_cast"),
    *("pvary", "pcast", "ppermute", "all_to_all"),
)

# Primitives whose outputs hold the operand's elements, moved.
MOVEMENTS: dict[str, Movement] = {
    "transpose": lambda axes, eqn: tuple(axes[old] for old in eqn.params["permutation"]),
    "squeeze": _squeeze,
    "unstack": _unstack,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    **dict.fromkeys(_KEEPING_AXES, unchanged),
}

# Primitives that take elements at positions known only when the function runs.
INDEXING: dict[str, Movement] = {"dynamic_slice": _dynamic_slice, "gather": _gather}

# Primitives that may scale a weight by a number, or by one per channel; the result is still a weight.
SCALING = ("mul", "div")


# The axes that a matmul or convolution contracts, for each of its two operands.
_CONTRACTED: dict[str, Callable[[Mapping[str, Any]], Sequence[Sequence[int]]]] = {
    "dot_general": lambda params: params["dimension_numbers"][0],
    "ragged_dot_general": lambda params: params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0],
    "conv_general_dilated": lambda params: [  # the input features; those and the window
        params["dimension_numbers"].lhs_spec[1:2],
        params["dimension_numbers"].rhs_spec[1:],
    ],
}


def contracted_axes(eqn: JaxprEqn, position: int) -> Sequence[int]:
    """The axes of the operand at `position` that a matmul or convolution contracts; none in any other operation."""
    find = _CONTRACTED.get(eqn.primitive.name)
    return find(eqn.params)[position] if find is not None and position < 2 else ()
