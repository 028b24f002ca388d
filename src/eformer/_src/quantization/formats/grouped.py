"""Integers of 2 to 8 bits in blocks, with a scale and an offset each: INT4 and its kin, and those of other projects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from eformer._src.jaximus.array import ImplicitArray, aux_field
from eformer._src.kernels import grouped, reference
from eformer._src.quantization.base import Grain, Leaves
from eformer._src.quantization.elementwise_layout import replaced
from eformer._src.quantization.packed import PackedArray
from eformer._src.quantization.registry import find_format, formats, register_format
from eformer._src.quantization.validation import FLOATS, MAX_LENGTH, FieldChecks, LeafCheck, a_bool, an_int

SMALL = (jnp.uint8, jnp.int8)  # of scales and offsets that have a scale themselves
SUPERBLOCK = 1024  # elements, or nearly so, that share the scale of their scales in double quantization
FLOAT4 = {jnp.dtype(jnp.float8_e8m0fnu): "mxfp4", jnp.dtype(jnp.float8_e4m3fn): "nvfp4"}  # formats by their scales


def _some_bits(name: str, value: Any) -> None:
    an_int(name, value)
    if value not in grouped.PLANES:
        raise ValueError(f"`{name}={value}` must be one of {', '.join(map(str, grouped.PLANES))}")


def _a_length(least: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        an_int(name, value)
        if not least <= value <= MAX_LENGTH:
            raise ValueError(f"`{name}={value}` must be from {least} to {MAX_LENGTH}")

    return check


def _a_codebook(name: str, value: Any) -> None:
    known = ("integer", *grouped.CODEBOOKS)
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}")


class ArrayGrouped(PackedArray):
    """`decode() == scale * (value - zero) + offset`, with one scale, zero and offset for each block along `axis`.

    The value of a code of `bits` bits is the code itself, or what `codebook` says. Without `zero` and `offset` integers
    are centred: the value is `code - 2 ** (bits - 1)`. `packed` holds the low 2, 4 or 8 bits of each code, four, two or
    one to a byte along `axis`, the first in the lowest bits; `high` holds the other bits of codes of 3, 5 and 6 bits.

    `scale`, `zero` and `offset` have the array's axes, with an entry for each block of `block_size`; the last block may
    be short. Scales and offsets may be small numbers times `scale_scale` and `offset_scale`, which have an entry for
    each `superblock_size` elements along `axis`. So GPTQ, AWQ, MLX and most types of GGUF are held exactly.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import ArrayGrouped
    >>> q = ArrayGrouped.quantize(jnp.ones((128, 256)), bits=3, axis=0)
    >>> q.shape, q.nbytes * 8 / q.size
    ((128, 256), 3.625)
    """

    _code_fields = ("packed", "high")
    _scale_fields = ("scale", "offset")
    _other_fields = ("zero", "scale_scale", "offset_scale")
    _field_checks: ClassVar[FieldChecks] = {
        "packed": LeafCheck("uint8, the low bits of codes", (jnp.uint8,)),
        "high": LeafCheck("uint8, the high bits of codes", (jnp.uint8,), optional=True),
        "scale": LeafCheck(
            "floating point, or with `scale_scale` uint8 or int8",
            (*FLOATS, jnp.float8_e8m0fnu, jnp.float8_e4m3fn, *SMALL),
        ),
        "zero": LeafCheck("uint8", (jnp.uint8,), optional=True),
        "offset": LeafCheck("floating point, or with `offset_scale` uint8 or int8", (*FLOATS, *SMALL), optional=True),
        "scale_scale": LeafCheck("floating point", FLOATS, optional=True),
        "offset_scale": LeafCheck("floating point", FLOATS, optional=True),
        "bits": _some_bits,
        "block_size": _a_length(1),
        "superblock_size": _a_length(0),
        "codebook": _a_codebook,
    }

    packed: jax.Array
    scale: jax.Array
    high: jax.Array | None = None
    zero: jax.Array | None = None
    offset: jax.Array | None = None
    scale_scale: jax.Array | None = None
    offset_scale: jax.Array | None = None
    bits: int = aux_field(default=4, kw_only=True)
    block_size: int = aux_field(default=64, kw_only=True)
    superblock_size: int = aux_field(default=0, kw_only=True)
    codebook: str = aux_field(default="integer", kw_only=True)

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        block_size: int | None = None,
        *,
        bits: int = 4,
        axis: int = -1,
        symmetric: bool | None = None,
        double_quantization: bool | None = None,
        fit: bool = True,
        use_kernel: bool = True,
        importance: jax.Array | None = None,
    ) -> Self:
        """`array` in codes of `bits` bits with blocks of `block_size` along `axis`; the sharding is kept.

        Scales and offsets are bfloat16, and float32 for 8 bits. With `double_quantization` they are 8-bit integers,
        under a scale for each 1,024 elements; by default where they would take more than half a bit an element
        otherwise. `symmetric` leaves out the offsets, which halves what scales take; zero is exact then. By default
        blocks have 32 elements, 64 for codes of 8 bits, and 16 without offsets for 2 and 3 bits. `fit`
        searches for those with the smallest squared error, up to five times as long; without, they span the extremes
        of a block. The squared error of an element counts as much as its `importance`, which broadcasts to the array,
        such as the mean square of what it is multiplied by. Integers raise a ValueError unless they are held exactly.
        """
        block_size = default_block_size(bits) if block_size is None else block_size
        a_bool("fit", fit)
        _a_length(1)("block_size", block_size)
        symmetric, two_levels = scale_levels(bits, block_size, symmetric, double_quantization)
        scale_dtype = jnp.dtype(jnp.float32 if bits == 8 else jnp.bfloat16)
        superblock = block_size * max(SUPERBLOCK // block_size, 1) if two_levels else 0
        options = {"bits": bits, "block_size": block_size, "superblock_size": superblock}
        fit = fit or importance is not None
        levels = {"symmetric": symmetric, "scale_dtype": scale_dtype, "fit": fit, "importance": importance}
        encode = functools.partial(_encode, **levels, **options)
        made = cls._quantized(_name(bits), array, axis, encode, **options, use_kernel=use_kernel)
        _check_finite(array, made)
        return made

    def _names_among(self, names: Sequence[str]) -> Sequence[str]:
        own = _name(self.bits) if self.codebook == "integer" else self.codebook
        own = FLOAT4.get(self.scale.dtype, own) if own == "e2m1" else own
        return [name for name in names if name == own] or [self.codebook]

    def _counts(self) -> Mapping[str, int]:
        return {name: 8 // width for name, width in zip(self._code_fields, grouped.PLANES[self.bits], strict=False)}

    @property
    def _kernel_format(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"uint{self.bits}" if self.codebook == "integer" else grouped.kernel_name(self.codebook)

    def _check_shapes(self) -> None:
        self._check_levels()
        super()._check_shapes()

    def _check_levels(self) -> None:
        """Raise a ValueError unless the leaves that are there belong together."""
        if (self.high is not None) != (len(grouped.PLANES[self.bits]) == 2):
            raise ValueError(f"codes of {self.bits} bits have {'a' if self.high is None else 'no'} plane `high`")
        if self.codebook != "integer" and (self.bits != 4 or self.zero is not None):
            raise ValueError(f"codes of {self.codebook!r} have 4 bits and no `zero`; got `bits={self.bits}`")
        if self.zero is not None and self.offset is not None:
            raise ValueError("a block has a `zero` or an `offset`, not both")
        for name in self._scale_fields:
            leaf, of_leaf = getattr(self, name), getattr(self, f"{name}_scale")
            small = leaf is not None and jnp.issubdtype(leaf.dtype, jnp.integer)
            if (small and of_leaf is None) or (leaf is None and of_leaf is not None):
                given = "no leaf" if leaf is None else leaf.dtype
                raise ValueError(f"`{name}` of integers goes with `{name}_scale`; got {given} and {_words(of_leaf)}")
        if self.superblock_size % self.block_size:
            raise ValueError(
                f"`superblock_size={self.superblock_size}` must be a multiple of `block_size={self.block_size}`, or 0"
            )

    def _values(self, codes: Leaves, axis: int, length: int) -> jax.Array:
        found = grouped.unpack_codes(list(codes.values()), self.bits, axis, length)
        if self.codebook != "integer":
            return jnp.asarray(grouped.CODEBOOKS[self.codebook])[found]
        centred = self.zero is None and self.offset is None
        return found.astype(jnp.float32) - (2 ** (self.bits - 1) if centred else 0)

    def _level(self, name: str) -> jax.Array | None:
        """The scales or the offsets as floats, times their own scales."""
        leaf, of_leaf = getattr(self, name), getattr(self, f"{name}_scale")
        if leaf is None:
            return None
        wide = leaf if leaf.dtype == jnp.float64 else leaf.astype(jnp.float32)
        if of_leaf is None:
            return wide
        along, factor = self.axis, of_leaf.astype(wide.dtype)
        if not self.ndim or of_leaf.shape[along] == 1:
            return wide * factor
        blocks = -(-self.shape[along] // self.block_size)
        wide = jnp.broadcast_to(wide, replaced(wide.shape, along % self.ndim, blocks))
        per_factor = (self.superblock_size or self.block_size) // self.block_size
        return reference.scale_blocks(wide, factor, per_factor, along)

    def _scale(self) -> jax.Array:
        scale = self._level("scale")
        assert scale is not None
        return scale

    def decode(self) -> jax.Array:
        return self._scaled_blocks(self._unscaled(), self._scale(), self.zero, self._level("offset"))

    def _scaled_blocks(
        self, values: jax.Array, scale: jax.Array, zero: jax.Array | None = None, offset: jax.Array | None = None
    ) -> jax.Array:
        """`scale * (values - zero) + offset`, for `values` of this array's shape and an entry for each block."""
        if not self.ndim:
            entries = [None if leaf is None else leaf[None] for leaf in (zero, offset)]
            return grouped.decode_blocks(values[None], scale[None], *entries, block_size=1, axis=0)[0]
        return grouped.decode_blocks(values, scale, zero, offset, self.block_size, self.axis)

    def _factors(self) -> tuple[jax.Array, jax.Array | None]:
        return self.decode(), None

    def _with_scale(self) -> Self:
        """An equal array whose scales and offsets are floating point, without scales of their own."""
        levels = {name: self._level(name) for name in self._scale_fields}
        return self._replaced(**levels, scale_scale=None, offset_scale=None, superblock_size=0)

    def _finer(self) -> Self:
        """Scales of blocks without those of superblocks, which parts of the array may cut."""
        return self if self.scale_scale is None and self.offset_scale is None else self._with_scale()

    def _fits_kernels(self) -> bool:
        return self.axis >= -2 and jnp.float64 not in {leaf.dtype for leaf in self._named_leaves().values()}

    def _stored_scales(self) -> Leaves:
        """The leaves themselves. Only what all blocks share is repeated, and never the scales of scales of a matrix."""
        leaves = self._named_leaves()
        levels = ("scale", "zero", "offset")
        stored = {name: self._with_every_block(name, leaves[name]) for name in levels if name in leaves}
        for name in ("scale_scale", "offset_scale"):
            if name in leaves:
                leaf = leaves[name]
                stored[name] = leaf if leaf.shape[0] == self.shape[0] else jnp.repeat(leaf, self.shape[0], axis=0)
        return stored

    def _of_parts(self, leaves: Leaves, grains: Mapping[str, tuple[Grain, ...]]) -> Self:
        sizes = {"block_size": "scale", "superblock_size": "scale_scale"}
        cut = {
            size: grains[name][self.axis]
            for size, name in sizes.items()
            if grains.get(name, (0,) * self.ndim)[self.axis]
        }
        if "block_size" in cut:
            cut.setdefault("superblock_size", 0)  # one factor for all needs no length
        return self._mapped(lambda name, _: leaves[name])._replaced(**cut)

    def _grain(self, name: str, axis: int) -> int:
        ndim = self.packed.ndim
        if not ndim or axis != self.axis % ndim:
            return 1
        if name in self._code_fields:
            return self._counts()[name]
        return (self.superblock_size or self.block_size) if name.endswith("_scale") else self.block_size

    def _encoded_again(self, array: jax.Array) -> ArrayGrouped:
        name = FLOAT4.get(self.scale.dtype, "mxfp4") if self.codebook == "e2m1" else self.codebook
        if name in {form.name for form in formats()}:
            made: Any = find_format(name).encode(array, self.block_size)
            return made
        symmetric = self.zero is None and self.offset is None
        double = self.scale_scale is not None
        return self.quantize(array, self.block_size, bits=self.bits, symmetric=symmetric, double_quantization=double)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        """Half the widest step; and for elements below the first or above the last value, their distance from it."""
        centre = 2 ** (self.bits - 1) if self.zero is None and self.offset is None else 0
        table = np.sort(grouped.CODEBOOKS.get(self.codebook, np.arange(2.0**self.bits, dtype=np.float32) - centre))
        scale, levels = self._scale(), (self.zero, self._level("offset"))
        ends = [self._scaled_blocks(jnp.full(self.shape, table[i]), scale, *levels) for i in (0, -1)]
        x = original.astype(scale.dtype)
        outside = jnp.maximum(jnp.minimum(*ends) - x, x - jnp.maximum(*ends))
        widest = jnp.full(self.shape, np.max(np.diff(table)) / 2)
        return jnp.maximum(outside, 0) + self._scaled_blocks(widest, jnp.abs(scale))


