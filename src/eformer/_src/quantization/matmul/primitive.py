"""The primitive `quantized_matmul`: x (count, ..., k) times a stack q of quantized matrices, as one operation.

As a primitive it has a derivative that runs the same kernels on the transposed matrices, `vmap` makes longer stacks,
and `lowering` chooses the kernel once the devices are known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from eformer._src.jaximus.instrumentation import note_materialized
from eformer._src.quantization.base import MatmulOperand
from eformer._src.quantization.sharding import varying_alike

# What `lax.dot_general` makes of its argument `precision`.
Precision: TypeAlias = tuple[lax.Precision, lax.Precision] | lax.DotAlgorithm | lax.DotAlgorithmPreset | None
Operand: TypeAlias = jax.Array | ad.Zero

PARTLY_MANUAL = "`shard_map` over some axes of the mesh leaves the others to XLA, which can't divide a kernel"


class Static(NamedTuple):
    """The parameter of matmul primitives, whose last operands are the leaves of the quantized array."""

    treedef: Any  # `jax.tree_util.PyTreeDef`, which is not typed as a class
    contracted_axis: int  # 0 for `x @ q`, 1 for `x @ q.mT`
    dtype: np.dtype
    precision: Precision = None

    def array(self, operands: Sequence[object]) -> Any:
        return jtu.tree_unflatten(self.treedef, operands[len(operands) - self.treedef.num_leaves :])

    def without_rounding(self, operands: Sequence[object]) -> Static:
        """For derivatives: these are of the exact matmul, and tangents and gradients are not rounded to 8 bits."""
        q = self.array(operands)
        return (
            self
            if q.activation_dtype is None
            else self._replace(treedef=jtu.tree_structure(q.with_activation_dtype(None)))
        )


@functools.singledispatch
def matmul_in_xla(q: MatmulOperand, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    """What `bind_matmul` computes, in XLA's own operations, in a dtype of at least 32 bits.

    A format registers its own. Without `in_tiles` it may not loop over parts of `q`.
    """
    del x, contracted_axis, in_tiles
    raise TypeError(f"{type(q).__name__} has no matmul in XLA's operations")


def bind_matmul(x: jax.Array, q: MatmulOperand, contracted_axis: int, dtype: np.dtype) -> jax.Array:
    """x (count, ..., k) @ q (count, k, n), or @ q.mT of q (count, n, k) for `contracted_axis=1`: (count, ..., n).

    Every leaf of `q` has the axis `count`. Kernels sum in float32; devices add up partial sums of `dtype`.
    """
    leaves, treedef = jtu.tree_flatten(q)
    return matmul_p.bind(*varying_alike([x, *leaves]), static=Static(treedef, contracted_axis, dtype))


def note_partly_manual(q: MatmulOperand) -> None:
    """Note the dense copy of `q` that is made inside a `shard_map` over some axes of the mesh only."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and any(size > 1 and name not in mesh.manual_axes for name, size in mesh.shape.items()):
        note_materialized(q, PARTLY_MANUAL)


def matmul_primitive(name: str, in_xla: Callable[..., jax.Array], batch_rest: Callable[..., jax.Array]) -> Primitive:
    """A primitive `(x, *rest, static=Static(...))` with a derivative; `in_xla` computes it in XLA's own operations.

    `batch_rest(operands, axes, static)` maps it over axes of other operands than `x`, and puts the new axis first.
    """
    primitive = Primitive(name)
    compiled: Any = jax.jit(primitive.bind, static_argnames="static")

    def run(*operands: jax.Array, static: Static) -> jax.Array:
        with jax.disable_jit(False):  # a primitive has to be compiled to run at all
            return compiled(*operands, static=static)

    def abstract_eval(x: ShapedArray, *rest: ShapedArray, static: Static) -> ShapedArray:
        columns = static.array(rest).shape[2 - static.contracted_axis]
        return x.update(shape=(*x.shape[:-1], columns), dtype=static.dtype, weak_type=False)

    def jvp(primals: Sequence[jax.Array], tangents: Sequence[Operand], static: Static) -> tuple[jax.Array, jax.Array]:
        (x, *rest), (dx, *drest) = primals, tangents
        terms = [] if isinstance(dx, ad.Zero) else [primitive.bind(dx, *rest, static=static.without_rounding(rest))]
        if not all(isinstance(d, ad.Zero) for d in drest):  # scales have derivatives too
            of_rest = functools.partial(in_xla, x, static=static)
            terms.append(jax.jvp(of_rest, rest, [ad.instantiate_zeros(d) for d in drest])[1])
        return primitive.bind(*primals, static=static), functools.reduce(lax.add, terms)  # JAX asks for one at least

    def transpose(ct: Operand, x: ad.UndefinedPrimal, *rest: jax.Array, static: Static) -> list[Operand | None]:
        static = static._replace(contracted_axis=1 - static.contracted_axis, dtype=x.aval.dtype)
        dx = ad.Zero(x.aval) if isinstance(ct, ad.Zero) else primitive.bind(ct, *rest, static=static)
        return [dx, *[None] * len(rest)]

    def batch(operands: Sequence[jax.Array], axes: Sequence[int | None], static: Static) -> tuple[jax.Array, int]:
        (x, *rest), (x_axis, *rest_axes) = operands, axes
        if x_axis is None or any(axis is not None for axis in rest_axes):
            return batch_rest(operands, axes, static), 0
        return primitive.bind(jnp.moveaxis(x, x_axis, 1), *rest, static=static), 1  # x gets more rows

    primitive.def_impl(run)
    primitive.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    return primitive


def in_xla(x: jax.Array, *leaves: jax.Array, static: Static) -> jax.Array:
    return matmul_in_xla(static.array(leaves), x, static.contracted_axis).astype(static.dtype)


def _in_longer_stack(operands: Sequence[jax.Array], axes: Sequence[int | None], static: Static) -> jax.Array:
    size = next(o.shape[a] for o, a in zip(operands, axes, strict=True) if a is not None)

    def stack(operand: jax.Array, axis: int | None) -> jax.Array:
        whole = jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    out = matmul_p.bind(*map(stack, operands, axes), static=static)
    return out.reshape(size, out.shape[0] // size, *out.shape[1:])


matmul_p = matmul_primitive("quantized_matmul", in_xla, _in_longer_stack)
