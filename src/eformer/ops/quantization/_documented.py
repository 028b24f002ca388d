"""The documented functions that are no part of a format, put into the documented modules by name.

`add_8bit_xy` and the other handlers of primitives are there to be called; `implicit` dispatches to the rules. A handler
of an operation that has a rule runs that rule.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer.jaximus import implicit, ste

from . import _handlers as handlers
from . import implicit_array_1bit, implicit_array_8bit, implicit_array_nf4
from ._config import format_name
from .implicit_array_1bit import Array1B, quantize_binary, quantize_ternary
from .implicit_array_8bit import Array8B
from .implicit_array_nf4 import ArrayNF4

MODULES = {"1bit": implicit_array_1bit, "8bit": implicit_array_8bit, "nf4": implicit_array_nf4}
# By name: the operation, its documented arguments, and how it runs.
HANDLERS: dict[str, tuple[handlers.Operation, str, handlers.Run]] = {
    "add_{}_xy": (lax.add, "x, y", handlers.on_dense),
    "broadcast_in_dim_{}_operand": (lax.broadcast_in_dim, "operand, *args, **params", handlers.moved),
    "concatenate_{}_operands": (lax.concatenate, "operands, *args, **kwargs", handlers.on_dense),
    "conv_general_dilated_{}_lhs_rhs": (lax.conv_general_dilated, "lhs, rhs, *args, **kwargs", handlers.on_dense),
    "convert_element_type_{}_operand_kw": (lax.convert_element_type, "operand, **kwargs", handlers.by_rule),
    "convert_element_type_{}_operand_pos": (lax.convert_element_type, "operand, new_dtype", handlers.by_rule),
    "div_{}_xy": (lax.div, "x, y", handlers.on_dense),
    "div_{}_xy_fallback": (lax.div, "x, y", handlers.on_dense),
    "dot_general_{}_lhs_rhs": (lax.dot_general, "lhs, rhs, *args, **kwargs", handlers.by_rule),
    "exp_{}_x": (lax.exp, "x, *args, **kwargs", handlers.on_dense),
    "gather_{}_operand": (lax.gather, "operand, *args, **kwargs", handlers.by_rule),
    "integer_pow_{}_x": (handlers.integer_pow, "x, **kwargs", handlers.on_dense),
    "integer_pow_{}_xy": (handlers.integer_pow, "x, y", handlers.on_dense),
    "log_{}_x": (lax.log, "x, *args, **kwargs", handlers.on_dense),
    "lt_{}_xy": (lax.lt, "x, y, **kwargs", handlers.on_dense),
    "max_{}_xy": (lax.max, "x, y, *args, **kwargs", handlers.on_dense),
    "mul_{}_xy": (lax.mul, "x, y", handlers.on_dense),
    "reduce_{}_operand_init_value": (lax.reduce, "operand, init_value, *args, **kwargs", handlers.on_dense),
    "reshape_{}_operand": (lax.reshape, "operand, *args, **params", handlers.moved),
    "sqrt_{}_x": (lax.sqrt, "x, **kwargs", handlers.on_dense),
    "transpose_{}_operand": (lax.transpose, "operand, *args, **kwargs", handlers.moved),
}


@ste
def straight_through_1bit(
    array: jax.Array, dtype: str | None = None, scale: str | None = None, *, format: str | None = None
) -> Array1B:
    """`quantize(array, dtype="ternary")`, the default, or `"binary"` made dense, with the gradient of the identity."""
    name = format_name(dtype, format, "ternary")
    rules = {"ternary": quantize_ternary, "binary": quantize_binary}
    if name not in rules:
        raise ValueError(f"`dtype={name!r}` must be 'ternary' or 'binary'")
    return rules[name](array, scale)


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
    if any(s not in (1, n) for s, n in zip(rhs_scale.shape, rhs_q_int8.shape, strict=True)):
        raise ValueError(f"scale {rhs_scale.shape} does not broadcast over rhs {rhs_q_int8.shape}")
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


def _install() -> None:
    functions = {
        "1bit": [straight_through_1bit],
        "8bit": [straight_through_8bit, matmul_bf16_int8_weight_only],
        "nf4": [straight_through_nf4, safe_materialize, safe_delete],
    }
    for tag, module in MODULES.items():
        for name, described in HANDLERS.items():
            setattr(module, name.format(tag), handlers.handler(name.format(tag), module.__name__, *described))
        for function in functions[tag]:
            setattr(module, function.__name__, function)


_install()
