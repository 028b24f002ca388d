"""Observing the engine: which rule served which primitive, and which arrays were made dense."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import jax
from jax.extend.core import Primitive

from eformer._src.user_warnings import warn as warn_user

if TYPE_CHECKING:
    from .array import ImplicitArray
    from .array_methods import ArrayMethods


class MaterializationWarning(UserWarning):
    """No rule served a primitive, so an implicit array was made dense."""


class MaterializationError(RuntimeError):
    """A whole implicit array would have been made dense, under `materialization_error()`."""


@dataclasses.dataclass(frozen=True)
class ServedPrimitive:
    """A primitive that met an implicit array, and the rule that served it: the row of an `Explanation`."""

    primitive: str
    classes: tuple[str, ...]
    rule: str
    kernel: str = ""  # that the rule calls


@dataclasses.dataclass(eq=False)
class Recorder:
    counts: Counter[ServedPrimitive] = dataclasses.field(default_factory=Counter)
    dense_bytes: Counter[ServedPrimitive] = dataclasses.field(default_factory=Counter)
    remarks: Counter[str] = dataclasses.field(default_factory=Counter)
    repeats: int = 1  # how often the code being traced runs: the lengths of the scans around it, multiplied


@dataclasses.dataclass(frozen=True)
class Mode:
    strict: bool = False
    recorder: Recorder | None = None
    silent: bool = False


UNWATCHED = Mode()
# A context that `jax.jit` knows of: entering it traces anew, so a cached trace can't hide a materialization. Its value
# is hashable, so the engine's own caches of traces can key on it too.
mode = jax.make_user_context(default_value=UNWATCHED)


class _Running(threading.local):
    """What runs now: a rule, the function given to `implicit`, or neither; and why it makes something dense."""

    met: ServedPrimitive | None = None
    why: str = ""


_running = _Running()
_FUNCTION = ServedPrimitive("materialize", (), "asked for by the function")
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def materialization_error() -> Iterator[None]:
    """Inside, whatever would decode a whole implicit array raises `MaterializationError` instead.

    That is a primitive without a rule, a rule that has to decode, and a function under `implicit` that calls
    `materialize()`. What runs without an error has held no dense copy: only tiles in a loop, and rows of a gather.
    """
    with mode(dataclasses.replace(mode.value, strict=True)):
        yield


def unobserved() -> AbstractContextManager[None]:
    """Around evaluations that only ask for a shape: they materialize nothing."""
    return mode(Mode(silent=True))


@contextlib.contextmanager
def repeated(times: int) -> Iterator[None]:
    """The code traced inside runs `times` times; 0 if it is traced only for its types, and again to run."""
    recorder = mode.value.recorder or Recorder()
    outer, recorder.repeats = recorder.repeats, recorder.repeats * times
    try:
        yield
    finally:
        recorder.repeats = outer


def serving(primitive: Primitive, classes: Sequence[type], rule: str) -> AbstractContextManager[None]:
    """Around a rule: the dense copies made inside are put down to it."""
    if mode.value is UNWATCHED:
        return _NOTHING
    return _running_now(ServedPrimitive(primitive.name, tuple(c.__name__ for c in classes), rule))


def in_function() -> AbstractContextManager[None]:
    """Around a function under `implicit`: the dense copies that it asks for are put down to it."""
    return _NOTHING if mode.value is UNWATCHED else _running_now(_FUNCTION)


def because(why: str) -> AbstractContextManager[None]:
    """Around a `materialize()` in a rule: the reason that an error tells."""
    return _NOTHING if mode.value is UNWATCHED else _running_now(_running.met, why)


@contextlib.contextmanager
def _running_now(met: ServedPrimitive | None, why: str = "") -> Iterator[None]:
    outer = _running.met, _running.why
    _running.met, _running.why = met, why
    try:
        yield
    finally:
        _running.met, _running.why = outer


def note_served(out: object = None) -> None:
    """Count the rule that `serving` surrounds, unless it declined."""
    recorder, met = mode.value.recorder, _running.met
    if recorder is not None and met is not None and out is not NotImplemented:
        recorder.counts[met] += recorder.repeats


def note_kernel(name: str) -> None:
    """The kernel that the rule calls: a column of `explain`."""
    if mode.value.recorder is not None and _running.met is not None:
        _running.met = dataclasses.replace(_running.met, kernel=name)


def note_remark(text: str) -> None:
    """What `explain` says below its table, of a rule that could do better with another array."""
    if mode.value.recorder is not None:
        mode.value.recorder.remarks[text] += mode.value.recorder.repeats


def note_materialized(array: ArrayMethods, why: str = "") -> None:
    """A dense copy of `array` is about to be made: `explain` adds up its bytes, `materialization_error` raises.

    Every way to decode a whole array calls this, so the two cannot disagree. Outside `implicit` nothing is noted:
    there the caller asks for the copy. A single element, or a row of a larger array, does not count as a copy. `why`
    says what made it necessary.
    """
    now, met = mode.value, _running.met
    if met is None or not (now.strict or now.recorder) or array.size <= 1 or array._is_part():
        return
    cost = array.size * array.dtype.itemsize
    if now.strict:
        raise MaterializationError(_refusal(met, array, cost, why or _running.why))
    if met is _FUNCTION:
        met = dataclasses.replace(met, classes=(type(array).__name__,))
        now.recorder.counts[met] += now.recorder.repeats
    now.recorder.dense_bytes[met] += cost * now.recorder.repeats


def _refusal(met: ServedPrimitive, array: ArrayMethods, cost: int, why: str) -> str:
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


def note_fallback(primitive: Primitive, classes: Collection[type[ImplicitArray]]) -> None:
    """Warn once per class and primitive that it is materialized; raise under `materialization_error`."""
    if not classes:
        return
    names = " and ".join(c.__name__ for c in classes)
    if mode.value.strict:
        raise MaterializationError(
            f"no rule serves `{primitive.name}` of {names}, so it would be materialized; write one with "
            f'`@register("{primitive.name}")`, or call it outside `materialization_error()`'
        )
    if mode.value.silent or mode.value.recorder is not None:  # nothing is made dense, or whoever asks is told
        return
    for cls in classes:
        if cls.warn_on_materialize and (cls, primitive.name) not in _warned:
            warn_user(
                f"no rule serves `{primitive.name}` of {cls.__name__}: it is materialized "
                f"(`eformer.jaximus.explain` shows what this costs)",
                MaterializationWarning,
            )
            _warned.add((cls, primitive.name))
