"""What the engine makes of an operation on quantized arrays: it is traced again, alone, and `explain` is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from eformer.jaximus import explain, implicit, is_implicit


@dataclass(frozen=True)
class Given:
    """The leaf of the model with this index."""

    index: int


@dataclass(frozen=True, eq=False)
class Slice:
    """What the body of a scan sees of a stack."""

    stack: Term


@dataclass(frozen=True, eq=False)
class Op:
    """An output of a primitive; operands that come from no leaf are known by their type."""

    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[Term | jax.ShapeDtypeStruct, ...]
    out: int


Term = Given | Slice | Op


def made_dense(term: Term, arrays: Mapping[int, Any]) -> dict[str, int]:
    """The bytes that `term` makes dense, by primitive; `arrays` are the leaves, abstract, by their index."""
    found = []

    def run(arrays: Mapping[int, Any], others: list[jax.Array]) -> None:
        # Closed over, so that what passes between two operations is the array itself and can be sliced by leaves.
        found.append(explain(lambda: _evaluate(term, arrays, iter(others)))())

    jax.eval_shape(run, dict(arrays), list(_others(term)))
    dense: dict[str, int] = {}
    for met, _, cost in found[0]:
        if cost:
            dense[met.primitive] = dense.get(met.primitive, 0) + cost
    return dense


def signature(term: Term | jax.ShapeDtypeStruct, leaves: Mapping[int, Any]) -> Any:
    """Equal for terms that do the same to leaves of the same kind, which `leaves` say."""
    match term:
        case Given():
            return leaves[term.index]
        case Slice():
            return ("slice", signature(term.stack, leaves))
        case Op():
            operands = tuple(signature(operand, leaves) for operand in term.operands)
            return (term.primitive.name, tuple(sorted(term.params.items())), operands, term.out)
    return (term.shape, str(term.dtype))


def leaves_of(term: Term | jax.ShapeDtypeStruct) -> set[int]:
    match term:
        case Given():
            return {term.index}
        case Slice():
            return leaves_of(term.stack)
        case Op():
            return set().union(*map(leaves_of, term.operands))
    return set()


def _others(term: Term | jax.ShapeDtypeStruct) -> Iterator[jax.ShapeDtypeStruct]:
    """The types of the operands that come from no leaf, in the order in which `_evaluate` asks for them."""
    match term:
        case Slice():
            yield from _others(term.stack)
        case Op():
            for operand in term.operands:
                yield from _others(operand)
        case jax.ShapeDtypeStruct():
            yield term


def _evaluate(term: Term | jax.ShapeDtypeStruct, arrays: Mapping[int, Any], others: Iterator[jax.Array]) -> Any:
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
