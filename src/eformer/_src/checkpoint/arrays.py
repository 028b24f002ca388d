"""Arrays in checkpoints: entries, which a file has, and items and records, which are written."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from eformer._src.jaximus.array import is_implicit
from eformer._src.quantization.base import QuantizedArray

from .file import CheckpointError
from .header import Json, Tensor
from .serialization import FORMAT_ERRORS, check_decoding, describe, format_name

Dense = jax.Array | np.ndarray | np.generic
Value = jax.Array | np.ndarray | QuantizedArray
AbstractArray = jax.ShapeDtypeStruct | QuantizedArray  # an array without values: a quantized one has structs as leaves
Q = TypeVar("Q", bound=QuantizedArray)


# --- in a file ---


@dataclass(frozen=True)
class ArrayInfo:
    """Facts about an array that are known without reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype  # of the array represented
    format: str | None  # the name of a quantized format, ours or the file's; None if the array is dense
    nbytes: int  # in the file


class Entry(abc.ABC):
    """An array in a checkpoint, made of one tensor of the file or several."""

    name: str
    like: AbstractArray  # the array that `host` gives, without values
    format: str | None = None
    tensors: Sequence[Tensor]

    @abc.abstractmethod
    def host(self) -> np.ndarray | QuantizedArray:
        """The array, dense or quantized, of NumPy arrays; they look into the file where nothing has to be decoded."""

    def unread(self) -> np.ndarray | QuantizedArray:
        """What `host` gives, for `place`: each `LazyLeaf` is read shard by shard."""
        return self.host()

    @property
    def info(self) -> ArrayInfo:
        like, nbytes = self.like, sum(tensor.nbytes for tensor in self.tensors)
        return ArrayInfo(tuple(like.shape), np.dtype(like.dtype), self.format, nbytes)

    def drop(self) -> None:
        for tensor in self.tensors:
            tensor.drop()

    def wrong(self, what: str) -> CheckpointError:
        return self.tensors[0].file.wrong(what, self.name)

    def checked(self, make: Callable[[], Q]) -> Q:
        """`make()`, of NumPy arrays; a CheckpointError if that fails, or if the codes are none of its format."""
        try:
            made = make()
            made._check_codes()
        except CheckpointError:
            raise
        except FORMAT_ERRORS as error:
            raise self.wrong(str(error)[:300]) from None
        return made


class DenseEntry(Entry):
    """A tensor that is the array."""

    def __init__(self, tensor: Tensor) -> None:
        self.name, self.tensors = tensor.name, (tensor,)
        self.like = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)

    def host(self) -> np.ndarray:
        return self.tensors[0].view()


class QuantizedEntry(Entry):
    """Tensors that are the leaves of a quantized array; `codes` is the version of its codes."""

    def __init__(self, name: str, like: QuantizedArray, tensors: Sequence[Tensor], codes: int) -> None:
        self.name, self.like, self.tensors, self._codes = name, like, tensors, codes
        self.format = format_name(like)

    def host(self) -> QuantizedArray:
        likes, structure = jtu.tree_flatten(self.like)
        pairs = zip(self.tensors, likes, strict=True)
        leaves = [tensor.view().astype(like.dtype, copy=False) for tensor, like in pairs]
        return self.checked(lambda: jtu.tree_unflatten(structure, leaves))._recoded(self._codes)


# --- to be written ---


@dataclass(frozen=True)
class ArrayToWrite:
    """An array to write: `make()` gives its values, `like` is known before, `done()` is called after."""

    name: str
    like: AbstractArray
    make: Callable[[], Value]
    done: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorsToWrite:
    """The tensors of one array in a file, which stay together in one shard; `values()` gives an array per part."""

    name: str
    parts: Sequence[TensorSpec]
    values: Callable[[], Iterable[Dense]]
    done: Callable[[], None]
    described: Json = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class CheckpointToWrite:
    """The arrays of a checkpoint in the layout of some project, and what has to be said beside them.

    `own` are keys of files beside, by the files' names, without which the weights can't be read; those of config.json
    replace all that it says of quantization. `metadata` is that of the files.
    """

    records: Sequence[TensorsToWrite]
    own: Mapping[str, dict[str, Json]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


def structs(q: Q) -> Q:
    """A quantized array without its values."""
    return jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), q)


def arrays_to_write(named: Sequence[tuple[str, object]], *, spread: bool = False) -> list[ArrayToWrite]:
    """The named leaves of a tree as items. Python numbers become 64-bit arrays; a leaf without values raises.

    An array with shards in other processes raises too, unless it may be `spread`.
    """
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"two leaves have the name {twice!r}: a key with a dot in it reads like a key in a key")
    return [_array_to_write(name, leaf, spread) for name, leaf in named]


def _array_to_write(name: str, leaf: object, spread: bool) -> ArrayToWrite:
    if isinstance(leaf, (bool, int, float, np.generic)):
        leaf = np.asarray(leaf)
    if is_implicit(leaf) and not isinstance(leaf, QuantizedArray):
        raise TypeError(f"{name!r} is a {type(leaf).__name__}: of implicit arrays, only quantized ones can be saved")
    parts = jtu.tree_leaves(leaf)
    arrays = parts and all(isinstance(part, (jax.Array, np.ndarray, np.generic)) for part in parts)
    if not arrays or not isinstance(leaf, (jax.Array, np.ndarray, QuantizedArray)):
        raise TypeError(f"{name!r} is a {type(leaf).__name__}; only arrays and numbers can be saved")
    if any(jnp.issubdtype(part.dtype, jax.dtypes.prng_key) for part in parts):
        raise TypeError(f"{name!r} is a random key, which only `save` as safetensors takes; save its `key_data` here")
    if not spread and not all(getattr(part, "is_fully_addressable", True) for part in parts):
        raise ValueError(f"{name!r} is spread over several processes: `save` it as safetensors, or gather it first")
    like = structs(leaf) if isinstance(leaf, QuantizedArray) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return ArrayToWrite(name, like, lambda: leaf)


def tensors_to_write(item: ArrayToWrite) -> TensorsToWrite:
    """The tensors of an array in this package's own layout: a dense array is one, a quantized one its leaves."""
    described, names = None, [item.name]
    if isinstance(item.like, QuantizedArray):
        described, names = describe(item.name, item.like)
        try:
            check_decoding(item.like)
        except CheckpointError as error:
            raise ValueError(f"{item.name!r} can't be saved: {error.what}") from None
    leaves = zip(names, jtu.tree_leaves(item.like), strict=True)
    parts = [TensorSpec(name, np.dtype(leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves]
    return TensorsToWrite(item.name, parts, lambda: jtu.tree_leaves(item.make()), item.done, described)


def contiguous_bytes(value: Dense, part: TensorSpec) -> memoryview:
    """The bytes of an array as they are written, in C order."""
    array = np.asarray(value)
    if array.shape != part.shape or array.dtype != part.dtype:
        raise ValueError(
            f"{part.name!r} was announced as {part.dtype}{list(part.shape)}, and is {array.dtype}{list(array.shape)}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
