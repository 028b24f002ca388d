"""Binary and ternary matrices for `v @ A` by Redundant Segment Reduction (arXiv 2411.06360).

The columns are taken in blocks of `k`, so that a row of a block is an integer of `k` bits. Rows with the same integer
do the same to `v`: their elements of `v` are summed first, and the `2**k` sums meet the table of all bit strings.
That is `m / k * (n + k * 2**k)` operations in place of `n * m`, and for `k == 8` a matrix of `n * m / 8` bytes.

>>> import jax.numpy as jnp
>>> from eformer.ops.quantization import RSROperatorBinary, RSROperatorTernary
>>>
>>> # Binary matrix
>>> A = jnp.array([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=jnp.int32)
>>> rsr = RSROperatorBinary.from_matrix(A, k=4)
>>> v = jnp.array([1.0, 2.0])
>>> result = rsr.dot(v)  # Efficient v @ A
>>> result
Array([2., 1., 1., 2.], dtype=float32)
>>>
>>> # Ternary matrix
>>> B = jnp.array([[-1, 0, 1], [1, -1, 0]], dtype=jnp.int32)
>>> rsr_ternary = RSROperatorTernary.from_matrix(B, k=4)
>>> rsr_ternary.dot(v)
Array([ 1., -2.,  1.], dtype=float32)
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from eformer.jaximus import aux_field, is_implicit, materialize, register
from eformer.kernels import cpu, reference

from ._input import as_floats, checked_array, without_loss
from ._matmul._operand import Grain, Leaves, MatmulOperand
from ._matmul._primitive import matmul, matmul_in_xla
from ._sharding import asked_of, is_explicit, laid_out, sharding_of, shards, typed_as
from ._validation import Leaf, Part, Rules, a_number_type, an_int, check_fields

MAX_K = 16  # the table of `2**k` sums of a block outgrows every cache soon after
# The sums of this many rows of x stay in cache (2 cores of an AMD EPYC; `benchmarks/matmul.py` shows the effect).
MAX_ROWS = 256


class RSROperator(MatmulOperand):
    """What the binary and the ternary operator share: all that follows from the binary matrices they are made of."""

    commute_ops: ClassVar[bool] = True
    warn_on_materialize: ClassVar[bool] = True

    @abc.abstractmethod
    def _binaries(self) -> tuple[RSROperatorBinary, ...]:
        """The matrix, or two of which it is the difference."""

    def decode(self) -> jax.Array:
        return functools.reduce(jnp.subtract, (b.decode() for b in self._binaries()))

    def _product(self, x: jax.Array) -> jax.Array:
        """`x` of shape (*stack, rows, n) times this of shape (*stack, n, m), in the dtype of `x`."""
        return _segment_matmul(x, *self._codes_and_k())[..., : self.shape[-1]]

    def _codes_and_k(self) -> tuple[tuple[jax.Array, ...], int]:
        """The codes of the binary matrices and their `k`; a ValueError where they do not go together.

        Constructors see to it, but leaves and fields also come from files, and from functions over trees.
        """
        binaries = self._binaries()
        codes, k = tuple(b.codes for b in binaries), binaries[0].k
        check_k(k)
        if any(b.k != k or b.codes.shape != codes[0].shape or b.codes.dtype != _code_dtype(k) for b in binaries):
            given = " and ".join(f"{b.codes.dtype}{list(b.codes.shape)} with `k={b.k}`" for b in binaries)
            raise ValueError(f"codes for `k={k}` are {_code_dtype(k)}, and those of both halves alike, got {given}")
        return codes, k

    def dot(self, v: Any) -> Any:  # an implicit array too
        """`v @ A` for `v` of shape (..., n), without `A`: note the order, which is not that of `jax.Array.dot`.

        The result has the shape and dtype of the dense product. Half precision is summed in float32 and rounded once;
        integers wrap as they do in the dense product. Floats are summed in another order, so last digits may differ.

        A NaN or an infinity in `v` gives NaN wherever it does in the dense product (that multiplies it by each 0 too).
        It gives NaN also in place of an infinity in a ternary product, and in place of some finite numbers when finite
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
        return jtu.tree_unflatten(jtu.tree_structure(self), leaves)

    def leaf_specs(self, spec: PartitionSpec) -> Any:
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


