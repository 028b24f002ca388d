"""Several processes that write one file: the first decides, all write their parts, and it appears when all are done."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from ._atomic import atomic_file, publish, started


def are_several() -> bool:
    """Whether other processes call the same functions; starts no backend if this one is alone."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    return not are_several() or jax.process_index() == 0


def from_first(make: Callable[[], Any]) -> Any:
    """What `make` gives in the first process, which JSON can hold; what it raises there, all raise."""
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
    """Whether it is true in every process; returns when all have said so."""
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.int32(value))))


@contextlib.contextmanager
def shared_file(path: Path, *, size: int, overwrite: bool) -> Iterator[BinaryIO]:
    """`atomic_file` of `size` bytes that all processes write to; it appears when all have written their parts."""
    if not are_several():
        with atomic_file(path, overwrite=overwrite) as file:
            file.truncate(size)
            yield file
        return
    temporary = Path(from_first(lambda: str(started(path, size=size, overwrite=overwrite))))
    error = None
    try:
        with open(temporary, "r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as raised:  # noqa: BLE001  # raised below, when all know of it
        error = raised
    whole = _all(error is None)
    from_first(lambda: publish(temporary, path, overwrite=overwrite) if whole else temporary.unlink(missing_ok=True))
    if error is not None:
        raise error
    if not whole:
        raise RuntimeError(f"{path} was not written: another process failed, and says why")
