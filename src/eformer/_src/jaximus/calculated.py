"""Whether a function that `jax.tree.map` ran has calculated with codes: equations tell, or values."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer
from jax.extend import core as jexc
from jax.flatten_util import ravel_pytree

from .types import Leaf

_ARRAYS = (jax.Array, np.ndarray)
SAMPLE = 2**14  # elements that are compared at most
REPEATS = 8  # how often codes must occur again, for what becomes of them to tell anything

# Primitives that move elements, and change none, with those of their operands that choose which. All others calculate.
_MOVES: dict[str, slice] = dict.fromkeys(
    (
        *("all_gather", "all_gather_invariant", "all_to_all", "broadcast_in_dim", "concatenate", "copy", "copy_p"),
        *("device_put", "expand_dims", "name", "optimization_barrier", "pad", "pbroadcast", "ppermute", "pvary"),
        *("reshape", "reshard", "rev", "sharding_constraint", "slice", "split", "squeeze", "stack", "stop_gradient"),
        *("tile", "transpose", "unstack"),
    ),
    slice(0),
) | {
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "gather": slice(1, None),
    "scatter": slice(1, 2),
    "select_n": slice(1),
}
_REDUCTIONS = ("reduce", "argmax", "argmin")  # the beginnings of their names


class Origin(str):
    """The leaves of codes that an array was made of, referred to weakly.

    All are equal, so that they don't tell the structures of trees apart; and a `str`, which is compared without Python,
    because every compiled call compares structures.
    """

    leaves: tuple[weakref.ref[Any], ...] = ()

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()


def is_code(leaf: Leaf) -> bool:
    """Whether the leaf is of integers, or of floating point in one byte, which no optimizer's steps can move."""
    dtype = getattr(leaf, "dtype", jnp.float32)
    return jnp.issubdtype(dtype, jnp.integer) or (
        jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    )


def calculated(before: Sequence[Leaf], after: Sequence[Leaf], frame: FrameType | None) -> int | None:
    """The place of the first leaf that was calculated from the one before; None if there is none.

    `frame` is the one that makes an array of the new leaves, such as that of `jax.tree.map`.
    """
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        arrays = isinstance(old, _ARRAYS) and isinstance(new, _ARRAYS)
        if old is new or not arrays or (old.shape, old.dtype) != (new.shape, new.dtype):
            continue
        inner_old, inner_new = _innermost(old), _innermost(new)
        if isinstance(inner_new, Tracer):
            found = _is_traced_from(inner_new, inner_old, [_innermost(leaf) for leaf in _beside(frame, old)])
        elif isinstance(inner_old, Tracer):
            found = False
        else:
            found = _is_function_of(inner_new, inner_old, _beside(frame, old)) or _was_fraction(inner_new, frame)
        if found:
            return i
    return None


def _innermost(leaf: Leaf) -> Leaf:
    """What `vmap` and derivatives carry, in a tracer of theirs."""
    while isinstance(leaf, Tracer):
        inner = getattr(leaf, "val" if hasattr(leaf, "batch_dim") else "primal", None)
        if not isinstance(inner, _ARRAYS):
            break
        leaf = inner
    return leaf


# Traced leaves, by the equations that made them.


class _Path(NamedTuple):
    """What lies between codes and what they are made of."""

    calculated: bool = False
    chooses: bool = False  # which elements are moved, and is none of them


def _is_traced_from(new: Any, old: Leaf, beside: Sequence[Leaf]) -> bool:
    """Whether `new` was calculated from `old`, or from a leaf `beside` it, and not merely moved."""

    def is_old(tracer: Any) -> bool:
        if any(tracer is each for each in beside):
            return True
        if isinstance(old, Tracer):
            return tracer is old
        # A constant of the program stands in it as a tracer of its own.
        return tracer.parent is None and (tracer.shape, tracer.dtype) == (old.shape, old.dtype)

    def made_by(tracer: Any) -> _Made | None:
        eqn = getattr(tracer, "parent", None)
        if eqn is None or is_old(tracer):
            return None
        return eqn, eqn.in_tracers, next((i for i, var in enumerate(eqn.outvars) if var is tracer.val), 0)

    return any(any(path) and is_old(tracer) for tracer, path in _sources(new, _Path(), new.dtype, made_by))


_Made = tuple[Any, Sequence[Any], int]  # an equation, its operands, and the number of the output


