"""Binary and ternary: two bits an element, in {-1, 0, 1}, and a scale if asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from eformer.jaximus import aux_field, ste
from eformer.kernels import Matrix, reference

from ._base import checked_array, laid_out, normalized_axes, register_format
from ._documented import *  # noqa: F403  # the documented handlers of primitives
from ._integers import as_floats, without_loss
from ._leafwise import LeafwiseArray, Leaves, axis_from_start, unmoved
from ._validation import FLOATS, Leaf, Rules, an_int, check_fields

SCALES = ("tensor", "channel", None)


class Array1B(LeafwiseArray):
    """`decode() == value * scale`, with four values of {-1, 0, 1} a byte along `axis`; without a scale, 1.

    The axis is the first of the last two, so the first of a matrix or vector; axes before it stack matrices. Any length
    works, also where the documentation asks for a multiple of 4: the last byte is filled up (`padding`).

    `Array1B(array)` of a dense array alone quantizes it: integers must be in {-1, 0, 1}, floating point is taken
    through the ternary rule of `quantize(array, dtype="ternary")`. The documentation's own example does the latter.
    """

    array_fields = ("weight", "scale")
    nan_code = 0xAA  # in each of the four
    rules: ClassVar[Rules] = {
        "weight": Leaf("uint8, four values a byte", (jnp.uint8,)),
        "scale": Leaf("floating point", FLOATS, optional=True),
        "axis": an_int,
        "padding": an_int,
    }

    weight: jax.Array
    scale: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    axis: int = aux_field(default=-2, kw_only=True)
    padding: int = aux_field(default=0, kw_only=True)
    code_version: ClassVar[int] = 2  # of what the two bits stand for, in checkpoints

    def __post_init__(self) -> None:
        weight = self.weight
        if weight.dtype != jnp.uint8:
            floating = jnp.issubdtype(weight.dtype, jnp.floating)
            made = quantize_ternary(weight) if floating else self.quantize(weight)
            for name in ("weight", "scale", "axis", "padding"):
                object.__setattr__(self, name, getattr(made, name))
            if self.dtype is None:
                object.__setattr__(self, "dtype", made.dtype)
        check_fields(self, self.rules)
        if self.weight.ndim:
            axis = -1 if self.axis == -2 and self.weight.ndim == 1 else self.axis
            object.__setattr__(self, "axis", normalized_axes(axis, self.weight.ndim)[0])
        if self.dtype is None:
            object.__setattr__(self, "dtype", jnp.dtype(jnp.float32))

    def _settle(self, shape: Sequence[int] | None) -> None:
        # A documented constructor tells how full the last byte is by the shape alone.
        if shape is not None and len(shape) == self.weight.ndim > 0:
            object.__setattr__(self, "padding", self.weight.shape[self.axis] * 4 - shape[self.axis])
        super()._settle(shape)

    def _check_shapes(self) -> None:
        ndim = self.weight.ndim
        if not 0 <= self.padding < 4 or (ndim and not (-ndim <= self.axis < 0 <= min(self.shape))):
            raise ValueError(
                f"weight {self.weight.shape} packs four values a byte along axis {self.axis}, counted from the end, "
                f"the last byte without {self.padding} of them: that is no array of shape {self.shape}"
            )
        super()._check_shapes()

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        dtype: Any = None,
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
        static = {"axis": _pack_axis(x.ndim), "padding": _padding(x), "use_kernel": use_kernel}
        dtype = x.dtype if dtype is None else dtype
        return laid_out(lambda x: cls(_packed(x), scale=scale, dtype=dtype, **static), x)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.weight.shape
        if not shape:
            return ()
        axis = axis_from_start(self.axis, len(shape))
        return (*shape[:axis], shape[axis] * 4 - self.padding, *shape[axis + 1 :])

    def values(self) -> jax.Array:
        """float32, in {-1, 0, 1}; NaN where there was one."""
        if not self.weight.ndim:
            return reference.unpack_ternary(self.weight[None], 0, 1)[0]
        return reference.unpack_ternary(self.weight, self.axis, self.shape[self.axis])

    def decode(self) -> jax.Array:
        values = self.values()
        return values if self.scale is None else values * self.scale

    def factors(self) -> tuple[jax.Array, jax.Array | None]:
        return self.values(), self.scale

    def fits_kernels(self) -> bool:
        return self.axis >= -2 and (self.scale is None or self.scale.dtype == jnp.float32)

    def stored_matrix(self) -> Matrix:
        scales = () if self.scale is None else (self.scale,)
        return Matrix("ternary", (self.weight,), scales, *self.shape[1:], packed_axis=self.axis + 2)

    def requantized(self, array: jax.Array) -> Array1B:
        scaled = None if self.scale is None else "tensor"
        return quantize_ternary(as_floats(array), scale=scaled, use_kernel=self.use_kernel).with_dtype(self.dtype)

    def recoded(self, version: int) -> Self:
        """This, of codes of an earlier version: in the first, 0, 1 and 2 were -1, 0 and 1, and 3 was NaN."""
        if version != 1:
            raise ValueError(f"ternary codes have version 1 or {self.code_version}, not {version}")
        (weight, *rest), treedef = jax.tree.flatten(self)
        return jax.tree.unflatten(treedef, [weight ^ np.uint8(0x55), *rest])

    def _step_bound(self, original: jax.Array) -> jax.Array:
        # Nothing is known of what made the values but their sign: an element became 0, or the scale with its sign.
        x, scale = jnp.abs(original.astype(jnp.float32)), jnp.float32(1) if self.scale is None else jnp.abs(self.scale)
        return jnp.maximum(x, jnp.abs(x - scale))

    def unit_codes(self) -> jax.Array:
        return reference.pack_ternary(jnp.ones(4), 0)[0]

    def with_scale(self) -> Self:
        if self.scale is not None:
            return self
        ones = jnp.ones((1,) * self.ndim, jnp.float32)
        return self._rebuilt({**self.named_leaves(), "scale": ones}, unmoved(self.ndim), self.shape)

    def _grain(self, name: str, axis: int) -> int:
        packed = name == "weight" and self.weight.ndim and axis == self.axis % self.weight.ndim
        return 4 if packed else 1

    def _rebuilt(self, leaves: Leaves, moved: Mapping[int, int], shape: tuple[int, ...]) -> Self:
        axis = moved[self.axis % self.ndim] - len(shape) if self.ndim else -1
        weight = leaves["weight"]
        return type(self)(
            weight,
            scale=leaves.get("scale"),
            axis=axis,
            padding=weight.shape[axis] * 4 - shape[axis] if shape else 0,
            dtype=self.dtype,
            use_kernel=self.use_kernel,
            activation_dtype=self.activation_dtype,
        )


def _pack_axis(ndim: int) -> int:
    return -2 if ndim > 1 else -1


def _check_values(x: jax.Array) -> None:
    if isinstance(x, Tracer):
        return
    values = np.asarray(x)
    wrong = values[(values != -1) & (values != 0) & (values != 1)]
    if wrong.size:
        raise ValueError(
            f"Array1B packs values in {{-1, 0, 1}}, got {wrong[0]}; `quantize(array, dtype='ternary')` or "
            f"`dtype='binary'` makes such values of any array"
        )


@jax.jit
def _packed(x: jax.Array) -> jax.Array:
    if not x.ndim:
        return reference.pack_ternary(x[None], 0)[0]
    return reference.pack_ternary(x, _pack_axis(x.ndim))


def _padding(x: jax.Array) -> int:
    return -x.shape[_pack_axis(x.ndim)] % 4 if x.ndim else 0


@functools.partial(jax.jit, static_argnums=(0, 2))
def _rounded(rule: Callable[[jax.Array], jax.Array], x: jax.Array, scale: str | None) -> tuple[Any, Any]:
    values = rule(x)
    axes = {"tensor": range(x.ndim), "channel": range(x.ndim)[-2:-1], None: ()}[scale]
    return _packed(values), None if scale is None else reference.mean_magnitude(x, values, axes)


def _quantize(
    name: str, rule: Callable[[jax.Array], jax.Array], array: jax.Array, scale: str | None, use_kernel: bool
) -> Array1B:
    if scale not in SCALES:
        raise ValueError(f"`scale={scale!r}` must be one of {', '.join(map(repr, SCALES))}")
    x = checked_array(array)

    def make(x: jax.Array) -> Array1B:
        packed, scales = _rounded(rule, as_floats(x), scale)
        static = {"axis": _pack_axis(x.ndim), "padding": _padding(x), "use_kernel": use_kernel}
        return Array1B(packed, scale=scales, dtype=x.dtype, **static)

    return without_loss(lambda x: laid_out(make, x), x, name)


def quantize_binary(array: jax.Array, scale: str | None = None, *, use_kernel: bool = True) -> Array1B:
    """The sign of each element, 1 for zero; NaN stays NaN. Integers raise a ValueError unless they are held exactly.

    `scale`, "tensor" or "channel" (per column of the last axis), keeps the mean magnitude, which is lost without.
    """
    return _quantize("binary", reference.signs, array, scale, use_kernel)


def quantize_ternary(array: jax.Array, scale: str | None = None, *, use_kernel: bool = True) -> Array1B:
    """1 above half a standard deviation of the whole array, -1 below minus that, else 0; of integers, if that is exact.

    `scale`, "tensor" or "channel" (per column of the last axis), keeps the mean magnitude of what is not 0. An array
    that holds a NaN or an infinity has no standard deviation, and becomes all NaN. On a sharded array the deviation is
    summed in another order: an element that lies on the threshold to the last bit can fall on its other side.
    """
    return _quantize("ternary", reference.ternary, array, scale, use_kernel)


@ste
def straight_through_1bit(array: jax.Array, dtype: str = "ternary", scale: str | None = None) -> Any:
    """`quantize(array, dtype="ternary")` or `"binary"` made dense, with the gradient of the identity."""
    rules = {"ternary": quantize_ternary, "binary": quantize_binary}
    if dtype not in rules:
        raise ValueError(f"`dtype={dtype!r}` must be 'ternary' or 'binary'")
    return rules[dtype](array, scale)


register_format("ternary", Array1B, quantize_ternary)
register_format("binary", Array1B, quantize_binary)