@register_array_type
class RSROperatorBinary(RSROperator):
    """A matrix of {0, 1} of shape (n, m): `codes[b, i]` is `A[i, b * k : (b + 1) * k]` read as bits, the highest first.

    `codes` has shape (ceil(m / k), n), one byte each up to `k == 8` and two up to `k == 16`; axes before these stack
    matrices. The last `padding` columns are none of the matrix's. `org_dtype` is the dtype that was asked for first;
    `dtype`, by default the same, is that of `materialize()` now.

    The constructor takes `codes`, or the documented `one_hot_maps` of shape (num_blocks, n, 2**k), which is not stored:
    at `k == 8` it would be 32 times the dense matrix in bytes. Codes may also stand in the place of `one_hot_maps`.

    >>> import jax.numpy as jnp
    >>> A = jnp.array([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=jnp.int32)
    >>> rsr = RSROperatorBinary.from_matrix(A, k=4)
    >>> v = jnp.array([1.0, 2.0])
    >>> result = rsr.dot(v)  # Computes v @ A efficiently
    >>> rsr.codes
    Array([[6, 9]], dtype=uint8)
    """

    rules: ClassVar[Rules] = {
        "codes": Leaf("uint8, or from `k=9` on uint16", (jnp.uint8, jnp.uint16)),
        "k": lambda _, k: check_k(k),
        "padding": an_int,
        "org_dtype": a_number_type,
    }

    codes: jax.Array
    k: int = aux_field()
    padding: int = aux_field()
    org_dtype: Any = aux_field()  # any dtype-like goes in, an `np.dtype` is stored

    def __init__(
        self,
        one_hot_maps: jax.Array | None = None,
        k: int = 8,
        padding: int = 0,
        org_dtype: Any = jnp.float32,
        *,
        codes: jax.Array | None = None,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        use_kernel: bool = True,
        activation_dtype: str | None = None,
    ) -> None:
        check_k(k)
        if (one_hot_maps is None) == (codes is None):
            raise TypeError("give `one_hot_maps` or `codes`: either says what the matrix is, and none or both do not")
        codes = _checked_codes(one_hot_maps, k) if codes is None else _in_range(jnp.asarray(codes), k)
        org_dtype = _checked_dtype(org_dtype)
        dtype = org_dtype if dtype is None else _checked_dtype(dtype)
        static = {"k": k, "padding": padding, "org_dtype": org_dtype, "dtype": dtype}
        how = {"use_kernel": use_kernel, "activation_dtype": activation_dtype}
        for name, value in {"codes": codes, **static, **how}.items():
            object.__setattr__(self, name, value)
        self._settle(shape)

    def _check_shapes(self) -> None:
        if len(self.codes.shape) < 2 or self.codes.dtype != (jnp.uint8 if self.k <= 8 else jnp.uint16):
            raise ValueError(
                f"codes for `k={self.k}` are {'uint8' if self.k <= 8 else 'uint16'} of shape (num_blocks, n), got "
                f"{self.codes.dtype}{list(self.codes.shape)}"
            )
        if not 0 <= self.padding < self.k:
            raise ValueError(
                f"`padding={self.padding}` must be from 0 to {self.k - 1}: "
                f"with `k={self.k}` more would be a whole block"
            )
        if self.padding and not self.codes.shape[-2]:
            raise ValueError(f"`padding={self.padding}` columns of no block: a matrix without columns has `padding=0`")

    def check_values(self) -> None:
        largest = int(np.max(self.codes, initial=0))
        if largest >= 2**self.k:
            raise ValueError(f"codes for `k={self.k}` are from 0 to {2**self.k - 1}, and there is a {largest}")

    @classmethod
    def from_matrix(cls, A: jax.Array, k: int = 8, org_dtype: Any = jnp.float32) -> Self:
        """The operator of an integer matrix of {0, 1}, to be materialized as `org_dtype`.

        Another value raises a ValueError where values can be seen; under tracing it is clipped. A TypeError if the
        matrix is not of an integer dtype.
        """
        return laid_out(lambda x: cls._of(x, k, org_dtype), _checked_matrix(A, 0))

    @classmethod
    def quantize(cls, A: jax.Array, k: int = 8) -> Self:
        """The operator of the matrix that is 1 where `A` is above 0, and else 0, in the dtype of `A`.

        This is what packing to one bit means to an operator of {0, 1}: such a matrix stays as it is. A NaN raises a
        ValueError where values can be seen; under tracing it becomes 0, for one bit can't tell. Integers must be held
        exactly; `from_matrix` takes those of {0, 1} under tracing too.
        """
        x = _checked_rank(checked_array(A))
        _check_no_nan(x)
        return without_loss(lambda x: laid_out(lambda x: cls._of(x, k, x.dtype), x), x, cls.__name__)

    @classmethod
    def _of(cls, x: jax.Array, k: int, dtype: Any, sign: int = 1) -> Self:
        check_k(k)
        return cls(_encoded(x, k, sign), k, -x.shape[1] % k, dtype)

    @property
    def one_hot_maps(self) -> jax.Array:
        """The documented array of shape (num_blocks, n, 2**k), int8, built at each call: `2**k` bytes a code."""
        return jax.nn.one_hot(self.codes, 2**self.k, dtype=jnp.int8)

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.codes.shape) < 2:
            raise ValueError(
                f"codes of shape {self.codes.shape} are no matrix: `vmap` over an RSR operator takes a stack of "
                f"matrices apart, not one matrix into rows; `materialize()` it first"
            )
        *stack, blocks, rows = self.codes.shape
        return (*stack, rows, blocks * self.k - self.padding)

    def _binaries(self) -> tuple[RSROperatorBinary, ...]:
        return (self,)

    def decode(self) -> jax.Array:
        return _decoded(self.codes, self.k, self.shape[-1])

    def _step_bound(self, original: jax.Array) -> jax.Array:
        x = original.astype(jnp.float32)
        return jnp.where(x > 0, jnp.abs(x - 1), -x)

    def _splits_columns(self, parts: int) -> bool:
        """Whether that many devices can have whole blocks, and as many columns each."""
        return parts == 1 or (self.padding == 0 and self.codes.shape[-2] % parts == 0)


