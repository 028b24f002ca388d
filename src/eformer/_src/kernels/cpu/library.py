"""The native core: a library of C functions (`csrc/ffi/interface.cc`) that knows no Python, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int64, c_void_p
from pathlib import Path

import numpy as np


class LoopQuery(Structure):
    """`eformer::LoopQuery`."""

    _fields_ = (
        ("format", c_char_p),
        ("instruction_set", c_char_p),
        *((name, c_int64) for name in ("x_rows", "rows", "cols", "packed_axis", "contracted_axis", "block_size")),
        ("round_x", c_bool),
    )


class Move(Structure):
    """`eformer::Move`."""

    _fields_ = (("how", c_char_p), ("first", c_int64), ("bytes", c_int64), ("out", c_void_p), ("out_bytes", c_int64))


FUNCTIONS = {  # their results, then their arguments
    "eformer_names": (c_char_p, c_char_p),
    "eformer_handler": (c_void_p, c_char_p),
    "eformer_loop": (c_char_p, POINTER(LoopQuery)),
    "eformer_separate": (c_char_p, c_void_p, c_int64, c_int64, POINTER(Move), c_int64),
    "eformer_texts": (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p),
}


class Library:
    """The functions of one core, with Python's types. Calls run without Python's lock."""

    def __init__(self, path: str | Path) -> None:
        self._calls = ctypes.CDLL(str(path))
        try:
            for name, (result, *arguments) in FUNCTIONS.items():
                call = getattr(self._calls, name)
                call.restype, call.argtypes = result, arguments
        except AttributeError:
            raise ImportError(f"{path} is the native core of another version: install eformer again") from None

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of "handlers", "formats", "moves", or the processor's "instruction_sets", the best first."""
        return tuple(self._calls.eformer_names(kind.encode()).decode().split())

    def handlers(self) -> dict[str, int]:
        """The addresses of what XLA calls."""
        return {name: self._calls.eformer_handler(name.encode()) for name in self.names("handlers")}

    def loop(self, format: str, instruction_set: str, sizes: Sequence[int], round_x: bool) -> str:
        """The loop that multiplies, and on a second line why x is not rounded; `sizes` are integers of `LoopQuery`."""
        query = LoopQuery(format.encode(), instruction_set.encode(), *sizes, round_x)
        return self._calls.eformer_loop(query).decode()

    def separate(self, blocks: np.ndarray, block_bytes: int, moves: Sequence[tuple[str, int, int, np.ndarray]]) -> None:
        """Do the moves, each its name, first byte, bytes and result; a ValueError for arguments that do not fit."""
        for _, _, _, out in moves:
            if not (out.flags.c_contiguous and out.flags.writeable):
                raise ValueError(
                    "the result of a move must be C-contiguous and writable; this one is strided or read-only"
                )
        given = [Move(how.encode(), first, count, out.ctypes.data, out.nbytes) for how, first, count, out in moves]
        wrong = self._calls.eformer_separate(
            blocks.ctypes.data, blocks.nbytes, block_bytes, (Move * len(given))(*given), len(given)
        )
        if wrong:
            raise ValueError(wrong.decode())

    def texts(self, data: memoryview, at: int, number: int) -> tuple[list[str], int] | None:
        """`number` texts from byte `at` on, each after its length in 8 bytes, and the byte after them.

        Bytes that are not UTF-8 become surrogates. None if the data ends before, or if a text has a byte 0xFF.
        """
        if not 0 < number <= len(data):  # else it is none, or would not fit into 64 bits
            return ([], at) if number == 0 and 0 <= at <= len(data) else None
        buffer = np.frombuffer(data, np.uint8)
        given = buffer.ctypes.data, buffer.size, at, number
        end = self._calls.eformer_texts(*given, None)
        if end < 0:
            return None
        joined = np.empty(end - at - 7 * number - 1, np.uint8)  # of each, its length goes and a byte between comes
        self._calls.eformer_texts(*given, joined.ctypes.data)
        found = str(joined.data, "utf-8", "surrogateescape").split(BETWEEN)
        return (found, end) if len(found) == number else None


BETWEEN = "\udcff"  # the byte 0xFF, as "surrogateescape" decodes it


def core_file() -> str | None:
    """Where the core is, which an editable install keeps apart from this file; None if it was not compiled."""
    spec = importlib.util.find_spec(f"{__package__}.libeformer")
    return None if spec is None else spec.origin


@functools.cache
def library() -> Library | None:
    """The core, or None if it was not compiled."""
    path = core_file()
    return None if path is None else Library(path)
