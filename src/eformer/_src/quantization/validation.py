"""What each field of a quantized array may hold: a table in the class, checked wherever such an array is made.

Constructors and files go through the same check, so a file can make no array that a constructor refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._src.jaximus.array import is_implicit

MAX_LENGTH = 2**31 - 1  # of a block; kernels count in 64 bits, which hold every sum of such lengths

COUNTS = {1: "one", 2: "two", 4: "four", 8: "eight"}  # in words, of codes in a byte

StaticCheck = Callable[[str, object], None]  # raises unless the field of that name may have that value


class LeafCheck(NamedTuple):
    """A leaf that is an array of one of these dtypes; `words` says it to a reader."""

    words: str
    dtypes: tuple[DTypeLike, ...]
    optional: bool = False


FieldChecks = Mapping[str, LeafCheck | StaticCheck]

FLOATS = (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16)


def check_fields(array: object, checks: FieldChecks) -> None:
    """A TypeError or ValueError unless each field holds what its check asks for."""
    for name, check in checks.items():
        value = getattr(array, name)
        if not isinstance(check, LeafCheck):
            check(name, value)
        elif value is None:
            if not check.optional:
                raise TypeError(f"{type(array).__name__} needs `{name}`: {check.words}")
        elif is_implicit(value) or not hasattr(value, "dtype"):
            raise TypeError(f"{name} must be an array, {check.words}, got {type(value).__name__}")
        elif not _is_one_of(value.dtype, check.dtypes):
            raise TypeError(f"{name} must be {check.words}, got {value.dtype}")


@functools.lru_cache(maxsize=1024)
def _is_one_of(dtype: DTypeLike, dtypes: tuple[DTypeLike, ...]) -> bool:
    return any(jnp.issubdtype(dtype, each) for each in dtypes)


def an_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__} {value!r}")


def a_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")


def a_block_size(per_byte: int) -> StaticCheck:
    """The check of a block size in a format that has up to `per_byte` codes in a byte."""
    multiple = "even" if per_byte == 2 else f"a multiple of {per_byte}"

    def check(name: str, value: Any) -> None:
        an_int(name, value)
        if not per_byte <= value <= MAX_LENGTH or value % per_byte:
            raise ValueError(
                f"`{name}={value}` must be {multiple} and at least {per_byte}, and at most {MAX_LENGTH}: "
                f"{COUNTS[per_byte]} codes share a byte"
            )

    return check


def int8_or_none(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or value != "int8"):
        raise ValueError(f"`{name}` must be None or 'int8', got {value!r}")


def a_number_type(name: str, value: Any) -> None:
    """A dtype that values can be decoded to; None while a constructor has still to find it."""
    if value is None:
        return
    try:
        found = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a dtype, got {value!r}") from None
    if not (jnp.issubdtype(found, jnp.floating) or jnp.issubdtype(found, jnp.integer)):
        raise TypeError(f"`{name}` must be a floating point or integer dtype, got {found}")
