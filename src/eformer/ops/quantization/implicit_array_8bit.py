"""INT8: one byte an element and a scale per slice."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import InitVar
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from eformer.jaximus import aux_field, implicit, ste
from eformer.kernels import Matrix, reference

from ._base import ShardingType, checked_array, laid_out, normalized_axes, register_format
from ._documented import *  # noqa: F403  # the documented handlers of primitives
from ._integers import as_floats, without_loss
from ._leafwise import LeafwiseArray, Leaves
from ._validation import FLOATS, Leaf, Rules, check_fields, ints_or_none


class Array8B(LeafwiseArray):
    """`decode() == weight * scale`: int8 in [-127, 127], and a scale with length 1 along the axes of `axis`.

    An element is off by at most `scale / 2`. A slice that holds a NaN or an infinity decodes to NaN.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import Array8B
    >>> quantized = Array8B.quantize(jnp.ones((128, 256), jnp.float32), axis=(-1,))
    >>> inputs = jnp.ones((32, 128), jnp.bfloat16)
    >>> output = inputs.astype(jnp.float32) @ quantized
    >>> output.shape, quantized.nbytes
    ((32, 256), 33280)
    """

    array_fields = ("weight", "scale")
    rules: ClassVar[Rules] = {
        "weight": Leaf("int8", (jnp.int8,)),
        "scale": Leaf("floating point, a scale per slice", FLOATS),
        "axis": ints_or_none,
    }

    scale: jax.Array
    weight: jax.Array
    axis: tuple[int, ...] | None = aux_field(default=None)
    sharding: InitVar[ShardingType] = None  # pyright: ignore[reportIncompatibleMethodOverride]  # see QuantizedArray

    def __post_init__(self, sharding: ShardingType) -> None:
        check_fields(self, self.rules)
        super()._check_shapes()
        ndim, axis = self.weight.ndim, self.axis
        if axis is None:
            axis = tuple(i - ndim for i in range(ndim) if self.scale.shape[i] == 1)
        object.__setattr__(self, "axis", normalized_axes(axis, ndim))
        if self.dtype is None:
            object.__setattr__(self, "dtype", self.scale.dtype)
        placed = self.with_sharding(sharding)
        object.__setattr__(self, "scale", placed.scale)
        object.__setattr__(self, "weight", placed.weight)

    def _check_shapes(self) -> None:
        super()._check_shapes()
        if self.axis is None or self.axis != normalized_axes(self.axis, self.ndim):
            raise ValueError(f"`axis={self.axis}` must be sorted and counted from the end, as the constructor makes it")
        if any(self.scale.shape[axis] != 1 for axis in self.axis):
            raise ValueError(f"scale {self.scale.shape} must have length 1 along the axes {self.axis}: `axis`")

    @classmethod
    def quantize(
        cls, array: jax.Array, dtype: Any = None, axis: int | tuple[int, ...] | None = None, *, use_kernel: bool = True
    ) -> Self:
        """`array` in INT8, with a scale per slice along `axis`, the last by default; any axes, in any number.

        `dtype` is that of the dense array this stands for, by default `array`'s. The sharding is kept. Integers raise a
        ValueError unless they are held exactly, as those up to 127 always are.
        """
        x = checked_array(array)
        axes = normalized_axes(tuple(range(x.ndim))[-1:] if axis is None else axis, x.ndim)

        def make(x: jax.Array) -> Self:
            weight, scale = _encode(x, axes)
            return cls(scale, weight, axes, dtype=x.dtype if dtype is None else dtype, use_kernel=use_kernel)

        return without_loss(lambda x: laid_out(make, x), x, "int8", all_up_to=127)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def decode(self) -> jax.Array:
        return reference.decode_int8(self.weight, self.scale)

    def factors(self) -> tuple[jax.Array, jax.Array]:
        return self.weight, self.scale

    def fits_kernels(self) -> bool:
        return self.scale.dtype == jnp.float32 and self.weight.dtype == jnp.int8

    def stored_matrix(self) -> Matrix:
        return Matrix("int8", (self.weight,), (self.scale,), *self.shape[1:])

    def requantized(self, array: jax.Array) -> Array8B:
        return self.quantize(as_floats(array), dtype=self.dtype, use_kernel=self.use_kernel)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.abs(self.scale) / 2, original.shape)

    def unit_codes(self) -> int:
        return 1

    def _grain(self, name: str, axis: int) -> int:
        del name, axis
        return 1

    def _rebuilt(self, leaves: Leaves, moved: Mapping[int, int], shape: tuple[int, ...]) -> Self:
        ndim = len(shape)
        axes = {moved[a % self.ndim] for a in self.axis or () if a % self.ndim in moved}
        axis = tuple(a - ndim for a in axes if leaves["scale"].shape[a] == 1)  # the others have scales of their own now
        return type(self)(
            leaves["scale"],
            leaves["weight"],
            tuple(sorted(axis)),
            dtype=self.dtype,
            use_kernel=self.use_kernel,
            activation_dtype=self.activation_dtype,
        )


@functools.partial(jax.jit, static_argnums=1)
def _encode(x: jax.Array, axis: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return reference.encode_int8(x, axis)


@ste
def straight_through_8bit(array: jax.Array, axis: int | tuple[int, ...] | None = None) -> Any:
    """`Array8B.quantize(array, axis=axis)` made dense, with the gradient of the identity."""
    return Array8B.quantize(array, axis=axis)


def matmul_bf16_int8_weight_only(lhs_bf16: jax.Array, rhs_q_int8: jax.Array, rhs_scale: jax.Array) -> jax.Array:
    """`lhs @ (rhs * scale)` by the kernel of `Array8B`, summed in float32, as bfloat16; no dense copy is made.

    The scale has two axes, each of length 1 or as long as that of `rhs`: per column, per row, for all or for each.
    """
    if lhs_bf16.ndim < 1 or rhs_q_int8.ndim != 2 or rhs_scale.ndim != 2:
        raise ValueError(
            f"expected lhs (..., M, K), rhs (K, N) and a scale of two axes, got {lhs_bf16.shape}, {rhs_q_int8.shape} "
            f"and {rhs_scale.shape}"
        )
    rows = rhs_q_int8.shape[0]
    if lhs_bf16.shape[-1] != rows:
        raise ValueError(f"lhs {lhs_bf16.shape} @ rhs {rhs_q_int8.shape}: {lhs_bf16.shape[-1]} columns, {rows} rows")
    if any(s not in (1, n) for s, n in zip(rhs_scale.shape, rhs_q_int8.shape, strict=True)):
        raise ValueError(f"scale {rhs_scale.shape} does not broadcast over rhs {rhs_q_int8.shape}")
    q = Array8B(rhs_scale.astype(jnp.float32), rhs_q_int8)
    lhs = lhs_bf16 if lhs_bf16.dtype in (jnp.bfloat16, jnp.float16) else lhs_bf16.astype(jnp.float32)
    multiply: Any = functools.partial(lax.dot_general, preferred_element_type=jnp.bfloat16)
    return implicit(multiply)(lhs, q, (((lhs.ndim - 1,), (0,)), ((), ())))


register_format("int8", Array8B, Array8B.quantize)
