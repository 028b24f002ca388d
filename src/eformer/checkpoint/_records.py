"""What is written: named arrays, and their tensors, whose sizes are known before their values are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer.jaximus import is_implicit
from eformer.ops.quantization import QuantizedArray

from ._describe import check_decoding, describe
from ._dtypes import dtype_name
from ._error import CheckpointError
from ._header import Json

Value = jax.Array | np.ndarray | QuantizedArray
Like = jax.ShapeDtypeStruct | QuantizedArray  # an array without values: a quantized one has structs as leaves
Q = TypeVar("Q", bound=QuantizedArray)


@dataclass(frozen=True)
class Item:
    """An array to write: `make()` gives its values, `like` is known before, `done()` is called after."""

    name: str
    like: Like
    make: Callable[[], Value]
    done: Callable[[], None] = lambda: None


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
    """The tensors of one array in a file, which stay together in one shard; `values()` gives an array per part."""

    name: str
    parts: Sequence[Part]
    values: Callable[[], Iterable[jax.Array | np.ndarray | np.generic]]
    done: Callable[[], None]
    described: Json = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def structs(q: Q) -> Q:
    """A quantized array without its values."""
    return jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), q)


def items_of(named: Sequence[tuple[str, object]], *, spread: bool = False) -> list[Item]:
    """The named leaves of a tree as items. Python numbers become 64-bit arrays; a leaf without values raises.

    An array with shards in other processes raises too, unless it may be `spread`.
    """
    found = [_item(name, leaf, spread) for name, leaf in named]
    names = [item.name for item in found]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"two leaves have the name {twice!r}: a key with a dot in it reads like a key in a key")
    return found


def _item(name: str, leaf: object, spread: bool) -> Item:
    if isinstance(leaf, (bool, int, float, np.generic)):
        leaf = np.asarray(leaf)
    if is_implicit(leaf) and not isinstance(leaf, QuantizedArray):
        raise TypeError(f"{name!r} is a {type(leaf).__name__}: of implicit arrays, only quantized ones can be saved")
    parts = jtu.tree_leaves(leaf)
    arrays = parts and all(isinstance(part, (jax.Array, np.ndarray, np.generic)) for part in parts)
    if not arrays or not isinstance(leaf, (jax.Array, np.ndarray, QuantizedArray)):
        raise TypeError(f"{name!r} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    if any(jnp.issubdtype(part.dtype, jax.dtypes.prng_key) for part in parts):
        raise TypeError(f"{name!r} is a random key; save `jax.random.key_data(key)`, and wrap what you load")
    if not spread and not all(getattr(part, "is_fully_addressable", True) for part in parts):
        raise ValueError(f"{name!r} is spread over several processes: `save` it as safetensors, or gather it first")
    like = structs(leaf) if isinstance(leaf, QuantizedArray) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return Item(name, like, lambda: leaf)


def record_of(item: Item) -> Record:
    """The tensors of an array in this package's own layout: a dense array is one, a quantized one its leaves."""
    like = item.like
    if not isinstance(like, QuantizedArray):
        return Record(item.name, [_part(item.name, like)], lambda: jtu.tree_leaves(item.make()), item.done)
    described, names = describe(item.name, like)
    try:
        check_decoding(like)
    except CheckpointError as error:
        raise ValueError(f"{item.name!r} can't be saved: {error.what}") from None
    parts = [_part(name, leaf) for name, leaf in zip(names, jtu.tree_leaves(like), strict=True)]
    return Record(item.name, parts, lambda: jtu.tree_leaves(item.make()), item.done, described)


def _part(name: str, like: jax.ShapeDtypeStruct) -> Part:
    dtype_name(like.dtype, name)  # raises if the file can't hold it
    return Part(name, np.dtype(like.dtype), tuple(like.shape))


def contiguous_bytes(value: jax.Array | np.ndarray | np.generic, part: Part) -> memoryview:
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
