"""How a function uses the leaves of a model: a walk over its jaxpr that follows each leaf to the operations it ends in.

A jaxpr says everything that a trace meets, and needs no rule to exist for an operation; what the engine then makes of
an operation is asked of the engine (`_replay`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core as jexc

from ._movements import INDEXING, MOVEMENTS, PASSING, SCALING, Axes, summed_axes, unchanged
from ._replay import Given, Op, Slice, Term

MANY_ROWS = 256


@dataclass(frozen=True, eq=False)
class Value:
    """What became of one leaf, or of several that were joined; `term` is how, None where it can't be done again."""

    leaves: dict[int, Axes]
    term: Term | None
    indexed: bool = False  # parts were taken at places that are known only when the function runs


@dataclass(frozen=True, eq=False)
class Use:
    """An operation that a leaf ends in.

    `axes` are those of the leaf that it sums over, or along which it takes whole slices if it is `gathered`; none
    for any other operation. `work` is how many numbers it multiplies or reads. `may_be_dense` is how many bytes are
    dense in any case: those of the parts that were taken by index.
    """

    primitive: str
    axes: tuple[int, ...]
    gathered: bool
    work: int
    term: Term | None
    may_be_dense: int


@dataclass(eq=False)
class Walk:
    uses: dict[int, list[Use]] = field(default_factory=dict)

    def jaxpr(self, jaxpr: Any, values: Sequence[Value | None], times: int) -> list[Value | None]:
        """Follow the `values` of its inputs through a jaxpr that runs `times` times; returns those of its outputs."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = {var: value for var, value in zip(jaxpr.invars, values, strict=True) if value is not None}

        def find(var: Any) -> Value | None:
            return None if isinstance(var, jexc.Literal) else known.get(var)

        for eqn in jaxpr.eqns:
            operands = [find(var) for var in eqn.invars]
            if any(operands):
                outs = self._equation(eqn, operands, times)
                known.update((var, out) for var, out in zip(eqn.outvars, outs, strict=True) if out is not None)
        return [find(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Value | None], times: int) -> Sequence[Value | None]:
        name = eqn.primitive.name
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, operands, times)
        inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(operands):
            if name == "shard_map":  # inside, arrays are parts: what the engine does with them is not asked
                operands = [value and Value(value.leaves, None, value.indexed) for value in operands]
            return self.jaxpr(inner, operands, times)
        if name in PASSING:
            return [value and _passed(value, eqn) for value in operands]
        moved = _moved(eqn, operands)
        if moved is not None:
            return moved
        for position, value in enumerate(operands):
            if value is not None:
                self._note(eqn, operands, position, value, times)
        return [None] * len(eqn.outvars)

    def _note(self, eqn: Any, operands: list[Value | None], position: int, value: Value, times: int) -> None:
        out = math.prod(eqn.outvars[0].aval.shape)
        summed = summed_axes(eqn, position)
        gathered = eqn.primitive.name in INDEXING and position == 0
        term = _term(eqn, operands)
        dense = _nbytes(eqn.outvars[0] if gathered else eqn.invars[position]) if gathered or value.indexed else 0
        for leaf, axes in value.leaves.items():
            if gathered:
                moved = INDEXING[eqn.primitive.name](axes, eqn)
                found, work = frozenset().union(*moved), out
            else:
                found = frozenset().union(*(axes[axis] for axis in summed or ()))
                work = out * math.prod(eqn.invars[position].aval.shape[axis] for axis in summed or ())
            use = Use(eqn.primitive.name, tuple(sorted(found)), gathered, work * times, term, dense)
            self.uses.setdefault(leaf, []).append(use)


def _moved(eqn: Any, operands: list[Value | None]) -> list[Value] | None:
    """The outputs, if they are the operands' elements moved or scaled; None for an operation that a leaf ends in."""
    name = eqn.primitive.name
    values = [value for value in operands if value is not None]
    move = MOVEMENTS.get(name)
    indexed = values[0].indexed
    if name in INDEXING and operands[0] is not None:
        left = INDEXING[name](next(iter(values[0].leaves.values())), eqn)
        if len([each for each in left if each]) >= 2:  # matrices, such as a layer's or an expert's
            move, indexed = INDEXING[name], True
    elif name in SCALING and len(values) == 1 and _is_all_weight(values[0], eqn.outvars[0].aval.shape):
        move = unchanged
    if move is None or (name == "concatenate" and len(values) < len(operands)):
        return None
    leaves = {leaf: move(axes, eqn) for value in values for leaf, axes in value.leaves.items()}
    outs = range(len(eqn.outvars))
    return [Value(leaves, _term(eqn, operands, out), indexed) for out in outs]


