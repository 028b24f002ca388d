"""Which axes of a leaf the axes of a value run along, after operations that only move its elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Axes = tuple[frozenset[int], ...]  # for each axis of a value, the axes of the leaf that it runs along
_NONE: frozenset[int] = frozenset()


def unchanged(axes: Axes, eqn: Any) -> Axes:
    del eqn
    return axes


def _transpose(axes: Axes, eqn: Any) -> Axes:
    return tuple(axes[old] for old in eqn.params["permutation"])


def _squeeze(axes: Axes, eqn: Any) -> Axes:
    gone = {axis % len(axes) for axis in eqn.params["dimensions"]}
    return tuple(each for axis, each in enumerate(axes) if axis not in gone)


def _broadcast(axes: Axes, eqn: Any) -> Axes:
    came_from = {new: old for old, new in enumerate(eqn.params["broadcast_dimensions"])}
    return tuple(axes[came_from[new]] if new in came_from else _NONE for new in range(len(eqn.params["shape"])))


def _reshape(axes: Axes, eqn: Any) -> Axes:
    """An axis of stride s and length n covers the strides from s to s * n; axes that overlap share elements."""
    old, new = _covered(eqn.invars[0].aval.shape), _covered(eqn.outvars[0].aval.shape)
    return tuple(
        _NONE.union(*(axes[i] for i, (low, high) in enumerate(old) if max(low, start) < min(high, stop)))
        for start, stop in new
    )


def _covered(shape: Sequence[int]) -> list[tuple[int, int]]:
    return [(math.prod(shape[axis + 1 :]), math.prod(shape[axis:])) for axis in range(len(shape))]


def _dynamic_slice(axes: Axes, eqn: Any) -> Axes:
    sizes = zip(axes, eqn.params["slice_sizes"], eqn.invars[0].aval.shape, strict=True)
    return tuple(each if taken > 1 or taken == size else _NONE for each, taken, size in sizes)


def _gather(axes: Axes, eqn: Any) -> Axes:
    numbers, sliced = eqn.params["dimension_numbers"], _dynamic_slice(axes, eqn)
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = iter([each for axis, each in enumerate(sliced) if axis not in gone])
    offsets = set(numbers.offset_dims)
    return tuple(next(kept) if axis in offsets else _NONE for axis in range(len(eqn.outvars[0].aval.shape)))


Movement = Callable[[Axes, Any], Axes]

_KEEPING_AXES = (
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient", "name", "neg", "rev", "pad"),
    *("slice", "split", "concatenate", "sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"),
)

# Operations by the name of their primitive; each output has the elements of the operand, moved.
MOVEMENTS: dict[str, Movement] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    **dict.fromkeys(_KEEPING_AXES, unchanged),
}

# Elements at places that are not known before the function runs.
INDEXING: dict[str, Movement] = {"dynamic_slice": _dynamic_slice, "gather": _gather}

# Each output is what the operand at its place was.
PASSING = ("optimization_barrier",)

# By a number, or by one per channel: the values stay those of a weight.
SCALING = ("mul", "div")


def summed_axes(eqn: Any, position: int) -> tuple[int, ...] | None:
    """The axes of the operand at `position` that the operation sums products over; None if it is no such operation."""
    find = _SUMS.get(eqn.primitive.name)
    return find(eqn, position) if find is not None and position < 2 else None


def _of_dot(eqn: Any, position: int) -> tuple[int, ...]:
    return tuple(eqn.params["dimension_numbers"][0][position])


def _of_ragged_dot(eqn: Any, position: int) -> tuple[int, ...]:
    return tuple(eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][position])


def _of_convolution(eqn: Any, position: int) -> tuple[int, ...]:
    numbers = eqn.params["dimension_numbers"]
    if position == 0:
        return (numbers.lhs_spec[1],)
    return tuple(sorted(numbers.rhs_spec[1:]))  # the features that come in, and the window


_SUMS = {
    "dot_general": _of_dot,
    "ragged_dot_general": _of_ragged_dot,
    "ragged_dot": _of_ragged_dot,
    "conv_general_dilated": _of_convolution,
}
