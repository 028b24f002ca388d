"""Chooses the format of a leaf, and the axis of its blocks, by how a function uses it."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from eformer._src.model.defaults import MIN_LENGTH, options_along
from eformer._src.model.rules import Options
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.registry import Format, find_format

from .find import Use
from .replay import Term, leaves_of, made_dense, signature


class Decision(NamedTuple):
    reason: str
    format: str | None = None
    options: Options = Options()


Asked = tuple[Format, dict[str, object]]  # what `read_format` gives
Chosen = tuple[str, Options]  # the name of a format with its options


class _Dense(NamedTuple):
    """The `excess` bytes that the uses of a leaf make dense, in which `primitives`, and whether `always`."""

    excess: int
    primitives: tuple[str, ...]
    always: bool


@dataclass
class FormatChooser:
    """Decides over the leaves of a model; `leaves` and their `uses` are given by index."""

    leaves: Mapping[int, jax.ShapeDtypeStruct]
    uses: Mapping[int, Sequence[Use]]
    format: Asked
    embeddings: Asked | None
    replayed: dict[Hashable, dict[str, int]] = field(default_factory=dict)  # bytes made dense; layers replay alike

    def __call__(self, index: int) -> Decision:
        uses = self.uses[index]
        if not uses:
            return Decision("the function does not use it")
        if self._format(index) is None:
            return Decision("an embedding: the function gathers from it")
        wanted = _wanted(uses)
        if not wanted:
            return Decision(f"it would go dense: used by {_names(use.primitive for use in uses)}")
        tried: list[tuple[_Dense, Chosen]] = []
        for chosen in self._candidates(index):
            tried.append((self._dense(index, chosen), chosen))
            if not tried[-1][0].excess:
                break
        if not tried:
            return Decision(f"no axis has {MIN_LENGTH} elements for a block")
        dense, chosen = min(tried, key=lambda each: each[0].excess)
        if dense.always:
            return Decision(f"it would go dense in {_names(dense.primitives)}")
        return Decision(_reason(uses, wanted, dense), *chosen)

    def _format(self, index: int) -> Asked | None:
        return self.embeddings if any(use.gathered for use in self.uses[index]) else self.format

    def _candidates(self, index: int) -> Iterator[Chosen]:
        """The format with its options, best first: blocks along the contracted axes, then along the others."""
        asked, leaf = self._format(index), self.leaves[index]
        if asked is None:
            return
        form, given = asked
        choices: list[tuple[int, ...]] = []
        for axes in _wanted(self.uses[index]):
            # All of them with one scale, then each alone: most formats have blocks along one axis only.
            choices += [axes, *((axis,) for axis in sorted(axes, key=lambda axis: (-leaf.shape[axis], -axis)))]
        choices += [(axis,) for axis in range(-1, -len(leaf.shape) - 1, -1)]
        if "axis" not in form.options or "axis" in given:
            choices = choices[:1]
        for axes in dict.fromkeys(choices):
            options = Options(options_along(form, axes[0] if len(axes) == 1 else axes, given))
            length = math.prod(leaf.shape[axis] for axis in axes)
            if length >= MIN_LENGTH and _abstract(form.name, options, leaf) is not None:
                yield form.name, options

    def _dense(self, index: int, chosen: Chosen) -> _Dense:
        uses = self.uses[index]
        found = [self._replay(use.term, index, chosen) if use.term is not None else {} for use in uses]
        excess = [max(sum(made.values()) - use.may_be_dense, 0) for made, use in zip(found, uses, strict=True)]
        primitives = dict.fromkeys(name for made, more in zip(found, excess, strict=True) if more for name in made)
        return _Dense(sum(excess), tuple(primitives), all(excess))

    def _replay(self, term: Term, index: int, chosen: Chosen) -> dict[str, int]:
        """The bytes that a use makes dense, by primitive; other leaves in it are assumed to take their first choice."""
        kinds = {i: chosen if i == index else next(self._candidates(i), None) for i in leaves_of(term)}
        key = signature(term, {i: (kind, self.leaves[i]) for i, kind in kinds.items()})
        if key not in self.replayed:
            arrays = {i: _abstract(*kind, self.leaves[i]) if kind else self.leaves[i] for i, kind in kinds.items()}
            self.replayed[key] = made_dense(term, arrays)
        return self.replayed[key]


def _wanted(uses: Sequence[Use]) -> list[tuple[int, ...]]:
    """The axes to put blocks along, most work first."""
    work: dict[tuple[int, ...], int] = {}
    for use in uses:
        if use.axes:
            axes = use.axes[-1:] if use.gathered else use.axes
            work[axes] = work.get(axes, 0) + use.work
    return sorted(work, key=lambda axes: -work[axes])


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
