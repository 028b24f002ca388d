"""FP8: one byte of floating point an element, E4M3 or E5M2, and a scale per tensor, slice or block."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from eformer._src.jaximus.array import aux_field
from eformer._src.kernels import reference
from eformer._src.kernels.matrix import Matrix
from eformer._src.quantization.base import Grain, Leaves
from eformer._src.quantization.elementwise_layout import AxisMap, LeafwiseArray, replaced
from eformer._src.quantization.input import checked_array, normalized_axes, without_loss
from eformer._src.quantization.registry import register_format
from eformer._src.quantization.sharding import laid_out
from eformer._src.quantization.validation import (
    FLOATS,
    MAX_LENGTH,
    FieldChecks,
    LeafCheck,
    a_bool,
    an_int,
    check_fields,
)

CODES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}  # by the names of their kernels
NAMES = {"e4m3": "fp8", "e5m2": "fp8_e5m2"}  # of the formats


def _a_block_shape(name: str, value: Any) -> None:
    if not isinstance(value, tuple):
        raise TypeError(f"`{name}` must be a tuple of ints, got {value!r}")
    for length in value:
        an_int(name, length)
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"`{name}={value}` must have lengths from 1 to {MAX_LENGTH}")
    if value[:1] == (1,):
        raise ValueError(f"`{name}={value}` must not begin with 1: an axis in front of it has no blocks")


class ArrayFloat8(LeafwiseArray):
    """`decode() == weight * scale`: codes of float8_e4m3fn or float8_e5m2, and one scale for each block.

    `block_shape` has the lengths of blocks along the last axes, such as (128, 128) along the last two; along the axes
    before them, blocks have length 1. Along each axis `scale` has an entry for each block, or one entry for all; the
    last block may be short. So a scale (1, n) is for the columns of a matrix, (m, 1) for its rows, (1, 1) for all.

    An element is off by at most 2**-4 of itself in E4M3 and 2**-3 in E5M2, or, if that is more, by 2**-10 and 2**-17 of
    its scale. Codes that are NaN decode to NaN.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import ArrayFloat8
    >>> q = ArrayFloat8.quantize(jnp.ones((256, 384)), block_shape=(128, 128))
    >>> q.weight.dtype, q.scale.shape
    (dtype(float8_e4m3fn), (2, 3))
    """

    _code_fields = ("weight",)
    _scale_fields = ("scale",)
    _unit_codes: ClassVar = {"weight": 1}
    _field_checks: ClassVar[FieldChecks] = {
        "weight": LeafCheck("float8_e4m3fn or float8_e5m2", tuple(CODES.values())),
        "scale": LeafCheck("floating point, or float8_e8m0fnu", (*FLOATS, jnp.float8_e8m0fnu)),
        "block_shape": _a_block_shape,
    }

    weight: jax.Array
    scale: jax.Array
    block_shape: tuple[int, ...] = aux_field(default=(), kw_only=True)

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        axis: int | tuple[int, ...] | None = None,
        *,
        block_shape: Sequence[int] | None = None,
        code_dtype: DTypeLike = jnp.float8_e4m3fn,
        fit: bool = False,
        use_kernel: bool = True,
        importance: jax.Array | None = None,
    ) -> Self:
        """`array` in FP8 with a float32 scale per slice along `axis`, the last by default; any axes, in any number.

        With `block_shape`, such as (128, 128), there is a scale for each block along the last axes instead, whatever
        `axis` is. The sharding is kept. `fit` tries larger scales, too, and takes the one with the smallest squared
        error; codes are as dense as their values are small, so it gains little, and the less the more elements share a
        scale. Errors count as much as their `importance`, if it is given, which broadcasts to the array. Integers raise
        a ValueError unless they are held exactly.
        """
        a_bool("fit", fit)
        x, name = checked_array(array), _code_name(code_dtype)
        lengths = tuple(block_shape or ())
        if len(lengths) > x.ndim:
            raise ValueError(f"`block_shape={block_shape}` needs {len(lengths)} axes, and the array has {x.ndim}")
        axes = normalized_axes(tuple(range(x.ndim))[-1:] if axis is None else axis, x.ndim)
        axes = axes if block_shape is None else ()
        lengths = _without_leading_ones(lengths)
        _a_block_shape("block_shape", lengths)

        def make(x: jax.Array) -> Self:
            weight, scale = _encode(x, axes, lengths, CODES[name], fit or importance is not None, importance)
            return cls(weight, scale, block_shape=lengths, dtype=x.dtype, use_kernel=use_kernel)

        return without_loss(lambda x: laid_out(make, x), x, NAMES[name])

    def __post_init__(self) -> None:
        check_fields(self, self._field_checks)
        if self.dtype is None:
            vars(self)["dtype"] = jnp.dtype(jnp.float32)

    def _check_shapes(self) -> None:
        if len(self.block_shape) > self.ndim:
            raise ValueError(f"`block_shape={self.block_shape}` has more axes than weight {self.shape}")
        super()._check_shapes()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def _code_name(self) -> str:
        return _code_name(self.weight.dtype)

    def _names_among(self, names: Sequence[str]) -> Sequence[str]:
        return [name for name in names if name == NAMES[self._code_name]]

    def _blocks(self) -> dict[int, int]:
        """The length of blocks along each axis that has some."""
        return _blocks(self.block_shape, self.shape)

    def decode(self) -> jax.Array:
        self._check_shapes()  # a tree may have been restructured since it was constructed
        # Codes have no gradient, like the integer codes of other formats.
        return reference.decode_float8(lax.stop_gradient(self.weight), self.scale, self._blocks())

    def _factors(self) -> tuple[jax.Array, jax.Array | None]:
        if self._blocks():
            return super()._factors()
        return lax.stop_gradient(self.weight), self._wide_scale()

    def _wide_scale(self) -> jax.Array:
        return self.scale if self.scale.dtype == jnp.float64 else self.scale.astype(jnp.float32)

    def _with_scale(self) -> Self:
        """An equal array whose scales have the precision that it decodes in."""
        return self._replaced(scale=self._wide_scale())

    @property
    def _kernel_format(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self._code_name}_blocks" if self._blocks() else self._code_name

    def _fits_kernels(self) -> bool:
        blocks = self._blocks()
        in_matrices = min(blocks, default=self.ndim) >= self.ndim - 2
        even = not blocks or blocks[max(blocks)] % 2 == 0
        return self.scale.dtype != jnp.float64 and in_matrices and even

    def _stored_matrix(self) -> Matrix:
        """Kernels know blocks along one axis: along the other, the scales are repeated for each row or column."""
        _, rows, cols = self.shape
        blocks, scale = self._blocks(), self._wide_scale()
        if not blocks:
            return Matrix(self._kernel_format, (self.weight,), (scale,), rows, cols)
        axis = max(blocks)
        size = blocks.pop(axis)
        entries = replaced(self.shape, axis, -(-self.shape[axis] // size))
        scale = jnp.broadcast_to(reference.repeat_blocks(scale, blocks, self.shape), entries)
        return Matrix(self._kernel_format, (self.weight,), (scale,), rows, cols, axis - 1, size)

    def _in_blocks(self, axis: int) -> ArrayFloat8:
        if self.scale.shape[axis] != 1:
            return self
        grains = {a: self._grain("scale", a) for a in range(self.ndim)} | {axis: max(self.shape[axis], 1)}
        return self._replaced(block_shape=self._with_grains(grains, self.ndim))

    def _encoded_again(self, array: jax.Array) -> ArrayFloat8:
        blocks = self.block_shape if 0 < len(self.block_shape) <= array.ndim else None
        return self.quantize(array, block_shape=blocks, code_dtype=self.weight.dtype)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        """Half the distance of codes: a part of the element, or of the least normal number; and what is clipped."""
        info = jnp.finfo(self.weight.dtype)
        x = jnp.abs(original.astype(self._wide_scale().dtype))
        scale = jnp.abs(reference.repeat_blocks(self._wide_scale(), self._blocks(), self.shape))
        half = jnp.maximum(x, scale * float(info.tiny)) * (float(info.eps) / 2)
        return half + jnp.maximum(x - scale * float(info.max), 0)

    def _grain(self, name: str, axis: int) -> Grain:
        place = axis - self.weight.ndim
        return self.block_shape[place] if name == "scale" and place >= -len(self.block_shape) else 1

    def _with_grains(self, grains: Mapping[int, int], ndim: int) -> tuple[int, ...]:
        return _without_leading_ones(tuple(grains.get(axis, 1) for axis in range(ndim)))

    def _rebuilt(self, leaves: Leaves, shape: tuple[int, ...], moved: AxisMap | None = None) -> Self:
        grains = {axis: self._grain("scale", axis) for axis in range(self.ndim)}
        if moved is not None:
            grains = {moved[axis]: grain for axis, grain in grains.items() if axis in moved}
        return self._replaced(**leaves, block_shape=self._with_grains(grains, len(shape)))

    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        # Less than they were where a part cuts a block.
        cut = {axis: grain or self._grain("scale", axis) for axis, grain in enumerate(grains["scale"])}
        part = self._mapped(lambda name, _: leaves[name])
        return part._replaced(block_shape=self._with_grains(cut, self.ndim))


def _code_name(dtype: DTypeLike) -> str:
    found = next((name for name, each in CODES.items() if dtype == each), None)
    if found is None:
        raise ValueError(
            f"codes of FP8 are {' or '.join(jnp.dtype(each).name for each in CODES.values())}, not {dtype}"
        )
    return found


def _without_leading_ones(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return lengths[next((i for i, length in enumerate(lengths) if length != 1), len(lengths)) :]


def _blocks(block_shape: Sequence[int], shape: Sequence[int]) -> dict[int, int]:
    first = len(shape) - len(block_shape)
    return {first + i: length for i, length in enumerate(block_shape) if length > 1}


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _encode(
    x: jax.Array,
    axis: tuple[int, ...],
    block_shape: tuple[int, ...],
    dtype: DTypeLike,
    fit: bool,
    importance: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    return reference.encode_float8(x, axis, _blocks(block_shape, x.shape), dtype, fit, importance)


def _register(code: str) -> None:
    def encode(
        array: jax.Array,
        axis: int | tuple[int, ...] | None = None,
        *,
        block_shape: Sequence[int] | None = None,
        fit: bool = False,
        use_kernel: bool = True,
        importance: jax.Array | None = None,
    ) -> ArrayFloat8:
        options: dict[str, Any] = {"block_shape": block_shape, "fit": fit, "use_kernel": use_kernel}
        options |= {"importance": importance}
        return ArrayFloat8.quantize(array, axis, code_dtype=CODES[code], **options)

    register_format(NAMES[code], ArrayFloat8, encode)


for _code in NAMES:
    _register(_code)
