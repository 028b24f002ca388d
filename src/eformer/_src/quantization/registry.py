"""The registry of formats: every name that `quantize` takes, and the class and options behind it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
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
    """Make `quantize(w, name)` call `encode(w, **options)`; the tests of all formats then run on it too.

    Every format takes the option `activation_dtype` too, which is set on what `encode` returns.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a format is a text, got {type(name).__name__} {name!r}")
    if name in _formats:
        raise ValueError(f"there is a format {name!r} already, made of {_formats[name].array_type.__name__}")

    @functools.wraps(encode)
    def encode_for(array: Any, *args: Any, activation_dtype: str | None = None, **options: Any) -> QuantizedArray:
        importance = options.get(IMPORTANCE)
        if isinstance(importance, (str, Mapping)):
            raise TypeError(
                f"`{IMPORTANCE}` must be an array that broadcasts to the one that is quantized, got "
                f"{type(importance).__name__} {importance!r}"
            )
        made = encode(array, *args, **options)
        return made if activation_dtype is None else made.with_activation_dtype(activation_dtype)

    _formats[name] = Format(name, array_type, encode_for)
    return _formats[name]


def formats() -> tuple[Format, ...]:
    """All formats, in the order they were registered."""
    return tuple(_formats.values())


def format_names(q: QuantizedArray) -> tuple[str, ...]:
    """Names of the formats that could have produced this array (several if they share a layout)."""
    return tuple(q._names_among([form.name for form in formats() if form.array_type is type(q)]))


_others: dict[str, type[QuantizedArray]] = {}


def register_array_type(cls: Class) -> Class:
    """Make a class known that no format makes, so that checkpoints can hold its arrays; a decorator."""
    _others[cls.__name__] = cls
    return cls


def array_types() -> dict[str, type[QuantizedArray]]:
    """All known classes by name, with and without a format."""
    return {form.array_type.__name__: form.array_type for form in formats()} | _others


def is_format_name(text: object) -> bool:
    """Whether it is the name of a format, without options."""
    return isinstance(text, str) and text.strip().lower() in map(str.lower, _formats)


# What other libraries call formats that are here under another name.
_ELSEWHERE = {
    **dict.fromkeys(
        ("q4_0", "q4_k", "q4_1", "gptq", "awq", "w4a16", "4bit", "int4_grouped", "uint4", "i4", "4"), "int4"
    ),
    **dict.fromkeys(("q8_0", "8bit", "w8a16", "w8a8", "uint8", "i8", "8"), "int8"),
    **dict.fromkeys(("fp4", "float4", "nf4_double", "bnb", "bitsandbytes"), "nf4"),
    **dict.fromkeys(("float8", "fp8_e4m3", "e4m3", "e4m3fn", "float8_e4m3fn"), "fp8"),
    **dict.fromkeys(("e5m2", "float8_e5m2"), "fp8_e5m2"),
    **dict.fromkeys(("1.58bit", "bitnet", "2bit", "tq2_0"), "ternary"),
    **dict.fromkeys(("1bit", "int1"), "binary"),
}


def find_format(name: object) -> Format:
    """The format registered under `name`, in any case; a TypeError or ValueError lists the names there are."""
    known = ", ".join(map(repr, _formats))
    if not isinstance(name, str):
        hint = f"; for {name} bits write 'int{name}'" if f"int{name}" in _formats else ""
        raise TypeError(f"a format is a name, one of {known}; got {type(name).__name__} {name!r}{hint}")
    if name in _formats:
        return _formats[name]
    folded = {each.lower(): form for each, form in _formats.items()}
    lower = name.strip().lower()
    if lower in folded:
        return folded[lower]
    near = _ELSEWHERE.get(lower) or next(iter(difflib.get_close_matches(lower, folded, 1, 0.6)), None)
    hint = f"; did you mean {near!r}?" if near in _formats else ""
    raise ValueError(f"unknown format {name!r}; there are {known}{hint}")
