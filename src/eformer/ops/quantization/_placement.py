"""Where an operation that is being lowered will run, and who divides its work."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import mlir


class Placement(enum.Enum):
    """Who divides the work of the operation that is being lowered."""

    ALONE = enum.auto()  # nobody: there is one device, or `shard_map` has given each its part
    DEVICES = enum.auto()  # XLA, over several devices
    UNKNOWN = enum.auto()  # XLA, over devices that can't be told, or over some axes of a `shard_map`
    EXPORT = enum.auto()  # whoever reads the file that the program is written to


def placement(ctx: Any) -> Placement:
    """Of the context that a lowering rule gets."""
    module = ctx.module_context
    if module.lowering_parameters.for_export:
        return Placement.EXPORT
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None:
        rest = {name for name, size in context.mesh.shape.items() if size > 1} - set(manual)
        return Placement.UNKNOWN if rest else Placement.ALONE
    if (getattr(context, "num_devices", 1) or 1) == 1:
        return Placement.ALONE
    return Placement.DEVICES if _devices(ctx) else Placement.UNKNOWN


def _devices(ctx: Any) -> tuple[Any, ...] | None:
    """As many devices as the program runs on. XLA counts them and does not care which they are."""
    module = ctx.module_context
    known = module.axis_context.device_assignment
    if known is None:
        backend = module.get_backend(optional=True)
        known = () if backend is None else tuple(backend.devices())[: module.axis_context.num_devices]
    return known if len(known) == module.axis_context.num_devices else None


def device_kind(ctx: Any) -> str | None:
    """What the devices are called that the program is for; None if that can't be told."""
    module = ctx.module_context
    mesh = getattr(module.axis_context, "mesh", None)
    devices = list(getattr(module.axis_context, "device_assignment", None) or ())
    if isinstance(mesh, jax.sharding.Mesh):
        devices = list(mesh.devices.flat)
    if not devices and module.backend is not None:
        devices = module.backend.devices()
    return devices[0].device_kind if devices else None


def lower_partitioned(ctx: Any, function: Callable[..., jax.Array], *operands: Any) -> Any:
    """Lower a function that calls `partitioned`, with `devices` for it."""
    devices = _devices(ctx)
    context = dataclasses.replace(ctx.module_context.axis_context, device_assignment=devices)
    ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
    return mlir.lower_fun(functools.partial(function, devices=devices), multiple_results=False)(ctx, *operands)
