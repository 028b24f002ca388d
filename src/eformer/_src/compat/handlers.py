"""The documented handlers of primitives, such as `add_8bit_xy`, which the formats' documented modules offer.

They are there to be called; `implicit` dispatches to the rules. A handler takes the primitive and then the documented
arguments. It is made from a function of `jax.lax`; if that has a rule, it runs the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import jax.numpy as jnp
from jax import lax

from eformer._src.jaximus.array import is_implicit, materialize
from eformer._src.jaximus.trace import implicit
from eformer._src.quantization.elementwise_layout import LeafwiseArray

Operands = tuple[Any, ...]
Params = dict[str, Any]
Call = Callable[[Operands, Params], Any]
Run = Callable[[Call, Operands, Params], Any]
Operation = Callable[..., Any]  # of operands, dense or quantized, and parameters


def on_dense(call: Call, operands: Operands, params: Params) -> Any:
    """on dense arrays."""
    return call(*materialize((operands, params)))


def by_rule(call: Call, operands: Operands, params: Params) -> Any:
    """as `implicit` runs it."""
    return implicit(call)(operands, params)


def moved(call: Call, operands: Operands, params: Params) -> Any:
    """in the operand's format: exact by a rule, else requantized."""
    operand, out = operands[0], by_rule(call, operands, params)
    return operand._requantized(out) if isinstance(operand, LeafwiseArray) and not is_implicit(out) else out


def integer_pow(x: Any, y: Any = 2) -> Any:
    return lax.integer_pow(x, y) if isinstance(y, int) else lax.pow(x, jnp.asarray(y))


# By name: the operation, its documented arguments, and how it runs.
HANDLERS: dict[str, tuple[Operation, str, Run]] = {
    "add_{}_xy": (lax.add, "x, y", on_dense),
    "broadcast_in_dim_{}_operand": (lax.broadcast_in_dim, "operand, *args, **params", moved),
    "concatenate_{}_operands": (lax.concatenate, "operands, *args, **kwargs", on_dense),
    "conv_general_dilated_{}_lhs_rhs": (lax.conv_general_dilated, "lhs, rhs, *args, **kwargs", on_dense),
    "convert_element_type_{}_operand_kw": (lax.convert_element_type, "operand, **kwargs", by_rule),
    "convert_element_type_{}_operand_pos": (lax.convert_element_type, "operand, new_dtype", by_rule),
    "div_{}_xy": (lax.div, "x, y", on_dense),
    "div_{}_xy_fallback": (lax.div, "x, y", on_dense),
    "dot_general_{}_lhs_rhs": (lax.dot_general, "lhs, rhs, *args, **kwargs", by_rule),
    "exp_{}_x": (lax.exp, "x, *args, **kwargs", on_dense),
    "gather_{}_operand": (lax.gather, "operand, *args, **kwargs", by_rule),
    "integer_pow_{}_x": (integer_pow, "x, **kwargs", on_dense),
    "integer_pow_{}_xy": (integer_pow, "x, y", on_dense),
    "log_{}_x": (lax.log, "x, *args, **kwargs", on_dense),
    "lt_{}_xy": (lax.lt, "x, y, **kwargs", on_dense),
    "max_{}_xy": (lax.max, "x, y, *args, **kwargs", on_dense),
    "mul_{}_xy": (lax.mul, "x, y", on_dense),
    "reduce_{}_operand_init_value": (lax.reduce, "operand, init_value, *args, **kwargs", on_dense),
    "reshape_{}_operand": (lax.reshape, "operand, *args, **params", moved),
    "sqrt_{}_x": (lax.sqrt, "x, **kwargs", on_dense),
    "transpose_{}_operand": (lax.transpose, "operand, *args, **kwargs", moved),
}


def handlers_of(tag: str, module: str) -> dict[str, Operation]:
    """The handlers of the format that documented names call `tag`, for a module of that name."""
    named = {name.format(tag): about for name, about in HANDLERS.items()}
    return {name: _handler(name, module, *about) for name, about in named.items()}


def _handler(name: str, module: str, operation: Operation, arguments: str, run: Run) -> Operation:
    """The handler of `operation`, with a signature of `primitive` and then the documented arguments."""
    signature = inspect.Signature([_parameter(each) for each in ("primitive", *arguments.split(", "))])

    def handle(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        primitive, *operands = given.args

        def call(operands: Operands, params: Params) -> Any:
            try:
                inspect.signature(operation).bind(*operands, **params)
            except TypeError:  # the parameters are JAX's, with which the primitive is bound
                return primitive.bind(*operands, **params)
            return operation(*operands, **params)

        return run(call, tuple(operands), given.kwargs)

    handle.__name__ = handle.__qualname__ = name
    handle.__module__ = module
    handle.__doc__ = f"`lax.{operation.__name__}`, {run.__doc__}"
    handle.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]  # `inspect.signature` reads it
    return handle


def _parameter(text: str) -> Parameter:
    name = text.lstrip("*")
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return Parameter(name, kinds[len(text) - len(name)])
