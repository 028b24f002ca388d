"""The metadata of a GGUF file as bytes: names, types and values."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping

import numpy as np

from .read import ARRAY, SCALARS, STRING, Kind

_U32, _I32, _U64, _I64 = 4, 5, 10, 11
_NUMBERS = {np.dtype(scalar.format[1:]): kind for kind, scalar in SCALARS.items()}
_RANGES = {_U32: (0, 2**32), _I32: (-(2**31), 0), _U64: (0, 2**64), _I64: (-(2**63), 0)}


def pairs_of(metadata: Mapping[str, object], kinds: Mapping[str, Kind]) -> bytes:
    """The entries of the metadata as in a file, their number first; `kinds` are the types that they had in another."""
    made = bytearray(struct.pack("<Q", len(metadata)))
    for name, value in metadata.items():
        kind = _kind(name, value, kinds.get(name))
        made += text_of(name) + struct.pack("<I", kind) + _content(name, value, kind, kinds.get(name))
    return bytes(made)


def text_of(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _kind(name: str, value: object, known: Kind | None = None) -> int:
    """The number of the type of a value: the one it had in a file, NumPy's, or the smallest for integers.

    That has 32 or 64 bits. Python's floats have 64 bits; programs that run models want `numpy.float32`.
    """
    if isinstance(known, int) and known in SCALARS and isinstance(value, (bool, int, float)):
        with contextlib.suppress(struct.error, OverflowError):  # it has another value now
            SCALARS[known].pack(value)
            return known
    if isinstance(value, (bool, float, np.generic)) and (dtype := np.asarray(value).dtype) in _NUMBERS:
        return _NUMBERS[dtype]
    if isinstance(value, str):
        return STRING
    if isinstance(value, int):
        for kind, (low, high) in _RANGES.items():
            if low <= value < high:
                return kind
    if isinstance(value, (list, tuple)):
        return ARRAY
    raise TypeError(f"the metadata {name!r} is {value!r}; GGUF holds text, numbers, booleans and lists of these")


def _content(name: str, value: object, kind: int, known: Kind | None = None) -> bytes:
    if isinstance(value, str):
        return text_of(value)
    if not isinstance(value, (list, tuple)):
        return SCALARS[kind].pack(value)
    if isinstance(known, list):  # a list of lists, each with a type of its own
        own = known if len(known) == len(value) else [None] * len(value)
        parts = [_content(name, each, ARRAY, kind) for each, kind in zip(value, own, strict=True)]
        return struct.pack("<IQ", ARRAY, len(value)) + b"".join(parts)
    kinds = {_kind(name, each, known) for each in value}
    if kinds <= _RANGES.keys() and len(kinds) > 1:  # integers of several sizes and signs
        kinds = {_I64}
    if len(kinds) > 1:
        raise TypeError(f"the metadata {name!r} is a list of several types; GGUF has lists of one")
    inner = kinds.pop() if kinds else _U32 if known is None else known
    return struct.pack("<IQ", inner, len(value)) + b"".join(_content(name, each, inner) for each in value)
