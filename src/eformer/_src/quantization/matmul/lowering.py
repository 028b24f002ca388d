"""Which kernel runs the matmul: chosen by the platform, and by who partitions the matmul over devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax import tree_util as jtu
from jax.interpreters import mlir

from eformer._src.jaximus.instrumentation import serving, unobserved
from eformer._src.kernels import cpu, pallas
from eformer._src.quantization.base import MatmulOperand

from .partitioning import SUMMED, Dim, Problem, partitioned
from .primitive import Static, bind_matmul, matmul_in_xla, matmul_p


def _devices(ctx: mlir.LoweringRuleContext) -> tuple[object, ...]:
    """As many devices as the program runs on; which ones does not matter to XLA. Empty if they are not known."""
    module = ctx.module_context
    context: Any = module.axis_context
    known = context.device_assignment
    if known is None:
        backend = module.get_backend(optional=True)
        known = () if backend is None else tuple(backend.devices())[: context.num_devices]
    return known if len(known) == context.num_devices else ()


def _device_kind(ctx: mlir.LoweringRuleContext) -> str | None:
    """The `device_kind` of the devices that the program is for; None if it is not known."""
    module, context = ctx.module_context, ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    devices = getattr(context, "device_assignment", None)
    devices = list(mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else devices or ())
    if not devices and module.backend is not None:
        devices = module.backend.devices()
    return devices[0].device_kind if devices else None


@functools.singledispatch
def matmul_on_cpu(q: MatmulOperand, x: jax.Array, contracted_axis: int) -> jax.Array | None:
    """x (count, rows, k) times q by the native core, in float32; None where it can't. A format may register its own."""
    call = _core_call(q, contracted_axis)
    if call is None:
        return None
    return cpu.matmul(x, call.matrix, contracted_axis, round_x=call.round_x, round_values=call.round_values)


def _core_call(q: MatmulOperand, contracted_axis: int) -> cpu.Matmul | None:
    if not q._fits_kernels() or not cpu.supports(matrix := q._stored_matrix()):
        return None
    stacks = (None,) * (len(matrix.codes) + len(matrix.scales))
    return cpu.Matmul(matrix, contracted_axis, q.activation_dtype == "int8", q.dtype == jnp.bfloat16, stacks)


_BY_DEFAULT = matmul_on_cpu.dispatch(object)


def in_core(q: MatmulOperand, contracted_axis: int) -> cpu.Matmul | None:
    """How the native core multiplies by q, in a call that several matrices share; None where it can't."""
    is_own = matmul_on_cpu.dispatch(type(q)) is not _BY_DEFAULT
    return None if is_own else _core_call(q, contracted_axis)


def matmul_on_accelerator(
    q: MatmulOperand, x: jax.Array, contracted_axis: int, device: pallas.Device
) -> jax.Array | None:
    """x (count, rows, k) times q by a Pallas kernel, in float32; None where it can't, or where XLA is faster."""
    if not q._fits_kernels():
        return None
    return pallas.matmul(x, q._stored_matrix(), contracted_axis, device, round_x=q.activation_dtype == "int8")


def _run_kernel(kernel: Callable[..., jax.Array | None], x: jax.Array, *leaves: jax.Array, static: Static) -> jax.Array:
    """The matmul by `kernel`, or in XLA's operations where that gives None."""
    q = static.array(leaves)
    out = kernel(q, lax.reshape(x, (x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])), static.contracted_axis)
    if out is None:
        return _in_xla(x, *leaves, static=static)
    return lax.convert_element_type(lax.reshape(out, (*x.shape[:-1], out.shape[-1])), static.dtype)


def _in_xla(x: jax.Array, *leaves: jax.Array, static: Static, in_tiles: bool = True) -> jax.Array:
    """The matmul in XLA's operations. Without `in_tiles` XLA can partition it; it would gather the tiles of a loop."""
    q = static.array(leaves) if in_tiles else static.array(leaves)._divisible()
    with serving(matmul_p, (type(q),), __name__):
        return matmul_in_xla(q, x, static.contracted_axis, in_tiles=in_tiles).astype(static.dtype)