def _passed(value: Value, eqn: Any) -> Value:
    return Value(value.leaves, value.term and Op(eqn.primitive, eqn.params, (value.term,), 0), value.indexed)


def _is_all_weight(value: Value, shape: Sequence[int]) -> bool:
    """Whether no axis is repeated: a vector broadcast against activations is no weight any more."""
    return all(each or size == 1 for axes in value.leaves.values() for each, size in zip(axes, shape, strict=True))


def _term(eqn: Any, operands: Sequence[Value | None], out: int = 0) -> Term | None:
    terms: list[Any] = []
    for var, value in zip(eqn.invars, operands, strict=True):
        if value is not None and value.term is None:
            return None
        terms.append(_struct(var.aval) if value is None else value.term)
    if eqn.primitive.name == "dot_general" and None in operands:
        position = operands.index(None)
        terms[position] = _with_many_rows(terms[position], eqn.params["dimension_numbers"], position)
    return Op(eqn.primitive, eqn.params, tuple(terms), out)


def _with_many_rows(x: jax.ShapeDtypeStruct, numbers: Any, position: int) -> jax.ShapeDtypeStruct:
    """As of a long prompt: what the engine does without a dense weight then, it does for one token too."""
    taken = {*numbers[0][position], *numbers[1][position]}
    free = next((axis for axis in range(len(x.shape)) if axis not in taken), None)
    if free is None:
        return x
    return x.update(shape=(*x.shape[:free], x.shape[free] * MANY_ROWS, *x.shape[free + 1 :]))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _nbytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _scan(walk: Walk, eqn: Any, operands: list[Value | None], times: int) -> Sequence[Value | None]:
    inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    values = [
        _sliced(value) if value and len(var.aval.shape) < len(outer.aval.shape) else value
        for value, var, outer in zip(operands, inner.invars, eqn.invars, strict=True)
    ]
    outs = walk.jaxpr(inner, values, times * eqn.params["length"])
    carried = [len(a.aval.shape) == len(b.aval.shape) for a, b in zip(inner.outvars, eqn.outvars, strict=True)]
    return [value if carry else None for value, carry in zip(outs, carried, strict=True)]


def _sliced(value: Value) -> Value:
    leaves = {leaf: axes[1:] for leaf, axes in value.leaves.items()}
    return Value(leaves, value.term and Slice(value.term), value.indexed)


def _while(walk: Walk, eqn: Any, operands: list[Value | None], times: int) -> Sequence[Value | None]:
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = operands[of_condition + of_body :]
    walk.jaxpr(eqn.params["cond_jaxpr"], [*operands[:of_condition], *carry], times)
    return walk.jaxpr(eqn.params["body_jaxpr"], operands[of_condition:], times)


def _cond(walk: Walk, eqn: Any, operands: list[Value | None], times: int) -> Sequence[Value | None]:
    outs = [walk.jaxpr(branch, operands[1:], times) for branch in eqn.params["branches"]]
    return [next((value for value in same if value is not None), None) for same in zip(*outs, strict=True)]


_CONTROL: dict[str, Callable[..., Sequence[Value | None]]] = {"scan": _scan, "while": _while, "cond": _cond}


def find_uses(function: Callable[..., Any], leaves: Sequence[Any], followed: Collection[int]) -> dict[int, list[Use]]:
    """The uses of those `leaves` whose indices are `followed`, in `function(leaves)`, which is traced and not run."""
    traced = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def run(arrays: list[Any]) -> Any:
        mixed = list(leaves)
        for i, array in zip(traced, arrays, strict=True):
            mixed[i] = array
        return [x for x in jax.tree.leaves(function(mixed)) if isinstance(x, jax.Array)]

    jaxpr = jax.make_jaxpr(run)([leaves[i] for i in traced])
    walk = Walk()
    values: list[Value | None] = []
    for i in traced:  # one that is quantized already has several inputs
        values += [_given(i, leaves[i])] if i in followed else [None] * len(jax.tree.leaves(leaves[i]))
    walk.jaxpr(jaxpr, values, 1)
    return walk.uses


def _given(index: int, leaf: Any) -> Value:
    axes = tuple(frozenset([axis - len(leaf.shape)]) for axis in range(len(leaf.shape)))
    return Value({index: axes}, Given(index))
