"""The class of quantized caches: a quantized array, and what is written into it is quantized as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from eformer._src.cache.rotation import rotated
from eformer._src.jaximus.array import Deferred, ImplicitArray, aux_field
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.elementwise_layout import LeafwiseArray
from eformer._src.quantization.formats.float8 import ArrayFloat8
from eformer._src.quantization.formats.grouped import ArrayGrouped
from eformer._src.quantization.formats.int8 import Array8B
from eformer._src.quantization.validation import FieldChecks, a_bool, check_fields


def _a_quantized(name: str, value: object) -> None:
    if not isinstance(value, (Array8B, ArrayFloat8, ArrayGrouped)):
        raise TypeError(
            f"`{name}` must be an Array8B, an ArrayFloat8 or an ArrayGrouped, got {type(value).__name__}; "
            f"`eformer.cache.empty` and `eformer.cache.quantize` make caches"
        )


class QuantizedCache(QuantizedArray):
    """`decode() == stored.decode()`; with `rotated`, each run of channels of that times a Hadamard matrix.

    The elements that share scales lie along the axis of a head's channels. A write of whole heads, by
    `lax.dynamic_update_slice`, `cache.at[...].set` or `jnp.concatenate`, quantizes what is written, and nothing else
    changes. A matmul reads the codes; where they are rotated, it rotates the other operand, or the result: with H = H'
    and H H = 1, q . k is (H q) . (H k).
    """

    _field_checks: ClassVar[FieldChecks] = {"stored": _a_quantized, "rotated": a_bool}

    stored: LeafwiseArray
    rotated: bool = aux_field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, self._field_checks)
        if self.dtype is None:
            vars(self)["dtype"] = self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def channels(self) -> tuple[int, ...]:
        """The axes, counted from the end, along which elements share scales."""
        return channels_of(self.stored)

    def content(self, dtype: Any = None) -> LeafwiseArray:
        """The array that is stored, with the switches of this one and its dtype, or another."""
        stored = self.stored
        own = {"dtype": dtype or self.dtype, "use_kernel": self.use_kernel, "activation_dtype": self.activation_dtype}
        if all(getattr(stored, name) == value for name, value in own.items()):
            return stored
        copy = stored._replaced(**own)
        if stored._moved_from is not None:  # a transpose knows what it is the transpose of; so must its copy
            origin, permutation = stored._moved_from
            object.__setattr__(copy, "_moved_from", (origin._replaced(**own), permutation))
        return copy

    def decode(self) -> jax.Array:
        values = self.stored.decode()
        return rotated(values, *self.channels) if self.rotated else values

    def like(self, array: jax.Array, axes: tuple[int, ...] | None = None) -> Self:
        """`array` quantized as this cache is; `axes` are those of its channels, if others than this cache's."""
        axes = self.channels if axes is None else axes
        return self._replaced(stored=_encoded(array, self.content(), axes, self.rotated))

    def is_stacked(self) -> bool:
        return self.stored.is_stacked()

    def leaf_specs(self, spec: PartitionSpec) -> Self | None:
        along = [spec[axis] for axis in (each + self.ndim for each in self.channels) if axis < len(spec)]
        if self.rotated and any(entry is not None for entry in along):
            return None  # no device would have a whole run of channels
        stored = self.stored.leaf_specs(spec)
        return None if stored is None else _with_leaves(self, stored)

    @property
    def sharding(self) -> Any:
        return self.stored.sharding

    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        return _with_leaves(self, self.stored._leaf_shardings(sharding))

    def _step_bound(self, original: jax.Array) -> jax.Array:
        if not self.rotated:
            return self.stored._step_bound(original)
        # Rounding is orthogonal to what it is measured along: the lengths of a run's errors agree.
        bound = self.stored._step_bound(rotated(original, *self.channels))
        squares = jnp.sum(bound**2, axis=self.channels, keepdims=True)
        return jnp.broadcast_to(jnp.sqrt(squares), original.shape)

    def _vmap_error(self, leaf: jax.Array, axis: int) -> str | None:
        return self.stored._vmap_error(leaf, axis)

    def _deferred(self) -> ImplicitArray | Deferred:
        deferred = self.stored._deferred()
        if not isinstance(deferred, Deferred):
            return self
        return Deferred(dataclasses.replace(self, stored=deferred.array), _WithStored(deferred.make))


@dataclasses.dataclass(frozen=True)
class _WithStored:
    make: Callable[[Any], Any]

    def __call__(self, cache: Any) -> QuantizedCache:
        return dataclasses.replace(cache, stored=self.make(cache.stored))


def _with_leaves(cache: QuantizedCache, tree: Any) -> Any:
    """The tree of `cache` with the leaves of `tree`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.unflatten(jax.tree.structure(cache), leaves)


def float8(array: jax.Array, axis: int) -> ArrayFloat8:
    """In blocks, because their axis is known wherever they are moved, though a scale is that of a whole head."""
    return ArrayFloat8.quantize(array, block_shape=(array.shape[axis], *[1] * (-1 - axis)))


def channels_of(stored: LeafwiseArray) -> tuple[int, ...]:
    if isinstance(stored, Array8B):
        return stored.axis or ()
    if isinstance(stored, ArrayGrouped):
        return (stored.axis,)
    assert isinstance(stored, ArrayFloat8)
    return (-len(stored.block_shape),) if stored.block_shape else (-1,)


def _encoded(array: jax.Array, like: LeafwiseArray, axes: tuple[int, ...], turn: bool) -> LeafwiseArray:
    """`array` quantized along `axes` as `like` is; its channels are rotated first where `turn` says so."""
    x = rotated(array, *axes) if turn else array
    if isinstance(like, Array8B):
        made: LeafwiseArray = Array8B.quantize(x, axis=axes)
    elif isinstance(like, ArrayFloat8):
        made = float8(x, *axes)
    else:
        assert isinstance(like, ArrayGrouped)
        levels = {"symmetric": like.offset is None, "double_quantization": like.scale_scale is not None}
        layout: Any = {"bits": like.bits, "block_size": like.block_size, **levels}
        made = ArrayGrouped.quantize(x, axis=axes[0], fit=False, **layout)
    own = {name: getattr(like, name) for name in ("dtype", "use_kernel", "activation_dtype")}
    return made._replaced(**own)
