"""`fuse`: weights that meet the same activations as one array, so that one matmul serves them all."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from eformer.jaximus import (
    ImplicitArray,
    MaterializationError,
    aux_field,
    implicit,
    materialization_error,
    materialize,
    register,
)

_Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class FusedPart(ImplicitArray):
    """`materialize() == whole[start:stop]`, or its transpose: rows of a matrix (out, in) that other parts share.

    A matmul that sums over `in` multiplies by the whole matrix, as it is stored, and takes its part of the result.
    """

    whole: Any  # a dense or a quantized matrix
    start: int = aux_field()
    stop: int = aux_field()
    transposed: bool = aux_field(default=False)

    def __post_init__(self) -> None:
        if self.dtype is None:
            object.__setattr__(self, "dtype", self.whole.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        size, summed = self.stop - self.start, self.whole.shape[1]
        return (summed, size) if self.transposed else (size, summed)

    def materialize(self) -> jax.Array:
        dense = materialize(implicit(lambda whole: lax.slice_in_dim(whole, self.start, self.stop))(self.whole))
        return dense.T if self.transposed else dense


@functools.partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["sizes"])
@dataclasses.dataclass(frozen=True)
class Fused:
    """Matrices (sizes[i], in) one below the other: `whole` is (sum of sizes, in)."""

    whole: Any
    sizes: tuple[int, ...]

    def parts(self) -> tuple[FusedPart, ...]:
        """Views of the matrices. Make them inside `jit`: there they share `whole`, and XLA runs equal matmuls once."""
        edges = itertools.accumulate(self.sizes, initial=0)
        return tuple(FusedPart(self.whole, *pair) for pair in itertools.pairwise(edges))


def fuse(matrices: Sequence[Any]) -> Fused:
    """Matrices (out, in) that are multiplied by the same x, as one: x is rounded once, and one kernel is called.

    The function that uses them is not changed: it gets `parts()`, and calls `x @ part.T` for each. Quantized matrices
    keep their codes; a ValueError if their formats differ, so that one array can't hold them.
    """
    shapes = [matrix.shape for matrix in matrices]
    if not shapes or any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"fuse takes matrices (out, in) with the same `in`, got {shapes}")
    try:
        with materialization_error():
            whole = implicit(jnp.concatenate)(list(matrices))
    except MaterializationError:
        formats = [type(matrix).__name__ for matrix in matrices]
        raise ValueError(f"one quantized array can't hold these matrices: {', '.join(formats)} differ") from None
    return Fused(whole, tuple(shape[0] for shape in shapes))


@register("transpose")
def transpose(primitive: Primitive, q: FusedPart, *, permutation: Sequence[int], **params: Any) -> FusedPart:
    del primitive, params
    if list(permutation) == [0, 1]:
        return q
    return dataclasses.replace(q, transposed=not q.transposed)


@register("dot_general")
def dot_general(
    primitive: Primitive, x: jax.Array, q: FusedPart, *, dimension_numbers: _Numbers, **params: Any
) -> jax.Array | NotImplementedType:
    (x_summed, q_summed), (_, q_batch) = dimension_numbers
    if q_batch or list(q_summed) != [0 if q.transposed else 1]:
        return NotImplemented
    how = {"dimension_numbers": ((tuple(x_summed), (1,)), ((), ())), **params}
    y = implicit(lambda x, whole: primitive.bind(x, whole, **how))(x, q.whole)
    return lax.slice_in_dim(y, q.start, q.stop, axis=y.ndim - 1)
