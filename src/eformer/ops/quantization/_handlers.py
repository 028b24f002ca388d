"""What the documented handlers are made of: `handler(primitive, <documented arguments>)` of a function of `jax.lax`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import jax.numpy as jnp
from jax import lax

from eformer.jaximus import implicit, is_implicit, materialize

from ._leafwise import LeafwiseArray

Handler = Callable[..., Any]
Handlers = tuple[Handler, Handler, Handler]  # of "1bit", "8bit" and "nf4"
Run = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


def dense(name: str, function: Callable[..., Any], arguments: str) -> Handlers:
    """Handlers that run the operation on dense arrays."""
    return _handlers(name, function, arguments, _on_dense, "on dense arrays")


def by_rule(name: str, function: Callable[..., Any], arguments: str) -> Handlers:
    """Handlers that run the operation as `implicit` does."""
    return _handlers(name, function, arguments, _by_rule, "as `implicit` runs it")


def moved(name: str, function: Callable[..., Any], arguments: str) -> Handlers:
    """Handlers of an operation that moves elements; the result has the operand's format."""
    return _handlers(name, function, arguments, _moved, "in the operand's format: exact by a rule, else requantized")


def integer_pow(x: Any, y: Any = 2) -> Any:
    return lax.integer_pow(x, y) if isinstance(y, int) else lax.pow(x, jnp.asarray(y))


def _handlers(name: str, function: Callable[..., Any], arguments: str, run: Run, how: str) -> Handlers:
    signature = inspect.Signature([_parameter(each) for each in ("primitive", *arguments.split(", "))])

    def of(tag: str) -> Handler:
        def handler(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            primitive, *operands = given.args
            return run(function, primitive, tuple(operands), given.kwargs)

        handler.__name__ = handler.__qualname__ = name.format(tag)
        handler.__doc__ = f"`lax.{function.__name__}`, {how}."
        handler.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]  # `inspect.signature` reads it
        return handler

    return of("1bit"), of("8bit"), of("nf4")


def _parameter(text: str) -> Parameter:
    name = text.lstrip("*")
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return Parameter(name, kinds[len(text) - len(name)])


def _call(function: Callable[..., Any], primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    """`function` of `jax.lax`; or, given the parameters that JAX binds a primitive with, that."""
    try:
        inspect.signature(function).bind(*operands, **params)
    except TypeError:
        return primitive.bind(*operands, **params)
    return function(*operands, **params)


def _on_dense(function: Callable[..., Any], primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    return _call(function, primitive, *materialize((operands, params)))


def _by_rule(function: Callable[..., Any], primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    return implicit(functools.partial(_call, function, primitive))(operands, params)


def _moved(function: Callable[..., Any], primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
    operand, out = operands[0], _by_rule(function, primitive, operands, params)
    return operand.requantized(out) if isinstance(operand, LeafwiseArray) and not is_implicit(out) else out
