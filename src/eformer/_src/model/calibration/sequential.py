"""Quantize leaves in the order in which a function uses them: later ones see what the earlier ones became."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from eformer._src.jaximus.array import materialize
from eformer._src.model.uses.find import moved, traced
from eformer._src.model.uses.rules_from_use import flat_call

from .evaluate import CALLS, CONTROL, Evaluation, ProgramArray, bound, follow
from .statistics import Moments, Statistic

Quantize = Callable[[int, Statistic | None], Any]  # a leaf, by its number, with what it is multiplied by


class _AllQuantized(Exception):
    """All leaves are quantized: what the function does after that is of no interest."""


class _InOrder(Evaluation):
    """Runs a program operation by operation; a leaf is quantized when the first operation but a movement needs it.

    A loop or a branch runs twice: to find what its leaves are multiplied by, and again with these quantized.
    """

    def __init__(self, leaves: Mapping[int, Any], todo: Iterable[int], quantize: Quantize) -> None:
        super().__init__(list(todo))
        self.current, self.todo, self.quantize = dict(leaves), set(self.with_moment), quantize
        self.made: dict[int, Any] = {}

    def equation(self, eqn: JaxprEqn, operands: Sequence[ProgramArray]) -> list[ProgramArray]:
        if eqn.primitive.name in CALLS:
            return super().equation(eqn, operands)
        values = [given.value for given in operands]
        if not any(values):
            return super().equation(eqn, operands)
        if eqn.primitive.name == "optimization_barrier" or moved(eqn, values) is not None:
            outs = super().equation(eqn, operands)
            again = lambda number: bound(eqn, _now(operands))[number]  # noqa: E731
            return [out._replace(again=functools.partial(again, number)) for number, out in enumerate(outs)]
        waiting = {i for given in operands for i in given.brings if i in self.todo}
        if waiting:
            self._sum_up(eqn, operands)
            for i in sorted(waiting):
                self._quantize(i)
            if not self.todo:
                raise _AllQuantized
        now = [given._replace(array=x) for given, x in zip(operands, _now(operands), strict=True)]
        return super().equation(eqn, now)

    def start(self, i: int, array: Any) -> ProgramArray:
        return follow(i, array)._replace(again=lambda: self.current[i])

    def _sum_up(self, eqn: JaxprEqn, operands: Sequence[ProgramArray]) -> None:
        self.found.clear()
        if eqn.primitive.name in CONTROL:
            super().equation(eqn, operands)
            return
        arrays = [given.array for given in operands]
        for at, given in enumerate(operands):
            if given.value is not None:
                self.note(eqn, arrays, at, given)

    def _quantize(self, i: int) -> None:
        uses = {key.axes: Moments(*sums) for key, sums in self.found.items() if key.source == i}
        self.made[i] = self.quantize(i, Statistic(self.current[i].shape, uses) if uses else None)
        self.current[i] = materialize(self.made[i])
        self.todo.remove(i)


def _now(operands: Sequence[ProgramArray]) -> list[Any]:
    return [given.array if given.again is None else given.again() for given in operands]


def in_order(
    function: Callable[..., object],
    params: object,
    batches: Sequence[tuple[Any, ...]],
    todo: Iterable[int],
    quantize: Quantize,
) -> dict[int, Any]:
    """The leaves `todo`, by number, as `quantize` makes them in the order of the function; those it does not use not.

    All batches run together, under `vmap`: they must be of the same shapes.
    """
    kinds = {tuple(str(jax.typeof(x)) for x in jax.tree.leaves(each)) for each in batches}
    if len(kinds) > 1:
        raise ValueError(f"`sequential` takes batches of the same shapes, got {len(kinds)} kinds: {sorted(kinds)[:2]}")
    together = jax.tree.map(lambda *each: jnp.stack(each), *batches)

    def all_batches(params: Any, *inputs: Any) -> object:
        return jax.vmap(lambda inputs: function(params, *inputs))(inputs)

    named, arguments, call = flat_call(all_batches, params, together)
    program, whole = traced(call, arguments)
    arrays = [x for leaf in arguments for x in jax.tree.leaves(leaf) if hasattr(x, "shape") and hasattr(x, "dtype")]
    leaves = {i: leaf for i, (_, leaf) in enumerate(named)}
    run = _InOrder(leaves, todo, quantize)
    wanted = set(run.todo)
    given = [run.start(i, x) if i in wanted else ProgramArray(x) for i, x in zip(whole, arrays, strict=True)]
    del arrays
    with contextlib.suppress(_AllQuantized):
        run.run(program, given)
    return run.made
