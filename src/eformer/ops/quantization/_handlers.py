"""The documented handlers, `handler(primitive, *operands, **params)`: four kinds, one per way of serving an operation.

They are there to be called. What `implicit` dispatches to are the rules; a handler that has one runs it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from eformer.jaximus import implicit, is_implicit, materialize

from ._leafwise import LeafwiseArray

Handler = Callable[..., Any]


def _call(function: Callable[..., Any], primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    """`function` of `jax.lax`; or, given the parameters that JAX binds a primitive with, that."""
    try:
        inspect.signature(function).bind(*operands, **params)
    except TypeError:
        return primitive.bind(*operands, **params)
    return function(*operands, **params)


def dense(function: Callable[..., Any]) -> Handler:
    """The operation on dense arrays."""

    @functools.wraps(function, assigned=("__module__",))
    def handler(primitive: Any, *operands: Any, **params: Any) -> Any:
        return _call(function, primitive, materialize(operands), params)

    return handler


def by_rule(function: Callable[..., Any]) -> Handler:
    """The operation as `implicit` runs it."""

    @functools.wraps(function, assigned=("__module__",))
    def handler(primitive: Any, *operands: Any, **params: Any) -> Any:
        return implicit(functools.partial(_call, function, primitive))(operands, params)

    return handler


def moved(function: Callable[..., Any]) -> Handler:
    """The operation, which moves elements, with a result of the operand's format: exact by a rule, else requantized."""
    run = by_rule(function)

    @functools.wraps(function, assigned=("__module__",))
    def handler(primitive: Any, operand: Any, *args: Any, **params: Any) -> Any:
        out = run(primitive, operand, *args, **params)
        return operand.requantized(out) if isinstance(operand, LeafwiseArray) and not is_implicit(out) else out

    return handler


def converted(primitive: Any, operand: Any, new_dtype: Any = None, **params: Any) -> Any:
    """The array with another dtype on record; it is rounded to it when it is decoded."""
    return by_rule(lax.convert_element_type)(primitive, operand, new_dtype, **params)


def integer_pow(x: Any, y: Any = 2) -> Any:
    return lax.integer_pow(x, y) if isinstance(y, int) else lax.pow(x, jnp.asarray(y))
