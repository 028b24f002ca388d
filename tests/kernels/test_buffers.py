"""The core's functions on plain buffers: arguments that do not fit are refused, and nothing is written."""

from __future__ import annotations

import _ctypes
import struct

import numpy as np
import pytest

from eformer._src.kernels import cpu
from eformer._src.kernels.cpu.library import Library

if not cpu.moves():
    pytest.skip("installed without the native core", allow_module_level=True)

BLOCKS = np.arange(4 * 144, dtype=np.uint8).reshape(4, 144)
WRONG = {
    "an unknown move": ("halves", 0, 8, 32),
    "bytes before the block": ("bytes", -1, 8, 32),
    "bytes after the block": ("bytes", 140, 8, 32),
    "no bytes": ("bytes", 0, 0, 0),
    "less than none": ("bytes", 8, -8, 32),
    "a number that overflows": ("bytes", 2**63 - 4, 8, 32),
    "no whole number of units": ("nibbles_32", 0, 48, 192),
    "a result that is too small": ("bytes", 0, 8, 31),
    "a result that is too large": ("bytes", 0, 8, 40),
}


@pytest.mark.parametrize("name", WRONG)
def test_moves_that_do_not_fit(name: str):
    how, first, count, size = WRONG[name]
    right, out = np.zeros(32, np.uint8), np.zeros(size, np.uint8)
    with pytest.raises(ValueError, match=r"block|move|size"):
        cpu.separate(BLOCKS, [("bytes", 0, 8, right), (how, first, count, out)])
    assert not right.any()
    assert not out.any()


def test_memory_that_must_not_be_written():
    out = np.zeros(32, np.uint8)
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError), match=r"read-only|writable"):
        cpu.separate(BLOCKS, [("bytes", 0, 8, out)])


def test_no_blocks_and_no_moves():
    cpu.separate(BLOCKS[:0], [("bytes", 0, 8, np.zeros(0, np.float16))])
    cpu.separate(BLOCKS, [])


@pytest.mark.parametrize(("at", "number"), [(0, 3), (0, -1), (-1, 1), (100, 1), (11, 2)])
def test_texts_that_are_not_there(at: int, number: int):
    data = memoryview(struct.pack("<Q", 3) + b"abc" + struct.pack("<Q", 1) + b"d")
    assert cpu.texts(data, at, number) is None
    assert cpu.texts(data, 0, 2) == (["abc", "d"], 20)


def test_texts_with_a_byte_that_separates_them_are_left_to_the_reader():
    data = memoryview(struct.pack("<Q", 1) + b"\xff" + struct.pack("<Q", 2) + b"\xfe\xc3")
    assert cpu.texts(data, 0, 2) is None
    assert cpu.texts(data[9:], 0, 1) == (["\udcfe\udcc3"], 10)


def test_a_library_that_is_not_this_core():
    with pytest.raises(ImportError, match="another version: install eformer again"):
        Library(_ctypes.__file__)
