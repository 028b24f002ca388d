"""One interface to all formats: `quantize` and `straight_through`, by name."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax

from eformer.jaximus import ste

from ._base import Format, QuantizedArray, find_format
from ._validation import a_bool, an_even_length, int8_or_none
from .implicit_array_1bit import Array1B as Array1B
from .implicit_array_8bit import Array8B as Array8B
from .implicit_array_nf4 import ArrayNF4 as ArrayNF4


class QuantizationType(enum.StrEnum):
    """The documented formats; formats registered besides are named by a plain string."""

    NF4 = "nf4"
    INT8 = "int8"
    TERNARY = "ternary"
    BINARY = "binary"


def _checked_type(dtype: QuantizationType | str) -> QuantizationType | str:
    find_format(dtype)
    return QuantizationType(dtype) if dtype in set(QuantizationType) else dtype


@dataclass(frozen=True)
class QuantizationConfig:
    """How to quantize; hashable, so it can be a static argument of a jitted function.

    `block_size` is for formats that have blocks. With `simulate`, `quantize` returns a dense array of quantized values,
    with the gradient of the identity. `use_kernel=False` makes matmuls decode the whole array first.
    `activation_dtype="int8"` lets them round what the array is multiplied by: see `with_activation_dtype`.

    >>> from eformer.ops.quantization import QuantizationConfig, QuantizationType
    >>> QuantizationConfig(dtype="int8").dtype is QuantizationType.INT8
    True
    """

    dtype: QuantizationType | str = QuantizationType.NF4
    block_size: int = 64
    simulate: bool = False
    use_kernel: bool = True
    activation_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _checked_type(self.dtype))
        an_even_length("block_size", self.block_size)
        for name in ("simulate", "use_kernel"):
            a_bool(name, getattr(self, name))
        int8_or_none("activation_dtype", self.activation_dtype)


def quantize(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int = 64,
    simulate: bool = False,
    *,
    activation_dtype: str | None = None,
    **options: Any,
) -> Any:
    """`array` in a quantized format: "nf4" by default, "int8", "ternary", "binary", or one registered.

    A `config` is taken instead of the arguments after it. `options` are the format's own, such as `axis` for "nf4" and
    "int8" or `scale="channel"` for "ternary". With `simulate`, the result is the dense array of the quantized values,
    with the gradient of the identity (`straight_through`); otherwise an implicit array, without gradient.
    `activation_dtype="int8"` trades exactness of its matmuls for speed: see `QuantizedArray.with_activation_dtype`.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import quantize
    >>> quantize(jnp.ones((128, 256)), dtype="nf4")
    ArrayNF4(float32[128, 256], 18,432 bytes)
    """
    config = _config(config, dtype, block_size, simulate, activation_dtype)
    if config.simulate:
        return straight_through(array, config, **options)
    return _encode(array, config, options)


def straight_through(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int = 64,
    **options: Any,
) -> jax.Array:
    """`quantize(array, ...).materialize()`, bit for bit, with the gradient of the identity: to train through rounding.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.ops.quantization import straight_through
    >>> jax.grad(lambda w: straight_through(w, dtype="ternary").sum())(jnp.array([0.3, -2.0]))
    Array([1., 1.], dtype=float32)
    """
    config = _config(config, dtype, block_size, simulate=False)
    return ste(lambda x: _encode(x, config, options))(array)


def _config(
    config: Any, dtype: Any, block_size: Any, simulate: Any, activation_dtype: Any = None
) -> QuantizationConfig:
    if config is None:
        dtype = QuantizationType.NF4 if dtype is None else dtype
        return QuantizationConfig(dtype, block_size, simulate, activation_dtype=activation_dtype)
    if not isinstance(config, QuantizationConfig):
        raise TypeError(
            f"`config` must be a QuantizationConfig, got {type(config).__name__} {config!r}; a name goes to `dtype`"
        )
    return config


def _encode(array: Any, config: QuantizationConfig, options: dict[str, Any]) -> QuantizedArray:
    form = find_format(config.dtype)
    _check_options(form, options)
    # What the config says of matters that the format does not have is no concern of it.
    general = {"block_size": config.block_size, "use_kernel": config.use_kernel}
    made = form.encode(array, **{k: v for k, v in general.items() if k in form.options}, **options)
    return made if config.activation_dtype is None else made.with_activation_dtype(config.activation_dtype)


def _check_options(form: Format, options: dict[str, Any]) -> None:
    for name in options:
        if name not in form.options or name in ("block_size", "use_kernel"):
            known = [o for o in form.options if o not in ("block_size", "use_kernel")]
            raise TypeError(f"the format {form.name!r} has no option {name!r}; it has {', '.join(map(repr, known))}")
