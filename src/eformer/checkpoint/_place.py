"""From a mapped file to devices: each device gets its shard, and no result keeps looking into the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax import tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from eformer.ops.quantization import QuantizedArray, checked_sharding

from ._arrays import Value, structs

# One for all arrays, by name, or a function of name and shape; None is the default device.
OneSharding = Sharding | PartitionSpec | None
ShardingFor = OneSharding | Mapping[str, OneSharding] | Callable[[str, tuple[int, ...]], OneSharding]

ALIGNMENT = 64  # bytes; JAX on CPU takes memory over from there, and copies any other


def sharding_for(sharding: ShardingFor, name: str, shape: tuple[int, ...]) -> OneSharding:
    if isinstance(sharding, Mapping):
        sharding = sharding.get(name)
    elif callable(sharding):
        sharding = sharding(name, shape)
    if sharding is not None and not isinstance(sharding, (Sharding, PartitionSpec)):
        raise TypeError(f"the sharding of {name!r} must be a Sharding, a PartitionSpec or None, got {sharding!r}")
    return sharding


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
        if sharding is None:
            raise
        raise ValueError(
            f"{name!r}, {host.dtype}{list(host.shape)}, can't be laid out by {sharding}: {error}"
        ) from error


def _place_quantized(host: QuantizedArray, sharding: OneSharding) -> QuantizedArray:
    leaves, treedef = jtu.tree_flatten(host)
    leaves = [leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False) for leaf in leaves]
    sharding = _checked(sharding, host.shape)
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


def _place_array(view: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(aligned_copy(view))
    return jax.make_array_from_callback(view.shape, sharding, lambda index: aligned_copy(view[index]))


def aligned_copy(view: np.ndarray) -> np.ndarray:
    """A copy whose memory JAX on CPU uses as it is, so that there is one copy and not two."""
    memory = np.empty(view.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + view.nbytes].view(view.dtype).reshape(view.shape)
    copy[...] = view
    return copy
