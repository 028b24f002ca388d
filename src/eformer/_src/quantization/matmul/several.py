"""The primitive `quantized_matmuls`: matmuls of the same x, each with a matrix of its own, as one operation.

Matrices may be entries of longer stacks, chosen by an index: the layers of a `scan`. On CPU it is one call of the
native core, which gets x ready once, wakes the threads once and reads the entry in its stack. Elsewhere it is
`quantized_matmul`, once for each matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from eformer._src.kernels import cpu

from .lowering import in_core, runs_alone
from .primitive import Operand, Static, matmul_p

Flags: TypeAlias = tuple[bool, ...]


class MatmulParams(NamedTuple):
    """The parameters of one of the matmuls, whose operands are the leaves of its quantized array."""

    static: Static
    is_stack: Flags  # of each leaf: whether it is a stack (n * count, ...), where the matmul takes (count, ...)


def is_indexed(each: Sequence[MatmulParams]) -> bool:
    """Whether there is an index among the operands (x, index, *leaves)."""
    return any(any(one.is_stack) for one in each)


def leaves_of(operands: Sequence[Any], each: Sequence[MatmulParams]) -> list[Sequence[Any]]:
    """The leaves of each quantized array."""
    at, found = 1 + is_indexed(each), []
    for one in each:
        found.append(operands[at : at + len(one.is_stack)])
        at += len(one.is_stack)
    return found


def _slices(leaves: Sequence[jax.Array], one: MatmulParams, index: jax.Array, count: int) -> list[jax.Array]:
    """The leaves that the matmul takes: of stacks the entries that belong to `index`."""
    return [
        lax.dynamic_slice_in_dim(leaf, index * count, count, 0) if is_stack else leaf
        for leaf, is_stack in zip(leaves, one.is_stack, strict=True)
    ]


def one_by_one(*operands: jax.Array, each: tuple[MatmulParams, ...]) -> list[jax.Array]:
    """The same as single matmuls of slices."""
    x, index = operands[:2]
    return [
        matmul_p.bind(x, *_slices(leaves, one, index, x.shape[0]), static=one.static)
        for leaves, one in zip(leaves_of(operands, each), each, strict=True)
    ]


def _together(*operands: jax.Array, each: tuple[MatmulParams, ...]) -> list[jax.Array]:
    """One call of the core for the matrices that it can read; the others one by one."""
    x = operands[0]
    index = operands[1] if is_indexed(each) else jnp.int32(0)
    rows = lax.reshape(x, (x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]))
    found: list[jax.Array | None] = []
    calls = []
    for leaves, one in zip(leaves_of(operands, each), each, strict=True):
        slices = _slices(leaves, one, index, x.shape[0])
        call = in_core(one.static.array(slices), one.static.contracted_axis)
        found.append(matmul_p.bind(x, *slices, static=one.static) if call is None else None)
        if call is not None:
            # A buffer that is a slice, and nothing computed from it, is read in its stack.
            stack_of = {id(s): leaf for s, leaf, is_stack in zip(slices, leaves, one.is_stack, strict=True) if is_stack}
            buffers = (*call.matrix.codes, *call.matrix.scales)
            calls.append(call._replace(stacks=tuple(stack_of.get(id(buffer)) for buffer in buffers)))
    outs = iter(cpu.matmuls(rows, calls, index) if calls else ())

    def shaped(out: jax.Array, one: MatmulParams) -> jax.Array:
        return lax.convert_element_type(lax.reshape(out, (*x.shape[:-1], out.shape[-1])), one.static.dtype)

    return [shaped(next(outs), one) if out is None else out for out, one in zip(found, each, strict=True)]


def _abstract_eval(*operands: ShapedArray, each: tuple[MatmulParams, ...]) -> list[ShapedArray]:
    x = operands[0]

    def of(leaves: Sequence[ShapedArray], one: MatmulParams) -> ShapedArray:
        slices = [
            leaf.update(shape=(x.shape[0], *leaf.shape[1:])) if is_stack else leaf
            for leaf, is_stack in zip(leaves, one.is_stack, strict=True)
        ]
        columns = one.static.array(slices).shape[2 - one.static.contracted_axis]
        return x.update(shape=(*x.shape[:-1], columns), dtype=one.static.dtype, weak_type=False)

    return [of(leaves, one) for leaves, one in zip(leaves_of(operands, each), each, strict=True)]


def _run(*operands: jax.Array, each: tuple[MatmulParams, ...]) -> list[jax.Array]:
    with jax.disable_jit(False):  # a primitive has to be compiled to run at all
        return _compiled(*operands, each=each)


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Operand], each: tuple[MatmulParams, ...]) -> Any:
    varied = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_varied(*values: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, value in zip(varied, values, strict=True):
            operands[i] = value
        return one_by_one(*operands, each=each)

    return jax.jvp(of_varied, [primals[i] for i in varied], [tangents[i] for i in varied])


def _batch(operands: Sequence[jax.Array], axes: Sequence[int | None], each: tuple[MatmulParams, ...]) -> Any:
    return jax.vmap(functools.partial(one_by_one, each=each), tuple(axes))(*operands), [0] * len(each)


def _lower_on_cpu(ctx: mlir.LoweringRuleContext, *operands: Any, each: tuple[MatmulParams, ...]) -> Any:
    function = _together if runs_alone(ctx) else one_by_one
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands, each=each)


matmuls_p = Primitive("quantized_matmuls")
matmuls_p.multiple_results = True
_compiled: Any = jax.jit(matmuls_p.bind, static_argnames="each")
matmuls_p.def_impl(_run)
matmuls_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[matmuls_p] = _jvp
batching.primitive_batchers[matmuls_p] = _batch
mlir.register_lowering(matmuls_p, mlir.lower_fun(one_by_one, multiple_results=True))
mlir.register_lowering(matmuls_p, _lower_on_cpu, platform="cpu")
