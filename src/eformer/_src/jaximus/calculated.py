"""Whether a function that `jax.tree.map` ran has calculated with codes: equations tell, or values."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer
from jax.extend import core as jexc

from .types import Leaf

_ARRAYS = (jax.Array, np.ndarray)
SAMPLE = 2**14  # elements that are compared at most
REPEATS = 8  # how often codes must occur again, for what becomes of them to tell anything

# Primitives that move elements, and change none. All others calculate.
_MOVES = frozenset(
    {
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "copy_p",
        "device_put",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "gather",
        "name",
        "optimization_barrier",
        "pad",
        "pbroadcast",
        "ppermute",
        "pvary",
        "reshape",
        "reshard",
        "rev",
        "scatter",
        "select_n",
        "sharding_constraint",
        "slice",
        "sort",
        "split",
        "squeeze",
        "stack",
        "stop_gradient",
        "tile",
        "transpose",
        "unstack",
    }
)
_CALLS = frozenset({"jit", "pjit", "closed_call"})


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
        else:
            found = not isinstance(inner_old, Tracer) and _is_function_of(inner_new, inner_old, _beside(frame, old))
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


def _is_traced_from(new: Any, old: Leaf, beside: Sequence[Leaf]) -> bool:
    """Whether `new` was calculated from `old`, or from a leaf `beside` it, and not merely moved."""

    def is_old(tracer: Any) -> bool:
        if any(tracer is each for each in beside):
            return True
        if isinstance(old, Tracer):
            return tracer is old
        # A constant of the program stands in it as a tracer of its own.
        return tracer.parent is None and (tracer.shape, tracer.dtype) == (old.shape, old.dtype)

    def made_by(tracer: Any) -> tuple[jexc.JaxprEqn, Sequence[Any], int] | None:
        eqn = getattr(tracer, "parent", None)
        if eqn is None or is_old(tracer):
            return None
        return eqn, eqn.in_tracers, next((i for i, var in enumerate(eqn.outvars) if var is tracer.val), 0)

    return any(by_calculation and is_old(tracer) for tracer, by_calculation in _sources(new, made_by))


def _sources(atom: Any, made_by: Callable[[Any], tuple[Any, Sequence[Any], int] | None]) -> Iterable[tuple[Any, bool]]:
    """What `atom` is made of and is not made by an equation itself, and whether a calculation lies between."""
    todo, seen = [(atom, False)], set()
    while todo:
        atom, calculated = todo.pop()
        if (id(atom), calculated) in seen or not hasattr(atom, "aval"):
            continue
        seen.add((id(atom), calculated))
        made = made_by(atom)
        if made is None:
            yield atom, calculated
            continue
        eqn, operands, place = made
        if eqn.primitive.name in _CALLS:
            inside = _sources_of_output(eqn.params["jaxpr"].jaxpr, place)
            todo += [(operands[i], calculated or inner) for i, inner in inside]
        elif next(iter(jexc.jaxprs_in_params(eqn.params)), None) is None:
            calculates = eqn.primitive.name not in _MOVES
            dtypes = {x.aval.dtype for x in operands} - {jnp.dtype(bool)} if calculates else {atom.aval.dtype}
            todo += [(x, calculated or calculates) for x in operands if x.aval.dtype in dtypes]


def _sources_of_output(jaxpr: jexc.Jaxpr, place: int) -> list[tuple[int, bool]]:
    """The inputs, by number, that this output of `jaxpr` depends on, and whether by a calculation."""
    made = {out: (eqn, eqn.invars, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    inputs = {var: i for i, var in enumerate(jaxpr.invars)}
    known: Callable[[Any], Any] = lambda atom: None if isinstance(atom, jexc.Literal) else made.get(atom)  # noqa: E731
    found = _sources(jaxpr.outvars[place], known)
    return [(inputs[atom], by) for atom, by in found if not isinstance(atom, jexc.Literal) and atom in inputs]


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


def _sample(leaf: Leaf) -> np.ndarray | None:
    """Some elements, as bits; None of an array whose values can't be seen."""
    if isinstance(leaf, jax.Array) and (isinstance(leaf, Tracer) or leaf.is_deleted() or not leaf.is_fully_addressable):
        return None
    flat = np.asarray(leaf).reshape(-1)
    if flat.dtype.itemsize > 8 or flat.dtype.hasobject:
        return None
    return flat[:: math.ceil(flat.size / SAMPLE) or 1].view(f"u{flat.dtype.itemsize}")
