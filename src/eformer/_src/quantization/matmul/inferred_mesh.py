"""A mesh inferred from shards: XLA knows which device has which shard, and no mesh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import AxisType, Mesh, Sharding


def infer_mesh(devices: Sequence[object], starts: Sequence[np.ndarray]) -> Mesh:
    """A mesh of all devices with an axis per prime factor of their number, in the order that explains most `starts`.

    It can express every sharding over a mesh of the user's, and over parts of that mesh's axes.
    """

    def explained(sizes: tuple[int, ...]) -> int:
        return sum(len(axes) for each in starts for axes in mesh_axes(each, sizes))

    sizes = max(_orders(len(devices)), key=explained)
    names, automatic = tuple(f"axis{i}" for i in range(len(sizes))), (AxisType.Auto,) * len(sizes)
    return Mesh(np.array(devices, object).reshape(sizes), names, automatic)


def _orders(n: int) -> list[tuple[int, ...]]:
    """All orders of the prime factors of `n`: one for a power of a prime, and few for real numbers of devices."""
    primes = [p for p in range(2, n + 1) if n % p == 0 and all(p % divisor for divisor in range(2, p))]
    return [(p, *rest) for p in primes for rest in _orders(n // p)] or [()]


def shard_starts(sharding: Sharding, ndim: int, devices: Sequence[object]) -> np.ndarray:
    """(devices, ndim): start index of each device's shard, for an array with `len(devices)` elements per dimension."""
    if sharding.is_fully_replicated:
        return np.zeros((len(devices), ndim), int)
    indices = sharding.devices_indices_map((len(devices),) * ndim)
    return np.array([[part.start or 0 for part in indices[device]] for device in devices])  # pyright: ignore[reportArgumentType]  # devices


def mesh_axes(starts: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The axes of a mesh of `sizes` that divide each dimension, outermost first; () if they don't explain `starts`."""
    return [_mesh_axes_of_dimension(each.reshape(sizes)) for each in starts.T]


def _mesh_axes_of_dimension(starts: np.ndarray) -> tuple[int, ...]:
    steps = [int(np.take(starts, 1, axis).flat[0]) for axis in range(starts.ndim)]
    axes = sorted((axis for axis, step in enumerate(steps) if step), key=lambda axis: -steps[axis])
    rest = starts.size
    for axis in axes:
        rest //= starts.shape[axis]
        if steps[axis] != rest:
            return ()
    expected = sum(step * np.indices(starts.shape)[axis] for axis, step in enumerate(steps))
    return tuple(axes) if np.array_equal(starts, expected) else ()
