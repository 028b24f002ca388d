"""Which kernel runs the matmul: chosen per platform, and by who partitions the work over devices."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import tree_util as jtu
from jax.interpreters import mlir

from eformer.jaximus import serving, unobserved
from eformer.kernels import pallas

from ._operand import MatmulOperand
from ._partitioning import SUMMED, Dim, Problem, partitioned
from ._primitive import in_xla, matmul, matmul_in_xla, matmul_p


class Partitioner(enum.Enum):
    """Who partitions the operation that is being lowered."""

    NOBODY = enum.auto()  # there is one device, or `shard_map` has given each its shard
    XLA = enum.auto()  # over several devices that are known
    UNKNOWN = enum.auto()  # XLA, over devices that are not known, or over the axes that a `shard_map` leaves to it
    READER = enum.auto()  # whoever runs the exported program


def partitioner(ctx: Any) -> Partitioner:
    """Of the context that a lowering rule gets."""
    module = ctx.module_context
    if module.lowering_parameters.for_export:
        return Partitioner.READER
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None:
        rest = {name for name, size in context.mesh.shape.items() if size > 1} - set(manual)
        return Partitioner.UNKNOWN if rest else Partitioner.NOBODY
    if (getattr(context, "num_devices", 1) or 1) == 1:
        return Partitioner.NOBODY
    return Partitioner.XLA if _devices(ctx) else Partitioner.UNKNOWN


def _devices(ctx: Any) -> tuple[Any, ...] | None:
    """As many devices as the program runs on. XLA counts them and does not care which they are."""
    module = ctx.module_context
    known = module.axis_context.device_assignment
    if known is None:
        backend = module.get_backend(optional=True)
        known = () if backend is None else tuple(backend.devices())[: module.axis_context.num_devices]
    return known if len(known) == module.axis_context.num_devices else None


def _device_kind(ctx: Any) -> str | None:
    """What the devices are called that the program is for; None if that can't be told."""
    module = ctx.module_context
    mesh = getattr(module.axis_context, "mesh", None)
    devices = list(getattr(module.axis_context, "device_assignment", None) or ())
    if isinstance(mesh, jax.sharding.Mesh):
        devices = list(mesh.devices.flat)
    if not devices and module.backend is not None:
        devices = module.backend.devices()
    return devices[0].device_kind if devices else None


def _lower_partitioned(ctx: Any, function: Callable[..., jax.Array], *operands: Any) -> Any:
    """Lower a function that calls `partitioned`, with `devices` for it."""
    devices = _devices(ctx)
    context = dataclasses.replace(ctx.module_context.axis_context, device_assignment=devices)
    ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
    return mlir.lower_fun(functools.partial(function, devices=devices), multiple_results=False)(ctx, *operands)


def _for_xla_to_divide(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves).divisible()
    return matmul_in_xla(q, x, contracted_axis, in_tiles=False).astype(dtype)  # a loop over tiles would gather them


def _on_cpu(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves)
    return _by_kernel(q.matmul_on_cpu, q, x, contracted_axis, dtype)


def _on_accelerator(
    x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any, device: pallas.Device
) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves)
    with unobserved():  # where no kernel is better, XLA fuses the decoding into its own matmul
        return _by_kernel(functools.partial(q.matmul_on_accelerator, device), q, x, contracted_axis, dtype)


def _by_kernel(
    kernel: Callable[..., jax.Array | None], q: MatmulOperand, x: jax.Array, contracted_axis: int, dtype: Any
) -> jax.Array:
    """What the kernel gives for x of 3 axes, or XLA's own operations where it gives None."""
    rows = x.shape[1:-1]
    out = kernel(lax.reshape(x, (x.shape[0], math.prod(rows), x.shape[-1])), contracted_axis)
    if out is None:
        return matmul_in_xla(q, x, contracted_axis).astype(dtype)
    return lax.convert_element_type(lax.reshape(out, (x.shape[0], *rows, out.shape[-1])), dtype)


def _over_devices(
    x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any, devices: Sequence[Any]
) -> jax.Array:
    """Each device multiplies its parts, by the kernel that it would use alone."""
    q = jtu.tree_unflatten(treedef, leaves).divisible()
    axes = ("count", SUMMED, "n") if contracted_axis == 0 else ("count", "n", SUMMED)
    rows = tuple(Dim(f"row{i}") for i in range(x.ndim - 2))
    dims = {
        name: tuple(Dim(axes[axis] if grain else None, grain) for axis, grain in grains)
        for name, grains in q.leaf_axes().items()
    }
    sizes = {**dict(zip(axes, q.shape, strict=True)), **{f"row{i}": n for i, n in enumerate(x.shape[1:-1])}}
    problem = Problem(
        x=(Dim("count"), *rows, Dim(SUMMED)),
        leaves=tuple(dims.values()),
        out=(Dim("count"), *rows, Dim("n")),
        sizes=tuple(sizes.items()),
    )

    def local(x: jax.Array, leaves: Sequence[jax.Array], grains: Sequence[tuple[int, ...]]) -> jax.Array:
        part = q.of_parts(dict(zip(dims, leaves, strict=True)), dict(zip(dims, grains, strict=True)))
        return matmul(x, part, contracted_axis, dtype)

    identity = f"quantized_matmul {jtu.tree_structure(q)} {contracted_axis} {dtype}"
    return partitioned(problem, local, identity, x, [q.named_leaves()[name] for name in dims], devices=devices)


def _lowering(on_device: Callable[..., jax.Array]) -> Callable[..., Any]:
    """How a platform lowers the matmul: `on_device` where one device, or each of several, is on its own.

    Where XLA divides the work, each device calls it on its parts. XLA's own operations are used where a call of the
    kernel can't be: in a program written to a file, and under `shard_map` over some axes of a mesh only.
    """

    functions = {Partitioner.NOBODY: on_device, Partitioner.UNKNOWN: _for_xla_to_divide, Partitioner.READER: in_xla}

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        where = partitioner(ctx)
        kind, _ = params["treedef"].node_data()
        with serving(matmul_p, (kind,), f"{__name__}.matmul"):
            return _lowered(where, ctx, *operands, **params)

    def _lowered(where: Partitioner, ctx: Any, *operands: Any, **params: Any) -> Any:
        if where is Partitioner.XLA:
            return _lower_partitioned(ctx, functools.partial(_over_devices, **params), *operands)
        return mlir.lower_fun(functions[where], multiple_results=False)(ctx, *operands, **params)

    return lower


def _lower_on_accelerator(platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    on_device = functools.partial(_on_accelerator, device=pallas.Device(platform, _device_kind(ctx)))
    return _lowering(on_device)(ctx, *operands, **params)


mlir.register_lowering(matmul_p, _lowering(in_xla))
mlir.register_lowering(matmul_p, _lowering(_on_cpu), platform="cpu")
for _platform in pallas.PLATFORMS:
    mlir.register_lowering(matmul_p, functools.partial(_lower_on_accelerator, _platform), platform=_platform)