@register_array_type
class RSROperatorTernary(RSROperator):
    """A matrix of {-1, 0, 1} as `rsr_b1 - rsr_b2`, two of {0, 1}: where it is 1, and where it is -1.

    Twice the memory of `RSROperatorBinary`, and almost twice the time.

    >>> import jax.numpy as jnp
    >>> A = jnp.array([[-1, 0, 1], [1, -1, 0]], dtype=jnp.int32)
    >>> rsr = RSROperatorTernary.from_matrix(A, k=4)
    >>> v = jnp.array([1.0, 2.0])
    >>> result = rsr.dot(v)  # Computes v @ A efficiently
    >>> rsr.rsr_b1.materialize()
    Array([[0., 0., 1.],
           [1., 0., 0.]], dtype=float32)
    """

    rules: ClassVar[Rules] = {"rsr_b1": Part(RSROperatorBinary), "rsr_b2": Part(RSROperatorBinary)}

    rsr_b1: RSROperatorBinary
    rsr_b2: RSROperatorBinary

    def __post_init__(self) -> None:
        check_fields(self, self.rules)
        if self.dtype is None:
            object.__setattr__(self, "dtype", self.rsr_b1.dtype)

    def _check_shapes(self) -> None:
        first, second = ((b.shape, b.k) for b in self._binaries())
        if first != second:
            raise ValueError(
                f"`rsr_b1` and `rsr_b2` must have the same shape and `k`, for the matrix is their difference: got "
                f"{first[0]} with `k={first[1]}` and {second[0]} with `k={second[1]}`"
            )
        if jnp.issubdtype(self.dtype, jnp.unsignedinteger):
            raise ValueError(f"`dtype={self.dtype}` can't hold -1; a signed or floating point dtype can")

    def check_values(self) -> None:
        for binary in self._binaries():
            binary.check_values()

    @classmethod
    def from_matrix(cls, A: jax.Array, k: int = 8) -> Self:
        """The operator of an integer matrix of {-1, 0, 1}, to be materialized as float32.

        Another value raises a ValueError where values can be seen; under tracing it is clipped. A TypeError if the
        matrix is not of an integer dtype.
        """
        return laid_out(lambda x: cls._of(x, k, jnp.float32), _checked_matrix(A, -1))

    @classmethod
    def quantize(cls, A: jax.Array, k: int = 8) -> Self:
        """The operator of `A` rounded as by `quantize(A, dtype="ternary")`, in the dtype of `A`.

        That is 1 above half a standard deviation of the whole matrix, -1 below minus that, else 0; a matrix of
        {-1, 0, 1} stays as it is. A NaN or an infinity leaves no standard deviation: a ValueError where values can be
        seen; under tracing the matrix becomes 0, for the format has no code for it. Integers must be held exactly;
        `from_matrix` takes those of {-1, 0, 1} under tracing too.
        """

        def make(x: jax.Array) -> Self:
            values = _ternary(as_floats(x))
            _check_no_nan(values)
            return laid_out(lambda values: cls._of(values, k, x.dtype), values)

        return without_loss(make, _checked_rank(checked_array(A)), cls.__name__)

    @classmethod
    def _of(cls, values: jax.Array, k: int, dtype: Any) -> Self:
        return cls(*(RSROperatorBinary._of(values, k, dtype, sign) for sign in (1, -1)))

    def _binaries(self) -> tuple[RSROperatorBinary, ...]:
        return self.rsr_b1, self.rsr_b2

    def _step_bound(self, original: jax.Array) -> jax.Array:
        # Nothing is known of the threshold, so this is the larger distance of the two values of its sign.
        x = jnp.abs(original.astype(jnp.float32))
        return jnp.maximum(x, jnp.abs(x - 1))


