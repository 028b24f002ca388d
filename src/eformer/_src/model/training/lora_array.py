"""`LoraArray`: a frozen weight plus an update of low rank, which are multiplied one after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from eformer._src.jaximus.array import ImplicitArray, aux_field, materialize
from eformer._src.jaximus.rules import register
from eformer._src.jaximus.trace import implicit


class LoraArray(ImplicitArray):
    """`base + scaling * a @ b`: a weight (..., rows, cols), with `a` (..., rows, rank) and `b` (..., rank, cols).

    The base is frozen: gradients reach `a` and `b` only. A matmul runs on the base as it is, on the quantized kernel if
    it is quantized, and adds two matmuls of `rank`; the sum of base and update is never stored. `scaling` has an entry
    for each matrix of a stack. With `dropout_key`, elements of the activations are dropped before they enter the
    update, with probability `dropout`, and the others are scaled up.
    """

    base: Any  # a dense or a quantized array
    a: jax.Array
    b: jax.Array
    scaling: jax.Array
    dropout_key: jax.Array | None = None
    dropout: float = aux_field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.dtype is None:
            object.__setattr__(self, "dtype", self.base.dtype)
        if self.base.ndim < 2:
            raise ValueError(f"an update of low rank is for matrices and stacks of them, got {self.base.shape}")
        *stack, rows, cols = self.base.shape
        rank = self.a.shape[-1] if self.a.ndim else -1
        if self.a.shape != (*stack, rows, rank) or self.b.shape != (*stack, rank, cols) or rank < 1:
            raise ValueError(
                f"`a` {self.a.shape} @ `b` {self.b.shape} is no update of a weight {self.base.shape}: they must be "
                f"{(*stack, rows, 'rank')} and {(*stack, 'rank', cols)}"
            )
        if self.scaling.shape != tuple(stack):
            raise ValueError(f"`scaling` {self.scaling.shape} must have one entry per matrix, {tuple(stack)}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    def update(self) -> jax.Array:
        """`scaling * a @ b`, dense, in the dtype of `a`."""
        return lax.stop_gradient(self.scaling)[..., None, None].astype(self.a.dtype) * (self.a @ self.b)

    def materialize(self) -> jax.Array:
        base = lax.stop_gradient(materialize(self.base))
        wide = jnp.promote_types(base.dtype, self.a.dtype)
        return (base.astype(wide) + self.update().astype(wide)).astype(self.dtype)

    def is_stacked(self) -> bool:
        return self.ndim > 2 and (not isinstance(self.base, ImplicitArray) or self.base.is_stacked())

    def leaf_specs(self, spec: PartitionSpec) -> Any:
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        base = self.base.leaf_specs(spec) if isinstance(self.base, ImplicitArray) else spec
        if base is None:
            return None
        *stack, rows, cols = entries
        specs = [PartitionSpec(*stack, rows, None), PartitionSpec(*stack, None, cols), PartitionSpec(*stack)]
        key = [] if self.dropout_key is None else [PartitionSpec(*stack)]
        leaves = [*jax.tree.leaves(base, is_leaf=lambda x: isinstance(x, PartitionSpec)), *specs, *key]
        return jax.tree.unflatten(jax.tree.structure(self), leaves)

    def _dropped(self, x: jax.Array, stack_axes: Sequence[int]) -> jax.Array:
        """`x` as it enters the update; its axes `stack_axes` go along the stack."""
        if self.dropout_key is None or not self.dropout:
            return x
        count = len(stack_axes)
        rest = [size for axis, size in enumerate(x.shape) if axis not in stack_axes]
        draw = functools.partial(jax.random.bernoulli, p=1 - self.dropout, shape=rest)
        for _ in stack_axes:
            draw = jax.vmap(draw)
        kept = jnp.moveaxis(draw(self.dropout_key), range(count), stack_axes)
        return jnp.where(kept, x / (1 - self.dropout), jnp.zeros_like(x))


_Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
_Result = jax.Array | NotImplementedType


def _frozen(base: Any) -> Any:
    return base if isinstance(base, ImplicitArray) else lax.stop_gradient(base)


def _on_base(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """The primitive on operands, some of them implicit."""
    return implicit(lambda *operands: primitive.bind(*operands, **params))(*operands)


@register("dot_general")
def dot_general(
    primitive: Primitive, x: jax.Array, q: LoraArray, *, dimension_numbers: _Numbers, **params: Any
) -> _Result:
    """`x @ base + scaling * (x @ a) @ b`, or the same with the transposes, for a matrix or a stack of them."""
    (x_summed, q_summed), (x_batch, q_batch) = dimension_numbers
    rows = q.ndim - 2
    if len(q_summed) != 1 or q_summed[0] < rows or list(q_batch) != list(range(rows)):
        return NotImplemented
    y = _on_base(primitive, x, _frozen(q.base), dimension_numbers=dimension_numbers, **params)
    transposed = q_summed[0] != rows
    first, second = (jnp.matrix_transpose(q.b), jnp.matrix_transpose(q.a)) if transposed else (q.a, q.b)
    narrow = q._dropped(x, x_batch).astype(first.dtype)
    narrow = lax.dot_general(narrow, first, ((tuple(x_summed), (rows,)), (tuple(x_batch), tuple(q_batch))))
    stack = tuple(range(rows))  # the axes of the stack come first in the result
    update = lax.dot_general(narrow, second, (((narrow.ndim - 1,), (rows,)), (stack, stack)))
    scaling = lax.stop_gradient(q.scaling).astype(update.dtype)
    return y + (update * lax.broadcast_in_dim(scaling, update.shape, stack)).astype(y.dtype)


@register("dot_general")
def dot_general_left(
    primitive: Primitive, q: LoraArray, x: jax.Array, *, dimension_numbers: _Numbers, **params: Any
) -> _Result:
    """`q @ x` from `x @ q` with the operands swapped."""
    (q_summed, x_summed), (q_batch, x_batch) = dimension_numbers
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    y = dot_general(primitive, x, q, dimension_numbers=((x_summed, q_summed), (x_batch, q_batch)), **params)
    return y if y is NotImplemented else jnp.moveaxis(y, -1, len(x_batch))


@register("ragged_dot_general")
def ragged_dot_general(
    primitive: Primitive,
    x: jax.Array,
    q: LoraArray,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    **params: Any,
) -> _Result:
    """Experts, (x's rows, in) @ (experts, in, out): each group of rows has the update of its own expert."""
    numbers = ragged_dot_dimension_numbers
    plain = ((((x.ndim - 1,), (1,)), ((), ())), [0], [0])
    given = (numbers.dot_dimension_numbers, [*numbers.lhs_ragged_dimensions], [*numbers.rhs_group_dimensions])
    if q.ndim != 3 or x.ndim != 2 or given != plain:
        return NotImplemented
    how = {"ragged_dot_dimension_numbers": numbers, **params}
    y = _on_base(primitive, x, _frozen(q.base), group_sizes, **how)
    scaled = q.a * lax.stop_gradient(q.scaling)[:, None, None].astype(q.a.dtype)
    narrow = lax.ragged_dot(q._dropped(x, ()).astype(q.a.dtype), scaled, group_sizes)
    return y + lax.ragged_dot(narrow, q.b, group_sizes).astype(y.dtype)


@register("conv_general_dilated")
def conv_general_dilated(primitive: Primitive, x: jax.Array, q: LoraArray, **params: Any) -> _Result:
    """The convolution with the base, plus one with the update, which is dense for that: the base stays as it is."""
    if q.dropout_key is not None and q.dropout:
        return NotImplemented
    y = _on_base(primitive, x, _frozen(q.base), **params)
    return y + primitive.bind(x, q.update().astype(x.dtype), **params).astype(y.dtype)


@register("transpose")
def transpose(primitive: Primitive, q: LoraArray, *, permutation: Sequence[int], **params: Any) -> Any:
    """The last two axes swapped, or none: base, `a` and `b` are transposed, and `a` and `b` change places."""
    rows = q.ndim - 2
    if list(permutation) == list(range(q.ndim)):
        return q
    if list(permutation) != [*range(rows), rows + 1, rows]:
        return NotImplemented
    base = _on_base(primitive, q.base, permutation=permutation, **params)
    parts = {"a": jnp.matrix_transpose(q.b), "b": jnp.matrix_transpose(q.a)}
    return dataclasses.replace(q, base=base, **parts)


@register("gather")
def gather(
    primitive: Primitive,
    q: LoraArray,
    indices: jax.Array,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    **params: Any,
) -> _Result:
    """Whole rows, as of an embedding: the rows of the base, plus those of `a` times `b`."""
    if q.ndim != 2 or dimension_numbers.start_index_map != (0,) or slice_sizes[1] != q.shape[1]:
        return NotImplemented
    if dimension_numbers.collapsed_slice_dims != (0,) or dimension_numbers.offset_dims != (indices.ndim - 1,):
        return NotImplemented
    run = functools.partial(_on_base, primitive, dimension_numbers=dimension_numbers, **params)
    rows = run(_frozen(q.base), indices, slice_sizes=slice_sizes)
    update = run(q.a, indices, slice_sizes=(slice_sizes[0], q.rank)) @ q.b
    return rows + (update * lax.stop_gradient(q.scaling).astype(update.dtype)).astype(rows.dtype)


@register("convert_element_type")
def convert_element_type(primitive: Primitive, q: LoraArray, *, new_dtype: Any, **params: Any) -> Any:
    """Another floating point dtype of base and results; `a` and `b` keep their own."""
    if not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    base = _on_base(primitive, q.base, new_dtype=new_dtype, **params)
    return dataclasses.replace(q, base=base, dtype=jnp.dtype(new_dtype))
