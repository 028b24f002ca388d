"""The rule of `dot_general`: the matmuls that kernels compute as exactly go to the primitive, the others to XLA."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike

from eformer._src.jaximus.array import materialize
from eformer._src.jaximus.instrumentation import mode, note_kernel, note_materialized, note_remark, unobserved
from eformer._src.jaximus.rules import register
from eformer._src.kernels import cpu
from eformer._src.quantization.base import MatmulOperand
from eformer._src.quantization.elementwise_layout import LeafwiseArray, reshaped
from eformer._src.quantization.sharding import asked_of, typed_as

from .primitive import Precision, bind_matmul, note_partly_manual
from .tiles import AsDense, Axes, Contraction, Numbers, contract_in_tiles, map_tiles

Either: TypeAlias = jax.Array | LeafwiseArray
Stack = TypeVar("Stack", bound=MatmulOperand)

_use_kernels = jax.make_user_context(default_value=True)


def use_kernels(value: bool) -> AbstractContextManager[None]:
    """In `with use_kernels(False):` matmuls decode the whole array first, also in functions compiled before."""
    if not isinstance(value, bool):
        raise TypeError(f"use_kernels takes True or False, got {value!r}")
    return _use_kernels(value)


def is_kernel_available() -> bool:
    """Whether matmuls on the default device have a path that never holds the decoded array.

    On CPU that is the native core, or a loop over tiles; on TPU and GPU, a Pallas kernel.
    """
    return jax.default_backend() in ("cpu", "tpu", "gpu")


@register("dot_general")
def dot_general(
    primitive: Primitive,
    lhs: Either,
    rhs: Either,
    *,
    dimension_numbers: Numbers,
    preferred_element_type: DTypeLike | None,
    precision: Precision = None,
    **params: Any,  # those of other versions of JAX too
) -> Any:
    dtype = jnp.dtype(preferred_element_type or result_dtype(lhs.dtype, rhs.dtype, precision))
    run = functools.partial(contract, numbers=dimension_numbers, dtype=dtype, precision=precision)
    asked = asked_of(params) if any(value is not None for value in params.values()) else set()
    if asked - {"out_sharding"}:
        return NotImplemented
    if not asked and not has_explicit_sharding(lhs, rhs):
        return run(lhs, rhs)
    how = {"dimension_numbers": dimension_numbers, "precision": precision, "preferred_element_type": dtype, **params}
    return typed_as(lambda lhs, rhs: primitive.bind(*materialize([lhs, rhs]), **how), run)(lhs, rhs)


def has_explicit_sharding(*operands: jax.Array | MatmulOperand) -> bool:
    """Whether the sharding of an operand is part of its type, as on meshes with explicit axes."""
    leaves = jax.tree.leaves(operands)
    return any(AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves)


def result_dtype(lhs: np.dtype, rhs: np.dtype, precision: Precision = None) -> np.dtype:
    """The dtype that `lax.dot_general` gives by default for operands of these dtypes."""
    if lhs == rhs and (precision is None or isinstance(precision, tuple)):
        return lhs
    structs = [jax.ShapeDtypeStruct((), dtype) for dtype in (lhs, rhs)]
    return jax.eval_shape(lambda x, y: lax.dot_general(x, y, (((), ()), ((), ())), precision), *structs).dtype


def contract(lhs: Either, rhs: Either, numbers: Numbers, dtype: np.dtype, precision: Precision) -> jax.Array:
    """`lax.dot_general` with one quantized operand or two, as `dtype`: by a kernel, or else in XLA's operations."""
    (l_summed, r_summed), (l_batch, r_batch) = numbers
    if isinstance(rhs, LeafwiseArray):
        if isinstance(lhs, LeafwiseArray):
            return _contract_two(lhs, rhs, numbers, dtype, precision)
        return _kernel_or_xla(lhs, rhs, contraction_of(numbers, lhs.ndim, rhs.ndim), dtype, precision)
    assert isinstance(lhs, LeafwiseArray)
    contraction = contraction_of(((r_summed, l_summed), (r_batch, l_batch)), rhs.ndim, lhs.ndim)
    if isinstance(precision, tuple) and not isinstance(precision, lax.DotAlgorithm):
        precision = (precision[1], precision[0])
    out = _kernel_or_xla(rhs, lhs, contraction, dtype, precision)
    batch, free = len(r_batch), len(contraction.x_free)
    return jnp.moveaxis(out, range(batch, batch + free), range(out.ndim - free, out.ndim))


