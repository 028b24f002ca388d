"""The layout of an array as XLA knows it, by the numbers of devices, read as axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh


def infer_mesh(devices: Sequence[Any], starts: Sequence[np.ndarray]) -> Mesh:
    """A mesh over all devices with an axis for each prime factor of their number, in an order that names most parts.

    XLA knows devices by their number, and no mesh. What any mesh divides, and parts of its axes, this one can name.
    """

    def named(sizes: tuple[int, ...]) -> int:
        return sum(len(axes) for each in starts for axes in mesh_axes(each, sizes))

    sizes = max(_orders(_primes(len(devices))), key=named)
    return Mesh(np.array(devices, object).reshape(sizes), tuple(f"axis{i}" for i in range(len(sizes))))


def _primes(n: int) -> list[int]:
    """The prime factors of a number, smallest first."""
    smallest = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [] if smallest is None else [smallest, *_primes(n // smallest)]


def _orders(factors: list[int]) -> list[tuple[int, ...]]:
    """All different orders; one for a power of a prime, and few for numbers that machines come in."""
    if not factors:
        return [()]
    without = {factor: [*factors[: factors.index(factor)], *factors[factors.index(factor) + 1 :]] for factor in factors}
    return [(factor, *rest) for factor, others in without.items() for rest in _orders(others)]


def shard_starts(operand: Any, devices: Sequence[Any]) -> np.ndarray:
    """For each device, where in each dimension its part begins, were that as long as there are devices."""
    shape = (len(devices),) * len(operand.shape)
    if operand.sharding.is_fully_replicated:
        return np.zeros((len(devices), len(shape)), int)
    indices = operand.sharding.devices_indices_map(shape)
    return np.array([[part.start or 0 for part in indices[device]] for device in devices])


def mesh_axes(starts: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Which axes of a mesh of `sizes` divide each dimension, the outermost first; none, if these can't say it all."""
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
