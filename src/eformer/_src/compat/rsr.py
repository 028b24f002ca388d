"""Binary and ternary matrices for `v @ A` by Redundant Segment Reduction (arXiv 2411.06360).

The columns of `A` (n, m) are taken in blocks of `k`, so that a row of a block is an integer of `k` bits. Elements of
`v` that meet the same integer are summed first; the `2**k` sums are then multiplied by the table of all bit strings.
That takes `m / k * (n + k * 2**k)` operations in place of `n * m`, and for `k == 8` a matrix takes `n * m / 8` bytes.

>>> import jax.numpy as jnp
>>> from eformer.ops.quantization import RSROperatorBinary, RSROperatorTernary
>>> A = jnp.array([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=jnp.int32)
>>> rsr = RSROperatorBinary.from_matrix(A, k=4)
>>> v = jnp.array([1.0, 2.0])
>>> result = rsr.dot(v)  # Efficient v @ A
>>> result
Array([2., 1., 1., 2.], dtype=float32)
>>> rsr.codes
Array([[6, 9]], dtype=uint8)
>>> B = jnp.array([[-1, 0, 1], [1, -1, 0]], dtype=jnp.int32)
>>> rsr_ternary = RSROperatorTernary.from_matrix(B, k=4)
>>> rsr_ternary.dot(v)
Array([ 1., -2.,  1.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._src.jaximus.array import aux_field
from eformer._src.kernels import reference
from eformer._src.quantization.input import as_floats
from eformer._src.quantization.registry import register_array_type
from eformer._src.quantization.stored import check_array
from eformer._src.quantization.validation import FieldChecks, LeafCheck, a_number_type, an_int, check_fields

from . import rsr_codes as rsr
from .rsr_operator import RSROperator


@register_array_type
class RSROperatorBinary(RSROperator):
    """A matrix of {0, 1} of shape (n, m): `codes[b, i]` is `A[i, b * k : (b + 1) * k]` read as bits, the highest first.

    `codes` has shape (ceil(m / k), n), one byte each up to `k == 8` and two up to `k == 16`; axes before these stack
    matrices. The last `padding` columns do not belong to the matrix. `org_dtype` is the dtype that was asked for first;
    `dtype`, by default the same, is that of `materialize()` now.

    The constructor takes `codes`, or the documented `one_hot_maps` of shape (num_blocks, n, 2**k), which is not stored:
    at `k == 8` it would be 32 times the dense matrix in bytes. Codes may also be given as `one_hot_maps`.
    """

    _field_checks: ClassVar[FieldChecks] = {
        "codes": LeafCheck("uint8, or from `k=9` on uint16", (jnp.uint8, jnp.uint16)),
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
        org_dtype = jax.dtypes.canonicalize_dtype(org_dtype)
        static = {"k": k, "padding": padding, "org_dtype": org_dtype, "use_kernel": use_kernel}
        dtype = org_dtype if dtype is None else dtype
        self._construct(shape, codes=codes, dtype=dtype, activation_dtype=activation_dtype, **static)

    def _check_shapes(self) -> None:
        if self.codes.dtype != rsr.code_dtype(self.k):
            raise ValueError(f"codes for `k={self.k}` are {rsr.code_dtype(self.k)}, got {self.codes.dtype}")
        most = self.k - 1 if self.codes.shape[-2] else 0
        if not 0 <= self.padding <= most:
            raise ValueError(
                f"`padding={self.padding}` must be from 0 to {most}: more would be a whole block, or "
                f"columns of no block"
            )

    def _check_codes(self) -> None:
        largest = int(np.max(self.codes, initial=0))
        if largest >= 2**self.k:
            raise ValueError(f"codes for `k={self.k}` are from 0 to {2**self.k - 1}, and there is a {largest}")

    @classmethod
    def _of(cls, values: jax.Array, k: int, dtype: DTypeLike, sign: int = 1) -> Self:
        rsr.check_k("k", k)
        return cls(rsr.encode(values, k, sign), k, -values.shape[1] % k, dtype)

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
        return reference.decode_rsr(self.codes, self.k, self.shape[-1])

    def _step_bound(self, original: jax.Array) -> jax.Array:
        x = original.astype(jnp.float32)
        return jnp.where(x > 0, jnp.abs(x - 1), -x)


def _a_binary(name: str, value: object) -> None:
    if not isinstance(value, RSROperatorBinary):
        raise TypeError(f"`{name}` must be an RSROperatorBinary, got {type(value).__name__}")


@register_array_type
class RSROperatorTernary(RSROperator):
    """A matrix of {-1, 0, 1} as `rsr_b1 - rsr_b2`, two of {0, 1}: where it is 1, and where it is -1.

    Twice the memory of `RSROperatorBinary`, and almost twice the time.
    """

    _smallest: ClassVar = -1
    _field_checks: ClassVar[FieldChecks] = {"rsr_b1": _a_binary, "rsr_b2": _a_binary}

    rsr_b1: RSROperatorBinary
    rsr_b2: RSROperatorBinary

    def __post_init__(self) -> None:
        check_fields(self, self._field_checks)
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
    def _of(cls, values: jax.Array, k: int, dtype: DTypeLike) -> Self:
        return cls(*(RSROperatorBinary._of(values, k, dtype, sign) for sign in (1, -1)))

    @classmethod
    def _rounded(cls, x: jax.Array) -> jax.Array:
        return _ternary(as_floats(x))

    def _binaries(self) -> tuple[RSROperatorBinary, ...]:
        return self.rsr_b1, self.rsr_b2

    def _step_bound(self, original: jax.Array) -> jax.Array:
        # Nothing is known of the threshold, so this is the larger distance of the two values of its sign.
        x = jnp.abs(original.astype(jnp.float32))
        return jnp.maximum(x, jnp.abs(x - 1))


_ternary = jax.jit(reference.ternary)  # one program, as `quantize(x, dtype="ternary")` is: both round alike
