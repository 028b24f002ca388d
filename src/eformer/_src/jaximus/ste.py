"""The straight-through estimator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax
from jax import tree_util as jtu

from eformer._src.jaximus.function import check_function

from .array import materialize
from .types import Tree, Value

P = ParamSpec("P")


def ste(function: Callable[Concatenate[Value, P], Value]) -> Callable[Concatenate[Value, P], jax.Array]:
    """`function` with the derivative of the identity in its first argument, and of a constant in the others.

    The result is `function`'s, made dense, bit for bit; it must have the shape of the first argument. A result that is
    not floating point takes the argument's dtype, since only floating point carries a derivative.
    """

    check_function(function, "ste")

    @functools.wraps(function)
    def wrapped(x: Value, *args: P.args, **kwargs: P.kwargs) -> jax.Array:
        x = jnp.asarray(materialize(x))
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(f"`ste` needs a floating point argument to pass the gradient to, got {x.dtype}")
        run: Callable[..., Value] = function  # its arguments are mapped, which a ParamSpec can't follow
        value = materialize(run(*map(_constant, (x, *args)), **_constant(kwargs)))
        if jnp.shape(value) != x.shape:
            raise ValueError(
                f"`ste({getattr(function, '__name__', function)})` passes the gradient on as it is, so the result must "
                f"have the argument's shape {x.shape}, got {jnp.shape(value)}"
            )
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            value = jnp.asarray(value, x.dtype)
        return _with_tangent_of(value, x)

    return wrapped


def _constant(tree: Tree) -> Tree:
    return jtu.tree_map(lambda leaf: lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


@jax.custom_jvp
def _with_tangent_of(value: jax.Array, x: jax.Array) -> jax.Array:
    del x
    return value


_with_tangent_of.defjvps(None, lambda tangent, out, value, x: tangent.astype(out.dtype))