def check_k(k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"`k` must be an int, got {type(k).__name__} {k!r}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"`k={k}` must be from 1 to {MAX_K}: it is the number of columns, so of bits, in a code")


def _code_dtype(k: int) -> np.dtype:
    return np.dtype(np.uint8 if k <= 8 else np.uint16)


def _checked_dtype(dtype: Any) -> np.dtype:
    found = jax.dtypes.canonicalize_dtype(dtype)
    if not (jnp.issubdtype(found, jnp.floating) or jnp.issubdtype(found, jnp.integer)):
        raise TypeError(f"an RSR operator is floating point or integer, got {found}")
    return found


def _checked_rank(x: jax.Array) -> jax.Array:
    if x.ndim != 2:
        raise ValueError(f"an RSR operator is made of a matrix, got an array of shape {x.shape}; vmap makes a stack")
    return x


def _checked_matrix(A: Any, smallest: int) -> jax.Array:
    x = _checked_rank(checked_array(A))
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"`from_matrix` takes an integer matrix, int32 or int8, got {x.dtype}; `quantize` takes floats")
    if not _hold(_all_within, x, smallest, 1):
        allowed = "{0, 1}" if smallest == 0 else "{-1, 0, 1}"
        raise ValueError(f"the matrix must have values in {allowed}, got some from {np.min(x)} to {np.max(x)}")
    return x


