"""Functions of the native core on plain buffers, for reading files: nothing of JAX is in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from .call import core_is_on


@functools.cache
def _native() -> ModuleType | None:
    """The extension module; None, and no warning, without it: reading a file takes longer then, and no matmul does."""
    try:
        from . import _native as found  # pyright: ignore[reportAttributeAccessIssue]  # compiled, with no source to read
    except ImportError:
        return None
    return found


@functools.cache
def _moves() -> frozenset[str]:
    native = _native()
    return frozenset() if native is None else frozenset(native.moves())


def moves() -> frozenset[str]:
    """The names that `separate` takes; none without the core, or where it is switched off."""
    return _moves() if core_is_on() else frozenset()


def separate(blocks: np.ndarray, moved: Sequence[tuple[str, int, int, np.ndarray]]) -> None:
    """Copy bytes of each of the blocks, uint8 (count, bytes), in one pass over them, without Python's lock.

    Each of `moved` is a name of `moves`, which says how bits are put in order, the first byte, the number of bytes, and
    the C-ordered array that takes them.
    """
    native = _native()
    if moved and native is not None:
        named = ((how, first, count, out.reshape(-1).view(np.uint8)) for how, first, count, out in moved)
        native.separate(np.ascontiguousarray(blocks).reshape(-1), blocks.shape[1], tuple(named))


def texts(data: memoryview, at: int, number: int) -> tuple[list[str], int] | None:
    """`number` texts from byte `at` on, each after its length in 8 bytes, and the byte after them.

    Bytes that are not UTF-8 become surrogates. None if the data ends before, or without the core.
    """
    native = _native()
    return native.texts(data, at, number) if native is not None and core_is_on() else None
