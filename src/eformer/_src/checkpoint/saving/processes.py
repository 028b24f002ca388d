"""Several processes save together: the first decides, all write their shards, and the file appears at the end."""

from __future__ import annotations

import builtins
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from eformer._src.atomic_files import Saving


def are_several() -> bool:
    """Whether other processes call the same functions; starts no backend if this one is alone."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    return not are_several() or jax.process_index() == 0


T = TypeVar("T", bound="list[str] | None")


def from_first(make: Callable[[], T]) -> T:
    """The result of `make` in the first process, which JSON can hold; an error there is raised in all."""
    if not are_several():
        return make()
    given, error = {}, None
    if is_first():
        try:
            given = {"value": make()}
        except Exception as raised:  # noqa: BLE001  # raised below, when all know of it
            given, error = {"error": type(raised).__name__, "message": str(raised)}, raised
    told = json.loads(_broadcast(json.dumps(given).encode()))
    if error is not None:
        raise error
    if "error" in told:
        kind = getattr(builtins, told["error"], RuntimeError)
        raise kind(f"the first process failed: {told['message']}")
    return told["value"]


def _broadcast(text: bytes) -> bytes:
    from jax.experimental import multihost_utils

    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.zeros(length, np.uint8)
    data[: len(text[:length])] = np.frombuffer(text[:length], np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(data)).astype(np.uint8).tobytes()


def _all(value: bool) -> bool:
    """Whether `value` is true in every process; returns when all have answered."""
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.int32(value))))


@contextlib.contextmanager
def saved_together(start: Callable[[], Saving], index: Callable[[Sequence[str]], bytes] | None) -> Iterator[list[Path]]:
    """The files of a save that the first process starts and all fill; they get their names when all are done."""
    started: list[Saving] = []

    def begin() -> list[str]:
        started.append(start())
        return list(map(str, started[0].temporaries))

    def end() -> None:
        (saving,) = started
        if whole:
            saving.commit(None if index is None else index(saving.names))

    error, whole = None, False
    try:
        temporaries = from_first(begin)
        try:
            yield list(map(Path, temporaries))
        except BaseException as raised:  # noqa: BLE001  # raised below, when all know of it
            error = raised
        whole = error is None if not are_several() else _all(error is None)
        from_first(end)
    finally:
        for saving in started:
            saving.abandon()  # nothing, if it has ended
    if error is not None:
        raise error
    if not whole:
        raise RuntimeError("the checkpoint was not written: another process failed, and says why")
