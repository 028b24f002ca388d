"""What a format declares about its leaves, so that kernels can read them and devices can share a matmul."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar, Self

import jax

from eformer.kernels import Matrix
from eformer.ops.quantization._base import QuantizedArray

Grain = int
Leaves = dict[str, jax.Array]


class MatmulOperand(QuantizedArray):
    """A quantized array whose leaf dimensions each follow one array axis.

    One entry of a leaf covers a fixed number of elements along that axis, the grain.
    """

    _kernel_format: ClassVar[str | None] = None  # the name that kernels know the format by, if there are any

    @abc.abstractmethod
    def _named_leaves(self) -> Leaves:
        """The leaves that follow the array's axes, the codes first."""

    @abc.abstractmethod
    def _leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        """The array axis and the grain of every dimension of every leaf; a grain of 0 is a broadcast length of 1."""

    @abc.abstractmethod
    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        """The shard of this array that has these shards of the leaves, whose grains may be smaller than before."""

    def _divisible(self) -> Self:
        """An equal array that has only `_named_leaves`, computed without communication between devices."""
        return self

    def _fits_kernels(self) -> bool:
        """Whether kernels can read this array, a matrix or a stack of matrices, as it is stored."""
        return False

    def _stored_matrix(self) -> Matrix:
        """This array (count, rows, cols), whose leaves all have the first axis, as kernels read it."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel that reads a stored matrix")
