"""Sums over the elements of a moved array, brought back to where these elements lie in the array before it was moved.

A sum has the array's axes, each of the array's length, or of length 1 if it is the same for all elements along it. So
the sums of a weight (inputs, outputs) have the shape (inputs, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from eformer._src.model.uses.movements import type_of


class CannotPull(Exception):
    """A sum can't be told for the array before it was moved."""


@dataclass(frozen=True)
class SumKind:
    """What a sum counts: `power` 2 for squares of inputs, 1 for one of two factors, 0 for their number.

    Elements that were left out count 0, if the sum is `spread`; else an axis stays of length 1 where it was.
    """

    power: int
    spread: bool = True


SQUARES, COUNT = SumKind(2), SumKind(0)
FIRST, SECOND = SumKind(1), SumKind(1, spread=False)

Operands = Sequence[Any]  # of an equation: arrays
# Of the sum, the equation, its operands, the numbers of an operand and of an output, and the kind of sum.
Pull = Callable[[jax.Array, JaxprEqn, Operands, int, int, SumKind], jax.Array]


def pull(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    """The sum `total` over elements of the output number `out`, for the operand number `at`."""
    return PULLS[eqn.primitive.name](total, eqn, operands, at, out, how)


def _shape(eqn: JaxprEqn, at: int) -> tuple[int, ...]:
    return type_of(eqn.invars[at]).shape


def _same(total: jax.Array, *_: object) -> jax.Array:
    return total


def _transpose(total: jax.Array, eqn: JaxprEqn, *_: object) -> jax.Array:
    return total.transpose(tuple(np.argsort(eqn.params["permutation"])))


def _squeeze(total: jax.Array, eqn: JaxprEqn, *_: object) -> jax.Array:
    ndim = len(_shape(eqn, 0))
    return jnp.expand_dims(total, [axis % ndim for axis in eqn.params["dimensions"]])


def _broadcast(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    del operands, out
    came_from, old = list(eqn.params["broadcast_dimensions"]), _shape(eqn, at)
    for axis, size in enumerate(eqn.params["shape"]):
        if axis not in came_from or old[came_from.index(axis)] != size:  # each element was repeated
            times = size if how.spread and total.shape[axis] == 1 else 1
            total = jnp.sum(total, axis, keepdims=True) * times
    new = [axis for axis in range(total.ndim) if axis not in came_from]
    return jnp.squeeze(total, new)


def _reshape(total: jax.Array, eqn: JaxprEqn, *_: object) -> jax.Array:
    new, old, shape = type_of(eqn.outvars[0]).shape, _shape(eqn, 0), []
    for ours, theirs in _groups(new, old):
        if all(total.shape[axis] == 1 for axis in ours):
            shape += [1] * len(theirs)
            continue
        total = jnp.broadcast_to(total, [new[i] if i in ours else n for i, n in enumerate(total.shape)])
        shape += [old[axis] for axis in theirs]
    return total.reshape(shape)


def _groups(new: Sequence[int], old: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The axes of both shapes, in the shortest runs that have equally many elements."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(new) or j < len(old):
        ours, theirs = ([i], []) if i < len(new) else ([], [j])
        i, j = i + len(ours), j + len(theirs)
        while (a := math.prod(new[axis] for axis in ours)) != (b := math.prod(old[axis] for axis in theirs)):
            if a < b:
                ours, i = [*ours, i], i + 1
            else:
                theirs, j = [*theirs, j], j + 1
        found.append((ours, theirs))
    return found


def _placed(
    total: jax.Array, shape: Sequence[int], starts: Sequence[Any], taken: Sequence[int], how: SumKind
) -> jax.Array:
    """`total` over a part of an array of that `shape`; the others count 0."""
    whole = [1 if taken[i] == shape[i] and n == 1 else shape[i] for i, n in enumerate(total.shape)]
    if not how.spread:
        whole = [1 if total.shape[i] == 1 else n for i, n in enumerate(whole)]
    part = [taken[i] if n > 1 else 1 for i, n in enumerate(whole)]
    starts = [start if n > 1 else 0 for start, n in zip(starts, whole, strict=True)]
    if whole == part:
        return jnp.broadcast_to(total, part)
    return lax.dynamic_update_slice(jnp.zeros(whole, total.dtype), jnp.broadcast_to(total, part), starts)


def _tile(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    del operands, out
    for axis, (times, size) in enumerate(zip(eqn.params["reps"], _shape(eqn, at), strict=True)):
        if total.shape[axis] == 1:
            total = total * times if how.spread else total
        else:
            copies = total.reshape(*total.shape[:axis], times, size, *total.shape[axis + 1 :])
            total = jnp.sum(copies, axis)
    return total


def _select(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    """Of arrays that a single number chooses from, the others count 0."""
    del eqn, out
    chosen = jnp.asarray(operands[0]).reshape(()).astype(jnp.int32) == at - 1
    return jnp.where(chosen, total, 0) if how.spread else total


def _cannot_pull(*_: object) -> jax.Array:
    """What devices send each other: their sums would have to be sent back."""
    raise CannotPull


def _slice(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    taken = type_of(eqn.outvars[0]).shape
    if strides is not None and any(n > 1 for n in strides):
        return _transposed(total, eqn, operands, at, out, how)
    return _placed(total, _shape(eqn, 0), starts, taken, how)


def _split(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    del operands, at
    shape, axis = _shape(eqn, 0), eqn.params["axis"]
    starts = [sum(eqn.params["sizes"][:out]) if i == axis else 0 for i in range(len(shape))]
    return _placed(total, shape, starts, type_of(eqn.outvars[out]).shape, how)


def _unstack(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    del operands, at
    shape = _shape(eqn, 0)
    axis = eqn.params["axis"] % len(shape)
    starts = [out if i == axis else 0 for i in range(len(shape))]
    taken = [1 if i == axis else n for i, n in enumerate(shape)]
    return _placed(jnp.expand_dims(total, axis), shape, starts, taken, how)


def _dynamic_slice(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    del at, out
    shape, taken = _shape(eqn, 0), eqn.params["slice_sizes"]
    starts = [jnp.asarray(start, jnp.int32) for start in operands[1:]]  # zeros beside them must have their type
    starts = [start if taken[i] < shape[i] else 0 for i, start in enumerate(starts)]
    return _placed(total, shape, starts, taken, how)


def _concatenate(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    del operands, out, how
    axis = eqn.params["dimension"]
    if total.shape[axis] == 1:
        return total
    sizes = [type_of(var).shape[axis] for var in eqn.invars]
    return lax.slice_in_dim(total, sum(sizes[:at]), sum(sizes[: at + 1]), axis=axis)


def _reverse(total: jax.Array, eqn: JaxprEqn, *_: object) -> jax.Array:
    return lax.rev(total, eqn.params["dimensions"])


def _gather(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    """Axes that are taken whole stay of length 1 if they are; the sums of all places that took an element are added."""
    del at, out
    numbers, shape = eqn.params["dimension_numbers"], _shape(eqn, 0)
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    taken, thin = list(eqn.params["slice_sizes"]), list(shape)
    for axis, offset in zip(kept, numbers.offset_dims, strict=True):
        if total.shape[offset] == 1 and taken[axis] == shape[axis]:
            taken[axis] = thin[axis] = 1
    places = [axis for axis in range(total.ndim) if axis not in numbers.offset_dims]
    if not how.spread:
        if any(total.shape[axis] > 1 for axis in places) or any(taken[axis] != thin[axis] for axis in kept):
            raise CannotPull
        return jnp.expand_dims(jnp.squeeze(total, places), sorted(gone))
    given = {offset: taken[axis] for axis, offset in zip(kept, numbers.offset_dims, strict=True)}
    wanted = [given.get(axis, size) for axis, size in enumerate(type_of(eqn.outvars[0]).shape)]
    params = {**eqn.params, "slice_sizes": tuple(taken), "fill_value": None}
    move = lambda x: eqn.primitive.bind(x, operands[1], **params)  # noqa: E731
    return _linear(move, thin, jnp.broadcast_to(total, wanted))


def _transposed(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    """What holds for every move of elements: its transpose, of a sum for each element."""
    if not how.spread:
        raise CannotPull
    whole = jnp.broadcast_to(total, type_of(eqn.outvars[out]).shape)

    def move(x: jax.Array) -> jax.Array:
        given = [x if i == at else jnp.zeros_like(each) for i, each in enumerate(operands)]
        found = eqn.primitive.bind(*given, **eqn.params)
        return found[out] if eqn.primitive.multiple_results else found

    return _linear(move, _shape(eqn, at), whole)


def _linear(move: Callable[[jax.Array], jax.Array], shape: Sequence[int], total: jax.Array) -> jax.Array:
    (found,) = jax.linear_transpose(move, jax.ShapeDtypeStruct(tuple(shape), total.dtype))(total)
    return found


def _scaled(total: jax.Array, eqn: JaxprEqn, operands: Operands, at: int, out: int, how: SumKind) -> jax.Array:
    """An element that is scaled by c before it is multiplied counts c² times."""
    del out
    factor = jnp.asarray(operands[1 - at], jnp.float32)
    if (how.power == 1 and factor.ndim) or (at == 1 and eqn.primitive.name == "div"):
        raise CannotPull
    return total * (1 / factor if eqn.primitive.name == "div" else factor) ** how.power


PULLS: Mapping[str, Pull] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "concatenate": _concatenate,
    "rev": _reverse,
    "pad": _transposed,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "tile": _tile,
    "select_n": _select,
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_to_all", "ppermute"), _cannot_pull),
    **dict.fromkeys(("mul", "div"), _scaled),
    **dict.fromkeys(("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient", "name"), _same),
    **dict.fromkeys(("neg", "sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"), _same),
}