def _check_finite(array: jax.Array, made: ArrayGrouped) -> None:
    """A ValueError if a block is NaN and no element is, where values can be seen; it takes reading the scales."""
    leaves = (array, made.scale if made.scale_scale is None else made.scale_scale)
    if isinstance(array, (Tracer, ImplicitArray)) or any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    if bool(jnp.any(jnp.isnan(leaves[1]))) and bool(jnp.all(jnp.isfinite(array))):
        most = float(jnp.finfo(jnp.float32).max) * 0.98
        raise ValueError(
            f"a block of codes spans at most {most:.3g}, and one spans more here: codes times their scale would "
            f"overflow; divide the array by a power of two, and multiply what it gives"
        )


@functools.partial(
    jax.jit, static_argnames=("axis", "bits", "block_size", "symmetric", "scale_dtype", "fit", "superblock_size")
)
def _encode(x: jax.Array, axis: int, bits: int, **options: Any) -> Leaves:
    codes, scales = grouped.encode(x, bits, axis=axis, **options)
    return {**dict(zip(ArrayGrouped._code_fields, grouped.pack_codes(codes, bits, axis), strict=False)), **scales}


def _name(bits: int) -> str:
    """The name of the format; "int8" is that of another class."""
    return "int8_grouped" if bits == 8 else f"int{bits}"


