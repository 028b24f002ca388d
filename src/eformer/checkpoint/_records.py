"""What is to be written: named arrays whose sizes are known before their values are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer.jaximus import is_implicit
from eformer.ops.quantization import QuantizedArray


@dataclass(frozen=True)
class Item:
    """An array to be written: `make()` gives it, dense or quantized, and `like` is the same without values."""

    name: str
    like: Any  # a `jax.ShapeDtypeStruct`, or a quantized array of them
    make: Callable[[], Any]
    done: Callable[[], None] = lambda: None  # called when the values are not needed any more


@dataclass(frozen=True)
class Part:
    """One tensor of a file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """The tensors that one array becomes in a file; they stay together in one shard."""

    name: str
    parts: Sequence[Part]
    values: Callable[[], Iterable[Any]]  # an array for each part
    described: dict[str, Any] = field(default_factory=dict)
    done: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def structs(value: Any) -> Any:
    """`value`, an array or a quantized one, without its values."""
    return jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), value)


def items_of(named: Sequence[tuple[str, Any]], *, spread: bool = False) -> list[Item]:
    """Named leaves of a tree as items. Python's numbers become arrays of 64 bits; what has no values raises.

    So does an array that other processes have parts of, unless it may be `spread`.
    """
    found = [_item(name, leaf, spread) for name, leaf in named]
    names = [item.name for item in found]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"two leaves have the name {twice!r}: a key with a dot in it reads like a key in a key")
    return found


def _item(name: str, leaf: Any, spread: bool) -> Item:
    if isinstance(leaf, (bool, int, float)):
        leaf = np.asarray(leaf)
    if is_implicit(leaf) and not isinstance(leaf, QuantizedArray):
        raise TypeError(f"{name!r} is a {type(leaf).__name__}: of implicit arrays, only quantized ones can be saved")
    parts = jtu.tree_leaves(leaf)
    if not parts or not all(isinstance(part, (jax.Array, np.ndarray, np.generic)) for part in parts):
        raise TypeError(f"{name!r} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    if any(jnp.issubdtype(part.dtype, jax.dtypes.prng_key) for part in parts):
        raise TypeError(f"{name!r} is a random key; save `jax.random.key_data(key)`, and wrap what you load")
    if not spread and not all(getattr(part, "is_fully_addressable", True) for part in parts):
        raise ValueError(f"{name!r} is spread over several processes: `save` it as safetensors, or gather it first")
    return Item(name, structs(leaf), lambda: leaf)


def contiguous_bytes(value: Any, part: Part) -> memoryview:
    """The bytes of an array as they are written: in C order, little-endian."""
    array = np.asarray(value)
    if array.shape != part.shape or array.dtype != part.dtype:
        raise ValueError(
            f"{part.name!r} was announced as {part.dtype}{list(part.shape)}, and is {array.dtype}{list(array.shape)}"
        )
    ordered = np.ascontiguousarray(array).reshape(-1)
    if not np.little_endian and ordered.dtype.itemsize > 1:
        ordered = ordered.byteswap()
    return ordered.view(np.uint8).data
