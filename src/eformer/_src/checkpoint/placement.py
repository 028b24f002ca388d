"""From a mapped file to devices: each device gets its shard, and no result keeps looking into the file."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.sharding import checked_sharding

from .arrays import Value, structs
from .file import CheckpointError
from .memory import aligned_copy

# One for all arrays, by name, or a function of name and shape; None is the default device.
OneSharding = Sharding | PartitionSpec | None
ShardingFor = OneSharding | Mapping[str, OneSharding] | Callable[[str, tuple[int, ...]], OneSharding]

Index = tuple[slice, ...]


def sharding_for(sharding: ShardingFor, name: str, shape: tuple[int, ...]) -> OneSharding:
    if isinstance(sharding, Mapping):
        sharding = sharding.get(name)
    elif callable(sharding):
        sharding = sharding(name, shape)
    if sharding is not None and not isinstance(sharding, (Sharding, PartitionSpec)):
        raise TypeError(f"the sharding of {name!r} must be a Sharding, a PartitionSpec or None, got {sharding!r}")
    return sharding


class Unread(abc.ABC):
    """A leaf of a quantized array that is in a file, and not as it will be in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def whole(self) -> Index:
        return tuple(map(slice, self.shape))

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray:
        """The part of it that `index` says, in memory that no one else has and that JAX on CPU takes over."""

    @classmethod
    def read_whole(cls, leaves: Sequence[Unread]) -> list[np.ndarray]:
        """All leaves of an array, as `read` gives them; a class may read them in one pass over the file."""
        return [leaf.read(leaf.whole) for leaf in leaves]


def place(name: str, host: np.ndarray | QuantizedArray, sharding: OneSharding) -> Value:
    """`host`, made of NumPy arrays, on devices; a ValueError if `sharding` can't split it.

    A dense 64-bit array stays a NumPy array unless JAX has 64-bit types enabled: it would be cut to 32 bits.
    """
    try:
        if isinstance(host, QuantizedArray):
            return _place_quantized(host, sharding)
        exact = jax.dtypes.canonicalize_dtype(host.dtype) == host.dtype
        return _place_array(host, _checked(sharding, host.shape)) if exact else np.array(host)
    except (ValueError, TypeError) as error:
        if sharding is None or isinstance(error, CheckpointError):
            raise
        raise ValueError(
            f"{name!r}, {host.dtype}{list(host.shape)}, can't be laid out by {sharding}: {error}"
        ) from error


def _place_quantized(host: QuantizedArray, sharding: OneSharding) -> QuantizedArray:
    leaves, treedef = jtu.tree_flatten(host)
    leaves = [leaf if isinstance(leaf, Unread) else _canonical(leaf) for leaf in leaves]
    sharding = _checked(sharding, host.shape)
    unread = [leaf for leaf in leaves if isinstance(leaf, Unread)]
    if sharding is None and unread and len(unread) == len(leaves):
        return jtu.tree_unflatten(treedef, jax.device_put(type(unread[0]).read_whole(unread)))
    if isinstance(sharding, NamedSharding):
        shardings = [leaf.sharding for leaf in jtu.tree_leaves(structs(host).with_sharding(sharding))]
    elif sharding is None or sharding.is_fully_replicated:
        shardings = [sharding] * len(leaves)
    else:
        raise TypeError("a quantized array takes a NamedSharding, a PartitionSpec or one device")
    return jtu.tree_unflatten(treedef, list(map(_place_array, leaves, shardings)))


def _checked(sharding: OneSharding, shape: tuple[int, ...]) -> Sharding | None:
    """`sharding` with its mesh; a ValueError if it does not fit the shape."""
    if isinstance(sharding, (NamedSharding, PartitionSpec)):
        found = checked_sharding(sharding, shape)
        spec = sharding if isinstance(sharding, PartitionSpec) else sharding.spec
        return NamedSharding(found.mesh, spec, memory_kind=found.memory_kind)
    if sharding is not None:
        sharding.shard_shape(shape)  # raises unless it can split the axes
    return sharding


def _canonical(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)


def _place_array(view: np.ndarray | Unread, sharding: Sharding | None) -> jax.Array:
    def read(index: Index | None) -> np.ndarray:
        assert index is not None  # it is, for an array that is not of random keys
        return view.read(index) if isinstance(view, Unread) else aligned_copy(view[index])

    if sharding is None:
        return jax.device_put(read(tuple(map(slice, view.shape))))
    return jax.make_array_from_callback(view.shape, sharding, read)