def _check_no_nan(x: jax.Array) -> None:
    if not _hold(_no_nan, x):
        raise ValueError("the matrix, or its standard deviation, is NaN: an RSR operator has no code for that")


def _checked_codes(maps: Any, k: int) -> jax.Array:
    """One-hot maps, or codes in their place, as codes in their dtype."""
    given = jnp.asarray(maps)
    if given.ndim == 2 and jnp.issubdtype(given.dtype, jnp.integer):
        return _in_range(given, k)
    if given.ndim != 3 or given.shape[-1] != 2**k:
        raise ValueError(
            f"`one_hot_maps` must have shape (num_blocks, n, {2**k}) for `k={k}`, or be integers, the codes, of shape "
            f"(num_blocks, n); got {given.dtype}{list(given.shape)}"
        )
    if not _hold(_one_hot, given):
        raise ValueError("`one_hot_maps` must be one-hot: a single 1 along the last axis, and else 0")
    return _in_range(jnp.argmax(given, axis=-1).astype(jnp.uint16), k)


def _in_range(codes: jax.Array, k: int) -> jax.Array:
    """Codes in their dtype; a stack of them too."""
    if codes.ndim < 2 or not jnp.issubdtype(codes.dtype, jnp.integer):
        raise ValueError(f"codes are integers of shape (num_blocks, n), got {codes.dtype}{list(codes.shape)}")
    info = jnp.iinfo(codes.dtype)
    if not 0 <= info.min < info.max < 2**k and not _hold(_all_within, codes, 0, 2**k - 1):
        raise ValueError(f"codes for `k={k}` are from 0 to {2**k - 1}, got {np.min(codes)} to {np.max(codes)}")
    return codes.astype(_code_dtype(k))


def _hold(condition: Callable[..., jax.Array], x: jax.Array, *args: Any) -> bool:
    """Whether the values of `x` meet the condition, or can't be seen."""
    if isinstance(x, Tracer):
        return True
    with jax.ensure_compile_time_eval():
        return bool(condition(x, *args))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _all_within(x: jax.Array, smallest: int, largest: int) -> jax.Array:
    info = jnp.iinfo(x.dtype)
    return jnp.all((x >= max(smallest, int(info.min))) & (x <= min(largest, int(info.max))))


@jax.jit
def _no_nan(x: jax.Array) -> jax.Array:
    return ~jnp.any(jnp.isnan(x))


