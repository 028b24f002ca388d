"""`PackedArray`: formats that put several codes into a byte along one axis, with or without a scale per block."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from eformer._src.jaximus.array import aux_field
from eformer._src.kernels import reference
from eformer._src.kernels.matrix import Matrix

from .base import Grain, Leaves
from .elementwise_layout import AxisMap, LeafwiseArray
from .input import checked_array, normalized_axes, without_loss
from .sharding import laid_out
from .validation import COUNTS, FLOATS, FieldChecks, LeafCheck, a_block_size, an_int, check_fields

Encode = Callable[[jax.Array, int], Leaves]  # of an array and the axis to pack along


class PackedArray(LeafwiseArray):
    """A quantized array whose codes are packed along `axis`, counted from the end.

    A format declares its fields, the `_values_per_byte` of each leaf of codes (a format of 3 bits has a leaf of 2-bit
    codes and one of 1-bit codes), its `_scale_fields`, what codes mean (`_values`) and their error (`_step_bound`).
    With a field `block_size` it has a scale per block of that many elements along `axis`. `padding` is how many values
    the last byte of the first code leaf has beyond the array's length.
    """

    _values_per_byte: ClassVar[Mapping[str, int]] = {}
    _field_checks: ClassVar[FieldChecks] = {"axis": an_int, "padding": an_int}

    axis: int = aux_field(default=-1, kw_only=True)
    padding: int = aux_field(default=0, kw_only=True)

    def __init_subclass__(cls, **kwargs: object) -> None:
        if "_values_per_byte" in vars(cls):
            counts = cls._values_per_byte
            cls._code_fields = tuple(counts)
            codes = {name: LeafCheck(f"uint8, {COUNTS[n]} codes a byte", (jnp.uint8,)) for name, n in counts.items()}
            scales = {name: LeafCheck("floating point", FLOATS) for name in cls._scale_fields}
            blocks = {"block_size": a_block_size(max(counts.values()))} if hasattr(cls, "block_size") else {}
            cls._field_checks = {**codes, **scales, **blocks, **vars(cls).get("_field_checks", {})}
        super().__init_subclass__(**kwargs)

    @abc.abstractmethod
    def _values(self, codes: Leaves, axis: int, length: int) -> jax.Array:
        """What the codes, leaves of at least one axis, stand for before their scale: `length` floats along `axis`."""

    def __post_init__(self) -> None:
        check_fields(self, self._field_checks)
        codes = self._codes()[0]
        if codes.ndim:
            vars(self)["axis"] = normalized_axes(self.axis, codes.ndim)[0]
        if self.dtype is None:
            vars(self)["dtype"] = jnp.dtype(jnp.float32)

    def _finish_construction(self, shape: Sequence[int] | None) -> None:
        codes = self._codes()[0]
        if shape is not None and len(shape) == codes.ndim > 0:  # the shape tells how full the last byte is
            vars(self)["padding"] = codes.shape[self.axis] * self._first_count - shape[self.axis]
        super()._finish_construction(shape)

    def _check_shapes(self) -> None:
        count, ndim = self._first_count, self._codes()[0].ndim
        if not 0 <= self.padding < count or (ndim and not (-ndim <= self.axis < 0 <= min(self.shape))):
            allowed = "1 for an odd length, else 0" if count == 2 else f"from 0 to {count - 1}"
            raise ValueError(
                f"{self._in_words()} with `padding={self.padding}`: that is no array. `axis` is counted from the end, "
                f"and `padding` is {allowed}"
            )
        try:
            super()._check_shapes()
        except ValueError as error:
            raise ValueError(
                f"{self._in_words()}: that is no array of shape {self.shape}. {error}. Axes that `vmap` or `scan` "
                f"takes off the leaves must be in front of that axis"
            ) from None

    def _in_words(self) -> str:
        shapes = {name: leaf.shape for name, leaf in self._named_leaves().items()}
        blocks = f" of blocks of {self._per_scale}" if self._per_scale > 1 else ""
        scales = "".join(f", {name} {shapes[name]}{blocks}" for name in self._scale_fields if name in shapes)
        first, count = self._code_fields[0], COUNTS[self._first_count]
        return f"{first} {shapes[first]} packs {count} values a byte along `axis={self.axis}`{scales}"

    @classmethod
    def _encoded(cls, x: jax.Array, axis: int, encode: Encode, **fields: Any) -> Self:
        """The array with the leaves `encode(x, axis)`, which gets at least one axis, and with the other `fields`."""

        def make(x: jax.Array) -> Self:
            leaves = encode(x if x.ndim else x[None], axis)
            own = (*cls._code_fields, *cls._scale_fields, *cls._other_fields)
            leaves = leaves if x.ndim else {n: leaf.reshape(()) if n in own else leaf for n, leaf in leaves.items()}
            return cls(**{"dtype": x.dtype, **fields, **leaves, "axis": axis, "shape": x.shape})

        return laid_out(make, x)

    @classmethod
    def _quantized(
        cls, name: str, array: ArrayLike, axis: int, encode: Encode, exact_up_to: int = 0, **fields: Any
    ) -> Self:
        """`array` by `encode`, along one axis of it; integers must be held exactly, as those `exact_up_to` always are.

        The format's `name` is for the error that says so.
        """
        for field, value in fields.items():
            check = cls._field_checks[field]
            if callable(check):
                check(field, value)
        x = checked_array(array)
        axes = normalized_axes(axis, x.ndim) if x.ndim else (-1,)
        if len(axes) != 1:
            raise ValueError(f"codes of {name!r} are packed along one axis, got `axis={axis}`")
        return without_loss(lambda x: cls._encoded(x, axes[0], encode, **fields), x, name, exact_up_to)

    def _encoded_again(self, array: jax.Array) -> LeafwiseArray:
        made_by: Any = type(self)  # each format has a `quantize` with its own options
        return made_by.quantize(array, **{"block_size": self._per_scale} if self._per_scale > 1 else {})

    @property
    def shape(self) -> tuple[int, ...]:
        first, count = next(iter(self._counts().items()))
        shape = getattr(self, first).shape
        if not shape:
            return ()
        if self.axis < -len(shape):
            raise ValueError(
                f"codes are packed along axis {self.axis}, but the leaves have {len(shape)} axes left: `vmap` and "
                f"slices of the leaves may take axes before it only; inside `implicit` any axis works"
            )
        axis = self.axis % len(shape)
        return (*shape[:axis], shape[axis] * count - self.padding, *shape[axis + 1 :])

    def _counts(self) -> Mapping[str, int]:
        """Codes per byte of each leaf of codes that this array has."""
        return self._values_per_byte

    def _codes(self) -> list[jax.Array]:
        return [getattr(self, name) for name in self._counts()]

    def _code_bits(self) -> int:
        return sum(8 // count for count in self._counts().values())

    def _coded(self, codes: jax.Array) -> Self:
        """This array with other `codes`, uint8 of its shape, packed with the low bits in the first leaf."""
        leaves, below = {}, 0
        for name, count in self._counts().items():
            width = 8 // count
            leaves[name] = reference.pack(codes >> below & (2**width - 1), count, self.axis % self.ndim)
            below += width
        return self._replaced(**leaves)

    @property
    def _first_count(self) -> int:
        return next(iter(self._counts().values()))

    @property
    def _per_scale(self) -> int:
        """How many elements along `axis` share a scale."""
        return getattr(self, "block_size", 1)

    def _scale(self) -> jax.Array | None:
        """The scales as floats of the array's rank; None where every scale is 1."""
        return getattr(self, self._scale_fields[0]) if self._scale_fields else None

    def _scaled(self, values: jax.Array, scale: jax.Array) -> jax.Array:
        """`values`, of this array's shape, times the scales of their blocks."""
        if not self.ndim or self._per_scale == 1:
            return values.astype(scale.dtype) * scale
        return reference.scale_blocks(values, scale, self._per_scale, self.axis)

    def _unscaled(self) -> jax.Array:
        self._check_shapes()  # a tree may have been restructured since it was constructed
        codes = dict(zip(self._counts(), self._codes(), strict=True))
        if not self.ndim:
            return self._values({name: leaf[None] for name, leaf in codes.items()}, 0, 1)[0]
        return self._values(codes, self.axis, self.shape[self.axis])

    def decode(self) -> jax.Array:
        values, scale = self._unscaled(), self._scale()
        return values if scale is None else self._scaled(values, scale)

    def _factors(self) -> tuple[jax.Array, jax.Array | None]:
        return (self._unscaled(), self._scale()) if self._per_scale == 1 else super()._factors()

    def _fits_kernels(self) -> bool:
        scales = [getattr(self, name) for name in self._scale_fields]
        single = all(scale is None or scale.dtype == jnp.float32 for scale in scales)
        return self._kernel_format is not None and self.axis >= -2 and single

    def _stored_matrix(self) -> Matrix:
        (_, rows, cols), codes = self.shape, tuple(self._codes())
        scales = self._stored_scales()
        return Matrix(
            self._kernel_format or "",
            codes,
            tuple(scales.values()),
            rows,
            cols,
            self.axis + 2,
            block_size=getattr(self, "block_size", 2),
            superblock_size=getattr(self, "superblock_size", 0),
            scale_names=tuple(scales),
        )

    def _stored_scales(self) -> Leaves:
        """The scales as kernels read them, by the names of `Matrix.scale_names`."""
        scale = self._scale()
        if scale is None:
            return {}
        return {"scale": scale if self._per_scale == 1 else self._with_every_block(self._scale_fields[0], scale)}

    def _with_every_block(self, name: str, leaf: jax.Array) -> jax.Array:
        """`leaf`, the field `name`, with an entry for each block where it has one for all of them."""
        entries = tuple(-(-n // self._grain(name, axis)) for axis, n in enumerate(self.shape))
        return leaf if leaf.shape == entries else jnp.broadcast_to(leaf, entries)

    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        part = super()._of_parts(leaves, grains)
        block = grains[self._scale_fields[0]][self.axis] if self._per_scale > 1 else 0
        return part._replaced(block_size=block) if block else part  # less than it was where a part cuts a block

    def _grain(self, name: str, axis: int) -> int:
        ndim = self._codes()[0].ndim
        if not ndim or axis != self.axis % ndim:
            return 1
        return self._counts().get(name) or self._per_scale

    def _rebuilt(self, leaves: Leaves, shape: tuple[int, ...], moved: AxisMap | None = None) -> Self:
        axis = -1 if not self.ndim else self.axis if moved is None else moved[self.axis % self.ndim] - len(shape)
        packed = leaves[self._code_fields[0]].shape
        padding = packed[axis] * self._first_count - shape[axis] if shape else 0
        return self._replaced(**leaves, axis=axis, padding=padding)
