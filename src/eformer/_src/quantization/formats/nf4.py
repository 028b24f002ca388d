"""NF4: four bits an element, sixteen quantiles of a normal distribution, and the largest magnitude of each block."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._src.jaximus.array import aux_field
from eformer._src.kernels import reference
from eformer._src.quantization.base import Leaves
from eformer._src.quantization.packed import PackedArray
from eformer._src.quantization.registry import register_format
from eformer._src.quantization.sharding import ShardingType
from eformer._src.quantization.validation import FLOATS, FieldChecks, LeafCheck, a_bool

NESTED_BLOCK = 256  # scales that share a scale
# Half the distance between neighbouring codes, at most: between -1 and the next.
_HALF_GAP = float(np.max(np.diff(reference.NF4_CODES))) / 2


class ArrayNF4(PackedArray):
    """`decode() == code * absmax of its block`, with two codes a byte and blocks of `block_size` along `axis`.

    `packed` and `absmax` have the array's axes; along `axis`, `packed` is half as long, and `absmax` has one entry per
    block. The last block may be short and the last byte half empty (`padding`). An element is off by at most 0.152 of
    its block's absmax, unless `fit` let it be clipped; zero is exact. A block that holds a NaN or an infinity decodes
    to NaN.

    With `nested` and `offset` the absmax itself is quantized, as bitsandbytes does it: `absmax` holds codes of an 8-bit
    dynamic map, `nested` a scale per 256 of them and `offset` their mean, per matrix of the last two axes. Moving such
    an array (transposing, slicing, gathering) first decodes the absmax.

    A dense floating point array given alone is quantized, with blocks along the last axis.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import ArrayNF4
    >>> quantized = ArrayNF4.quantize(jnp.ones((128, 256), jnp.float32), block_size=64)
    >>> output = jnp.ones((32, 128)) @ quantized
    >>> output.shape, quantized.nbytes * 8 / quantized.size
    ((32, 256), 4.5)
    """

    _values_per_byte: ClassVar = {"packed": 2}
    _scale_fields = ("absmax",)
    _kernel_format = "nf4"
    _unit_codes: ClassVar = {"packed": 0xFF}  # the last code is 1, in both halves of a byte
    _field_checks: ClassVar[FieldChecks] = {
        "absmax": LeafCheck("floating point, or with `nested` uint8", (*FLOATS, jnp.uint8)),
        "nested": LeafCheck("float32 or float64", (jnp.float32, jnp.float64), optional=True),
        "offset": LeafCheck("float32 or float64", (jnp.float32, jnp.float64), optional=True),
    }

    packed: jax.Array
    absmax: jax.Array
    block_size: int = aux_field(default=64)
    nested: jax.Array | None = None
    offset: jax.Array | None = None

    def __init__(
        self,
        packed: jax.Array,
        absmax: jax.Array | None = None,
        block_size: int = 64,
        sharding: ShardingType = None,
        nested: jax.Array | None = None,
        offset: jax.Array | None = None,
        *,
        axis: int = -1,
        padding: int = 0,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        use_kernel: bool = True,
        activation_dtype: str | None = None,
    ) -> None:
        if absmax is None:
            made = self.quantize(packed, block_size, axis=axis)
            packed, absmax, axis, padding = made.packed, made.absmax, made.axis, made.padding
            dtype = made.dtype if dtype is None else dtype
        leaves = {"packed": packed, "absmax": absmax, "nested": nested, "offset": offset}
        layout = {"block_size": block_size, "axis": axis, "padding": padding}
        switches = {"dtype": dtype, "use_kernel": use_kernel, "activation_dtype": activation_dtype}
        self._construct(shape, sharding, **leaves, **layout, **switches)

    def _check_shapes(self) -> None:
        super()._check_shapes()
        if self.nested is None and self.offset is None and self.absmax.dtype != jnp.uint8:
            return
        if self.nested is None or self.offset is None or self.absmax.dtype != jnp.uint8:
            raise ValueError(
                f"a quantized absmax is uint8, with `nested` and `offset`; got {self.absmax.dtype} with "
                f"`nested` {getattr(self.nested, 'shape', None)} and `offset` {getattr(self.offset, 'shape', None)}"
            )
        entries = tuple(-(-size // self._grain("absmax", axis)) for axis, size in enumerate(self.shape))
        if self.absmax.shape != entries:
            raise ValueError(f"a quantized absmax has a code per block, {entries}; got {self.absmax.shape}")
        # A mean per matrix; or per vector, of vectors that were quantized one by one and stacked.
        stacked = self.ndim - 1 if self.offset.ndim == self.ndim - 1 else max(self.ndim - 2, 0)
        stack, matrix = self.absmax.shape[:stacked], math.prod(self.absmax.shape[stacked:])
        wanted = (*stack, -(-matrix // NESTED_BLOCK)), stack
        if (self.nested.shape, self.offset.shape) != wanted:
            raise ValueError(
                f"absmax {self.absmax.shape} has `nested` {wanted[0]}, a scale per {NESTED_BLOCK} of a matrix, and "
                f"`offset` {wanted[1]}; got {self.nested.shape} and {self.offset.shape}"
            )

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        block_size: int = 64,
        *,
        axis: int = -1,
        double_quantization: bool = False,
        fit: bool = False,
        verbose: bool = False,
        use_kernel: bool = True,
        importance: jax.Array | None = None,
    ) -> Self:
        """`array` in NF4 with blocks of `block_size`, even, along `axis`; the sharding is kept.

        For a weight (K, N) that is used as `x @ w`, `axis=0` puts blocks along the contracted axis, as most checkpoints
        do. `double_quantization` takes 4.127 bits a weight instead of 4.5. With `fit` an absmax is the scale of the
        smallest squared error: a little less than the largest magnitude, and what lies beyond is clipped; of errors
        that count as much as their `importance`, if it is given, which broadcasts to the array. `verbose` prints what
        was made. Integers raise a ValueError unless they are held exactly, as those up to 4 always are.
        """
        a_bool("fit", fit)
        fit = fit or importance is not None
        options = {"block_size": block_size, "nested": double_quantization, "fit": fit, "importance": importance}
        encode = functools.partial(_encode, **options)
        exact = 0 if double_quantization else 4  # a quantized absmax is not exact itself
        made = cls._quantized("nf4", array, axis, encode, exact, block_size=block_size, use_kernel=use_kernel)
        if verbose:
            print(made)
        return made

    def _values(self, codes: Leaves, axis: int, length: int) -> jax.Array:
        return reference.unpack_nf4(codes["packed"], axis, length)

    def _coded(self, codes: jax.Array) -> Self:
        return self._replaced(packed=reference.pack_nf4(codes, self.axis % self.ndim))

    def _scale(self) -> jax.Array:
        if self.nested is None or self.offset is None:
            return self.absmax
        # The axes that `offset` has are stacked: in front of a matrix, or of vectors that were quantized one by one.
        shape, stacked = self.absmax.shape, self.offset.ndim
        matrix = self.absmax.reshape(*shape[:stacked], math.prod(shape[stacked:]))
        return reference.decode_dynamic(matrix, self.nested, self.offset).reshape(shape)

    def _fits_kernels(self) -> bool:
        if self.nested is None or self.offset is None:
            return super()._fits_kernels()
        is_single = self.nested.dtype == self.offset.dtype == jnp.float32
        return self.axis >= -2 and is_single and self.offset.ndim == self.ndim - 2  # else a stack of vectors

    def _stored_scales(self) -> Leaves:
        if self.nested is None or self.offset is None:
            return {"scale": self._with_every_block("absmax", self.absmax)}
        levels = {"nested": self.nested, "mean": self.offset, "map": jnp.asarray(reference.dynamic_map())}
        return {"scale": self.absmax, **levels}

    def _divisible(self) -> Self:
        if self.nested is None or self.offset is None:
            return self
        return self._with_absmax(reference.decode_dynamic_matrix(self.absmax, self.nested, self.offset))

    def _single(self) -> Self:
        return self if self.nested is None else self._with_absmax(self._scale())

    def _with_absmax(self, absmax: jax.Array) -> Self:
        return self._replaced(absmax=absmax, nested=None, offset=None)

    def is_stacked(self) -> bool:
        # The last two axes are one matrix to `nested`; those before are its own.
        return super().is_stacked() and (self.nested is None or self.ndim > 2)

    def _encoded_again(self, array: jax.Array) -> ArrayNF4:
        return self.quantize(array, self.block_size, double_quantization=self.nested is not None)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        scale = jnp.abs(self._scale())
        bound = self._scaled(jnp.full(original.shape, _HALF_GAP), scale)
        clipped = jnp.abs(original.astype(scale.dtype)) - self._scaled(jnp.ones(original.shape), scale)
        bound = jnp.maximum(bound, clipped)
        if self.nested is None:
            return bound
        # The nested absmax is off by half the widest step of the dynamic map, and multiplies at most 1.
        width = float(np.max(np.diff(reference.dynamic_map()))) / 2
        return bound + 2 * width * jnp.max(self.nested, initial=0)


@functools.partial(jax.jit, static_argnames=("axis", "block_size", "nested", "fit"))
def _encode(x: jax.Array, axis: int, block_size: int, nested: bool, fit: bool, importance: jax.Array | None) -> Leaves:
    absmax = reference.nf4_scales(x, block_size, axis, fit, importance)
    if not nested:
        return {"packed": reference.nf4_codes(x, absmax, block_size, axis), "absmax": absmax}
    matrix = absmax.reshape(*absmax.shape[:-2], math.prod(absmax.shape[-2:]))
    codes, scales, mean = reference.encode_dynamic(matrix)
    if fit:  # to what the absmax will be read as; without, as bitsandbytes does
        absmax = reference.decode_dynamic(codes, scales, mean).reshape(absmax.shape)
    packed = reference.nf4_codes(x, absmax, block_size, axis)
    return {"packed": packed, "absmax": codes.reshape(absmax.shape), "nested": scales, "offset": mean}


register_format("nf4", ArrayNF4, ArrayNF4.quantize)
