"""Chooses the format of a leaf, and the axis of its blocks, by how a function uses it."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from eformer.ops.quantization import QuantizedArray, find_format

from ._defaults import MIN_LENGTH, options_along
from ._replay import Term, leaves_of, made_dense, signature
from ._rules import Options
from ._uses import Use


class Decision(NamedTuple):
    format: str | None
    options: Options
    reason: str


Axis = int | tuple[int, ...]  # several: one scale for all of them


class _Dense(NamedTuple):
    """The `excess` bytes that the uses of a leaf make dense, in which `primitives`, and whether `always`."""

    excess: int
    primitives: tuple[str, ...]
    always: bool


@dataclass
class Choice:
    """Decides over the leaves of a model; `leaves` and their `uses` are given by index."""

    leaves: Mapping[int, jax.ShapeDtypeStruct]
    uses: Mapping[int, Sequence[Use]]
    format: str
    embeddings: str | None
    options: Mapping[str, object]
    replayed: dict[Hashable, dict[str, int]] = field(default_factory=dict)  # bytes made dense; layers replay alike

    def __call__(self, index: int) -> Decision:
        uses = self.uses[index]
        if not uses:
            return _kept("the function does not use it")
        form = self._format(index)
        if form is None:
            return _kept("an embedding: the function gathers from it")
        wanted = _wanted(uses)
        if not wanted:
            return _kept(f"it would go dense: used by {_names(use.primitive for use in uses)}")
        best: tuple[_Dense, Options] | None = None
        for options in self._candidates(index):
            dense = self._dense(index, form, options)
            if best is None or dense.excess < best[0].excess:
                best = dense, options
            if not dense.excess:
                break
        if best is None:
            return _kept(f"no axis has {MIN_LENGTH} elements for a block")
        dense, options = best
        if dense.always:
            return _kept(f"it would go dense in {_names(dense.primitives)}")
        return Decision(form, options, _reason(uses, wanted, dense))

    def _format(self, index: int) -> str | None:
        return self.embeddings if any(use.gathered for use in self.uses[index]) else self.format

    def _candidates(self, index: int) -> Iterator[Options]:
        """Options of the format, best first: blocks along the contracted axes, then along the others."""
        form, leaf = self._format(index), self.leaves[index]
        assert form is not None
        given = self.options if form == self.format else {}
        axes: list[Axis] = []
        for each in _wanted(self.uses[index]):
            if len(each) > 1:
                axes.append(each)  # most formats have blocks along one axis only
            axes += sorted(each, key=lambda axis: (-leaf.shape[axis], -axis))
        axes += range(-1, -len(leaf.shape) - 1, -1)
        if "axis" not in find_format(form).options or "axis" in given:
            axes = axes[:1]
        for axis in dict.fromkeys(axes):
            options = Options(options_along(form, axis, given))
            if _length(leaf, axis) >= MIN_LENGTH and _abstract(form, options, leaf) is not None:
                yield options

    def _dense(self, index: int, form: str, options: Options) -> _Dense:
        excess, primitives, always = 0, dict[str, None](), True
        for use in self.uses[index]:
            found = self._replay(use.term, index, form, options) if use.term is not None else {}
            more = sum(found.values()) - use.may_be_dense
            if more > 0:
                excess += more
                primitives.update(dict.fromkeys(found))
            else:
                always = False
        return _Dense(excess, tuple(primitives), always)

    def _replay(self, term: Term, index: int, form: str, options: Options) -> dict[str, int]:
        """The bytes that a use makes dense, by primitive."""
        chosen = {i: self._first(i) for i in leaves_of(term)}
        chosen[index] = (form, options)
        kinds = {i: (each, self.leaves[i].shape, str(self.leaves[i].dtype)) for i, each in chosen.items()}
        key = signature(term, kinds)
        try:
            hash(key)
        except TypeError:  # a parameter may be a list
            key = (id(term), form, options)
        if key not in self.replayed:
            arrays = {i: _abstract(*each, self.leaves[i]) if each else self.leaves[i] for i, each in chosen.items()}
            self.replayed[key] = made_dense(term, arrays)
        return self.replayed[key]

    def _first(self, index: int) -> tuple[str, Options] | None:
        """The format and options assumed for another leaf in the same operation: the first candidate."""
        form = self._format(index)
        options = None if form is None else next(self._candidates(index), None)
        return None if form is None or options is None else (form, options)


def _kept(reason: str) -> Decision:
    return Decision(None, Options(), reason)


def _wanted(uses: Sequence[Use]) -> list[tuple[int, ...]]:
    """The axes to put blocks along, most work first."""
    work: dict[tuple[int, ...], int] = {}
    for use in uses:
        if use.axes:
            axes = use.axes[-1:] if use.gathered else use.axes
            work[axes] = work.get(axes, 0) + use.work
    return sorted(work, key=lambda axes: -work[axes])


def _length(leaf: jax.ShapeDtypeStruct, axes: Axis) -> int:
    return math.prod(leaf.shape[axis] for axis in (axes if isinstance(axes, tuple) else (axes,)))


@functools.lru_cache(maxsize=1024)
def _abstract(form: str, options: Options, leaf: jax.ShapeDtypeStruct) -> QuantizedArray | None:
    """The leaf quantized, without values; None if the format refuses these options for it."""
    try:
        made: Any = jax.eval_shape(functools.partial(find_format(form).encode, **options), leaf)
    except (TypeError, ValueError, NotImplementedError):
        return None
    several = isinstance(options.get("axis"), tuple)
    return None if several and made.axis != options["axis"] else made


def _reason(uses: Sequence[Use], wanted: Sequence[tuple[int, ...]], dense: _Dense) -> str:
    summing = [use for use in uses if use.axes and not use.gathered]
    parts = ["gathered"] if any(use.gathered for use in uses) else []
    for axes in dict.fromkeys(use.axes for use in summing):
        by = _names(use.primitive for use in summing if use.axes == axes)
        parts.append(f"summed over {'axes' if len(axes) > 1 else 'axis'} {', '.join(map(str, axes))} by {by}")
    if len(wanted) > 1:
        parts.append(f"most of the work is along {', '.join(map(str, wanted[0]))}")
    if dense.excess:
        parts.append(f"goes dense in {_names(dense.primitives)}")
    return "; ".join(parts)


def _names(primitives: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(primitives))
