"""INT8: one byte an element and a scale per slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from eformer._src.jaximus.array import aux_field
from eformer._src.kernels import reference
from eformer._src.kernels.matrix import Matrix
from eformer._src.quantization.base import Leaves
from eformer._src.quantization.elementwise_layout import AxisMap, LeafwiseArray
from eformer._src.quantization.input import checked_array, normalized_axes, without_loss
from eformer._src.quantization.registry import register_format
from eformer._src.quantization.sharding import ShardingType, laid_out
from eformer._src.quantization.validation import FLOATS, FieldChecks, LeafCheck, a_bool, check_fields


class Array8B(LeafwiseArray):
    """`decode() == weight * scale`: int8 in [-127, 127], and a scale with length 1 along the axes of `axis`.

    An element is off by at most `scale / 2`, unless `fit` let it be clipped. A slice that holds a NaN or an infinity
    decodes to NaN.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import Array8B
    >>> quantized = Array8B.quantize(jnp.ones((128, 256), jnp.float32), axis=(-1,))
    >>> inputs = jnp.ones((32, 128), jnp.bfloat16)
    >>> output = inputs.astype(jnp.float32) @ quantized
    >>> output.shape, quantized.nbytes
    ((32, 256), 33280)
    """

    _code_fields = ("weight",)
    _scale_fields = ("scale",)
    _kernel_format = "int8"
    _unit_codes: ClassVar = {"weight": 1}
    _field_checks: ClassVar[FieldChecks] = {
        "weight": LeafCheck("int8", (jnp.int8,)),
        "scale": LeafCheck("floating point, a scale per slice", FLOATS),
    }

    scale: jax.Array
    weight: jax.Array
    axis: tuple[int, ...] | None = aux_field(default=None)

    def __init__(
        self,
        scale: jax.Array,
        weight: jax.Array,
        axis: int | tuple[int, ...] | None = None,
        sharding: ShardingType = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        use_kernel: bool = True,
        activation_dtype: str | None = None,
    ) -> None:
        switches = {"dtype": dtype, "use_kernel": use_kernel, "activation_dtype": activation_dtype}
        self._construct(shape, sharding, scale=scale, weight=weight, axis=axis, **switches)

    def __post_init__(self) -> None:
        check_fields(self, self._field_checks)
        super()._check_shapes()
        ndim, axis = self.weight.ndim, self.axis
        if axis is None:
            axis = tuple(i - ndim for i in range(ndim) if self.scale.shape[i] == 1)
        dtype = self.scale.dtype if self.dtype is None else self.dtype
        vars(self).update(axis=normalized_axes(axis, ndim), dtype=dtype)

    def _check_shapes(self) -> None:
        super()._check_shapes()
        if self.axis is None or self.axis != normalized_axes(self.axis, self.ndim):
            raise ValueError(f"`axis={self.axis}` must be sorted and counted from the end, as the constructor makes it")
        if any(self.scale.shape[axis] != 1 for axis in self.axis):
            raise ValueError(f"scale {self.scale.shape} must have length 1 along the axes {self.axis}: `axis`")

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        dtype: DTypeLike | None = None,
        axis: int | tuple[int, ...] | None = None,
        *,
        fit: bool = False,
        use_kernel: bool = True,
        importance: jax.Array | None = None,
    ) -> Self:
        """`array` in INT8, with a scale per slice along `axis`, the last by default; any axes, in any number.

        `dtype` is that of the dense array this stands for, by default `array`'s. The sharding is kept. With `fit` a
        scale is not that of the largest magnitude but of the smallest squared error, and what lies beyond 127 scales is
        clipped; errors count as much as their `importance`, if it is given, which broadcasts to the array. Integers
        raise a ValueError unless they are held exactly, as those up to 127 always are.
        """
        a_bool("fit", fit)
        x = checked_array(array)
        axes = normalized_axes(tuple(range(x.ndim))[-1:] if axis is None else axis, x.ndim)

        def make(x: jax.Array) -> Self:
            weight, scale = _encode(x, axes, fit=fit or importance is not None, importance=importance)
            return cls(scale, weight, axes, dtype=x.dtype if dtype is None else dtype, use_kernel=use_kernel)

        return without_loss(lambda x: laid_out(make, x), x, "int8", 127)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def decode(self) -> jax.Array:
        return reference.decode_int8(self.weight, self.scale)

    def _factors(self) -> tuple[jax.Array, jax.Array]:
        return self.weight, self.scale

    def _fits_kernels(self) -> bool:
        return self.scale.dtype == jnp.float32 and self.weight.dtype == jnp.int8

    def _stored_matrix(self) -> Matrix:
        _, rows, cols = self.shape
        return Matrix("int8", (self.weight,), (self.scale,), rows, cols)

    def _in_blocks(self, axis: int) -> LeafwiseArray:
        """In the format "int8_grouped", whose codes are 128 more."""
        if self.scale.shape[axis] != 1:
            return self
        codes = lax.bitcast_convert_type(self.weight, jnp.uint8) ^ np.uint8(128)
        switches = {"use_kernel": self.use_kernel, "activation_dtype": self.activation_dtype, "dtype": self.dtype}
        layout = {"bits": 8, "block_size": max(self.shape[axis], 1), "axis": axis - self.ndim}
        from .grouped import ArrayGrouped  # here: formats are registered in the order of their files

        return ArrayGrouped(codes, self.scale, **layout, **switches)

    def _encoded_again(self, array: jax.Array) -> Array8B:
        return self.quantize(array)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        scale = jnp.abs(self.scale)
        clipped = jnp.abs(original.astype(scale.dtype)) - 127 * scale
        return jnp.maximum(jnp.broadcast_to(scale / 2, original.shape), clipped)

    def _grain(self, name: str, axis: int) -> int:
        del name, axis
        return 1

    def _rebuilt(self, leaves: Leaves, shape: tuple[int, ...], moved: AxisMap | None = None) -> Self:
        ndim, moved = len(shape), dict(enumerate(range(self.ndim))) if moved is None else moved
        axes = {moved[a % self.ndim] for a in self.axis or () if a % self.ndim in moved}
        axis = tuple(a - ndim for a in axes if leaves["scale"].shape[a] == 1)  # the others now have scales of their own
        return self._replaced(**leaves, axis=tuple(sorted(axis)))


_encode = jax.jit(reference.encode_int8, static_argnums=1, static_argnames="fit")


register_format("int8", Array8B, Array8B.quantize)
