"""`RSROperator`: what the binary and the ternary operator share, which is all that follows from their codes."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from eformer.jaximus import ImplicitArray, is_implicit

from ._matmul._operand import Grain, Leaves, MatmulOperand
from ._sharding import sharding_of, shards

if TYPE_CHECKING:
    from .implicit_array_rsr import RSROperatorBinary


class RSROperator(MatmulOperand):
    """A matrix (..., n, m) given by codes (..., num_blocks, n) of one binary matrix, or two that are subtracted."""

    @abc.abstractmethod
    def _binaries(self) -> tuple[RSROperatorBinary, ...]:
        """The binary matrix, or the two whose difference this is."""

    def decode(self) -> jax.Array:
        return functools.reduce(jnp.subtract, (binary.decode() for binary in self._binaries()))

    def codes_and_k(self) -> tuple[tuple[jax.Array, ...], int]:
        """The codes of the binary matrices and their `k`, checked: leaves also come from functions over trees."""
        self.check()
        return tuple(self.named_leaves().values()), self._binaries()[0].k

    def dot(self, v: ArrayLike | ImplicitArray) -> Any:
        """`v @ A` for `v` of shape (..., n), without `A`: note the order, which is not that of `jax.Array.dot`.

        The result has the shape and dtype of the dense matmul. Half precision is summed in float32 and rounded once;
        integers wrap as they do in the dense matmul. Floats are summed in another order, so last digits may differ.

        A NaN or an infinity in `v` gives NaN wherever it does in the dense matmul (that multiplies it by each 0 too).
        It gives NaN also in place of an infinity in a ternary matmul, and in place of some finite numbers when finite
        elements of `v` sum up to more than the largest float; never a finite number that is wrong.

        Inside `implicit` an argument is an array among arrays, and has their `dot`: write `v @ operator` there.
        """
        return (v if is_implicit(v) else jnp.asarray(v)) @ self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._binaries()[0].shape

    def is_stacked(self) -> bool:
        return self.ndim > 2

    def named_leaves(self) -> Leaves:
        return {f"codes{i}": binary.codes for i, binary in enumerate(self._binaries())}

    def leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        stack = tuple((axis, 1) for axis in range(self.ndim - 2))
        return {
            name: (*stack, (self.ndim - 1, binary.k), (self.ndim - 2, 1))
            for name, binary in zip(self.named_leaves(), self._binaries(), strict=True)
        }

    def of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        del grains  # no part cuts a code
        return self._with_leaves(list(leaves.values()))

    def _with_leaves(self, leaves: Sequence[Any]) -> Self:
        """This tree with other leaves: arrays, specs or shardings."""
        return jtu.tree_unflatten(jtu.tree_structure(self), leaves)

    def leaf_specs(self, spec: PartitionSpec) -> Self | None:
        mesh = jax.sharding.get_abstract_mesh()
        *stack, rows, columns = [*spec, *[None] * (self.ndim - len(spec))]
        if mesh.empty:
            return super().leaf_specs(spec)
        if columns is not None and not all(b._splits_columns(shards(mesh, columns)) for b in self._binaries()):
            return None
        return self._with_leaves([PartitionSpec(*stack, columns, rows)] * len(self._binaries()))

    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        mesh, (*stack, rows, columns) = sharding.mesh, sharding.spec

        def place(binary: RSROperatorBinary) -> NamedSharding:
            whole = not binary._splits_columns(shards(mesh, columns))
            spec = PartitionSpec(*stack, None if whole else columns, rows)
            return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)

        return self._with_leaves(list(map(place, self._binaries())))

    @property
    def sharding(self) -> NamedSharding | None:
        codes = self._binaries()[0].codes
        found = sharding_of(codes)
        if found is None:
            return None
        *stack, columns, rows = [*found.spec, *[None] * (codes.ndim - len(found.spec))]
        if self.shape[-1] % shards(found.mesh, columns):
            columns = None
        return NamedSharding(found.mesh, PartitionSpec(*stack, rows, columns), memory_kind=found.memory_kind)
