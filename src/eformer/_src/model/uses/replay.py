"""What an operation does to quantized arrays: it is traced again on its own, under `explain`."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import tree_util as jtu
from jax.extend.core import Primitive

from eformer._src.jaximus.array import is_implicit
from eformer._src.jaximus.explain import explain
from eformer._src.jaximus.trace import implicit


@dataclass(frozen=True)
class LeafIndex:
    """The leaf of the model with this index."""

    index: int


@functools.partial(jtu.register_dataclass, data_fields=["stack"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Slice:
    """One matrix of a stack, as the body of a scan sees it."""

    stack: Term


@functools.partial(jtu.register_dataclass, data_fields=["operands"], meta_fields=["primitive", "params", "out"])
@dataclass(frozen=True, eq=False)
class Op:
    """The output number `out` of a primitive; an operand that comes from no leaf is given by its type."""

    primitive: Primitive
    params: Mapping[str, Any]
    operands: tuple[Operand, ...]
    out: int


# A tree whose leaves are `LeafIndex`s and types.
Term = LeafIndex | Slice | Op
Operand = Term | jax.ShapeDtypeStruct


def leaves_of(term: Term) -> set[int]:
    return {leaf.index for leaf in jax.tree.leaves(term) if isinstance(leaf, LeafIndex)}


def signature(term: Term, kinds: Mapping[int, Hashable]) -> Hashable:
    """Equal for terms that do the same to leaves of the same kinds."""
    leaves, structure = jax.tree.flatten(term)
    return structure, tuple(kinds[leaf.index] if isinstance(leaf, LeafIndex) else leaf for leaf in leaves)


def made_dense(term: Term, arrays: Mapping[int, Any]) -> dict[str, int]:
    """The bytes that `term` makes dense, by primitive, for abstract `arrays` by the index of their leaf."""
    found = []

    def run(term: Any) -> None:
        # A closure passes the array itself, not a tracer, between two operations: it can be sliced leaf by leaf.
        found.append(explain(lambda: _evaluate(term))())

    jax.eval_shape(run, jax.tree.map(lambda leaf: arrays[leaf.index] if isinstance(leaf, LeafIndex) else leaf, term))
    dense: dict[str, int] = {}
    for met, _, cost in found[0]:
        if cost:
            dense[met.primitive] = dense.get(met.primitive, 0) + cost
    return dense


def _evaluate(term: Any) -> Any:
    """The array of a term whose leaves are arrays."""
    match term:
        case Slice():
            stack = _evaluate(term.stack)
            if is_implicit(stack) and not stack.is_stacked():
                stack = implicit(lambda stack: lax.scan(lambda _, part: (None, part), None, stack)[1])(stack)
            return jax.tree.map(lambda leaf: leaf[0], stack)
        case Op():
            operands = map(_evaluate, term.operands)
            out = implicit(lambda *operands: term.primitive.bind(*operands, **term.params))(*operands)
            return out[term.out] if term.primitive.multiple_results else out
    return term
