"""`FakeQuantizedArray`: a weight in training whose matmuls round activations as those of the quantized weight do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from eformer._src.jaximus.array import ImplicitArray, is_implicit
from eformer._src.jaximus.rules import register
from eformer._src.jaximus.trace import implicit
from eformer._src.quantization.base import QuantizedArray


class FakeQuantizedArray(ImplicitArray):
    """`weight`, dense and trained; a matmul takes its value from `quantized`, and its derivative from `weight`.

    `weight` has the values that `quantized` decodes to. So the forward pass runs the kernel of the final model, with
    activations rounded as it rounds them, and gradients are those of the matmul without that rounding. Where `rounds`
    is given and false, for each matrix of a stack, the matmul is the dense one.
    """

    warn_on_materialize = False  # it holds the dense array

    weight: jax.Array
    quantized: QuantizedArray
    rounds: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def materialize(self) -> jax.Array:
        return self.weight

    def is_stacked(self) -> bool:
        return self.ndim > 2 and self.quantized.is_stacked()


def _straight_through(run: Callable[..., Any], x: jax.Array, q: FakeQuantizedArray) -> jax.Array:
    """`run(x, q.quantized)` with the derivative of `run(x, q.weight)`, which is linear in both."""

    @jax.custom_jvp
    def value(x: jax.Array, weight: jax.Array, quantized: QuantizedArray, rounds: jax.Array | None) -> jax.Array:
        rounded = implicit(run)
        if rounds is None:
            return rounded(x, quantized)
        return lax.cond(jnp.all(rounds), lambda: rounded(x, quantized), lambda: run(x, weight))

    @value.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x, weight, *_), (dx, dweight, *_) = primals, tangents
        change = run(x, dweight)
        if np.dtype(dx.dtype) != jax.dtypes.float0:  # x of integers has no derivative
            change = change + run(dx, weight)
        return value(*primals), change

    return value(x, q.weight, q.quantized, q.rounds)


@register("dot_general")
def dot_general(primitive: Primitive, x: jax.Array, q: FakeQuantizedArray, **params: Any) -> Any:
    return _straight_through(lambda x, w: primitive.bind(x, w, **params), x, q)


@register("dot_general")
def dot_general_left(primitive: Primitive, q: FakeQuantizedArray, x: jax.Array, **params: Any) -> Any:
    return _straight_through(lambda x, w: primitive.bind(w, x, **params), x, q)


@register("ragged_dot_general")
def ragged_dot_general(
    primitive: Primitive, x: jax.Array, q: FakeQuantizedArray, group_sizes: jax.Array, **params: Any
) -> Any:
    return _straight_through(lambda x, w: primitive.bind(x, w, group_sizes, **params), x, q)


def move(primitive: Primitive, q: FakeQuantizedArray, *operands: Any, **params: Any) -> Any:
    """The same on weight and quantized array, if that stays quantized and keeps the stack; else on the weight alone."""
    weight = primitive.bind(q.weight, *operands, **params)
    moved = implicit(lambda quantized: primitive.bind(quantized, *operands, **params))(q.quantized)
    if not is_implicit(moved) or (q.rounds is not None and q.rounds.shape != weight.shape[:-2]):
        return weight
    return dataclasses.replace(q, weight=weight, quantized=moved, dtype=weight.dtype)


for _name in ("transpose", "reshape", "convert_element_type", "squeeze", "slice", "dynamic_slice", "broadcast_in_dim"):
    register(_name)(move)
