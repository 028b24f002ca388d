"""Binary and ternary: two bits an element, in {-1, 0, 1}, and a scale if asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from eformer._src.jaximus.array import aux_field
from eformer._src.kernels import reference
from eformer._src.quantization.base import Leaves
from eformer._src.quantization.input import as_floats, checked_array, normalized_axes
from eformer._src.quantization.packed import PackedArray
from eformer._src.quantization.registry import register_format
from eformer._src.quantization.validation import FLOATS, FieldChecks, LeafCheck, a_bool

SCALES = ("tensor", "channel", None)
ABSMEAN = "absmean"  # of ternary alone


class Array1B(PackedArray):
    """`decode() == value * scale`, with four values of {-1, 0, 1} a byte along `axis`; without a scale, 1.

    The axis is the first of a matrix or vector unless another is asked for; axes before it stack matrices. The last
    byte is filled up (`padding`). `Array1B(array)` of a dense array alone quantizes it: integers must be in {-1, 0, 1},
    and floating point is rounded as by `quantize(array, "ternary")`.
    """

    _values_per_byte: ClassVar = {"weight": 4}
    _scale_fields = ("scale",)
    _kernel_format = "ternary"
    _nan_codes: ClassVar = {"weight": 0xAA}
    _unit_codes: ClassVar = {"weight": 0xFF}
    _field_checks: ClassVar[FieldChecks] = {"scale": LeafCheck("floating point", FLOATS, optional=True)}
    _code_version: ClassVar[int] = 2  # of what the two bits stand for, in checkpoints

    weight: jax.Array
    scale: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    axis: int = aux_field(default=-2, kw_only=True)

    def __post_init__(self) -> None:
        if self.weight.dtype != jnp.uint8:
            floating = jnp.issubdtype(self.weight.dtype, jnp.floating)
            made = quantize_ternary(self.weight) if floating else self.quantize(self.weight)
            dtype = made.dtype if self.dtype is None else self.dtype
            vars(self).update(weight=made.weight, scale=made.scale, axis=made.axis, padding=made.padding, dtype=dtype)
        elif self.weight.ndim == 1 and self.axis == -2:
            vars(self)["axis"] = -1
        super().__post_init__()

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        dtype: DTypeLike | None = None,
        axis: int | tuple[int, ...] | None = None,
        *,
        scale: jax.Array | None = None,
        use_kernel: bool = True,
    ) -> Self:
        """Pack an array of values in {-1, 0, 1}, which `scale` (of its rank, or None) multiplies.

        Another value raises a ValueError where values can be seen; under tracing it is rounded and clipped. `axis` is
        documented, checked, and without effect: packing loses nothing along any axis.

        >>> import jax.numpy as jnp
        >>> weights = jnp.array([[-1, 0, 1, 1], [1, -1, 0, 0]])
        >>> quantized = Array1B.quantize(weights.astype(jnp.int8))
        >>> quantized.shape, quantized.dtype, quantized.nbytes
        ((2, 4), dtype('int8'), 4)
        """
        x = checked_array(array)
        if axis is not None:
            normalized_axes(axis, x.ndim)
        _check_values(x)
        if scale is not None and scale.ndim != x.ndim:
            raise ValueError(f"scale {scale.shape} must have the {x.ndim} axes of the array {x.shape}")
        scales = {} if scale is None else {"scale": scale}
        fields = {"dtype": x.dtype if dtype is None else dtype, "use_kernel": use_kernel}
        return cls._encoded(x, _pack_axis(x.ndim), lambda x, axis: {"weight": _packed(x, axis), **scales}, **fields)

    def _values(self, codes: Leaves, axis: int, length: int) -> jax.Array:
        """float32, in {-1, 0, 1}; NaN where there was one."""
        return reference.unpack_ternary(codes["weight"], axis, length)

    def _encoded_again(self, array: jax.Array) -> Array1B:
        return quantize_ternary(array, scale=None if self.scale is None else "tensor")

    def _recoded(self, version: int) -> Self:
        """In version 1, the codes 0, 1 and 2 were -1, 0 and 1, and 3 was NaN."""
        return self._replaced(weight=self.weight ^ np.uint8(0x55)) if version == 1 else super()._recoded(version)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        # Nothing is known of what made the values but their sign: an element became 0, or the scale with its sign.
        x, scale = jnp.abs(original.astype(jnp.float32)), jnp.float32(1) if self.scale is None else jnp.abs(self.scale)
        return jnp.maximum(x, jnp.abs(x - scale))

    def _with_scale(self) -> Self:
        if self.scale is not None:
            return self
        return self._replaced(scale=jnp.ones((1,) * self.ndim, jnp.float32))


def _pack_axis(ndim: int) -> int:
    return -2 if ndim > 1 else -1


def _check_values(x: jax.Array) -> None:
    if isinstance(x, Tracer):
        return
    values = np.asarray(x)
    wrong = values[(values != -1) & (values != 0) & (values != 1)]
    if wrong.size:
        raise ValueError(
            f"Array1B packs values in {{-1, 0, 1}}, got {wrong[0]}; `quantize(array, 'ternary')` or "
            f"`dtype='binary'` makes such values of any array"
        )


_packed = jax.jit(reference.pack_ternary, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))
def _rounded(
    rounding: Callable[[jax.Array], jax.Array],
    scale: str | None,
    fit: bool,
    x: jax.Array,
    axis: int,
    importance: jax.Array | None,
) -> Leaves:
    x = reference.without_tiny(as_floats(x))
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    if scale == ABSMEAN:
        values, found = reference.absmean_ternary(x, range(x.ndim)[-2:])
        return {"weight": reference.pack_ternary(values, axis), "scale": found}
    values = rounding(x)
    if scale is None:
        return {"weight": reference.pack_ternary(values, axis)}
    axes = range(x.ndim) if scale == "tensor" else [axis % x.ndim] if x.ndim > 1 else []
    found = reference.mean_magnitude(x, values, axes)
    if fit:
        values, found = reference.fitted_ternary(x, values, found, axes, importance)
    return {"weight": reference.pack_ternary(values, axis), "scale": found}


def _quantize(
    name: str,
    rounding: Callable[[jax.Array], jax.Array],
    array: jax.Array,
    scale: str | None,
    axis: int | None,
    fit: bool,
    use_kernel: bool,
    importance: jax.Array | None = None,
) -> Array1B:
    known = (*SCALES, ABSMEAN) if rounding is reference.ternary else SCALES
    if scale not in known:
        raise ValueError(f"`scale={scale!r}` must be one of {', '.join(map(repr, known))}")
    a_bool("fit", fit)
    fit = fit or importance is not None
    if fit and scale == ABSMEAN:
        raise ValueError("`fit=True` fits a scale, and that of `scale='absmean'` is given; use `scale='channel'`")
    scale = "tensor" if fit and scale is None else scale
    fit = fit and rounding is reference.ternary  # of signs, the mean magnitude is the best scale already
    encode = functools.partial(_rounded, rounding, scale, fit, importance=importance)
    along = _pack_axis(getattr(array, "ndim", 0)) if axis is None else axis
    return Array1B._quantized(name, array, along, encode, use_kernel=use_kernel)


def quantize_binary(
    array: jax.Array, scale: str | None = None, *, axis: int | None = None, fit: bool = False, use_kernel: bool = True
) -> Array1B:
    """The sign of each element, 1 for zero; NaN stays NaN. Integers raise a ValueError unless they are held exactly.

    `scale`, "tensor" or "channel" (per slice along `axis`), keeps the mean magnitude, which is lost without. Four
    values along `axis`, the first of a matrix if it is None, share a byte: matmuls that contract it are fastest. No
    scale has a smaller squared error, so `fit` changes nothing but that it takes "tensor" for no scale.
    """
    return _quantize("binary", reference.signs, array, scale, axis, fit, use_kernel)


def quantize_ternary(
    array: jax.Array,
    scale: str | None = None,
    *,
    axis: int | None = None,
    fit: bool = False,
    use_kernel: bool = True,
    importance: jax.Array | None = None,
) -> Array1B:
    """1 above half a standard deviation of the whole array, -1 below minus that, else 0; of integers, if that is exact.

    `scale`, "tensor" or "channel" (per slice along `axis`), keeps the mean magnitude of what is not 0. Four values
    along `axis`, the first of a matrix if it is None, share a byte: matmuls that contract it are fastest. `fit`
    searches for scales with the smallest squared error, their thresholds at half a scale; without a `scale`, for one
    of the whole array; errors count as much as their `importance`, if it is given. `scale="absmean"` is the rule of
    BitNet b1.58 (arXiv 2402.17764), for training: the scale of each matrix is the mean magnitude of all its elements,
    and an element becomes the nearest of -1, 0 and 1 times it. With a NaN or an infinity the array, or with "absmean"
    the matrix, becomes all NaN. On a sharded array the deviation is summed in another order, so an element that lies on
    the threshold to the last bit can fall on its other side.
    """
    return _quantize("ternary", reference.ternary, array, scale, axis, fit, use_kernel, importance)


register_format("ternary", Array1B, quantize_ternary)
register_format("binary", Array1B, quantize_binary)
