"""`quantize` and `straight_through`, with the documented arguments beside `format` and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import jax
from jax.typing import ArrayLike

from eformer._src.jaximus.ste import ste
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.nf4 import ArrayNF4
from eformer._src.quantization.formats.ternary import Array1B
from eformer._src.quantization.registry import Format, find_format
from eformer._src.quantization.spelling import (
    Float8Name,
    FormatLike,
    GroupedName,
    Int8Name,
    NF4Name,
    OneBitName,
    QuantizationType,
    no_option,
    read_format,
)
from eformer._src.quantization.validation import a_bool, an_int, int8_or_none


class _OwnBlockSize(int):
    """The documented default of `block_size`; left as it is, it means the format's own."""


BLOCK_SIZE = _OwnBlockSize(64)
CONTRACTED = -2  # the axis of a matrix, or of matrices in a stack, that `x @ w` sums over


def format_name(dtype: str | None, format: str | None, default: str) -> str:
    """The name of the format that `dtype` or `format`, two names of one argument, asks for."""
    if dtype is not None and format is not None:
        raise TypeError(f"`dtype` and `format` mean the same: give one of them, not {dtype!r} and {format!r}")
    return next((name for name in (dtype, format) if name is not None), default)


@dataclass(frozen=True, init=False)
class QuantizationConfig:
    """How to quantize; hashable, so it can be a static argument of a jitted function.

    `format` is another name of `dtype`. `block_size` is for formats that have blocks, by default the format's own;
    others refuse one that is not 64, the documented default. With `simulate`, `quantize` returns a dense array of
    quantized values, with the gradient of the identity. `use_kernel=False` makes matmuls decode the whole array first.
    `activation_dtype="int8"` lets matmuls round the activations: see `with_activation_dtype`. `fit` searches for scales
    with the smallest squared error, by default as the format does.
    """

    dtype: QuantizationType | str = QuantizationType.NF4
    block_size: int = 64
    simulate: bool = False
    use_kernel: bool = True
    activation_dtype: str | None = None
    fit: bool | None = None

    def __init__(
        self,
        dtype: QuantizationType | str = QuantizationType.NF4,
        block_size: int = BLOCK_SIZE,
        simulate: bool = False,
        use_kernel: bool = True,
        activation_dtype: str | None = None,
        fit: bool | None = None,
        *,
        format: str | None = None,
    ) -> None:
        asked = None if dtype is QuantizationType.NF4 else dtype
        form, options = read_format(format_name(asked, format, QuantizationType.NF4))
        if options:
            raise TypeError(
                f"a QuantizationConfig takes options as arguments, and its `dtype` is a name alone: got "
                f"{format_name(asked, format, form.name)!r}"
            )
        name = QuantizationType(form.name) if form.name in set(QuantizationType) else form.name
        block_size = form.options.get("block_size", 64) if block_size is BLOCK_SIZE else block_size
        # What has the documented default was perhaps not given.
        given = {"block_size": block_size != 64, "fit": fit is not None, "use_kernel": use_kernel is not True}
        for option, is_given in given.items():
            if is_given and option not in form.options:
                raise TypeError(no_option(form, option))
        check = form.array_type._field_checks.get("block_size", an_int)
        if callable(check):
            check("block_size", block_size)
        a_bool("simulate", simulate)
        a_bool("use_kernel", use_kernel)
        int8_or_none("activation_dtype", activation_dtype)
        if fit is not None:
            a_bool("fit", fit)
        switches = {"simulate": simulate, "use_kernel": use_kernel, "activation_dtype": activation_dtype, "fit": fit}
        vars(self).update(dtype=name, block_size=block_size, **switches)

    @property
    def format(self) -> str:
        """`dtype` by another name."""
        return self.dtype

    @property
    def options(self) -> dict[str, object]:
        """Fields that are options of the format, without fields that were left open."""
        known = find_format(self.dtype).options
        given = {name: getattr(self, name) for name in ("block_size", "use_kernel", "activation_dtype", "fit")}
        return {name: value for name, value in given.items() if name in known and value is not None}


