"""Where primitives take the axis of the channels: a rotated cache may be moved only in whole runs of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax


class Move(NamedTuple):
    """A primitive that is applied to a cache of this `shape`, whose channels lie along `axis`."""

    axis: int
    shape: tuple[int, ...]
    others: Sequence[Any]  # the other operands
    params: Mapping[str, Any]


def _same(move: Move) -> int:
    return move.axis


def _unless_along(name: str) -> Callable[[Move], int | None]:
    """The same axis, unless the parameter `name` is this axis, or one of several, along which elements move."""

    def where(move: Move) -> int | None:
        along = move.params[name]
        return None if move.axis in (along if isinstance(along, (tuple, list)) else (along,)) else move.axis

    return where


def _after_a_new_one(name: str) -> Callable[[Move], int | None]:
    return lambda move: move.axis + (move.params[name] <= move.axis)


def _reshaped(move: Move) -> int | None:
    new, before = move.params["new_sizes"], math.prod(move.shape[: move.axis])
    if move.params.get("dimensions") is not None:
        return None
    wanted = (before, move.shape[move.axis])
    return next((i for i, size in enumerate(new) if (math.prod(new[:i]), size) == wanted), None)


def _broadcast(move: Move) -> int | None:
    new = move.params["broadcast_dimensions"][move.axis]
    return new if move.params["shape"][new] == move.shape[move.axis] else None


def _squeezed(move: Move) -> int | None:
    gone = {axis % len(move.shape) for axis in move.params["dimensions"]}
    return None if move.axis in gone else move.axis - sum(axis < move.axis for axis in gone)


def _sliced(move: Move) -> int | None:
    start, limit = (move.params[name][move.axis] for name in ("start_indices", "limit_indices"))
    stride = (move.params["strides"] or (1,) * len(move.shape))[move.axis]
    return move.axis if (start, limit, stride) == (0, move.shape[move.axis], 1) else None


def _sliced_at_run_time(move: Move) -> int | None:
    return move.axis if move.params["slice_sizes"][move.axis] == move.shape[move.axis] else None


def _unstacked(move: Move) -> int | None:
    gone = move.params["axis"]
    return None if move.axis == gone else move.axis - (gone < move.axis)


def _tiled(move: Move) -> int | None:
    return move.axis if move.params["reps"][move.axis] == 1 else None


def _selected(move: Move) -> int | None:
    return move.axis if move.others[0].ndim == 0 else None  # by one condition


def _gathered(move: Move) -> int | None:
    numbers: lax.GatherDimensionNumbers = move.params["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(move.shape)) if axis not in gone]
    if move.axis in gone or move.params["slice_sizes"][move.axis] != move.shape[move.axis]:
        return None
    return numbers.offset_dims[kept.index(move.axis)]


def _scaled(move: Move) -> int | None:
    """By a number, or by one for each position: then by the same for all channels."""
    (x,) = move.others
    return move.axis if x.ndim == 0 or (x.ndim == len(move.shape) and x.shape[move.axis] == 1) else None


def _gathered_from_devices(move: Move) -> int | None:
    along = "all_gather_dimension"
    return (_unless_along(along) if move.params["tiled"] else _after_a_new_one(along))(move)


def _exchanged(move: Move) -> int | None:
    return None if move.axis in (move.params["split_axis"], move.params["concat_axis"]) else move.axis


# The axis of the result in which each run of channels is whole and in order; None if there is none.
PLACES: dict[str, Callable[[Move], int | None]] = {
    "transpose": lambda move: list(move.params["permutation"]).index(move.axis),
    "reshape": _reshaped,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "slice": _sliced,
    "dynamic_slice": _sliced_at_run_time,
    "split": _unless_along("axis"),
    "unstack": _unstacked,
    "rev": _unless_along("dimensions"),
    "tile": _tiled,
    "concatenate": _unless_along("dimension"),
    "stack": _after_a_new_one("axis"),
    "select_n": _selected,
    "gather": _gathered,
    "mul": _scaled,
    "div": _scaled,
    "neg": _same,
    "convert_element_type": _same,
    "all_gather": _gathered_from_devices,
    "all_to_all": _exchanged,
}
