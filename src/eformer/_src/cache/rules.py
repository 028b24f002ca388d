"""What primitives do with quantized caches: writes quantize, moves move codes, matmuls read them.

What touches the channels of a rotated cache decodes it first, unless a rule here knows better.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from eformer._src.cache.channels import PLACES, Move
from eformer._src.cache.quantized_cache import QuantizedCache, channels_of
from eformer._src.cache.rotation import rotated, widened
from eformer._src.jaximus.rules import register
from eformer._src.jaximus.trace import implicit
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.elementwise_layout import LeafwiseArray
from eformer._src.quantization.sharding import bind_alike

Operand = QuantizedCache | jax.Array
Found = QuantizedCache | jax.Array | list[QuantizedCache | jax.Array] | NotImplementedType

# --- moves ---


def _moved(primitive: Primitive, *operands: Operand, **params: Any) -> Found:
    """What the rules of the arrays that are stored make of it, if runs of rotated channels stay whole."""
    at, cache = next((i, each) for i, each in enumerate(operands) if isinstance(each, QuantizedCache))
    place = None
    if cache.rotated:
        others = [*operands[:at], *operands[at + 1 :]]
        (axis,) = (axis + cache.ndim for axis in cache.channels)
        place = PLACES[primitive.name](Move(axis, cache.shape, others, params))
        if place is None:
            return NotImplemented
    if any(each.rotated != cache.rotated for each in operands if isinstance(each, QuantizedCache)):
        return NotImplemented
    stored = [each.content() if isinstance(each, QuantizedCache) else each for each in operands]
    out: Any = implicit(bind_alike)(primitive, *stored, **params)
    if not isinstance(out, (list, tuple)):
        return _around(cache, out, place)
    parts = [_around(cache, each, place) for each in out]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts  # pyright: ignore[reportReturnType]


def _around(cache: QuantizedCache, out: Any, place: int | None) -> QuantizedCache | jax.Array | NotImplementedType:
    """`out`, made of what `cache` stores, as a cache with channels in `place`; what is dense must not be rotated."""
    if not isinstance(out, LeafwiseArray):
        return NotImplemented if cache.rotated else out
    if cache.rotated:
        (channels,) = cache.channels
        if place is None or channels_of(out) != (place - out.ndim,) or out.shape[place] != cache.shape[channels]:
            return NotImplemented
    return cache._replaced(stored=out, dtype=out.dtype)


for _name in PLACES.keys() - {"concatenate"}:
    register(_name)(_moved)


@register("pad")
def pad(primitive: Primitive, cache: QuantizedCache, value: jax.Array, **params: Any) -> Found:
    """The padding has one value everywhere, so it is no rotated value: a rotated cache is not padded here."""
    return NotImplemented if cache.rotated else _moved(primitive, cache, value, **params)


# --- writes ---


@register("concatenate")
def concatenate(primitive: Primitive, *operands: Operand, dimension: int, **params: Any) -> Found:
    """Dense operands are quantized as the first cache is."""
    cache = next(each for each in operands if isinstance(each, QuantizedCache))
    if dimension - cache.ndim in cache.channels:
        return NotImplemented
    caches = [each if isinstance(each, QuantizedCache) else cache.like(each) for each in operands]
    return _moved(primitive, *caches, dimension=dimension, **params)


@register("dynamic_update_slice")
def dynamic_update_slice(primitive: Primitive, cache: QuantizedCache, update: Operand, *starts: Any, **params: Any):
    if any(cache.shape[axis] != update.shape[axis] for axis in cache.channels):
        return NotImplemented
    new = update if isinstance(update, QuantizedCache) else cache.like(update)
    out: Any = implicit(bind_alike)(primitive, cache.content(), new.content(), *starts, **params)
    place = cache.ndim + cache.channels[0] if cache.rotated else None
    same = isinstance(out, LeafwiseArray) and new.rotated == cache.rotated
    return _around(cache, out, place) if same else NotImplemented


@register("scatter")
def scatter(
    primitive: Primitive,
    cache: QuantizedCache,
    indices: jax.Array,
    updates: jax.Array,
    *,
    dimension_numbers: lax.ScatterDimensionNumbers,
    indices_are_sorted: bool,
    unique_indices: bool,
    mode: lax.GatherScatterMode | None,
    **params: Any,
) -> QuantizedCache | NotImplementedType:
    """`cache.at[...].set(updates)` of whole heads."""
    del primitive, params  # the function that says that updates replace what was there is typed for dense operands
    numbers = dimension_numbers
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = dict(zip((a for a in range(cache.ndim) if a not in gone), numbers.update_window_dims, strict=True))
    channels = [axis + cache.ndim for axis in cache.channels]
    if any(a not in window or updates.shape[window[a]] != cache.shape[a] for a in channels):
        return NotImplemented
    if not _has_every_scale(cache):
        return NotImplemented
    axes = tuple(window[a] - updates.ndim for a in channels)
    new = cache.like(updates, axes)

    def write(old: jax.Array, part: jax.Array) -> jax.Array:
        how: Any = {"indices_are_sorted": indices_are_sorted, "unique_indices": unique_indices, "mode": mode}
        return lax.scatter(old, indices, part, numbers, **how)

    pairs = zip(jax.tree.leaves(cache), jax.tree.leaves(new), strict=True)
    return jax.tree.unflatten(jax.tree.structure(cache), [write(*pair) for pair in pairs])


def _has_every_scale(cache: QuantizedCache) -> bool:
    """Whether each head of each position has scales of its own."""
    kept = [axis for axis in range(-cache.ndim, 0) if axis not in cache.channels]
    return all(leaf.shape[axis] == cache.shape[axis] for leaf in jax.tree.leaves(cache) for axis in kept)


# --- matmuls ---


@register("dot_general")
def dot_general(primitive: Primitive, lhs: Any, rhs: QuantizedCache, **params: Any) -> Any:
    return _matmul(primitive, (lhs, rhs), 1, **params)


@register("dot_general")
def dot_general_lhs(primitive: Primitive, lhs: QuantizedCache, rhs: Any, **params: Any) -> Any:
    return _matmul(primitive, (lhs, rhs), 0, **params)


def _matmul(primitive: Primitive, operands: Sequence[Any], at: int, *, dimension_numbers: Any, **params: Any) -> Any:
    """The matmul of two operands; `operands[at]` is a cache."""
    cache, x = operands[at], operands[1 - at]
    run = implicit(primitive.bind)
    if not cache.rotated:
        pair = (x, cache.content()) if at == 1 else (cache.content(), x)
        return run(*pair, dimension_numbers=dimension_numbers, **params)
    (axis,) = (axis + cache.ndim for axis in cache.channels)
    summed, batch = dimension_numbers
    if axis in batch[at] or isinstance(x, QuantizedArray) or not jnp.issubdtype(x.dtype, jnp.floating):
        return NotImplemented
    as_dense = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
    how = {"dimension_numbers": dimension_numbers, **params}
    dtype = jax.eval_shape(lambda *pair: primitive.bind(*pair, **how), *as_dense).dtype
    x = widened(x)
    stored, how["preferred_element_type"] = cache.content(x.dtype), x.dtype
    if axis in summed[at]:
        x = rotated(x, summed[1 - at][list(summed[at]).index(axis)])
    out = run(*((x, stored) if at == 1 else (stored, x)), **how)
    if axis not in summed[at]:
        free = [a for a in range(cache.ndim) if a not in summed[at] and a not in batch[at]]
        before = x.ndim - len(summed[0]) if at == 1 else len(batch[0])
        out = rotated(out, before + free.index(axis))
    return out.astype(dtype)
