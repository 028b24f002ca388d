"""What an operation does to quantized arrays: it is traced again on its own, under `explain`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive

from eformer.jaximus import explain, implicit, is_implicit


@dataclass(frozen=True)
class Given:
    """The leaf of the model with this index."""

    index: int


@dataclass(frozen=True, eq=False)
class Slice:
    """One matrix of a stack, as the body of a scan sees it."""

    stack: Term


@dataclass(frozen=True, eq=False)
class Op:
    """The output number `out` of a primitive; an operand that comes from no leaf is given by its type."""

    primitive: Primitive
    params: Mapping[str, Any]
    operands: tuple[Operand, ...]
    out: int


Term = Given | Slice | Op
Operand = Term | jax.ShapeDtypeStruct
Leaves = Mapping[int, Any]  # arrays by the index of their leaf: quantized, dense or abstract ones


def made_dense(term: Term, arrays: Leaves) -> dict[str, int]:
    """The bytes that `term` makes dense, by primitive, for abstract `arrays`."""
    found = []

    def run(arrays: Leaves, others: list[jax.Array]) -> None:
        # A closure passes the array itself, not a tracer, between two operations: it can be sliced leaf by leaf.
        found.append(explain(lambda: _evaluate(term, arrays, iter(others)))())

    jax.eval_shape(run, dict(arrays), list(_others(term)))
    dense: dict[str, int] = {}
    for met, _, cost in found[0]:
        if cost:
            dense[met.primitive] = dense.get(met.primitive, 0) + cost
    return dense


def signature(term: Operand, kinds: Mapping[int, Hashable]) -> Hashable:
    """Equal for terms that do the same to leaves of the same kinds."""
    match term:
        case Given():
            return kinds[term.index]
        case Slice():
            return ("slice", signature(term.stack, kinds))
        case Op():
            operands = tuple(signature(operand, kinds) for operand in term.operands)
            return (term.primitive.name, tuple(sorted(term.params.items())), operands, term.out)
    return (term.shape, str(term.dtype))


def leaves_of(term: Operand) -> set[int]:
    match term:
        case Given():
            return {term.index}
        case Slice():
            return leaves_of(term.stack)
        case Op():
            return set().union(*map(leaves_of, term.operands))
    return set()


def _others(term: Operand) -> Iterator[jax.ShapeDtypeStruct]:
    """The types of the operands that come from no leaf, in the order in which `_evaluate` asks for them."""
    match term:
        case Slice():
            yield from _others(term.stack)
        case Op():
            for operand in term.operands:
                yield from _others(operand)
        case jax.ShapeDtypeStruct():
            yield term


def _evaluate(term: Operand, arrays: Leaves, others: Iterator[jax.Array]) -> Any:
    match term:
        case Given():
            return arrays[term.index]
        case Slice():
            stack = _evaluate(term.stack, arrays, others)
            if is_implicit(stack) and not stack.is_stacked():
                stack = implicit(_scanned)(stack)
            return jax.tree.map(lambda leaf: leaf[0], stack)
        case Op():
            operands = [_evaluate(operand, arrays, others) for operand in term.operands]
            out = implicit(lambda *operands: term.primitive.bind(*operands, **term.params))(*operands)
            return out[term.out] if term.primitive.multiple_results else out
    return next(others)


def _scanned(stack: Any) -> jax.Array:
    return lax.scan(lambda carry, part: (carry, part), None, stack)[1]
