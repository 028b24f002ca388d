"""NF4: four bits an element, sixteen quantiles of a normal distribution, and the largest magnitude of each block."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer.jaximus import aux_field, ste
from eformer.kernels import Matrix, reference

from ._base import ShardingType, checked_array, laid_out, normalized_axes, register_format
from ._documented import *  # noqa: F403  # the documented handlers of primitives
from ._integers import as_floats, without_loss
from ._leafwise import LeafwiseArray, Leaves, axis_from_start
from ._validation import FLOATS, Leaf, Rules, an_even_length, an_int, check_fields

NESTED_BLOCK = 256  # scales that share a scale
# Half the distance between neighbouring codes, at most: between -1 and the next.
_HALF_GAP = float(np.max(np.diff(reference.NF4_CODES))) / 2


class ArrayNF4(LeafwiseArray):
    """`decode() == code * absmax of its block`, with two codes a byte and blocks of `block_size` along `axis`.

    `packed` and `absmax` have the array's axes; along `axis`, `packed` is half as long, and `absmax` has one entry per
    block. The last block may be short and the last byte half empty (`padding`). An element is off by at most 0.152 of
    its block's absmax; zero is exact. A block that holds a NaN or an infinity decodes to NaN.

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

    array_fields = ("packed", "absmax")
    rules: ClassVar[Rules] = {
        "packed": Leaf("uint8, two codes a byte", (jnp.uint8,)),
        "absmax": Leaf("floating point, or with `nested` uint8", (*FLOATS, jnp.uint8)),
        "nested": Leaf("float32 or float64", (jnp.float32, jnp.float64), optional=True),
        "offset": Leaf("float32 or float64", (jnp.float32, jnp.float64), optional=True),
        "block_size": an_even_length,
        "axis": an_int,
        "padding": an_int,
    }

    packed: jax.Array
    absmax: jax.Array = None  # pyright: ignore[reportAssignmentType]  # never None once constructed
    block_size: int = aux_field(default=64)
    sharding: InitVar[ShardingType] = None  # pyright: ignore[reportIncompatibleMethodOverride]  # see QuantizedArray
    nested: jax.Array | None = None
    offset: jax.Array | None = None
    axis: int = aux_field(default=-1, kw_only=True)
    padding: int = aux_field(default=0, kw_only=True)

    def __post_init__(self, sharding: ShardingType) -> None:
        an_even_length("block_size", self.block_size)
        if self.absmax is None:
            made = self.quantize(self.packed, self.block_size, axis=self.axis)
            for name in ("packed", "absmax", "axis", "padding"):
                object.__setattr__(self, name, getattr(made, name))
            if self.dtype is None:
                object.__setattr__(self, "dtype", made.dtype)
        check_fields(self, self.rules)
        if self.packed.ndim:
            object.__setattr__(self, "axis", normalized_axes(self.axis, self.packed.ndim)[0])
        if self.dtype is None:
            object.__setattr__(self, "dtype", jnp.dtype(jnp.float32))
        placed = self.with_sharding(sharding)
        for name in self._data_fields:
            object.__setattr__(self, name, getattr(placed, name))

    def _settle(self, shape: Sequence[int] | None) -> None:
        # A documented constructor tells how long the last, short block is by the shape alone.
        if shape is not None and len(shape) == self.packed.ndim > 0:
            object.__setattr__(self, "padding", self.packed.shape[self.axis] * 2 - shape[self.axis])
        super()._settle(shape)

    def _check_shapes(self) -> None:
        ndim, absmax = self.packed.ndim, self.absmax
        if self.padding not in (0, 1) or (ndim and not (-ndim <= self.axis < 0 <= min(self.shape))):
            raise ValueError(
                f"packed {self.packed.shape} of two codes a byte, `axis={self.axis}` and `padding={self.padding}`: "
                f"that is no array. `axis` is counted from the end, and `padding` is 1 for an odd length, else 0"
            )
        try:
            super()._check_shapes()
        except ValueError as error:
            raise ValueError(
                f"packed {self.packed.shape} of two codes a byte and absmax {absmax.shape} of blocks of "
                f"{self.block_size} along axis {self.axis}: that is no array of shape {self.shape}. {error}. Axes that "
                f"`vmap` or `scan` takes off the leaves must be in front of that axis"
            ) from None
        self._check_nested()

    def _check_nested(self) -> None:
        """Scales of scales come together: codes per block, a scale per 256 of them, and a mean per matrix."""
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
        verbose: bool = False,
        use_kernel: bool = True,
    ) -> Self:
        """`array` in NF4 with blocks of `block_size`, even, along `axis`; the sharding is kept.

        For a weight (K, N) that is used as `x @ w`, `axis=0` groups what is summed over, as most checkpoints do.
        `double_quantization` takes 4.127 bits a weight instead of 4.5. `verbose` prints what was made. Integers raise a
        ValueError unless they are held exactly, as those up to 4 always are.
        """
        an_even_length("block_size", block_size)
        x = checked_array(array)
        axes = normalized_axes(axis, x.ndim) if x.ndim else (-1,)
        if len(axes) != 1:
            raise ValueError(f"blocks of NF4 run along one axis, got `axis={axis}`")
        axis = axes[0]

        def make(x: jax.Array) -> Self:
            packed, absmax = _encode(x, block_size, axis)
            nested = offset = None
            if double_quantization:
                absmax, nested, offset = _encode_absmax(absmax)
            return cls(
                packed,
                absmax,
                block_size,
                nested=nested,
                offset=offset,
                axis=axis,
                padding=x.shape[axis] % 2 if x.ndim else 0,
                dtype=x.dtype,
                use_kernel=use_kernel,
            )

        # A quantized absmax is not exact itself.
        made = without_loss(lambda x: laid_out(make, x), x, "nf4", all_up_to=0 if double_quantization else 4)
        if verbose:
            print(made)
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.packed.shape
        if not shape:
            return ()
        axis = axis_from_start(self.axis, len(shape))
        return (*shape[:axis], shape[axis] * 2 - self.padding, *shape[axis + 1 :])

    def decode(self) -> jax.Array:
        self._check_shapes()  # a tree may have been restructured since it was constructed
        absmax = self._plain_absmax()
        if not self.packed.ndim:
            return reference.decode_nf4(self.packed[None], absmax[None], self.block_size, 0, 1)[0]
        length = self.shape[self.axis]
        block_size = min(self.block_size, max(length, 2))  # decoding fills blocks up, and a file chooses their length
        return reference.decode_nf4(self.packed, absmax, block_size, self.axis, length)

    def fits_kernels(self) -> bool:
        scales = [leaf for leaf in (self.absmax, self.nested, self.offset) if leaf is not None]
        if self.axis < -2 or any(leaf.dtype not in (jnp.float32, jnp.uint8) for leaf in scales):
            return False
        return self.offset is None or self.offset.ndim == self.packed.ndim - 2  # else a stack of vectors

    def stored_matrix(self) -> Matrix:
        if self.nested is None or self.offset is None:
            blocks = tuple(
                -(-n // self.block_size) if axis - 3 == self.axis else n for axis, n in enumerate(self.shape)
            )
            scales = (jnp.broadcast_to(self.absmax, blocks),)
        else:
            scales = (self.absmax, self.nested, self.offset, jnp.asarray(reference.dynamic_map()))
        packed_axis = self.axis + 2
        return Matrix(
            "nf4", (self.packed,), scales, *self.shape[1:], packed_axis=packed_axis, block_size=self.block_size
        )

    def _plain_absmax(self) -> jax.Array:
        if self.nested is None or self.offset is None:
            return self.absmax
        return _decode_absmax(self.absmax, self.nested, self.offset)

    def divisible(self) -> Self:
        if self.nested is None or self.offset is None:
            return self
        return self._with_absmax(reference.decode_dynamic_matrix(self.absmax, self.nested, self.offset))

    def of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[int, ...]]) -> Self:
        part = super().of_parts(leaves, grains)
        block_size = grains["absmax"][self.axis]
        if block_size:  # less than it was where a part cuts a block
            object.__setattr__(part, "block_size", block_size)
        return part

    def _single(self) -> Self:
        return self if self.nested is None else self._with_absmax(self._plain_absmax())

    def _with_absmax(self, absmax: jax.Array) -> Self:
        return type(self)(
            self.packed,
            absmax,
            self.block_size,
            axis=self.axis,
            padding=self.padding,
            dtype=self.dtype,
            use_kernel=self.use_kernel,
            activation_dtype=self.activation_dtype,
        )

    def is_stacked(self) -> bool:
        # The last two axes are one matrix to `nested`; those before are its own.
        return super().is_stacked() and (self.nested is None or self.ndim > 2)

    def requantized(self, array: jax.Array) -> ArrayNF4:
        nested = self.nested is not None
        made = self.quantize(as_floats(array), self.block_size, double_quantization=nested, use_kernel=self.use_kernel)
        return made.with_dtype(self.dtype)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        del original
        absmax = jnp.abs(self._plain_absmax())
        if not self.ndim:
            return absmax * _HALF_GAP
        bound = jnp.repeat(absmax, self.block_size, self.axis)
        bound = lax.slice_in_dim(bound, 0, self.shape[self.axis], axis=self.axis % self.ndim)
        if self.nested is None or self.offset is None:
            return bound * _HALF_GAP
        # The nested absmax is off by half the widest step of the dynamic map, and what it multiplies is 1 at most.
        width = float(np.max(np.diff(reference.dynamic_map()))) / 2
        return bound * _HALF_GAP + 2 * width * jnp.max(self.nested, initial=0)

    def unit_codes(self) -> int:
        return 17 * int(np.argmax(reference.NF4_CODES))  # in both halves of a byte

    def _grain(self, name: str, axis: int) -> int:
        if not self.packed.ndim or axis != self.axis % self.packed.ndim:
            return 1
        return 2 if name == "packed" else self.block_size

    def _rebuilt(self, leaves: Leaves, moved: Mapping[int, int], shape: tuple[int, ...]) -> Self:
        axis = moved[self.axis % self.ndim] - len(shape) if self.ndim else -1
        packed = leaves["packed"]
        return type(self)(
            packed,
            leaves["absmax"],
            self.block_size,
            axis=axis,
            padding=packed.shape[axis] * 2 - shape[axis] if shape else 0,
            dtype=self.dtype,
            use_kernel=self.use_kernel,
            activation_dtype=self.activation_dtype,
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode(x: jax.Array, block_size: int, axis: int) -> tuple[jax.Array, jax.Array]:
    if x.ndim:
        return reference.encode_nf4(x, block_size, axis)
    packed, absmax = reference.encode_nf4(x[None], block_size, 0)
    return packed[0], absmax[0]


@jax.jit
def _encode_absmax(absmax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes of the absmax's shape; scales and mean per matrix of its last two axes."""
    matrix = absmax.reshape(*absmax.shape[:-2], math.prod(absmax.shape[-2:]))
    codes, nested, offset = reference.encode_dynamic(matrix)
    return codes.reshape(absmax.shape), nested, offset


def _decode_absmax(codes: jax.Array, nested: jax.Array, offset: jax.Array) -> jax.Array:
    # The axes that `offset` has are stacked: in front of a matrix, or of the vectors that were quantized one by one.
    matrix = codes.reshape(*codes.shape[: offset.ndim], math.prod(codes.shape[offset.ndim :]))
    return reference.decode_dynamic(matrix, nested, offset).reshape(codes.shape)


@ste
def straight_through_nf4(array: jax.Array, block_size: int = 64, axis: int = -1) -> Any:
    """`ArrayNF4.quantize(array, block_size, axis=axis)` made dense, with the gradient of the identity."""
    return ArrayNF4.quantize(array, block_size, axis=axis)


def safe_materialize(arr: Any) -> tuple[Any, bool]:
    """`arr` made dense if it is an `ArrayNF4`, and whether it was."""
    return (arr.materialize(), True) if isinstance(arr, ArrayNF4) else (arr, False)


def safe_delete(arr: Any, materialized: bool) -> None:
    """Does nothing, as documented: JAX frees an array when the last reference to it goes."""
    del arr, materialized


register_format("nf4", ArrayNF4, ArrayNF4.quantize)
