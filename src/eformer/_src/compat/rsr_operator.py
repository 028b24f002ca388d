"""`RSROperator`: what the binary and the ternary operator share, which is all that follows from their codes."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from eformer._src.jaximus.array import ImplicitArray, is_implicit, materialize
from eformer._src.jaximus.rules import register
from eformer._src.kernels import cpu, reference
from eformer._src.quantization.base import Grain, Leaves, MatmulOperand
from eformer._src.quantization.input import without_loss
from eformer._src.quantization.matmul.dot_general import contract_stack, contraction_of, has_explicit_sharding
from eformer._src.quantization.matmul.lowering import matmul_on_cpu
from eformer._src.quantization.matmul.primitive import matmul_in_xla, note_partly_manual
from eformer._src.quantization.matmul.tiles import Contraction, Numbers
from eformer._src.quantization.sharding import asked_of, laid_out, sharding_of, shards, typed_as
from eformer._src.quantization.stored import check_array

from . import rsr_codes as rsr

if TYPE_CHECKING:
    from .rsr import RSROperatorBinary

# Sums for this many rows of x stay in cache (2 cores of an AMD EPYC; `benchmarks/matmul.py` shows the effect).
MAX_ROWS = 256


class RSROperator(MatmulOperand):
    """A matrix (..., n, m) given by codes (..., num_blocks, n) of one binary matrix, or two that are subtracted."""

    _smallest: ClassVar[int] = 0  # the values of the matrix are from this one to 1

    @classmethod
    def from_matrix(cls, A: jax.Array, k: int = 8, org_dtype: DTypeLike = jnp.float32) -> Self:
        """The operator of an integer matrix of {0, 1}, or {-1, 0, 1} if it is ternary, materialized as `org_dtype`.

        Another value raises a ValueError where values can be seen; under tracing it is clipped. A TypeError if the
        matrix is not of an integer dtype.
        """
        return laid_out(lambda x: cls._of(x, k, org_dtype), rsr.checked_integers(A, cls._smallest))

    @classmethod
    def quantize(cls, A: jax.Array, k: int = 8) -> Self:
        """The operator of `A` rounded to the values it has codes for, in the dtype of `A`.

        A binary one is 1 where `A` is above 0, and else 0. A ternary one is rounded as by
        `quantize(A, dtype="ternary")`: 1 above half a standard deviation of the whole matrix, -1 below minus that, else
        0. A NaN, or without a standard deviation an infinity too, raises a ValueError where values can be seen; under
        tracing it becomes 0. Integers must be held exactly; `from_matrix` takes those it holds under tracing too.
        """

        def make(x: jax.Array) -> Self:
            values = cls._rounded(x)
            rsr.check_no_nan(values)
            return laid_out(lambda values: cls._of(values, k, x.dtype), values)

        return without_loss(make, rsr.checked_matrix(A), cls.__name__)

    @classmethod
    @abc.abstractmethod
    def _of(cls, values: jax.Array, k: int, dtype: DTypeLike) -> Self:
        """The operator of a matrix of its values, to be materialized as `dtype`."""

    @classmethod
    def _rounded(cls, x: jax.Array) -> jax.Array:
        """`x` rounded to numbers whose sign `_of` encodes."""
        return x

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

        Half precision is summed in float32 and rounded once; integers wrap as in the dense matmul. Floats are summed in
        another order, so last digits may differ. A NaN or an infinity in `v` gives NaN wherever it does in the dense
        matmul. It does so also in place of an infinity in a ternary matmul, and of some finite numbers where elements
        of `v` sum up to more than the largest float; never a finite number that is wrong.

        Inside `implicit` an argument is an array among arrays, and has their `dot`: write `v @ operator` there.
        """
        return (v if is_implicit(v) else jnp.asarray(v)) @ self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._binaries()[0].shape

    def _can_become(self, dtype: DTypeLike) -> bool:
        """Every dtype has the values of the matrix, but for -1 without a sign."""
        kinds = (jnp.inexact, jnp.signedinteger if self._smallest < 0 else jnp.integer)
        return any(jnp.issubdtype(dtype, kind) for kind in kinds)

    def is_stacked(self) -> bool:
        return self.ndim > 2

    def _named_leaves(self) -> Leaves:
        return {f"codes{i}": binary.codes for i, binary in enumerate(self._binaries())}

    def _leaf_axes(self) -> dict[str, tuple[tuple[int, Grain], ...]]:
        stack, k = tuple((axis, 1) for axis in range(self.ndim - 2)), self._binaries()[0].k
        return dict.fromkeys(self._named_leaves(), (*stack, (self.ndim - 1, k), (self.ndim - 2, 1)))

    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        del grains  # no part cuts a code
        return jtu.tree_unflatten(jtu.tree_structure(self), leaves.values())

    def leaf_specs(self, spec: PartitionSpec) -> Self | None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return super().leaf_specs(spec)
        *stack, rows, columns = [*spec, *[None] * (self.ndim - len(spec))]
        if not self._splits_columns(shards(mesh, columns)):
            return None
        return jtu.tree_map(lambda _: PartitionSpec(*stack, columns, rows), self)

    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        mesh, (*stack, rows, columns) = sharding.mesh, sharding.spec
        spec = PartitionSpec(*stack, columns if self._splits_columns(shards(mesh, columns)) else None, rows)
        return jtu.tree_map(lambda _: NamedSharding(mesh, spec, memory_kind=sharding.memory_kind), self)

    def _splits_columns(self, parts: int) -> bool:
        """Whether each of `parts` devices can have whole blocks and the same number of columns."""
        first = self._binaries()[0]
        return parts == 1 or (first.padding == 0 and first.codes.shape[-2] % parts == 0)

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
    """`x` (rows, n) @ the bits of `codes[0]` (blocks, n), minus `x` @ those of `codes[1]`, if given.

    It goes block by block: the sums of all blocks at once would be `2**k / k` times as large as the result.
    """
    rows, n = x.shape
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