def _sources(
    atom: Any, path: _Path, dtype: np.dtype, made_by: Callable[[Any], _Made | None]
) -> Iterable[tuple[Any, _Path]]:
    """What `atom`, codes of `dtype`, is made of and is not made by an equation itself, and how."""
    todo, seen = [(atom, path)], set()
    while todo:
        atom, path = todo.pop()
        if (id(atom), path) in seen or not hasattr(atom, "aval"):
            continue
        seen.add((id(atom), path))
        made = made_by(atom)
        if made is None:
            yield atom, path
        else:
            eqn, operands, place = made
            todo += [(operands[i], how) for i, how in _operands_of(eqn, place, path, dtype)]


def _operands_of(eqn: Any, place: int, path: _Path, dtype: np.dtype) -> Iterable[tuple[int, _Path]]:
    """The operands, by number, that this output of `eqn` depends on, and how codes made of it depend on them."""
    name, count = eqn.primitive.name, len(eqn.invars)
    if path.chooses and name.startswith(_REDUCTIONS):
        return []  # chosen is a whole array, by one number
    if name == "sort":
        keys = [(i, path._replace(chooses=True)) for i in range(eqn.params["num_keys"])]
        return [(place, path), *keys]
    moves = name in _MOVES
    if name == "convert_element_type":
        moves = eqn.params["new_dtype"] == dtype or _holds(jnp.dtype(eqn.params["new_dtype"]), jnp.dtype(dtype))
    if moves:
        choosing = range(count)[_MOVES.get(name, slice(0))]
        return [(i, path._replace(chooses=path.chooses or i in choosing)) for i in range(count)]
    inside = _operands_of_program(eqn, place, path, dtype)
    return [(i, path._replace(calculated=True)) for i in range(count)] if inside is None else inside


def _operands_of_program(eqn: Any, place: int, path: _Path, dtype: np.dtype) -> list[tuple[int, _Path]] | None:
    """`_operands_of` an equation that runs programs; None if there is none, or their operands are not known."""
    name, outputs = eqn.primitive.name, len(eqn.outvars)
    first = 0  # the operand that is the first input
    carried = range(0)  # inputs that outputs of the same order become
    programs = list(jexc.jaxprs_in_params(eqn.params))
    if name == "while":
        programs, first = [eqn.params["body_jaxpr"].jaxpr], eqn.params["cond_nconsts"]
        carried = range(eqn.params["body_nconsts"], len(eqn.invars) - first)
    elif name == "scan":
        from .trace import scan_counts  # the trace is built on the class that asks here

        constants, count = scan_counts(dict(eqn.params))
        carried = range(constants, constants + count)
    elif name == "cond":
        first = 1
    if not programs or any(
        (len(each.invars), len(each.outvars)) != (len(eqn.invars) - first, outputs) for each in programs
    ):
        return None
    found: list[tuple[int, _Path]] = [(0, path._replace(chooses=True))] if name == "cond" else []
    todo, seen = [(place, path)], set()
    while todo:
        each = todo.pop()
        if each not in seen:
            seen.add(each)
            inside = [pair for program in programs for pair in _sources_of_output(program, *each, dtype)]
            found += [(first + i, how) for i, how in inside]
            todo += [(carried.index(i), how) for i, how in inside if i in carried]
    return list(dict.fromkeys(found))


