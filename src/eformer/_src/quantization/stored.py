"""Quantized arrays as files hold them: made from their fields, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from .base import QuantizedArray
from .validation import check_fields

Made = TypeVar("Made", bound=QuantizedArray)


def array_from_fields(cls: type[Made], values: Mapping[str, object]) -> Made:
    """Build an array from its fields, as a file has them; a field that is not named has its default.

    Fields that the constructor refuses raise here too.
    """
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        value = values.get(field.name, field.default)
        if value is dataclasses.MISSING or (field.name == "dtype" and value is None):
            raise TypeError(f"{cls.__name__} needs `{field.name}`")
        vars(made)[field.name] = value
    made._finish_construction(None)
    return made


def check_array(q: QuantizedArray) -> None:
    """Raise a TypeError or ValueError unless the leaves make one array: trees can be restructured."""
    check_fields(q, q._field_checks)
    q._check_shapes()


def declares_leaves(cls: type[QuantizedArray]) -> bool:
    """Whether the class says what each of its leaves may hold, so that `check_array` needs no trial."""
    return set(cls._data_fields) <= cls._field_checks.keys()