@functools.partial(jax.jit, static_argnums=(2, 3))
def _matmul(x: jax.Array, q: RSROperator, contraction: Contraction, dtype: np.dtype) -> jax.Array:
    """`x` times `q` (*stack, n, m) as `dtype`."""
    count = math.prod(q.shape[:-2])
    stacked = jtu.tree_map(lambda codes: codes.reshape(count, *codes.shape[-2:]), q)
    return contract_stack(x.astype(_accumulator(dtype)), stacked, 0, contraction, dtype)


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
    out = lax.map(lambda each: _segment_matmul(each[0], each[1], k), (rows, codes))
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
    dimension_numbers: Numbers,
    preferred_element_type: DTypeLike | None,
    **params: Any,
) -> Any:
    """`x @ operator`, over any axis of `x`, and of stacks of both. Whatever `precision` is asked for is met."""
    stack, contraction = rhs.ndim - 2, contraction_of(dimension_numbers, lhs.ndim, rhs.ndim)
    over_rows = (contraction.q_batch, contraction.q_summed) == (tuple(range(stack)), (stack,))
    dtype = jnp.dtype(preferred_element_type or jnp.result_type(lhs.dtype, rhs.dtype))
    loses = _accumulator(dtype).itemsize < lhs.dtype.itemsize
    asked = asked_of(params) - {"precision"}
    if not over_rows or not rhs.use_kernel or loses or asked - {"out_sharding"}:
        return NotImplemented

    def by_codes(x: jax.Array, q: RSROperator) -> jax.Array:
        note_partly_manual(q)
        return _matmul(x, q, contraction, dtype)

    def dense(x: jax.Array, q: RSROperator) -> jax.Array:
        how = {"dimension_numbers": dimension_numbers, "preferred_element_type": dtype, **params}
        return primitive.bind(x, q.materialize(), **how)

    x = materialize(lhs)
    run = typed_as(dense, by_codes) if asked or has_explicit_sharding(x, rhs) else by_codes
    return run(x, rhs)


@register("dot_general")
def dot_general_lhs(
    primitive: Primitive,
    lhs: RSROperator,
    rhs: Any,  # another implicit array too
    *,
    dimension_numbers: Numbers,
    **params: Any,
) -> Any:
    """The same, transposed, as `einsum` asks for it. `operator @ x`, which sums over columns, has no rule."""
    if "out_sharding" in asked_of(params):  # it names the axes in their order before
        return NotImplemented
    (q_summed, x_summed), (q_batch, x_batch) = dimension_numbers
    swapped = ((x_summed, q_summed), (x_batch, q_batch))
    out = dot_general(primitive, rhs, lhs, dimension_numbers=swapped, **params)
    return out if out is NotImplemented else jnp.moveaxis(out, -1, lhs.ndim - 2)