def _over_devices(x: jax.Array, *leaves: jax.Array, static: Static, devices: Sequence[object]) -> jax.Array:
    """The matmul in which each device multiplies its shards, by the kernel that it would use alone."""
    q = static.array(leaves)._divisible()
    contracted_axis, dtype = static.contracted_axis, static.dtype
    axes = ("count", SUMMED, "n") if contracted_axis == 0 else ("count", "n", SUMMED)
    rows = tuple(Dim(f"row{i}") for i in range(x.ndim - 2))
    dims = {
        name: tuple(Dim(axes[axis] if grain else None, grain) for axis, grain in grains)
        for name, grains in q._leaf_axes().items()
    }
    sizes = {**dict(zip(axes, q.shape, strict=True)), **{f"row{i}": n for i, n in enumerate(x.shape[1:-1])}}
    problem = Problem(
        x=(Dim("count"), *rows, Dim(SUMMED)),
        leaves=tuple(dims.values()),
        out=(Dim("count"), *rows, Dim("n")),
        sizes=tuple(sizes.items()),
    )

    def local(x: jax.Array, leaves: Sequence[jax.Array], grains: Sequence[tuple[int, ...]]) -> jax.Array:
        part = q._of_parts(dict(zip(dims, leaves, strict=True)), dict(zip(dims, grains, strict=True)))
        return bind_matmul(x, part, contracted_axis, dtype)

    identity = f"quantized_matmul {jtu.tree_structure(q)} {contracted_axis} {dtype}"
    return partitioned(problem, local, identity, x, [q._named_leaves()[name] for name in dims], devices=devices)


def runs_alone(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a kernel may be called as it is: the program is for one device, or `shard_map` has partitioned it."""
    context: Any = ctx.module_context.axis_context  # of one of three classes that JAX does not name publicly
    if ctx.module_context.lowering_parameters.for_export:  # whoever runs the program may partition it
        return False
    if (manual := getattr(context, "manual_axes", None)) is not None:
        return {name for name, size in context.mesh.shape.items() if size > 1} <= set(manual)
    return (getattr(context, "num_devices", 1) or 1) == 1


def _lower(alone: Callable[..., jax.Array], ctx: mlir.LoweringRuleContext, *operands: Any, static: Static) -> Any:
    """Lower the matmul to `alone` on one device, and on the shards of every device where XLA partitions it.

    XLA's own operations stand in where a kernel can't be called: in an exported program, and under `shard_map` over
    some axes of a mesh only.
    """
    module = ctx.module_context
    context: Any = module.axis_context
    function = functools.partial(_in_xla, in_tiles=False)  # for XLA to partition
    if runs_alone(ctx):
        function = alone
    elif module.lowering_parameters.for_export:
        function = _in_xla
    elif getattr(context, "manual_axes", None) is None and (devices := _devices(ctx)):
        function = functools.partial(_over_devices, devices=devices)
        context = dataclasses.replace(context, device_assignment=devices)
        ctx = ctx.replace(module_context=module.replace(axis_context=context))
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands, static=static)


def _lower_on_accelerator(platform: str, ctx: mlir.LoweringRuleContext, *operands: Any, static: Static) -> Any:
    kernel = functools.partial(matmul_on_accelerator, device=pallas.Device(platform, _device_kind(ctx)))

    def alone(*operands: jax.Array, static: Static) -> jax.Array:
        with unobserved():  # where there is no kernel, XLA fuses the decoding into its own matmul
            return _run_kernel(kernel, *operands, static=static)

    return _lower(alone, ctx, *operands, static=static)


mlir.register_lowering(matmul_p, functools.partial(_lower, _in_xla))
mlir.register_lowering(
    matmul_p, functools.partial(_lower, functools.partial(_run_kernel, matmul_on_cpu)), platform="cpu"
)
for _platform in pallas.PLATFORMS:
    mlir.register_lowering(matmul_p, functools.partial(_lower_on_accelerator, _platform), platform=_platform)
