"""How a function uses the leaves of a model: a finder over its jaxpr follows each leaf to the operations it ends in.

A jaxpr holds every operation, whether or not it has a rule; `replay` finds out what a rule does with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .movements import CHOOSING, INDEXING, MOVEMENTS, SCALING, Axes, contracted_axes, type_of, unchanged
from .replay import LeafIndex, Op, Operand, Slice, Term

MANY_ROWS = 256  # as in a prefill: a matmul that makes no weight dense then makes none for one token


@dataclass(frozen=True, eq=False)
class MovedLeaf:
    """An array made from one leaf by moving elements, or from several that were joined."""

    leaves: dict[int, Axes]
    term: Term | None  # how it was made; None if that can't be replayed
    indexed: bool = False  # a part was taken, at a position that is known only when the function runs


@dataclass(frozen=True, eq=False)
class Use:
    """An operation that a leaf ends in."""

    primitive: str
    axes: tuple[int, ...]  # of the leaf: contracted, or taken as whole slices if it is `gathered`; else empty
    gathered: bool
    work: int  # elements that it multiplies or reads
    term: Term | None
    may_be_dense: int  # bytes that are dense in any case: those of a part taken by index


Values = Sequence[MovedLeaf | None]  # None for an array that is made from no leaf
AnyJaxpr = Jaxpr | ClosedJaxpr


def opened(jaxpr: AnyJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


@dataclass(eq=False)
class UseFinder:
    uses: dict[int, list[Use]] = field(default_factory=dict)

    def jaxpr(self, jaxpr: AnyJaxpr, values: Values, times: int) -> list[MovedLeaf | None]:
        """Follow the `values` of the inputs through a jaxpr that runs `times` times; returns the outputs' values."""
        jaxpr = opened(jaxpr)
        known = {var: value for var, value in zip(jaxpr.invars, values, strict=True) if value is not None}

        def find(var: Var | Literal) -> MovedLeaf | None:
            return None if isinstance(var, Literal) else known.get(var)

        for eqn in jaxpr.eqns:
            operands = [find(var) for var in eqn.invars]
            if any(operands):
                outs = self._equation(eqn, operands, times)
                known.update((var, out) for var, out in zip(eqn.outvars, outs, strict=True) if out is not None)
        return [find(var) for var in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: Values, times: int) -> Values:
        name = eqn.primitive.name
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, operands, times)
        inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        if inner is not None and len(opened(inner).invars) == len(operands):
            if name == "shard_map":  # inside, arrays are shards, which can't be replayed
                operands = [value and MovedLeaf(value.leaves, None, value.indexed) for value in operands]
            return self.jaxpr(inner, operands, times)
        if name == "optimization_barrier":
            return operands
        outs = moved(eqn, operands)
        if outs is not None:
            return outs
        for position, value in enumerate(operands):
            if value is not None:
                self._note(eqn, operands, position, value, times)
        return [None] * len(eqn.outvars)

    def _note(self, eqn: JaxprEqn, operands: Values, position: int, value: MovedLeaf, times: int) -> None:
        out, operand = type_of(eqn.outvars[0]), type_of(eqn.invars[position])
        gathered = eqn.primitive.name in INDEXING and position == 0
        contracted = contracted_axes(eqn, position)
        work = out.size * math.prod(operand.shape[axis] for axis in contracted) * times
        part = out if gathered else operand
        dense = part.size * part.dtype.itemsize if gathered or value.indexed else 0
        term = _term(eqn, operands)
        for leaf, axes in value.leaves.items():
            found = INDEXING[eqn.primitive.name](axes, eqn) if gathered else [axes[axis] for axis in contracted]
            along = tuple(sorted(frozenset().union(*found)))
            self.uses.setdefault(leaf, []).append(Use(eqn.primitive.name, along, gathered, work, term, dense))


def moved(eqn: JaxprEqn, operands: Values) -> list[MovedLeaf] | None:
    """The outputs, if the operation only moves or scales elements; None for an operation that a leaf ends in."""
    name = eqn.primitive.name
    values = [value for value in operands if value is not None]
    move = MOVEMENTS.get(name)
    indexed = values[0].indexed
    if name in INDEXING and operands[0] is not None:
        left = INDEXING[name](next(iter(values[0].leaves.values())), eqn)
        if len([each for each in left if each]) >= 2:  # a matrix, such as that of one layer or expert
            move, indexed = INDEXING[name], True
    elif name in SCALING and len(values) == 1 and _is_all_weight(values[0], type_of(eqn.outvars[0]).shape):
        move = unchanged
    choosing = CHOOSING.get(name)
    if move is None or (choosing is not None and not _are_joined(eqn, operands, choosing)):
        return None
    leaves = {leaf: move(axes, eqn) for value in values for leaf, axes in value.leaves.items()}
    return [MovedLeaf(leaves, _term(eqn, operands, out), indexed) for out in range(len(eqn.outvars))]


