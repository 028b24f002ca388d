"""Quantized arrays whose elements are stored in another order along one axis, as those of GPTQ with `desc_act`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from eformer._src.jaximus.array import Deferred, ImplicitArray, aux_field
from eformer._src.jaximus.rules import register
from eformer._src.quantization import elementwise_layout as _leafwise
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.elementwise_layout import LeafwiseArray
from eformer._src.quantization.matmul import dot_general as _dot_general
from eformer._src.quantization.matmul.tiles import Numbers
from eformer._src.quantization.registry import format_names, register_array_type
from eformer._src.quantization.sharding import ShardingType, asked_of
from eformer._src.quantization.stored import check_array
from eformer._src.quantization.validation import FieldChecks, LeafCheck, an_int, check_fields


def _a_leafwise(name: str, value: object) -> None:
    if not isinstance(value, LeafwiseArray):
        raise TypeError(f"`{name}` must be a quantized array in blocks or with scales, got {type(value).__name__}")


@register_array_type
class ArrayPermuted(QuantizedArray):
    """Element `order[i]` along `axis` is element i of `array`: `take(decode(), order, axis) == array.decode()`.

    So blocks of `array` may hold elements that lie scattered in this one. A matmul takes the activations in that order,
    or the result back from it, and reads `array` as it is stored; `transpose` and `astype` keep it quantized, too.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import ArrayGrouped, ArrayPermuted
    >>> stored = ArrayGrouped.quantize(jnp.arange(8.0).reshape(2, 4), block_size=2)
    >>> q = ArrayPermuted(stored, order=jnp.array([2, 0, 3, 1]))
    >>> q.materialize()[0].round()
    Array([1., 3., 0., 2.], dtype=float32)
    """

    _field_checks: ClassVar[FieldChecks] = {
        "array": _a_leafwise,
        "order": LeafCheck("int32, the positions of elements", (jnp.int32,)),
        "axis": an_int,
    }

    array: LeafwiseArray
    order: jax.Array
    axis: int = aux_field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, self._field_checks)
        if self.dtype is None:
            vars(self)["dtype"] = self.array.dtype

    def _check_shapes(self) -> None:
        check_array(self.array)
        shape = self.array.shape
        if not -len(shape) <= self.axis < 0:
            raise ValueError(f"`axis={self.axis}` is counted from the end, and the array has the shape {shape}")
        if self.order.shape != (shape[self.axis],):
            raise ValueError(f"order {self.order.shape} must have an entry for each of {shape[self.axis]} elements")

    def _check_codes(self) -> None:
        self.array._check_codes()
        if not np.array_equal(np.sort(self.order), np.arange(self.order.size)):
            raise ValueError("`order` must have each position once")

    def _names_among(self, names: Sequence[str]) -> Sequence[str]:
        del names
        return format_names(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def _stored(self) -> LeafwiseArray:
        """The array as it is stored, with the dtype and the switches of this one."""
        own = {name: getattr(self, name) for name in ("dtype", "use_kernel", "activation_dtype")}
        # A transpose knows what it is the transpose of; a copy of it does not.
        same = all(getattr(self.array, name) == value for name, value in own.items())
        return self.array if same else self.array._replaced(**own)

    def _in_place(self, stored: jax.Array, axis: int) -> jax.Array:
        """What is in the order of `array` along `axis`, each element in its place."""
        return jnp.take(stored, jnp.argsort(self.order), axis=axis)

    def _deferred(self) -> ImplicitArray | Deferred:
        if self.array._moved_from is None:
            return self
        origin, permutation = self.array._moved_from
        axis = permutation[self.axis % self.ndim] - self.ndim
        return Deferred(self._replaced(array=origin, axis=axis), Transposition(permutation))

    def decode(self) -> jax.Array:
        self._check_shapes()  # a tree may have been restructured since it was constructed
        return self._in_place(self.array.decode(), self.axis)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        return self._in_place(self.array._step_bound(jnp.take(original, self.order, axis=self.axis)), self.axis)

    def _leaf_shardings(self, sharding: NamedSharding) -> Self:
        everywhere = NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
        leaves = [*jtu.tree_leaves(self.array._leaf_shardings(sharding)), everywhere]
        return jtu.tree_unflatten(jtu.tree_structure(self), leaves)

    @property
    def sharding(self) -> ShardingType:
        return self.array.sharding


def _matmul(
    primitive: Primitive, operands: Sequence[Any], at: int, numbers: Numbers, params: dict[str, Any]
) -> jax.Array | NotImplementedType:
    """The matmul of two operands; `operands[at]` is permuted."""
    q, x, (summed, batch) = operands[at], operands[1 - at], numbers
    axis = q.axis % q.ndim
    if axis in batch[at] or asked_of(params) - {"precision", "preferred_element_type"}:
        return NotImplemented
    if axis in summed[at]:
        x = jnp.take(x, q.order, axis=summed[1 - at][list(summed[at]).index(axis)])
    pair = (q._stored(), x) if at == 0 else (x, q._stored())
    out = _dot_general.dot_general(primitive, *pair, dimension_numbers=numbers, **params)
    if out is NotImplemented or axis in summed[at]:
        return out
    free = [a for a in range(q.ndim) if a not in summed[at] and a not in batch[at]]
    before = x.ndim - len(summed[0]) if at == 1 else len(batch[0])
    return q._in_place(out, before + free.index(axis))


@register("dot_general")
def dot_general(primitive: Primitive, lhs: jax.Array, rhs: ArrayPermuted, *, dimension_numbers: Numbers, **params: Any):
    return _matmul(primitive, (lhs, rhs), 1, dimension_numbers, params)


@register("dot_general")
def dot_general_lhs(
    primitive: Primitive, lhs: ArrayPermuted, rhs: jax.Array, *, dimension_numbers: Numbers, **params: Any
):
    return _matmul(primitive, (lhs, rhs), 0, dimension_numbers, params)


@register("transpose")
def transpose(primitive: Primitive, q: ArrayPermuted, *, permutation: Sequence[int], **params: object) -> ArrayPermuted:
    moved = _leafwise.transpose(primitive, q.array, permutation=permutation, **params)
    return q._replaced(array=moved, axis=list(permutation).index(q.axis % q.ndim) - q.ndim)


@dataclasses.dataclass(frozen=True)
class Transposition:
    permutation: tuple[int, ...]

    def __call__(self, q: Any) -> ArrayPermuted:
        return transpose(lax.transpose_p, q, permutation=self.permutation)


@register("convert_element_type")
def convert_element_type(
    primitive: Primitive, q: ArrayPermuted, *, new_dtype: DTypeLike, weak_type: bool = False, **params: object
) -> ArrayPermuted | NotImplementedType:
    del primitive
    if weak_type or asked_of(params) or not q.array._can_become(new_dtype):
        return NotImplemented
    return q.with_dtype(new_dtype)
