"""New memory that arrays are read into."""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections.abc import Iterable

import numpy as np

ALIGNMENT = 64  # bytes; JAX on CPU takes memory over from there, and copies any other
OWN_PAGES, HUGE_PAGE = 1 << 16, 1 << 21  # bytes
# Seconds in which a huge page is there. Clearing one takes 0.1 ms, and 512 small ones take 0.7 ms. If it takes longer,
# the system has to make room first; or it is a virtual machine that gave free memory back to its host: 2 to 5 ms.
QUICK = 1e-3


def aligned_copy(view: np.ndarray) -> np.ndarray:
    """A copy whose memory JAX on CPU uses as it is, so that there is one copy and not two."""
    copy = aligned_empty(view.shape, view.dtype)
    copy[...] = view
    return copy


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """New memory that JAX on CPU takes over; its values are arbitrary."""
    return aligned_empties([(shape, dtype)])[0]


def aligned_empties(kinds: Iterable[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    """Several arrays, of these shapes and dtypes, in one piece of memory, which is freed when all are gone."""
    sized = [(shape, dtype, math.prod(shape) * dtype.itemsize) for shape, dtype in kinds]
    rooms = [-(-nbytes // ALIGNMENT) * ALIGNMENT for _, _, nbytes in sized]
    memory, at, found = _memory(sum(rooms)), 0, []
    for (shape, dtype, nbytes), room in zip(sized, rooms, strict=True):
        found.append(memory[at : at + nbytes].view(dtype).reshape(shape))
        at += room
    return found


def _memory(nbytes: int) -> np.ndarray:
    """Aligned bytes. What is large is in pages of its own, which go back to the system as soon as it is gone."""
    if nbytes < OWN_PAGES or not hasattr(mmap, "MAP_ANONYMOUS"):
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]
    huge = nbytes // HUGE_PAGE * HUGE_PAGE if _huge_pages.quick else 0
    pages = mmap.mmap(-1, nbytes + (HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE if huge else 0
    if huge:
        _huge_pages.ask(pages, start, huge)  # the rest would be up to a huge page too much
    return memory[start : start + nbytes]


class _HugePages:
    """Huge pages, as long as they are there more quickly than the small pages in their place.

    The first page of each piece of memory is timed. After one that was slow this process gets small pages.
    """

    def __init__(self) -> None:
        self.quick = hasattr(mmap, "MADV_HUGEPAGE")

    def ask(self, pages: mmap.mmap, start: int, count: int) -> None:
        """Let `count` bytes from `start` on, whole huge pages, be such."""
        with contextlib.suppress(OSError):  # a system without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE, start, HUGE_PAGE)
            begun = time.perf_counter()
            pages[start] = 0
            self.quick = self.quick and time.perf_counter() - begun < QUICK
            if self.quick and count > HUGE_PAGE:
                pages.madvise(mmap.MADV_HUGEPAGE, start + HUGE_PAGE, count - HUGE_PAGE)


_huge_pages = _HugePages()