# A call without a format is one of the first: it makes NF4, and type checkers take the first that fits.
@overload
def quantize(  # pyright: ignore[reportOverlappingOverload]
    array: ArrayLike | QuantizedArray,
    config: NF4Name | None = None,
    dtype: NF4Name | None = None,
    block_size: int = ...,
    simulate: Literal[False] = False,
    *,
    format: NF4Name | None = None,
    activation_dtype: Literal["int8"] | None = None,
    **options: object,
) -> ArrayNF4: ...
@overload
def quantize(
    array: ArrayLike | QuantizedArray,
    config: Int8Name | None = None,
    dtype: Int8Name | None = None,
    block_size: int = ...,
    simulate: Literal[False] = False,
    *,
    format: Int8Name | None = None,
    activation_dtype: Literal["int8"] | None = None,
    **options: object,
) -> Array8B: ...
@overload
def quantize(
    array: ArrayLike | QuantizedArray,
    config: GroupedName | None = None,
    dtype: GroupedName | None = None,
    block_size: int = ...,
    simulate: Literal[False] = False,
    *,
    format: GroupedName | None = None,
    activation_dtype: Literal["int8"] | None = None,
    **options: object,
) -> ArrayGrouped: ...
@overload
def quantize(
    array: ArrayLike | QuantizedArray,
    config: OneBitName | None = None,
    dtype: OneBitName | None = None,
    block_size: int = ...,
    simulate: Literal[False] = False,
    *,
    format: OneBitName | None = None,
    activation_dtype: Literal["int8"] | None = None,
    **options: object,
) -> Array1B: ...
@overload
def quantize(
    array: ArrayLike | QuantizedArray,
    config: Float8Name | None = None,
    dtype: Float8Name | None = None,
    block_size: int = ...,
    simulate: Literal[False] = False,
    *,
    format: Float8Name | None = None,
    activation_dtype: Literal["int8"] | None = None,
    **options: object,
) -> ArrayFloat8: ...
@overload
def quantize(
    array: ArrayLike | QuantizedArray,
    config: QuantizationConfig | FormatLike | QuantizationType | None = None,
    dtype: FormatLike | QuantizationType | None = None,
    block_size: int = ...,
    simulate: Literal[False] = False,
    *,
    format: FormatLike | QuantizationType | None = None,
    activation_dtype: Literal["int8"] | None = None,
    **options: object,
) -> QuantizedArray: ...
@overload
def quantize(
    array: ArrayLike | QuantizedArray,
    config: QuantizationConfig | FormatLike | QuantizationType | None = None,
    dtype: FormatLike | QuantizationType | None = None,
    block_size: int = ...,
    *,
    simulate: Literal[True],
    format: FormatLike | QuantizationType | None = None,
    activation_dtype: Literal["int8"] | None = None,
    **options: object,
) -> jax.Array: ...
def quantize(
    array: object,
    config: object = None,
    dtype: object = None,
    block_size: int = BLOCK_SIZE,
    simulate: bool = False,
    *,
    format: object = None,
    activation_dtype: str | None = None,
    **options: object,
) -> QuantizedArray | jax.Array:
    """`array` in a format: `quantize(w, "int4")`, `quantize(w, "int4", block_size=64)`, `quantize(w, format="int4")`.

    `formats()` lists the names, in capitals or not, and `find_format(name).options` the options that a format takes.
    They may stand in the text, as on a command line: "int4,block_size=64". A format of the registry is taken, too.
    Without a format it is NF4.

    Blocks and scales of a matrix or a stack run along axis -2, which `x @ q` sums over: that is fastest and most exact.
    `axis=-1` is for `x @ q.T` and for embeddings. Calls with `dtype=`, the documented name of `format`, or with a
    `QuantizationConfig`, which is taken instead of the arguments after it, have blocks along the last axis.

    Formats that can be fitted take an `importance`, which broadcasts to the array: how much the squared error of each
    element counts. With `simulate`, the result is the dense array of the quantized values, with the gradient of the
    identity (`straight_through`); otherwise an implicit array, without gradient. `activation_dtype="int8"` trades
    exactness of its matmuls for speed: see `QuantizedArray.with_activation_dtype`.

    >>> import jax.numpy as jnp
    >>> from eformer import quantize
    >>> quantize(jnp.ones((128, 256)), "int4")
    ArrayGrouped(float32[128, 256], 19,456 bytes)
    """
    a_bool("simulate", simulate)
    given = {"activation_dtype": activation_dtype} if activation_dtype is not None else {}
    form, options = _asked(array, config, dtype, format, block_size, {**given, **options})
    if simulate or (isinstance(config, QuantizationConfig) and config.simulate):
        return _straight_through(array, form, options)
    return form.encode(array, **options)


def straight_through(
    array: ArrayLike,
    config: QuantizationConfig | FormatLike | QuantizationType | None = None,
    dtype: FormatLike | QuantizationType | None = None,
    block_size: int = BLOCK_SIZE,
    *,
    format: FormatLike | QuantizationType | None = None,
    **options: object,
) -> jax.Array:
    """`quantize(array, ...).materialize()`, bit for bit, with the gradient of the identity: to train through rounding.

    >>> import jax, jax.numpy as jnp
    >>> from eformer import straight_through
    >>> jax.grad(lambda w: straight_through(w, "ternary").sum())(jnp.array([0.3, -2.0]))
    Array([1., 1.], dtype=float32)
    """
    return _straight_through(array, *_asked(array, config, dtype, format, block_size, options))


def _straight_through(array: object, form: Format, options: Mapping[str, object]) -> jax.Array:
    return ste(lambda x: form.encode(x, **options))(array)


def _asked(
    array: object, config: object, dtype: object, format: object, block_size: int, options: Mapping[str, object]
) -> tuple[Format, dict[str, object]]:
    """The format that the arguments of `quantize` ask for, and all its options."""
    if isinstance(config, QuantizationConfig):
        return read_format(config.dtype, {**config.options, **options})
    names = {"the second argument": config, "`format`": format, "`dtype`": dtype}
    asked = {how: name for how, name in names.items() if name is not None}
    if asked.keys() == {"`format`", "`dtype`"}:
        raise TypeError(f"`dtype` and `format` mean the same: give one of them, not {dtype!r} and {format!r}")
    if len(asked) > 1 and dtype is not None and not isinstance(dtype, (str, Format)):
        meant = f"for blocks write `block_size={dtype}`" if isinstance(dtype, int) else "cast the array itself"
        raise TypeError(f"`dtype` is the name of a format, got {dtype!r}: {meant}")
    if len(asked) > 1:
        raise TypeError(
            f"the format is given twice: {' and '.join(f'{how} is {name!r}' for how, name in asked.items())}"
        )
    if config is QuantizationConfig:
        raise TypeError("`QuantizationConfig` is a class, and was given as a format: write `QuantizationConfig(...)`")
    name = next(iter(asked.values()), QuantizationType.NF4)
    form = read_format(name)[0]
    given = {} if block_size is BLOCK_SIZE else {"block_size": block_size}
    if block_size == BLOCK_SIZE and "block_size" not in form.options:
        given = {}  # 64, the documented default, says nothing of a format without blocks
    form, options = read_format(name, {**given, **options})
    if asked and dtype is None and "axis" in form.options and getattr(array, "ndim", 0) > 1:
        options.setdefault("axis", CONTRACTED)
    return form, options
