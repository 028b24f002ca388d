"""The product of a stack of dense and a stack of quantized matrices, as one operation that JAX sees.

So that its derivative runs the same kernels on the transposed matrices, `vmap` makes longer stacks, and the kernel is
chosen when it is lowered, which is when it is known where it will run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from eformer.kernels import cpu, pallas

from ._contraction import Contraction, product
from ._leafwise import LeafwiseArray

quantized_matmul_p = Primitive("quantized_matmul")


def quantized_matmul(x: jax.Array, q: LeafwiseArray, contracted_axis: int) -> jax.Array:
    """`x @ q`, or `x @ q.mT` for `contracted_axis=1`: float32 (count, m, n), of x (count, m, k) and q of 3 axes.

    Every leaf of `q` has the stack's axis first.
    """
    leaves, treedef = jtu.tree_flatten(q)
    return quantized_matmul_p.bind(x, *leaves, treedef=treedef, contracted_axis=contracted_axis)


def _in_jax(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves)
    return product(x, q, Contraction((2,), (contracted_axis + 1,), (0,), (0,)))


def _on_cpu(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves)
    return cpu.matmul(x, q.stored_matrix(), contracted_axis, round_x=q.activation_dtype == "int8")


def _on_accelerator(x: jax.Array, *leaves: Any, device: pallas.Device, treedef: Any, contracted_axis: int) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves)
    out = pallas.matmul(x, q.stored_matrix(), contracted_axis, device, round_x=q.activation_dtype == "int8")
    return _in_jax(x, *leaves, treedef=treedef, contracted_axis=contracted_axis) if out is None else out


def _lower(kernel: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    """The kernel, unless XLA would have to take its call apart, for several devices, or to write it to a file."""
    module = ctx.module_context
    devices = getattr(module.axis_context, "num_devices", 1) or 1
    manual = getattr(module.axis_context, "manual_axes", frozenset())
    partitioned = devices > 1 and not manual
    native = not partitioned and not module.lowering_parameters.for_export
    return mlir.lower_fun(kernel if native else _in_jax, multiple_results=False)(ctx, *operands, **params)


def _lower_on_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lower(_on_cpu if cpu.is_available() else _in_jax, ctx, *operands, **params)


def _lower_on_accelerator(platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    device = pallas.Device(platform, device_kind(ctx))
    return _lower(functools.partial(_on_accelerator, device=device), ctx, *operands, **params)


def device_kind(ctx: Any) -> str | None:
    """What the devices are that a program is lowered for; None if that is not said."""
    axes = ctx.module_context.axis_context
    devices = getattr(axes, "device_assignment", None) or ()
    mesh = getattr(axes, "mesh", None)
    if not devices and isinstance(mesh, jax.sharding.Mesh):
        devices = mesh.devices.flat
    return next((device.device_kind for device in devices), None)


@functools.partial(jax.jit, static_argnames=("treedef", "contracted_axis"))
def _run(*operands: Any, **params: Any) -> jax.Array:
    return quantized_matmul_p.bind(*operands, **params)


def _abstract_eval(x: Any, *leaves: Any, treedef: Any, contracted_axis: int) -> Any:
    shape = jtu.tree_unflatten(treedef, leaves).shape
    return ShapedArray((x.shape[0], x.shape[1], shape[2 - contracted_axis]), jnp.dtype(jnp.float32))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, *leaves), (dx, *dleaves) = primals, tangents
    parts = []
    if not isinstance(dx, ad.Zero):
        parts.append(quantized_matmul_p.bind(dx, *leaves, **params))
    if not all(isinstance(d, ad.Zero) for d in dleaves):  # scales are numbers too
        of_leaves = functools.partial(_in_jax, x, **params)
        parts.append(jax.jvp(of_leaves, leaves, [ad.instantiate_zeros(d) for d in dleaves])[1])
    return quantized_matmul_p.bind(*primals, **params), sum(parts[1:], parts[0])  # one at least: else JAX does not ask


def _transpose(ct: Any, x: Any, *leaves: Any, treedef: Any, contracted_axis: int) -> Any:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *[None] * len(leaves)]
    ct_x = quantized_matmul_p.bind(ct, *leaves, treedef=treedef, contracted_axis=1 - contracted_axis)
    return [ct_x.astype(x.aval.dtype), *[None] * len(leaves)]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    size = next(o.shape[a] for o, a in zip(operands, axes, strict=True) if a is not None)
    (x, *leaves), (x_axis, *leaf_axes) = operands, axes
    if all(axis is None for axis in leaf_axes):  # more rows of x
        x = jnp.moveaxis(x, x_axis, 1)
        count, _, rows, depth = x.shape
        out = quantized_matmul_p.bind(x.reshape(count, size * rows, depth), *leaves, **params)
        return out.reshape(count, size, rows, out.shape[2]), 1

    def stack(operand: Any, axis: Any) -> Any:
        whole = jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        return whole.reshape(size * whole.shape[1], *whole.shape[2:])

    out = quantized_matmul_p.bind(*map(stack, operands, axes), **params)
    return out.reshape(size, out.shape[0] // size, *out.shape[1:]), 0


quantized_matmul_p.def_impl(_run)
quantized_matmul_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose
batching.primitive_batchers[quantized_matmul_p] = _batch
mlir.register_lowering(quantized_matmul_p, mlir.lower_fun(_in_jax, multiple_results=False))
mlir.register_lowering(quantized_matmul_p, _lower_on_cpu, platform="cpu")
for _platform in pallas.PLATFORMS:
    mlir.register_lowering(quantized_matmul_p, functools.partial(_lower_on_accelerator, _platform), platform=_platform)