@jax.jit
def _one_hot(maps: jax.Array) -> jax.Array:
    ones, zeros = maps == jnp.ones((), maps.dtype), maps == jnp.zeros((), maps.dtype)
    return jnp.all(ones | zeros) & jnp.all(jnp.sum(ones, -1, dtype=jnp.int32) == 1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encoded(x: jax.Array, k: int, sign: int) -> jax.Array:
    return reference.encode_rsr(x > 0 if sign > 0 else x < 0, k)


_decoded = jax.jit(reference.decode_rsr, static_argnums=(1, 2))
_ternary = jax.jit(reference.ternary)


def _segment_matmul(x: jax.Array, codes: tuple[jax.Array, ...], k: int) -> jax.Array:
    """`x` (*stack, rows, n) times the bits of `codes[0]` (*stack, blocks, n), less those of `codes[1]` if there is one.

    Block by block: the sums of all blocks at once would be `2**k / k` times as large as the result.
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

    def block_product(block: tuple[jax.Array, ...]) -> jax.Array:
        sums = jnp.zeros((2**k, rows), x.dtype)
        for row_codes, terms in zip(block, signed, strict=True):
            sums = sums.at[row_codes.astype(jnp.int32) & (2**k - 1)].add(terms)  # as decoding takes `k` bits
        return lax.dot(table, sums, precision=lax.Precision.HIGHEST)  # a product, so that 0 times infinity is NaN

    return lax.collapse(lax.map(block_product, codes), 0, 2).T


@functools.partial(jax.jit, static_argnums=2)
def _multiply(x: jax.Array, q: RSROperator, dtype: Any) -> jax.Array:
    """`x` (*stack, ..., n) times `q` (*stack, n, m) as `dtype`."""
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
        return _product_of_stack(q, x)
    like = jax.ShapeDtypeStruct((*x.shape[:-1], q.shape[1]), x.dtype)
    return jax.linear_transpose(functools.partial(_product_of_stack, q), like)(x)[0]


def _product_of_stack(q: RSROperator, x: jax.Array) -> jax.Array:
    """`x` (count, ..., n) times `q` (count, n, m)."""
    count, *free, n = x.shape
    rows = x.reshape(count, math.prod(free), n)
    out = jtu.tree_map(lambda codes: codes[0], q)._product(rows[0]) if count == 1 else q._product(rows)
    return out.reshape(count, *free, q.shape[-1])


def _accumulator(dtype: Any) -> np.dtype:
    """`dtype`, of at least 32 bits."""
    if jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    kinds = {jnp.floating: jnp.float32, jnp.unsignedinteger: jnp.uint32, jnp.signedinteger: jnp.int32}
    return next(jnp.dtype(wide) for kind, wide in kinds.items() if jnp.issubdtype(dtype, kind))


@register("dot_general")
def dot_general(
    primitive: Any,
    lhs: Any,  # another implicit array too
    rhs: RSROperatorBinary | RSROperatorTernary,
    *,
    dimension_numbers: Any,
    **params: Any,
) -> Any:
    """`x @ operator`, over any axis of `x`, and of stacks of both. Whatever `precision` is asked for is met."""
    del primitive
    (x_summed, q_summed), (x_batch, q_batch) = dimension_numbers
    return _contract(lhs, rhs, (x_batch, x_summed), (q_batch, q_summed), **params)


@register("dot_general")
def dot_general_lhs(
    primitive: Any,
    lhs: RSROperatorBinary | RSROperatorTernary,
    rhs: Any,  # another implicit array too
    *,
    dimension_numbers: Any,
    **params: Any,
) -> Any:
    """The same, transposed: how `einsum` puts it. Of `operator @ x`, which sums over columns, there is no rule."""
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
    preferred_element_type: Any,
    precision: Any = None,
    **params: Any,
) -> Any:
    """The product along the first axes in parallel, summed over the second; NotImplemented unless that is the rows."""
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

    def product(x: jax.Array, q: RSROperator) -> jax.Array:
        note_partly_manual(q)
        return _multiply(jnp.moveaxis(x, (*x_batch, *x_summed), (*range(stack), -1)), q, dtype)

    def dense(x: jax.Array, q: RSROperator) -> jax.Array:
        numbers = ((x_summed, q_axes[1]), (x_batch, q_axes[0]))
        return lax.dot_general(x, q.materialize(), numbers, preferred_element_type=dtype, **params)

    if asked or any(is_explicit(sharding_of(leaf)) for leaf in (x, *jtu.tree_leaves(q))):
        return typed_as(dense, product)(x, q)
    return product(x, q)


@register("convert_element_type")
def convert_element_type(
    primitive: Any, q: RSROperatorBinary | RSROperatorTernary, *, new_dtype: Any, weak_type: bool = False, **params: Any
) -> Any:
    """Only the dtype on record changes: every dtype has the values of the matrix, but for -1 without a sign."""
    del primitive
    kinds = (jnp.inexact, jnp.signedinteger if isinstance(q, RSROperatorTernary) else jnp.integer)
    if weak_type or any(value is not None for value in params.values()):
        return NotImplemented
    return q.with_dtype(new_dtype) if any(jnp.issubdtype(new_dtype, kind) for kind in kinds) else NotImplemented
