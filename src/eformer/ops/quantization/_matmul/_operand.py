"""What a format tells of its leaves, so that a mesh of devices can have an array in parts."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp

from eformer.kernels import Matrix, cpu, pallas
from eformer.ops.quantization._base import QuantizedArray

Grain = int
Leaves = dict[str, jax.Array]


class MatmulOperand(QuantizedArray):
    """A quantized array whose leaves run along its axes, each entry for so many elements of the array."""

    @abc.abstractmethod
    def named_leaves(self) -> Leaves:
        """The leaves that run along the array's axes, the codes first."""

    @abc.abstractmethod
    def leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        """Of each leaf, for each of its dimensions: the axis of the array it runs along, and what an entry stands for.

        That is 0 for a length of 1 that is broadcast.
        """

    @abc.abstractmethod
    def of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        """The part of this array that these parts of the leaves are; their entries may stand for less than before."""

    def divisible(self) -> Self:
        """An equal array that has only such leaves, made without looking across devices."""
        return self

    def stored_matrix(self) -> Matrix | None:
        """This array of 3 axes, each leaf with the first, as kernels read it; None where they can't."""
        return None

    def matmul_on_cpu(self, x: jax.Array, contracted_axis: int) -> jax.Array | None:
        """x (count, rows, k) times this array of 3 axes, by the native core in float32; None where it can't."""
        matrix = self.stored_matrix()
        if matrix is None or not cpu.is_available():
            return None
        rounding = {"round_x": self.activation_dtype == "int8", "round_values": self.dtype == jnp.bfloat16}
        return cpu.matmul(x, matrix, contracted_axis, **rounding)

    def matmul_on_accelerator(self, device: pallas.Device, x: jax.Array, contracted_axis: int) -> jax.Array | None:
        """The same by a Pallas kernel; None also where XLA's own program is better."""
        matrix = self.stored_matrix()
        if matrix is None:
            return None
        return pallas.matmul(x, matrix, contracted_axis, device, round_x=self.activation_dtype == "int8")
