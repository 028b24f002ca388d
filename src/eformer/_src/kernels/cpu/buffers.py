"""Functions of the native core on plain buffers, for reading files: nothing of JAX is in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from .call import core_is_on
from .library import library


@functools.cache
def _moves() -> frozenset[str]:
    core = library()
    return frozenset() if core is None else frozenset(core.names("moves"))


def moves() -> frozenset[str]:
    """The names that `separate` takes; none without the core, or where it is switched off."""
    return _moves() if core_is_on() else frozenset()


def separate(blocks: np.ndarray, moved: Sequence[tuple[str, int, int, np.ndarray]]) -> None:
    """Copy bytes of each of the blocks, uint8 (count, bytes), in one pass over them, without Python's lock.

    Each of `moved` is a name of `moves`, which says how bits are put in order, the first byte, the number of bytes, and
    the C-ordered array that takes them.
    """
    core = library()
    if moved and core is not None:
        core.separate(np.ascontiguousarray(blocks), blocks.shape[1], moved)


def texts(data: memoryview, at: int, number: int) -> tuple[list[str], int] | None:
    """`number` texts from byte `at` on, each after its length in 8 bytes, and the byte after them.

    Bytes that are not UTF-8 become surrogates. None if the data ends before, if a text has a byte 0xFF, or without the
    core: then nothing is read.
    """
    core = library()
    return core.texts(data, at, number) if core is not None and core_is_on() else None