def contraction_of(numbers: Numbers, x_ndim: int, q_ndim: int) -> Contraction:
    (x_summed, q_summed), (x_batch, q_batch) = numbers
    q_summed, x_summed = zip(*sorted(zip(q_summed, x_summed, strict=True)), strict=True) if q_summed else ((), ())
    x_free = tuple(a for a in range(x_ndim) if a not in x_summed and a not in x_batch)
    q_free = tuple(a for a in range(q_ndim) if a not in q_summed and a not in q_batch)
    return Contraction(x_summed, q_summed, tuple(x_batch), tuple(q_batch), x_free, q_free)


def _contract_two(
    lhs: LeafwiseArray, rhs: LeafwiseArray, numbers: Numbers, dtype: np.dtype, precision: Precision
) -> jax.Array:
    """The matmul of two quantized arrays: tiles of `lhs` are decoded, and `rhs` stays quantized."""
    (l_summed, _), (l_batch, _) = numbers
    free = [axis for axis in range(lhs.ndim) if axis not in l_summed and axis not in l_batch]
    axis = next((axis for axis in free if lhs.shape[axis] > lhs._alignment(axis)), None)
    if axis is None or not (lhs.use_kernel and lhs.size):
        note_materialized(lhs, "it has no axis that can be cut into tiles, and the other operand is quantized too")
        return contract(lhs._decoded(), rhs, numbers, dtype, precision)

    def of_tile(_: ArrayLike, tile: LeafwiseArray) -> jax.Array:
        return contract(tile._decoded(), rhs, numbers, dtype, precision)

    return map_tiles(of_tile, lhs, axis, len(l_batch) + free.index(axis))


def _kernel_or_xla(
    x: jax.Array, q: LeafwiseArray, contraction: Contraction, dtype: np.dtype, precision: Precision
) -> jax.Array:
    """x times q as `dtype`, of shape (*batch, *free axes of x, *free axes of q)."""
    if q._moved_from is not None:  # `x @ q.T` reads the codes as they are stored
        q, contraction = _before_transpose(*q._moved_from, q, x.ndim, contraction)
    if mode.value.recorder is not None:
        _remark_on_axis(q, contraction)
    off = "use_kernel=False" if not q.use_kernel else "use_kernels(False)" if not _use_kernels.value else None
    why = f"`{off}` asks for it" if off else None
    exact, as_dense = _exact_kernels(x.dtype, q.dtype, dtype, precision), AsDense(dtype, precision)
    if exact == "none":
        return contract_in_tiles(x, q, contraction, dtype, as_dense, why)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)  # as the dense matmul does
    if off:
        return contract_in_tiles(x, q, contraction, dtype, None, why)
    by_kernel = functools.partial(_contract_by_kernel, contraction=contraction, dtype=dtype)
    if exact == "all":
        return by_kernel(x, q)
    why = f"the kernels of this device multiply in less than the precision asked for, {precision}"
    if jax.default_backend() != "cpu":
        return contract_in_tiles(x, q, contraction, dtype, as_dense, why)

    def elsewhere(x: jax.Array, q: LeafwiseArray) -> jax.Array:
        with unobserved():
            return contract_in_tiles(x, q, contraction, dtype, as_dense, why)

    q = q.with_activation_dtype(None) if q.activation_dtype else q
    return lax.platform_dependent(x, q, cpu=by_kernel, default=elsewhere)


def _remark_on_axis(q: LeafwiseArray, contraction: Contraction) -> None:
    """Tell `explain` of codes that are packed along another axis than the matmul sums over: slower, and less exact."""
    packed = getattr(q, "axis", None)
    if len(contraction.q_summed) == 1 and isinstance(packed, int) and packed % q.ndim != contraction.q_summed[0]:
        summed = contraction.q_summed[0] - q.ndim
        note_remark(
            f"{type(q).__name__}{list(q.shape)} is packed along axis {packed}, and the matmul sums over axis {summed}: "
            f"quantized with `axis={summed}` it would be faster and more exact, and could round activations"
        )


def _before_transpose(
    origin: LeafwiseArray, permutation: Axes, q: LeafwiseArray, x_ndim: int, contraction: Contraction
) -> tuple[LeafwiseArray, Contraction]:
    """The array that `q` is the transpose of, and its contraction, if that leaves the result's axes in their order."""
    (x_summed, q_summed), (x_batch, q_batch) = contraction.numbers
    q_summed, q_batch, q_free = (
        tuple(permutation[a] for a in axes) for axes in (q_summed, q_batch, contraction.q_free)
    )
    moved = contraction_of(((x_summed, q_summed), (x_batch, q_batch)), x_ndim, q.ndim)
    return (origin, moved) if moved.q_free == q_free else (q, contraction)


