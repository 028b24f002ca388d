"""What the engine tells about itself: which rule served which primitive, and what was made dense."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax


class MaterializationWarning(UserWarning):
    """No rule served a primitive, so an implicit array was made dense."""


class MaterializationError(RuntimeError):
    """No rule served a primitive, under `materialization_error()`."""


@dataclasses.dataclass(frozen=True)
class Met:
    """A primitive that met an implicit array: the row of an `Explanation`."""

    primitive: str
    classes: tuple[str, ...]
    rule: str


@dataclasses.dataclass(eq=False)
class Recorder:
    counts: dict[Met, int] = dataclasses.field(default_factory=dict)
    dense_bytes: dict[Met, int] = dataclasses.field(default_factory=dict)
    current: Met | None = None
    repeats: int = 1  # how often the code being traced runs: the product of the lengths of the scans around it


@dataclasses.dataclass(frozen=True)
class _Mode:
    strict: bool = False
    recorder: Recorder | None = None
    silent: bool = False


# A context that `jax.jit` knows of: entering it traces anew, so a cached trace can't hide a materialization.
_mode = jax.make_user_context(default_value=_Mode())


def mode() -> _Mode:
    """Hashable, so that the engine's own caches of traces can key on it too."""
    return _mode.value


@contextlib.contextmanager
def materialization_error() -> Iterator[None]:
    """Inside, a primitive that no rule serves raises `MaterializationError` instead of materializing."""
    with _mode(dataclasses.replace(mode(), strict=True)):
        yield


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """For evaluations that only ask for a shape: they materialize nothing."""
    with _mode(_Mode(silent=True)):
        yield


@contextlib.contextmanager
def repeated(times: int) -> Iterator[None]:
    """The code traced inside runs `times` times; 0 if it is traced only for its types, and again to run."""
    recorder = mode().recorder
    if recorder is None:
        yield
        return
    outer, recorder.repeats = recorder.repeats, recorder.repeats * times
    try:
        yield
    finally:
        recorder.repeats = outer


@contextlib.contextmanager
def serving(primitive: Any, classes: tuple[type, ...], rule: str) -> Iterator[None]:
    """Around a rule: what is materialized inside is put down to it."""
    recorder = mode().recorder
    if recorder is None:
        yield
        return
    outer = recorder.current
    recorder.current = Met(primitive.name, tuple(c.__name__ for c in classes), rule)
    try:
        yield
    finally:
        recorder.current = outer


def note_served() -> None:
    """The rule that `serving` surrounds gave an answer."""
    recorder = mode().recorder
    if recorder is not None and recorder.current is not None:
        met = recorder.current
        recorder.counts[met] = recorder.counts.get(met, 0) + recorder.repeats


def note_materialized(dense: Any) -> None:
    """A dense array of this size and dtype was made, for the rule that is running: `explain` adds it up."""
    recorder = mode().recorder
    if recorder is not None and recorder.current is not None:
        met, cost = recorder.current, dense.size * dense.dtype.itemsize
        recorder.dense_bytes[met] = recorder.dense_bytes.get(met, 0) + cost * recorder.repeats


_warned: set[tuple[type, str]] = set()


def note_fallback(primitive: Any, classes: tuple[type, ...], warn: Callable[[type], bool]) -> None:
    """Say once per class and primitive that it is materialized; raise under `materialization_error`."""
    names = " and ".join(c.__name__ for c in classes)
    if mode().strict:
        raise MaterializationError(
            f"no rule serves `{primitive.name}` of {names}, so it would be materialized; write one with "
            f'`@register("{primitive.name}")`, or call it outside `materialization_error()`'
        )
    if mode().silent or mode().recorder is not None:  # nothing is made dense, or whoever asks is told
        return
    for cls in classes:
        if warn(cls) and (cls, primitive.name) not in _warned:
            warnings.warn(
                f"no rule serves `{primitive.name}` of {cls.__name__}: it is materialized "
                f"(`eformer.jaximus.explain` shows what this costs)",
                MaterializationWarning,
                stacklevel=2,
            )
            _warned.add((cls, primitive.name))


class Explanation(tuple[tuple[Met, int, int], ...]):
    """Rows of (what was met, how often, the dense bytes it cost); prints as a table."""

    def __repr__(self) -> str:
        if not self:
            return "no primitive met an implicit array"
        header = ("primitive", "arrays", "rule", "times", "dense bytes")
        rows = [
            (met.primitive, ", ".join(met.classes), met.rule, f"{count:,}", f"{dense:,}") for met, count, dense in self
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        left = 3  # columns of words; the rest are numbers
        lines = [
            "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in (header, tuple("-" * w for w in widths), *rows)
        ]
        return "\n".join(line.rstrip() for line in lines)

    __str__ = __repr__

    @property
    def dense_bytes(self) -> int:
        """Bytes of dense arrays made, in all."""
        return sum(dense for _, _, dense in self)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    with _mode(dataclasses.replace(mode(), recorder=recorder)):
        yield recorder


def explanation(recorder: Recorder) -> Explanation:
    rows = [(met, count, recorder.dense_bytes.get(met, 0)) for met, count in recorder.counts.items() if count]
    return Explanation(sorted(rows, key=lambda row: (-row[2], row[0].primitive)))
