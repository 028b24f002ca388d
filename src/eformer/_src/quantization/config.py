"""One interface to all formats: `quantize` and `straight_through`, by name."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax

from eformer._src.jaximus.ste import ste

from .base import QuantizedArray
from .registry import IMPORTANCE, Format, find_format
from .validation import a_bool, an_int, int8_or_none


class QuantizationType(enum.StrEnum):
    """The formats that come with the package; every other registered format is named by a plain string."""

    NF4 = "nf4"
    INT8 = "int8"
    TERNARY = "ternary"
    BINARY = "binary"
    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    INT8_GROUPED = "int8_grouped"
    FP8 = "fp8"
    FP8_E5M2 = "fp8_e5m2"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


class _OwnBlockSize(int):
    """The documented default of `block_size`; left as it is, it means the format's own."""


BLOCK_SIZE = _OwnBlockSize(64)


def _no_option(form: Format, name: str) -> TypeError:
    has = ", ".join(repr(option) for option in form.options if option not in ("use_kernel", "activation_dtype"))
    return TypeError(f"the format {form.name!r} has no option {name!r}; it has {has or 'none'}")


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
        form = find_format(format_name(asked, format, QuantizationType.NF4))
        name = QuantizationType(form.name) if form.name in set(QuantizationType) else form.name
        block_size = form.options.get("block_size", 64) if block_size is BLOCK_SIZE else block_size
        # What has the documented default was perhaps not given.
        given = {"block_size": block_size != 64, "fit": fit is not None, "use_kernel": use_kernel is not True}
        for option, is_given in given.items():
            if is_given and option not in form.options:
                raise _no_option(form, option)
        check = form.array_type._rules.get("block_size", an_int)
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


def quantize(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int = BLOCK_SIZE,
    simulate: bool = False,
    *,
    format: str | None = None,
    activation_dtype: str | None = None,
    **options: Any,
) -> Any:
    """`array` in the format named `dtype`, or `format`, which means the same; "nf4" by default.

    `formats()` lists the names, and `find_format(name).options` the options a format takes, such as `axis` for "nf4"
    and "int8" or `scale="channel"` for "ternary". Formats that can be fitted take an `importance`, which broadcasts to
    the array: how much the squared error of each element counts. `block_size` is by default the format's own. A
    `config` is taken instead of the arguments after it. With `simulate`, the result is the dense array of the quantized
    values, with the gradient of the identity (`straight_through`); otherwise an implicit array, without gradient.
    `activation_dtype="int8"` trades exactness of its matmuls for speed: see `QuantizedArray.with_activation_dtype`.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import quantize
    >>> quantize(jnp.ones((128, 256)), format="nf4")
    ArrayNF4(float32[128, 256], 18,432 bytes)
    """
    if config is None:
        switches = {"simulate": simulate, "activation_dtype": activation_dtype}
        config = QuantizationConfig(format_name(dtype, format, QuantizationType.NF4), block_size, **switches)
    if getattr(config, "simulate", False):
        return straight_through(array, config, **options)
    return _encode(array, config, options)


def straight_through(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int = BLOCK_SIZE,
    *,
    format: str | None = None,
    **options: Any,
) -> jax.Array:
    """`quantize(array, ...).materialize()`, bit for bit, with the gradient of the identity: to train through rounding.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.ops.quantization import straight_through
    >>> jax.grad(lambda w: straight_through(w, format="ternary").sum())(jnp.array([0.3, -2.0]))
    Array([1., 1.], dtype=float32)
    """
    made_with = config
    if made_with is None:
        made_with = QuantizationConfig(format_name(dtype, format, QuantizationType.NF4), block_size)
    return ste(lambda x: _encode(x, made_with, options))(array)


def _encode(array: jax.Array, config: QuantizationConfig, options: dict[str, object]) -> QuantizedArray:
    if not isinstance(config, QuantizationConfig):
        raise TypeError(
            f"`config` must be a QuantizationConfig, got {type(config).__name__} {config!r}; a name goes to `dtype`"
        )
    form = find_format(config.dtype)
    switches = {"use_kernel": config.use_kernel, "activation_dtype": config.activation_dtype}
    general = {"block_size": config.block_size, **switches}
    names = [*form.options, *[IMPORTANCE] * form.takes_importance]
    general |= {} if config.fit is None else {"fit": config.fit}
    for name in options:
        if name not in names or name in ("block_size", *switches):
            raise _no_option(form, name)
    return form.encode(array, **{k: v for k, v in general.items() if k in form.options} | options)