def _sources_of_output(jaxpr: jexc.Jaxpr, place: int, path: _Path, dtype: np.dtype) -> list[tuple[int, _Path]]:
    """The inputs, by number, that this output of `jaxpr` depends on, and how."""
    made = {out: (eqn, eqn.invars, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    inputs = {var: i for i, var in enumerate(jaxpr.invars)}
    known: Callable[[Any], Any] = lambda atom: None if isinstance(atom, jexc.Literal) else made.get(atom)  # noqa: E731
    found = _sources(jaxpr.outvars[place], path, dtype, known)
    return [(inputs[atom], how) for atom, how in found if not isinstance(atom, jexc.Literal) and atom in inputs]


@functools.lru_cache
def _holds(wide: np.dtype, codes: np.dtype) -> bool:
    """Whether each code is a number of the dtype `wide`."""
    if jnp.issubdtype(codes, jnp.integer):
        info = jnp.iinfo(codes)
        if info.bits > 8:
            return np.can_cast(codes, wide)
        values = np.arange(info.min, info.max + 1).astype(codes)
    else:
        values = np.arange(256, dtype=np.uint8).view(codes)
        values = values[np.isfinite(values.astype(np.float32))]
    return np.array_equal(values.astype(wide).astype(codes), values)


# Leaves with values.


def _beside(frame: FrameType | None, leaf: Leaf) -> list[Leaf]:
    """The arrays that `jax.tree.map` of several trees gives to its function together with `leaf`, and `leaf`."""
    while frame is not None and frame.f_globals is jtu.tree_map.__globals__:
        given = frame.f_locals.get("all_leaves") or frame.f_locals.get("all_keypath_leaves") or []
        at = next((i for leaves in given for i, each in enumerate(leaves) if each is leaf), None)
        if at is not None:
            return [leaves[at] for leaves in given if isinstance(leaves[at], _ARRAYS)]
        frame = frame.f_back
    return []


def _is_function_of(new: Leaf, old: Leaf, beside: Sequence[Leaf]) -> bool:
    """Whether equal codes have become equal codes everywhere, others than they were, and not only zeros.

    So calculating with each element shows, and moving elements does not. Arrays that are too small, or have one code
    only, do not tell. With leaves `beside`, codes are equal where those are, too.
    """
    given = [_sample(leaf) for leaf in (new, old, *beside) if leaf.shape == old.shape]
    if any(each is None for each in given[:2]):
        return False
    if not any(new is each for each in beside) and _is_in_order(np.asarray(new)) and not _is_in_order(np.asarray(old)):
        return True
    after, *before = [each for each in given if each is not None]
    if not np.any(after) or np.all(np.any([after == each for each in before], axis=0)):
        return False
    order = np.lexsort(before)
    before, after = [each[order] for each in before], after[order]
    again = np.all([each[1:] == each[:-1] for each in before], axis=0)
    if np.sum(again) < REPEATS or np.all(again):
        return False
    same = bool(np.all((after[1:] == after[:-1])[again]))
    return same and not np.array_equal(np.sort(after), np.sort(before[0]))


def unravels(frame: FrameType) -> bool:
    """Whether this is the function that `ravel_pytree` gives, which casts a vector to the dtypes of leaves."""
    return frame.f_globals is ravel_pytree.__globals__


def _was_fraction(new: Leaf, frame: FrameType | None) -> bool:
    """Whether `new` was cast from a part of a vector with fractions."""
    while frame is not None and frame.f_globals is jtu.tree_map.__globals__:
        frame = frame.f_back
    if frame is None or not unravels(frame):
        return False
    flat, sizes = np.asarray(frame.f_locals["flat"]), frame.f_locals["unravel_list"].args[0]
    ends = np.cumsum(sizes)
    parts = [flat[end - size : end] for end, size in zip(ends, sizes, strict=True) if size == new.size]
    with np.errstate(invalid="ignore"):
        cast = [part.astype(new.dtype) for part in parts]
    wanted = np.asarray(new).reshape(-1)
    from_these = [part for part, codes in zip(parts, cast, strict=True) if np.array_equal(codes, wanted)]
    return not any(np.array_equal(part, wanted.astype(part.dtype)) for part in from_these)


def _is_in_order(codes: np.ndarray) -> bool:
    """Whether codes only grow, or only fall, along an axis: they were sorted by what they would be as numbers."""
    for axis in range(codes.ndim):
        lines = np.moveaxis(codes, axis, -1).reshape(-1, codes.shape[axis])
        lines = lines[:: math.ceil(codes.size / SAMPLE) or 1]
        steps = lines[:, 1:] > lines[:, :-1], lines[:, 1:] < lines[:, :-1]
        if any(np.sum(some) >= REPEATS and not np.any(others) for some, others in (steps, steps[::-1])):
            return True
    return False


def _sample(leaf: Leaf) -> np.ndarray | None:
    """Some elements, as bits; None of an array whose values can't be seen."""
    if isinstance(leaf, jax.Array) and (isinstance(leaf, Tracer) or leaf.is_deleted() or not leaf.is_fully_addressable):
        return None
    flat = np.asarray(leaf).reshape(-1)
    if flat.dtype.itemsize > 8 or flat.dtype.hasobject:
        return None
    return flat[:: math.ceil(flat.size / SAMPLE) or 1].view(f"u{flat.dtype.itemsize}")
