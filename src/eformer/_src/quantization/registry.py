"""The registry of formats: every name that `quantize` takes, and the class and options behind it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from .base import QuantizedArray

IMPORTANCE = "importance"  # an array, so no option that a rule or a file could name
Class = TypeVar("Class", bound=type[QuantizedArray])


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to quantize, under the name users ask for it by."""

    name: str
    array_type: type[QuantizedArray]
    encode: Callable[..., QuantizedArray]  # (array, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The names and defaults of the options that `encode` takes after the array."""
        return {p.name: p.default for p in self._parameters if p.name != IMPORTANCE} | {"activation_dtype": None}

    @property
    def takes_importance(self) -> bool:
        """Whether `encode` has a fit that takes how much the error of each element counts."""
        return any(p.name == IMPORTANCE for p in self._parameters)

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.encode).parameters.values())[1:]

    def __str__(self) -> str:
        return self.name


_formats: dict[str, Format] = {}


def register_format(name: str, array_type: type[QuantizedArray], encode: Callable[..., QuantizedArray]) -> Format:
    """Make `quantize(w, dtype=name)` call `encode(w, **options)`; the tests of all formats then run on it too.

    Every format takes the option `activation_dtype` too, which is set on what `encode` returns.
    """
    if name in _formats:
        raise ValueError(f"there is a format {name!r} already, made of {_formats[name].array_type.__name__}")

    @functools.wraps(encode)
    def encode_for(array: Any, *args: Any, activation_dtype: str | None = None, **options: Any) -> QuantizedArray:
        made = encode(array, *args, **options)
        return made if activation_dtype is None else made.with_activation_dtype(activation_dtype)

    _formats[name] = Format(name, array_type, encode_for)
    return _formats[name]


def formats() -> tuple[Format, ...]:
    """All formats, in the order they were registered."""
    return tuple(_formats.values())


def format_names(q: QuantizedArray) -> tuple[str, ...]:
    """The names of the formats that may have made this array; several if it does not tell them apart."""
    return tuple(q._names_among([form.name for form in formats() if form.array_type is type(q)]))


_others: dict[str, type[QuantizedArray]] = {}


def register_array_type(cls: Class) -> Class:
    """Make a class known that no format makes, so that checkpoints can hold its arrays; a decorator."""
    _others[cls.__name__] = cls
    return cls


def array_types() -> dict[str, type[QuantizedArray]]:
    """The known classes by name: those of all formats, and those that were registered without one."""
    return {form.array_type.__name__: form.array_type for form in formats()} | _others


def find_format(name: str) -> Format:
    """The format registered under `name`; a TypeError or ValueError lists the names there are."""
    known = ", ".join(map(repr, _formats))
    if not isinstance(name, str):
        raise TypeError(f"a quantization type is a name, one of {known}, got {type(name).__name__} {name!r}")
    if name not in _formats:
        raise ValueError(f"unknown quantization type {name!r}; there are {known}")
    return _formats[name]
