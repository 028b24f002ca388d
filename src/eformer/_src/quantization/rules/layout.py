"""Operations that lay an array out over devices: its leaves follow."""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding

from eformer._src.jaximus.rules import register
from eformer._src.jaximus.trace import implicit
from eformer._src.quantization.base import QuantizedArray


@register("sharding_constraint")
def sharding_constraint(
    primitive: Primitive, q: QuantizedArray, *, sharding: object, layout: object = None, **params: object
) -> QuantizedArray | NotImplementedType:
    del primitive, params
    return q.with_sharding(sharding) if isinstance(sharding, NamedSharding) and layout is None else NotImplemented


@register("reshard")
def reshard(
    primitive: Primitive, q: QuantizedArray, *, dst_sharding: object, concrete_mesh: Mesh | None, **params: object
) -> QuantizedArray | NotImplementedType:
    del primitive, params
    if not isinstance(dst_sharding, NamedSharding):
        return NotImplemented
    # Without a mesh of its own it is the one in context, which JAX has made abstract.
    return q.with_sharding(NamedSharding(concrete_mesh, dst_sharding.spec) if concrete_mesh else dst_sharding.spec)


@register("device_put")
def device_put(primitive: Primitive, *operands: QuantizedArray | Any, devices: Sequence[Any], **params: Any) -> Any:
    """Lay arrays out by the sharding asked for, which names the array's axes and not those of its leaves."""
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