def _are_joined(eqn: JaxprEqn, operands: Values, choosing: int) -> bool:
    """Whether the operands but the first ones, which choose by a single number, are all made from leaves."""
    chosen_by = [type_of(var).size == 1 for var in eqn.invars[:choosing]]
    return all(chosen_by) and not any(operands[:choosing]) and all(operands[choosing:])


def _is_all_weight(value: MovedLeaf, shape: Sequence[int]) -> bool:
    """Whether no axis was added by broadcasting: a vector broadcast against activations is no weight any more."""
    return all(each or size == 1 for axes in value.leaves.values() for each, size in zip(axes, shape, strict=True))


def _term(eqn: JaxprEqn, operands: Values, out: int = 0) -> Term | None:
    terms: list[Operand] = []
    for position, value in enumerate(operands):
        term = _other_operand(eqn, position) if value is None else value.term
        if term is None:
            return None
        terms.append(term)
    return Op(eqn.primitive, eqn.params, tuple(terms), out)


def _other_operand(eqn: JaxprEqn, position: int) -> jax.ShapeDtypeStruct:
    """The type of an operand that comes from no leaf; activations get many rows."""
    aval = type_of(eqn.invars[position])
    shape = list(aval.shape)
    if eqn.primitive.name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        free = [axis for axis in range(aval.ndim) if axis not in (*contracted[position], *batch[position])]
        if free:
            shape[free[0]] *= MANY_ROWS
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def _scan(finder: UseFinder, eqn: JaxprEqn, operands: Values, times: int) -> Values:
    inner = opened(eqn.params["jaxpr"])
    values = [
        sliced(value) if value and type_of(var).ndim < type_of(outer).ndim else value
        for value, var, outer in zip(operands, inner.invars, eqn.invars, strict=True)
    ]
    outs = finder.jaxpr(inner, values, times * eqn.params["length"])
    carried = [type_of(a).ndim == type_of(b).ndim for a, b in zip(inner.outvars, eqn.outvars, strict=True)]
    return [value if carry else None for value, carry in zip(outs, carried, strict=True)]


def sliced(value: MovedLeaf) -> MovedLeaf:
    leaves = {leaf: axes[1:] for leaf, axes in value.leaves.items()}
    return MovedLeaf(leaves, value.term and Slice(value.term), value.indexed)


def _while(finder: UseFinder, eqn: JaxprEqn, operands: Values, times: int) -> Values:
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = operands[of_condition + of_body :]
    finder.jaxpr(eqn.params["cond_jaxpr"], [*operands[:of_condition], *carry], times)
    return finder.jaxpr(eqn.params["body_jaxpr"], operands[of_condition:], times)


def _cond(finder: UseFinder, eqn: JaxprEqn, operands: Values, times: int) -> Values:
    outs = [finder.jaxpr(branch, operands[1:], times) for branch in eqn.params["branches"]]
    return [next((value for value in same if value is not None), None) for same in zip(*outs, strict=True)]


_CONTROL: dict[str, Callable[[UseFinder, JaxprEqn, Values, int], Values]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


Traced = tuple[ClosedJaxpr, list[int | None]]  # a program, and for each of its inputs the leaf that it is, as a whole


def traced(function: Callable[[list[Any]], object], leaves: Sequence[Any]) -> Traced:
    """The program of `function(leaves)`; its inputs are arrays among the leaves, and the parts of quantized ones."""
    given = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def run(arrays: dict[int, Any]) -> list[jax.Array]:
        out = function([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]

    parts = {i: jax.tree.leaves(leaf) for i, leaf in given.items()}
    whole = [i if each[0] is given[i] else None for i, each in parts.items() for _ in each]
    return jax.make_jaxpr(run)(given), whole


def of_leaf(leaf: int, ndim: int) -> MovedLeaf:
    """The value of a leaf itself; its axes are counted from the end."""
    return MovedLeaf({leaf: tuple(frozenset([axis]) for axis in range(-ndim, 0))}, LeafIndex(leaf))


def find_uses(
    function: Callable[[list[Any]], object], leaves: Sequence[Any], followed: Collection[int]
) -> dict[int, list[Use]]:
    """The uses of the leaves with the indices `followed`, in `function(leaves)`, which is traced and not run."""
    program, whole = traced(function, leaves)
    finder = UseFinder()
    values = [None if i is None or i not in followed else of_leaf(i, len(leaves[i].shape)) for i in whole]
    finder.jaxpr(program, values, 1)
    return finder.uses
