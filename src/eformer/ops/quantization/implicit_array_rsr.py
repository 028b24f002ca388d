"""Binary and ternary matrices for `v @ A` by Redundant Segment Reduction (arXiv 2411.06360).

The columns of `A` (n, m) are taken in blocks of `k`, so that a row of a block is an integer of `k` bits. Elements of
`v` that meet the same integer are summed first; the `2**k` sums are then multiplied by the table of all bit strings.
That takes `m / k * (n + k * 2**k)` operations in place of `n * m`, and for `k == 8` a matrix takes `n * m / 8` bytes.

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

from collections.abc import Sequence
from types import NotImplementedType
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from eformer.jaximus import aux_field, register

from . import _rsr_codes as rsr
from ._input import as_floats, without_loss
from ._registry import register_array_type
from ._rsr_operator import RSROperator
from ._sharding import laid_out
from ._stored import check_array
from ._validation import Leaf, Part, Rules, a_number_type, an_int, check_fields


@register_array_type
class RSROperatorBinary(RSROperator):
    """A matrix of {0, 1} of shape (n, m): `codes[b, i]` is `A[i, b * k : (b + 1) * k]` read as bits, the highest first.

    `codes` has shape (ceil(m / k), n), one byte each up to `k == 8` and two up to `k == 16`; axes before these stack
    matrices. The last `padding` columns do not belong to the matrix. `org_dtype` is the dtype that was asked for first;
    `dtype`, by default the same, is that of `materialize()` now.

    The constructor takes `codes`, or the documented `one_hot_maps` of shape (num_blocks, n, 2**k), which is not stored:
    at `k == 8` it would be 32 times the dense matrix in bytes. Codes may also be given as `one_hot_maps`.

    >>> import jax.numpy as jnp
    >>> A = jnp.array([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=jnp.int32)
    >>> rsr = RSROperatorBinary.from_matrix(A, k=4)
    >>> v = jnp.array([1.0, 2.0])
    >>> result = rsr.dot(v)  # Computes v @ A efficiently
    >>> rsr.codes
    Array([[6, 9]], dtype=uint8)
    """

    _rules: ClassVar[Rules] = {
        "codes": Leaf("uint8, or from `k=9` on uint16", (jnp.uint8, jnp.uint16)),
        "k": rsr.check_k,
        "padding": an_int,
        "org_dtype": a_number_type,
    }

    codes: jax.Array
    k: int = aux_field()
    padding: int = aux_field()
    org_dtype: np.dtype = aux_field()

    def __init__(
        self,
        one_hot_maps: jax.Array | None = None,
        k: int = 8,
        padding: int = 0,
        org_dtype: DTypeLike = jnp.float32,
        *,
        codes: jax.Array | None = None,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        use_kernel: bool = True,
        activation_dtype: str | None = None,
    ) -> None:
        rsr.check_k("k", k)
        if one_hot_maps is not None and codes is None:
            codes = rsr.codes_of_maps(one_hot_maps, k)
        elif one_hot_maps is None and codes is not None:
            codes = rsr.checked_codes(jnp.asarray(codes), k)
        else:
            raise TypeError("give `one_hot_maps` or `codes`: either says what the matrix is, and none or both do not")
        org_dtype = rsr.checked_dtype(org_dtype)
        static = {"k": k, "padding": padding, "org_dtype": org_dtype, "use_kernel": use_kernel}
        dtype = org_dtype if dtype is None else rsr.checked_dtype(dtype)
        self._construct(shape, codes=codes, dtype=dtype, activation_dtype=activation_dtype, **static)

    def _check_shapes(self) -> None:
        if len(self.codes.shape) < 2 or self.codes.dtype != rsr.code_dtype(self.k):
            raise ValueError(
                f"codes for `k={self.k}` are {rsr.code_dtype(self.k)} of shape (num_blocks, n), got "
                f"{self.codes.dtype}{list(self.codes.shape)}"
            )
        if not 0 <= self.padding < self.k:
            raise ValueError(
                f"`padding={self.padding}` must be from 0 to {self.k - 1}: "
                f"with `k={self.k}` more would be a whole block"
            )
        if self.padding and not self.codes.shape[-2]:
            raise ValueError(f"`padding={self.padding}` columns of no block: a matrix without columns has `padding=0`")

    def _check_codes(self) -> None:
        largest = int(np.max(self.codes, initial=0))
        if largest >= 2**self.k:
            raise ValueError(f"codes for `k={self.k}` are from 0 to {2**self.k - 1}, and there is a {largest}")

    @classmethod
    def from_matrix(cls, A: jax.Array, k: int = 8, org_dtype: DTypeLike = jnp.float32) -> Self:
        """The operator of an integer matrix of {0, 1}, to be materialized as `org_dtype`.

        Another value raises a ValueError where values can be seen; under tracing it is clipped. A TypeError if the
        matrix is not of an integer dtype.
        """
        return laid_out(lambda x: cls._of(x, k, org_dtype), rsr.checked_integers(A, 0))

    @classmethod
    def quantize(cls, A: jax.Array, k: int = 8) -> Self:
        """The operator of the matrix that is 1 where `A` is above 0, and else 0, in the dtype of `A`.

        This is what packing to one bit means to an operator of {0, 1}: such a matrix stays as it is. A NaN raises a
        ValueError where values can be seen; under tracing it becomes 0, for one bit can't tell. Integers must be held
        exactly; `from_matrix` takes those of {0, 1} under tracing too.
        """
        x = rsr.checked_matrix(A)
        rsr.check_no_nan(x)
        return without_loss(lambda x: laid_out(lambda x: cls._of(x, k, x.dtype), x), x, cls.__name__)

    @classmethod
    def _of(cls, x: jax.Array, k: int, dtype: DTypeLike, sign: int = 1) -> Self:
        rsr.check_k("k", k)
        return cls(rsr.encode(x, k, sign), k, -x.shape[1] % k, dtype)

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
        return rsr.decode(self.codes, self.k, self.shape[-1])

    def _step_bound(self, original: jax.Array) -> jax.Array:
        x = original.astype(jnp.float32)
        return jnp.where(x > 0, jnp.abs(x - 1), -x)

    def _splits_columns(self, parts: int) -> bool:
        """Whether each of `parts` devices can have whole blocks and the same number of columns."""
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

    _rules: ClassVar[Rules] = {"rsr_b1": Part(RSROperatorBinary), "rsr_b2": Part(RSROperatorBinary)}

    rsr_b1: RSROperatorBinary
    rsr_b2: RSROperatorBinary

    def __post_init__(self) -> None:
        check_fields(self, self._rules)
        if self.dtype is None:
            vars(self)["dtype"] = self.rsr_b1.dtype

    def _check_shapes(self) -> None:
        for binary in self._binaries():
            check_array(binary)
        first, second = ((b.shape, b.k) for b in self._binaries())
        if first != second:
            raise ValueError(
                f"`rsr_b1` and `rsr_b2` must have the same shape and `k`, for the matrix is their difference: got "
                f"{first[0]} with `k={first[1]}` and {second[0]} with `k={second[1]}`"
            )
        if jnp.issubdtype(self.dtype, jnp.unsignedinteger):
            raise ValueError(f"`dtype={self.dtype}` can't hold -1; a signed or floating point dtype can")

    def _check_codes(self) -> None:
        for binary in self._binaries():
            binary._check_codes()

    @classmethod
    def from_matrix(cls, A: jax.Array, k: int = 8) -> Self:
        """The operator of an integer matrix of {-1, 0, 1}, to be materialized as float32.

        Another value raises a ValueError where values can be seen; under tracing it is clipped. A TypeError if the
        matrix is not of an integer dtype.
        """
        return laid_out(lambda x: cls._of(x, k, jnp.float32), rsr.checked_integers(A, -1))

    @classmethod
    def quantize(cls, A: jax.Array, k: int = 8) -> Self:
        """The operator of `A` rounded as by `quantize(A, dtype="ternary")`, in the dtype of `A`.

        That is 1 above half a standard deviation of the whole matrix, -1 below minus that, else 0; a matrix of
        {-1, 0, 1} stays as it is. A NaN or an infinity leaves no standard deviation: a ValueError where values can be
        seen; under tracing the matrix becomes 0, for the format has no code for it. Integers must be held exactly;
        `from_matrix` takes those of {-1, 0, 1} under tracing too.
        """

        def make(x: jax.Array) -> Self:
            values = rsr.ternary(as_floats(x))
            rsr.check_no_nan(values)
            return laid_out(lambda values: cls._of(values, k, x.dtype), values)

        return without_loss(make, rsr.checked_matrix(A), cls.__name__)

    @classmethod
    def _of(cls, values: jax.Array, k: int, dtype: DTypeLike) -> Self:
        return cls(*(RSROperatorBinary._of(values, k, dtype, sign) for sign in (1, -1)))

    def _binaries(self) -> tuple[RSROperatorBinary, ...]:
        return self.rsr_b1, self.rsr_b2

    def _step_bound(self, original: jax.Array) -> jax.Array:
        # Nothing is known of the threshold, so this is the larger distance of the two values of its sign.
        x = jnp.abs(original.astype(jnp.float32))
        return jnp.maximum(x, jnp.abs(x - 1))


@register("convert_element_type")
def convert_element_type(
    primitive: Primitive, q: RSROperator, *, new_dtype: DTypeLike, weak_type: bool = False, **params: object
) -> RSROperator | NotImplementedType:
    """Change the dtype on record alone: every dtype has the values of the matrix, but for -1 without a sign."""
    del primitive
    kinds = (jnp.inexact, jnp.signedinteger if isinstance(q, RSROperatorTernary) else jnp.integer)
    if weak_type or any(value is not None for value in params.values()):
        return NotImplemented
    return q.with_dtype(new_dtype) if any(jnp.issubdtype(new_dtype, kind) for kind in kinds) else NotImplemented
