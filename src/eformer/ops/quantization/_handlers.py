"""The documented handlers are `handler(primitive, <documented arguments>)`, made here from functions of `jax.lax`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from eformer.jaximus import implicit, is_implicit, materialize

from ._leafwise import LeafwiseArray

Operation = Callable[..., Any]  # of operands, dense or quantized, and parameters
Operands = tuple[Any, ...]
Params = dict[str, Any]
Run = Callable[[Operation, Primitive, Operands, Params], Any]


def handler(name: str, module: str, operation: Operation, arguments: str, run: Run) -> Operation:
    """The handler of `operation`, with a signature of `primitive` and then the documented arguments."""
    signature = inspect.Signature([_parameter(each) for each in ("primitive", *arguments.split(", "))])

    def handle(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        primitive, *operands = given.args
        return run(operation, primitive, tuple(operands), given.kwargs)

    handle.__name__ = handle.__qualname__ = name
    handle.__module__ = module
    handle.__doc__ = f"`lax.{operation.__name__}`, {run.__doc__}"
    handle.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]  # `inspect.signature` reads it
    return handle


def integer_pow(x: Any, y: Any = 2) -> Any:
    return lax.integer_pow(x, y) if isinstance(y, int) else lax.pow(x, jnp.asarray(y))


def on_dense(operation: Operation, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """on dense arrays."""
    return _call(operation, primitive, *materialize((operands, params)))


def by_rule(operation: Operation, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """as `implicit` runs it."""
    return implicit(functools.partial(_call, operation, primitive))(operands, params)


def moved(operation: Operation, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """in the operand's format: exact by a rule, else requantized."""
    operand, out = operands[0], by_rule(operation, primitive, operands, params)
    return operand._requantized(out) if isinstance(operand, LeafwiseArray) and not is_implicit(out) else out


def _call(operation: Operation, primitive: Primitive, operands: Operands, params: Params) -> Any:
    """The function of `jax.lax`; or its primitive, if the parameters are those that JAX binds it with."""
    try:
        inspect.signature(operation).bind(*operands, **params)
    except TypeError:
        return primitive.bind(*operands, **params)
    return operation(*operands, **params)


def _parameter(text: str) -> Parameter:
    name = text.lstrip("*")
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return Parameter(name, kinds[len(text) - len(name)])
