"""What the engine tells about itself: which rule served which primitive, and what was made dense."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from eformer._warnings import warn as warn_user


class MaterializationWarning(UserWarning):
    """No rule served a primitive, so an implicit array was made dense."""


class MaterializationError(RuntimeError):
    """A whole implicit array would have been made dense, under `materialization_error()`."""


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


class _Running(threading.local):
    """What runs now: a rule, the function given to `implicit`, or neither; and why it makes something dense."""

    met: Met | None = None
    why: str = ""


_running = _Running()
_FUNCTION = Met("materialize", (), "asked for by the function")
_NOTHING = contextlib.nullcontext()


def observed() -> bool:
    """Whether anyone wants to know what is made dense."""
    now = mode()
    return now.strict or now.recorder is not None


@contextlib.contextmanager
def materialization_error() -> Iterator[None]:
    """Inside, whatever would decode a whole implicit array raises `MaterializationError` instead.

    That is a primitive without a rule, a rule that has to decode, and a function under `implicit` that calls
    `materialize()`. What runs without an error has held no dense copy: only tiles in a loop, and rows of a gather.
    """
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


def serving(primitive: Any, classes: tuple[type, ...], rule: str) -> AbstractContextManager[None]:
    """Around a rule: what is materialized inside is put down to it."""
    if not observed():
        return _NOTHING
    return _running_now(Met(primitive.name, tuple(c.__name__ for c in classes), rule))


def in_function() -> AbstractContextManager[None]:
    """Around a function under `implicit`: what it materializes by itself is put down to it."""
    return _running_now(_FUNCTION) if observed() else _NOTHING


def because(why: str) -> AbstractContextManager[None]:
    """Around a `materialize()` in a rule: the reason that an error tells."""
    return _running_now(_running.met, why) if observed() else _NOTHING


@contextlib.contextmanager
def _running_now(met: Met | None, why: str = "") -> Iterator[None]:
    outer = _running.met, _running.why
    _running.met, _running.why = met, why
    try:
        yield
    finally:
        _running.met, _running.why = outer


def note_served() -> None:
    """The rule that `serving` surrounds gave an answer."""
    recorder, met = mode().recorder, _running.met
    if recorder is not None and met is not None:
        recorder.counts[met] = recorder.counts.get(met, 0) + recorder.repeats


def note_materialized(array: Any, why: str = "") -> None:
    """A dense copy of `array` is about to be made: `explain` adds up its bytes, `materialization_error` raises.

    Every way to decode a whole array calls this, so the two cannot disagree. Outside `implicit` nothing is noted:
    there the caller asks for the copy. A single element is no copy to speak of. `why` says what made it necessary.
    """
    now, met = mode(), _running.met
    if met is None or not (now.strict or now.recorder is not None) or array.size <= 1:
        return
    cost = array.size * array.dtype.itemsize
    if now.strict:
        raise MaterializationError(_refusal(met, array, cost, why or _running.why))
    assert now.recorder is not None
    if met is _FUNCTION:
        met = dataclasses.replace(met, classes=(type(array).__name__,))
        now.recorder.counts[met] = now.recorder.counts.get(met, 0) + now.recorder.repeats
    now.recorder.dense_bytes[met] = now.recorder.dense_bytes.get(met, 0) + cost * now.recorder.repeats


def _refusal(met: Met, array: Any, cost: int, why: str) -> str:
    what = f"{type(array).__name__}{list(array.shape)} ({cost:,} bytes)"
    if met is _FUNCTION:
        return f"the function asks for a dense copy of {what} by itself; call it outside `materialization_error()`"
    reason = f": {why}" if why else ""
    return (
        f"`{met.primitive}` of {' and '.join(met.classes)} would make a dense copy of {what} in the rule "
        f'{met.rule}{reason}; change that, write a better rule with `@register("{met.primitive}")`, or call it '
        f"outside `materialization_error()`"
    )


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
            warn_user(
                f"no rule serves `{primitive.name}` of {cls.__name__}: it is materialized "
                f"(`eformer.jaximus.explain` shows what this costs)",
                MaterializationWarning,
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
    counts, dense = recorder.counts, recorder.dense_bytes
    rows = [(met, counts.get(met, 0), dense.get(met, 0)) for met in {**counts, **dense}]
    shown = [row for row in rows if row[1] or row[2]]
    return Explanation(sorted(shown, key=lambda row: (-row[2], row[0].primitive)))
