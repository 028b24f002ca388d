"""Calls of the core's handlers as XLA makes them, without XLA: any buffer and any attribute, thousands in a second.

The structures are those of `xla/ffi/api/c_api.h`, in the version that the core is compiled with.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p, cast
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "complex64": 15,
    "bfloat16": 16,
    np.dtype(ml_dtypes.float8_e5m2).name: 19,
    np.dtype(ml_dtypes.float8_e4m3fn).name: 20,
    np.dtype(ml_dtypes.float8_e8m0fnu).name: 33,
}
BUFFER, ARRAY, SCALAR, STRING = 1, 1, 3, 4  # kinds of arguments and attributes
EXECUTE = 3  # the stage of a call

HEAD = [("struct_size", c_size_t), ("extension", c_void_p)]


class Buffer(Structure):
    _fields_ = [*HEAD, ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))]


class ByteSpan(Structure):
    _fields_ = [("ptr", c_char_p), ("len", c_size_t)]


class Scalar(Structure):
    _fields_ = [("dtype", c_int), ("value", c_void_p)]


class Array(Structure):
    _fields_ = [("dtype", c_int), ("size", c_size_t), ("data", c_void_p)]


class Buffers(Structure):
    _fields_ = [*HEAD, ("size", c_int64), ("types", POINTER(c_int)), ("buffers", POINTER(c_void_p))]


class Attributes(Structure):
    _fields_ = [
        *HEAD,
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
    ]


class CreateError(Structure):
    _fields_ = [*HEAD, ("message", c_char_p), ("code", c_int)]


class GetMessage(Structure):
    _fields_ = [*HEAD, ("error", c_void_p), ("message", c_char_p)]


class Schedule(Structure):
    _fields_ = [*HEAD, ("context", c_void_p), ("task", CFUNCTYPE(None, c_void_p)), ("data", c_void_p)]


class NumThreads(Structure):
    _fields_ = [*HEAD, ("context", c_void_p), ("threads", POINTER(c_int64))]


class Version(Structure):
    _fields_ = [*HEAD, ("major", c_int), ("minor", c_int)]


class Api(Structure):
    _fields_ = [
        *HEAD,
        ("version", Version),
        ("internal", c_void_p),
        ("create_error", CFUNCTYPE(c_void_p, POINTER(CreateError))),
        ("get_message", CFUNCTYPE(None, POINTER(GetMessage))),
        ("destroy_error", CFUNCTYPE(None, c_void_p)),
        ("unused", c_void_p * 8),
        ("schedule", CFUNCTYPE(c_void_p, POINTER(Schedule))),
        ("num_threads", CFUNCTYPE(c_void_p, POINTER(NumThreads))),
        ("unused_too", c_void_p * 5),
    ]


class CallFrame(Structure):
    _fields_ = [
        *HEAD,
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("args", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
        ("future", c_void_p),
    ]


class Refused(Exception):
    """A handler returned an error; the text is its message."""


class Caller:
    """Calls handlers, with a pool of `threads` that does its work at once, or only when the call is over: `late`."""

    def __init__(self, handlers: Mapping[str, int]) -> None:
        kind = CFUNCTYPE(c_void_p, POINTER(CallFrame))
        self._handlers = {name: kind(address) for name, address in handlers.items()}
        self._messages: list[str] = []
        self._waiting: list[tuple[Any, Any]] = []
        self.threads, self.late = 1, False
        self._api = Api(struct_size=ctypes.sizeof(Api), version=Version(ctypes.sizeof(Version), None, 0, 3))
        for name, function in {
            "create_error": self._create_error,
            "get_message": self._get_message,
            "destroy_error": lambda args: None,
            "schedule": self._schedule,
            "num_threads": self._num_threads,
        }.items():
            setattr(self._api, name, dict(Api._fields_)[name](function))

    def _create_error(self, args: Any) -> int:
        self._messages.append(args[0].message.decode())
        return len(self._messages)  # any address but 0 is an error

    def _get_message(self, args: Any) -> None:
        args[0].message = self._messages[args[0].error - 1].encode()

    def _schedule(self, args: Any) -> None:
        task, data = ctypes.cast(args[0].task, CFUNCTYPE(None, c_void_p)), args[0].data
        self._waiting.append((task, data)) if self.late else task(data)

    def _num_threads(self, args: Any) -> None:
        args[0].threads[0] = self.threads

    def __call__(
        self, name: str, args: Sequence[np.ndarray], results: Sequence[np.ndarray], attributes: Mapping[str, Any]
    ) -> None:
        """Fills the results, or raises `Refused`."""
        self._messages.clear()
        kept: list[Any] = []  # what the frame points to
        head = CallFrame.future.offset
        frame = CallFrame(struct_size=head, api=ctypes.pointer(self._api), stage=EXECUTE)
        frame.args, frame.results = _buffers(args, kept), _buffers(results, kept)
        frame.attributes = _attributes(attributes, kept)
        failed = self._handlers[name](byref(frame))
        for task, data in self._waiting:
            task(data)
        self._waiting.clear()
        if failed:
            raise Refused(self._messages[failed - 1])


def _pointers(structures: Sequence[Structure], kept: list[Any]) -> Any:
    array = (c_void_p * max(len(structures), 1))(*map(addressof, structures))
    kept += [structures, array]
    return cast(array, POINTER(c_void_p))


def _kinds(kinds: Sequence[int], kept: list[Any]) -> Any:
    array = (c_int * max(len(kinds), 1))(*kinds)
    kept.append(array)
    return cast(array, POINTER(c_int))


def _buffers(arrays: Sequence[np.ndarray], kept: list[Any]) -> Buffers:
    made = []
    for array in arrays:
        dims = (c_int64 * max(array.ndim, 1))(*array.shape)
        kept.append(dims)
        dtype = DTYPES[array.dtype.name]
        made.append(Buffer(ctypes.sizeof(Buffer), None, dtype, array.ctypes.data, array.ndim, dims))
    pointers, kinds = _pointers(made, kept), _kinds([BUFFER] * len(made), kept)
    return Buffers(ctypes.sizeof(Buffers), None, len(made), kinds, pointers)


def _attributes(attributes: Mapping[str, Any], kept: list[Any]) -> Attributes:
    names, values, kinds = [], [], []
    for name in sorted(attributes):  # as XLA gives them
        value = attributes[name]
        names.append(ByteSpan(name.encode(), len(name.encode())))
        if isinstance(value, str):
            values.append(ByteSpan(value.encode(), len(value.encode())))
            kinds.append(STRING)
            continue
        if isinstance(value, np.ndarray):
            kept.append(value)
            values.append(Array(DTYPES[value.dtype.name], value.size, value.ctypes.data))
            kinds.append(ARRAY)
            continue
        number = np.array(value, np.bool_ if isinstance(value, bool) else np.int64)
        kept.append(number)
        values.append(Scalar(DTYPES[number.dtype.name], number.ctypes.data))
        kinds.append(SCALAR)
    arrays = _kinds(kinds, kept), _pointers(names, kept), _pointers(values, kept)
    return Attributes(ctypes.sizeof(Attributes), None, len(names), *arrays)


class Fence:
    """Memory behind which nothing can be read or written: who does ends the process."""

    def __init__(self, size: int) -> None:
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._pages, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(c_void_p(self._bytes.ctypes.data + self._size), c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """A copy of `array` that ends where the fence is, or `array` if it is too large or there is nothing in it."""
        if not 0 < array.nbytes <= self._size:
            return array
        placed = self._bytes[self._size - array.nbytes : self._size].view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed
