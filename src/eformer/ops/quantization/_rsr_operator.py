"""`RSROperator`: what the binary and the ternary operator share, which is all that follows from their codes.

In a matmul, rows of `x` that meet the same code are summed first.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from eformer.jaximus import ImplicitArray, is_implicit, materialize, register
from eformer.kernels import cpu, reference

from ._matmul._lowering import matmul_on_cpu
from ._matmul._operand import Grain, Leaves, MatmulOperand
from ._matmul._primitive import matmul_in_xla, matmul_stacks, note_partly_manual
from ._sharding import asked_of, is_explicit, sharding_of, shards, typed_as
from ._stored import check_array

if TYPE_CHECKING:
    from .implicit_array_rsr import RSROperatorBinary

# The sums of this many rows of x stay in cache (2 cores of an AMD EPYC; `benchmarks/matmul.py` shows the effect).
MAX_ROWS = 256


class RSROperator(MatmulOperand):
    """A matrix (..., n, m) given by codes (..., num_blocks, n) of one binary matrix, or two that are subtracted."""

    @abc.abstractmethod
    def _binaries(self) -> tuple[RSROperatorBinary, ...]:
        """The binary matrix, or the two whose difference this is."""

    def decode(self) -> jax.Array:
        return functools.reduce(jnp.subtract, (binary.decode() for binary in self._binaries()))

    def _codes_and_k(self) -> tuple[tuple[jax.Array, ...], int]:
        """The codes of the binary matrices and their `k`, checked: leaves also come from functions over trees."""
        check_array(self)
        return tuple(self._named_leaves().values()), self._binaries()[0].k

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

    def _named_leaves(self) -> Leaves:
        return {f"codes{i}": binary.codes for i, binary in enumerate(self._binaries())}

    def _leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        stack = tuple((axis, 1) for axis in range(self.ndim - 2))
        return {
            name: (*stack, (self.ndim - 1, binary.k), (self.ndim - 2, 1))
            for name, binary in zip(self._named_leaves(), self._binaries(), strict=True)
        }

    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
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


def _segment_matmul(x: jax.Array, codes: tuple[jax.Array, ...], k: int) -> jax.Array:
    """`x` (*stack, rows, n) @ the bits of `codes[0]` (*stack, blocks, n), minus `x` @ those of `codes[1]`, if given.

    It goes block by block: the sums of all blocks at once would be `2**k / k` times as large as the result.
    """
    rows, n = x.shape[-2:]
    if codes[0].ndim > 2:
        return lax.map(lambda each: _segment_matmul(each[0], each[1], k), (x, codes))
    if isinstance(rows, int) and rows > MAX_ROWS:  # a symbol, in a program to export, is not known to be more
        pieces = -(-rows // MAX_ROWS)
        filled = jnp.pad(x, ((0, -rows % pieces), (0, 0))).reshape(pieces, -(-rows // pieces), n)
        parts = lax.map(lambda piece: _segment_matmul(piece, codes, k), filled)
        return lax.collapse(parts, 0, 2)[:rows]
    table = reference.decode_rsr(jnp.arange(2**k, dtype=jnp.uint16)[None], k, k).astype(x.dtype).T

    signed = (x.T, -x.T)[: len(codes)]

    def one_block(block: tuple[jax.Array, ...]) -> jax.Array:
        sums = jnp.zeros((2**k, rows), x.dtype)
        for row_codes, terms in zip(block, signed, strict=True):
            sums = sums.at[row_codes.astype(jnp.int32) & (2**k - 1)].add(terms)  # as decoding takes `k` bits
        return lax.dot(table, sums, precision=lax.Precision.HIGHEST)  # a matmul, so that 0 times infinity is NaN

    return lax.collapse(lax.map(one_block, codes), 0, 2).T


@functools.partial(jax.jit, static_argnums=2)
def _matmul(x: jax.Array, q: RSROperator, dtype: np.dtype) -> jax.Array:
    """`x` (*stack, ..., n) @ `q` (*stack, n, m) as `dtype`."""
    stack, free = x.shape[: q.ndim - 2], x.shape[q.ndim - 2 : -1]
    count = math.prod(stack)
    stacked = jtu.tree_map(lambda codes: codes.reshape(count, *codes.shape[-2:]), q)
    x = x.reshape(count, *free, x.shape[-1]).astype(_accumulator(dtype))
    return matmul_stacks(x, stacked, 0, dtype).reshape(*stack, *free, q.shape[-1])


@matmul_on_cpu.register
def _(q: RSROperator, x: jax.Array, contracted_axis: int) -> jax.Array | None:
    if contracted_axis != 0 or x.dtype != jnp.float32 or not cpu.is_available():
        return None
    return cpu.segment_matmul(x, *q._codes_and_k())[..., : q.shape[-1]]


@matmul_in_xla.register
def _(q: RSROperator, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    del in_tiles
    if contracted_axis == 0:
        return _matmul_of_stack(q, x)
    like = jax.ShapeDtypeStruct((*x.shape[:-1], q.shape[1]), x.dtype)
    return jax.linear_transpose(functools.partial(_matmul_of_stack, q), like)(x)[0]


def _matmul_of_stack(q: RSROperator, x: jax.Array) -> jax.Array:
    """`x` (count, ..., n) @ `q` (count, n, m), in the dtype of `x`."""
    count, *free, n = x.shape
    rows, (codes, k) = x.reshape(count, math.prod(free), n), q._codes_and_k()
    out = _segment_matmul(rows[0], tuple(c[0] for c in codes), k) if count == 1 else _segment_matmul(rows, codes, k)
    return out[..., : q.shape[-1]].reshape(count, *free, q.shape[-1])


def _accumulator(dtype: np.dtype) -> np.dtype:
    """`dtype`, of at least 32 bits."""
    if dtype.itemsize >= 4:
        return dtype
    kinds = {jnp.floating: jnp.float32, jnp.unsignedinteger: jnp.uint32, jnp.signedinteger: jnp.int32}
    return next(jnp.dtype(wide) for kind, wide in kinds.items() if jnp.issubdtype(dtype, kind))


@register("dot_general")
def dot_general(
    primitive: Primitive,
    lhs: Any,  # another implicit array too
    rhs: RSROperator,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    **params: Any,
) -> Any:
    """`x @ operator`, over any axis of `x`, and of stacks of both. Whatever `precision` is asked for is met."""
    del primitive
    (x_summed, q_summed), (x_batch, q_batch) = dimension_numbers
    return _contract(lhs, rhs, (x_batch, x_summed), (q_batch, q_summed), **params)


@register("dot_general")
def dot_general_lhs(
    primitive: Primitive,
    lhs: RSROperator,
    rhs: Any,  # another implicit array too
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    **params: Any,
) -> Any:
    """The same, transposed, as `einsum` asks for it. `operator @ x`, which sums over columns, has no rule."""
    del primitive
    (q_summed, x_summed), (q_batch, x_batch) = dimension_numbers
    out = _contract(rhs, lhs, (x_batch, x_summed), (q_batch, q_summed), **params)
    return out if out is NotImplemented else jnp.moveaxis(out, -1, lhs.ndim - 2)


def _contract(
    x: Any,
    q: RSROperator,
    x_axes: tuple[Sequence[int], Sequence[int]],
    q_axes: tuple[Sequence[int], Sequence[int]],
    *,
    preferred_element_type: DTypeLike | None,
    precision: object = None,
    **params: Any,
) -> Any:
    """The matmul with (batch axes, summed axes) of each operand; NotImplemented unless those of `q` are its rows."""
    del precision
    stack = q.ndim - 2
    rows = (tuple(range(stack)), (stack,))
    dtype = jnp.dtype(preferred_element_type or jnp.result_type(x.dtype, q.dtype))
    loses = _accumulator(dtype).itemsize < x.dtype.itemsize
    asked = asked_of(params)
    if tuple(map(tuple, q_axes)) != rows or not q.use_kernel or loses or asked - {"out_sharding"}:
        return NotImplemented
    x = materialize(x)
    x_batch, x_summed = x_axes

    def by_codes(x: jax.Array, q: RSROperator) -> jax.Array:
        note_partly_manual(q)
        return _matmul(jnp.moveaxis(x, (*x_batch, *x_summed), (*range(stack), -1)), q, dtype)

    def dense(x: jax.Array, q: RSROperator) -> jax.Array:
        numbers = ((x_summed, q_axes[1]), (x_batch, q_axes[0]))
        return lax.dot_general(x, q.materialize(), numbers, preferred_element_type=dtype, **params)

    if asked or any(is_explicit(sharding_of(leaf)) for leaf in (x, *jtu.tree_leaves(q))):
        return typed_as(dense, by_codes)(x, q)
    return by_codes(x, q)
