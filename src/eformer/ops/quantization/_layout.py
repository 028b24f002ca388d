"""Where a program says how an array is laid out over devices: its leaves follow."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from eformer.jaximus import implicit, register

from ._base import QuantizedArray


@register("sharding_constraint")
def sharding_constraint(primitive: Any, q: QuantizedArray, *, sharding: Any, layout: Any = None, **params: Any) -> Any:
    del primitive, params
    return q.with_sharding(sharding) if isinstance(sharding, NamedSharding) and layout is None else NotImplemented


@register("reshard")
def reshard(primitive: Any, q: QuantizedArray, *, dst_sharding: Any, concrete_mesh: Any, **params: Any) -> Any:
    del primitive, params
    if not isinstance(dst_sharding, NamedSharding):
        return NotImplemented
    # Without a mesh of its own it is the one in context, which JAX has made abstract.
    return q.with_sharding(NamedSharding(concrete_mesh, dst_sharding.spec) if concrete_mesh else dst_sharding.spec)


@register("device_put")
def device_put(primitive: Any, *operands: QuantizedArray | Any, devices: Any, **params: Any) -> Any:
    """Where a sharding is asked for, which is one of the array and not of its leaves."""
    pairs = list(zip(operands, devices, strict=True))
    divided = [isinstance(q, QuantizedArray) and isinstance(place, NamedSharding) for q, place in pairs]
    if not any(divided):
        return NotImplemented

    def put(i: int) -> Any:
        operand, place = pairs[i]
        if divided[i]:
            return operand.with_sharding(place)
        own = {name: values[i : i + 1] for name, values in params.items()}
        return implicit(primitive.bind)(operand, devices=(place,), **own)[0]

    return [put(i) for i in range(len(pairs))]
