"""Primitives that change no value, or move whole arrays between devices: they are applied to each leaf."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax.numpy as jnp
from jax import lax
from jax import tree_util as jtu
from jax.extend.core import Primitive
from jax.sharding import NamedSharding

from .array import ImplicitArray, is_implicit
from .rules import Operand, register
from .types import Value


def _of_each_leaf(primitive: Primitive, array: ImplicitArray, **params: object) -> ImplicitArray:
    return jtu.tree_map(lambda leaf: primitive.bind(leaf, **params), array)


# `name` is `checkpoint_name`'s; `pvary`, in `shard_map`, says that values differ between devices.
for _name in ("stop_gradient", "name", "copy", "pvary"):
    register(_name)(_of_each_leaf)


@register("optimization_barrier")
def optimization_barrier(primitive: Primitive, *operands: Operand, **params: object) -> list[Value]:
    leaves, treedef = jtu.tree_flatten(list(operands))
    return jtu.tree_unflatten(treedef, primitive.bind(*leaves, **params))


@register("reduce_precision")
def reduce_precision(
    primitive: Primitive, array: ImplicitArray, *, exponent_bits: int, mantissa_bits: int, **params: object
) -> ImplicitArray:
    del primitive, params
    info = jnp.finfo(array.dtype)
    return array if exponent_bits >= info.nexp and mantissa_bits >= info.nmant else NotImplemented


@register("device_put")
def device_put(primitive: Primitive, *operands: Operand, **params: Sequence[object]) -> list[Value]:
    """Every parameter has an entry per operand, which the leaves of the operand share: a device, or None."""

    def put(operand: Operand, own: dict[str, Sequence[object]]) -> Value:
        if isinstance(own["devices"][0], NamedSharding):  # says how to divide the array, not its leaves
            operand = operand.materialize() if is_implicit(operand) else operand
        return jtu.tree_map(lambda leaf: primitive.bind(leaf, **own)[0], operand)

    given = [{name: values[i : i + 1] for name, values in params.items()} for i in range(len(operands))]
    return [put(operand, own) for operand, own in zip(operands, given, strict=True)]


@register("ppermute")
def ppermute(
    primitive: Primitive, array: ImplicitArray, *, axis_name: Hashable, perm: Sequence[object], **params: object
) -> ImplicitArray:
    """Declined where a device gets nothing: JAX gives it zeros, and leaves of zeros need not decode to zero."""
    del primitive, params
    if len(perm) != lax.axis_size(axis_name):
        return NotImplemented
    return jtu.tree_map(lambda leaf: lax.ppermute(leaf, axis_name, perm), array)