def default_block_size(bits: int) -> int:
    """The best that half a bit an element of scales can do (docs/quality.md); 8 bits are exact enough with more."""
    return 64 if bits == 8 else 16 if bits < 4 else 32


class ScaleLevels(NamedTuple):
    """How the blocks of an array are scaled."""

    symmetric: bool
    two: bool  # scales of 8 bits that have a scale themselves


def scale_levels(bits: int, block_size: int, symmetric: bool | None, double_quantization: bool | None) -> ScaleLevels:
    """What was asked for. By default 16 bits a scale and offset, unless that takes more than half a bit an element.

    Codes of 2 and 3 bits gain more from blocks of 16 than from offsets, and can't have both in half a bit.
    """
    if symmetric is None:
        symmetric = bits < 4 and block_size <= 16
    if double_quantization is None:
        double_quantization = bits != 8 and block_size < (32 if symmetric else 64)
    a_bool("symmetric", symmetric)
    a_bool("double_quantization", double_quantization)
    return ScaleLevels(symmetric, double_quantization)


def _register(name: str, bits: int) -> None:
    def encode(
        array: jax.Array,
        block_size: int = default_block_size(bits),
        *,
        axis: int = -1,
        symmetric: bool | None = None,
        double_quantization: bool | None = None,
        fit: bool = True,
        use_kernel: bool = True,
        importance: jax.Array | None = None,
    ) -> ArrayGrouped:
        levels = {"symmetric": symmetric, "double_quantization": double_quantization, "fit": fit}
        options = {"axis": axis, "use_kernel": use_kernel, **levels}
        return ArrayGrouped.quantize(array, block_size, bits=bits, importance=importance, **options)

    register_format(name, ArrayGrouped, encode)


for _bits in grouped.PLANES:
    _register(_name(_bits), _bits)


def _words(leaf: jax.Array | None) -> str:
    return "no leaf" if leaf is None else str(leaf.dtype)