_HALF_OR_SINGLE = frozenset(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
_PRESETS = lax.DotAlgorithmPreset


def _exact_kernels(x: np.dtype, q: np.dtype, out: np.dtype, precision: Precision) -> Literal["all", "cpu", "none"]:
    """Which kernels are as exact as the dense matmul of these dtypes. All of them sum in float32.

    On CPU they multiply in float32 too; on accelerators in bfloat16 or TF32. The dense matmul converts integers and
    bools in `x` to the dtype of the result.
    """
    if q not in _HALF_OR_SINGLE or out not in _HALF_OR_SINGLE or not (x in _HALF_OR_SINGLE or x.kind in "iub"):
        return "none"
    if isinstance(precision, tuple):
        return "all" if all(each in (None, lax.Precision.DEFAULT) for each in precision) else "cpu"
    return "all" if precision in (None, _PRESETS.DEFAULT) else "cpu" if precision == _PRESETS.F32_F32_F32 else "none"


def _contract_by_kernel(x: jax.Array, q: LeafwiseArray, contraction: Contraction, dtype: np.dtype) -> jax.Array:
    in_core = cpu.is_available() and q._kernel_format in cpu.formats()
    stack = as_stack(q, contraction) if in_core or jax.default_backend() != "cpu" else None
    if stack is None or not stack[0]._fits_kernels():
        return contract_in_tiles(x, q, contraction, dtype)
    note_partly_manual(q)
    if mode.value.recorder is not None and in_core:
        _note_kernel(stack[0], stack[1], math.prod(x.shape[a] for a in contraction.x_free))
    out = contract_stack(x, *stack, contraction, dtype)
    return lax.reshape(out, (*out.shape[:-1], *(q.shape[a] for a in contraction.q_free)))


def _note_kernel(q: LeafwiseArray, contracted_axis: int, rows: int) -> None:
    """Tell `explain` which loop of the native core multiplies, and why it does not round activations that it may."""
    matrix = with_count(q)._stored_matrix()
    rounds = q.activation_dtype == "int8"
    note_kernel(cpu.loop_name(matrix, contracted_axis, rows, round_x=rounds))
    if rounds and (why := cpu.why_not_rounded(matrix, contracted_axis, rows)):
        note_remark(f"{type(q).__name__}{list(q.shape[-2:])} does not round {rows} rows of activations: {why}")


def as_stack(q: LeafwiseArray, contraction: Contraction) -> tuple[LeafwiseArray, int] | None:
    """`q` as one matrix or as a stack (count, rows, cols), and which of its last two axes is contracted.

    None if that would move codes.
    """
    batch, summed, free = contraction.q_batch, contraction.q_summed, contraction.q_free
    order = tuple(range(q.ndim))
    contracted_axis = 0 if batch + summed + free == order else 1
    groups = (batch, summed, free) if contracted_axis == 0 else (batch, free, summed)
    if not summed or not free or 0 in q.shape or sum(groups, ()) != order:
        return None
    if q.ndim == 2:
        return q, contracted_axis
    if any(q._alignment(axis) > 1 for axis in batch):
        return None
    shape = tuple(math.prod(q.shape[a] for a in group) for group in groups)
    q = q if q.shape == shape else reshaped(q, shape)
    return None if q is NotImplemented else (q, contracted_axis)


def with_count(q: Stack) -> Stack:
    """The matrix or stack `q` as a stack, in which no leaf is broadcast along the first axis."""
    if q.ndim == 2:
        return jax.tree.map(lambda leaf: lax.expand_dims(leaf, (0,)), q)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (q.shape[0], *leaf.shape[1:])), q)


# An eager call runs this as one program. In a program that is being traced it is inlined.
@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def contract_stack(
    x: jax.Array, q: MatmulOperand, contracted_axis: int, contraction: Contraction, dtype: np.dtype
) -> jax.Array:
    """x times q, which `as_stack` gave, by the primitive: (*batch, *free axes of x, n)."""
    x = lax.transpose(x, (*contraction.x_batch, *contraction.x_free, *contraction.x_summed))
    batch, rows = len(contraction.x_batch), len(contraction.x_free)
    free = x.shape[: batch + rows]
    x = lax.reshape(x, (math.prod(free[:batch]), *free[batch:], math.prod(x.shape[batch + rows :])))
    out = bind_matmul(x, with_count(q), contracted_axis, dtype)
    return lax.reshape(out, (*free, out.shape[-1]))
