"""Documented functions that are no part of a format; the documented modules of the formats offer them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._src.jaximus.ste import ste
from eformer._src.jaximus.trace import implicit
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.formats.nf4 import ArrayNF4
from eformer._src.quantization.formats.ternary import Array1B, quantize_binary, quantize_ternary

from .quantize import format_name


@ste
def straight_through_1bit(
    array: jax.Array, dtype: str | None = None, scale: str | None = None, *, format: str | None = None
) -> Array1B:
    """`quantize(array, dtype="ternary")`, the default, or `"binary"` made dense, with the gradient of the identity."""
    name = format_name(dtype, format, "ternary")
    made_by = {"ternary": quantize_ternary, "binary": quantize_binary}
    if name not in made_by:
        raise ValueError(f"`dtype={name!r}` must be 'ternary' or 'binary'")
    return made_by[name](array, scale)


@ste
def straight_through_8bit(array: jax.Array, axis: int | tuple[int, ...] | None = None) -> Array8B:
    """`Array8B.quantize(array, axis=axis)` made dense, with the gradient of the identity."""
    return Array8B.quantize(array, axis=axis)


def matmul_bf16_int8_weight_only(lhs_bf16: jax.Array, rhs_q_int8: jax.Array, rhs_scale: jax.Array) -> jax.Array:
    """`lhs @ (rhs * scale)` by the kernel of `Array8B`, summed in float32, as bfloat16; no dense copy is made.

    `lhs` is (..., M, K) and `rhs` (K, N); the scale has two axes, each of length 1 or that of `rhs`.
    """
    if lhs_bf16.ndim < 1 or rhs_q_int8.ndim != 2 or rhs_scale.ndim != 2:
        raise ValueError(
            f"expected lhs (..., M, K), rhs (K, N) and a scale of two axes, got {lhs_bf16.shape}, {rhs_q_int8.shape} "
            f"and {rhs_scale.shape}"
        )
    rows = rhs_q_int8.shape[0]
    if lhs_bf16.shape[-1] != rows:
        raise ValueError(f"lhs {lhs_bf16.shape} @ rhs {rhs_q_int8.shape}: {lhs_bf16.shape[-1]} columns, {rows} rows")
    q = Array8B(rhs_scale.astype(jnp.float32), rhs_q_int8)
    lhs = lhs_bf16 if lhs_bf16.dtype in (jnp.bfloat16, jnp.float16) else lhs_bf16.astype(jnp.float32)
    matmul: Any = functools.partial(lax.dot_general, preferred_element_type=jnp.bfloat16)
    return implicit(matmul)(lhs, q, (((lhs.ndim - 1,), (0,)), ((), ())))


@ste
def straight_through_nf4(array: jax.Array, block_size: int = 64, axis: int = -1) -> ArrayNF4:
    """`ArrayNF4.quantize(array, block_size, axis=axis)` made dense, with the gradient of the identity."""
    return ArrayNF4.quantize(array, block_size, axis=axis)


def safe_materialize(arr: Any) -> tuple[Any, bool]:
    """`arr` made dense if it is an `ArrayNF4`, and whether it was."""
    return (arr.materialize(), True) if isinstance(arr, ArrayNF4) else (arr, False)


def safe_delete(arr: Any, materialized: bool) -> None:
    """Do nothing, as documented: JAX frees an array when the last reference to it goes."""
    del arr, materialized
