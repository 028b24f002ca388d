"""Shardings of quantized arrays: reading them, checking them, and giving them to leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from eformer._src.jaximus.instrumentation import unobserved

if TYPE_CHECKING:
    from .base import QuantizedArray

ShardingType = NamedSharding | PartitionSpec | None
Entry = Any  # of a PartitionSpec, which JAX does not type: None, a name, several names, or UNCONSTRAINED
Made = TypeVar("Made", bound="QuantizedArray")


def is_explicit(sharding: ShardingType) -> bool:
    """Whether the sharding is part of the array's type, as on meshes with explicit axes."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def shards(mesh: Mesh | AbstractMesh, entry: Entry) -> int:
    """Into how many parts an entry of a spec divides its axis."""
    return int(np.prod([mesh.shape[name] for name in _names(entry)], dtype=int))


def _names(entry: Entry) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def sharding_of(leaf: object) -> NamedSharding | None:
    """A leaf's `NamedSharding`; None if it has none, or if JAX decides it at compile time."""
    aval_sharding = getattr(jax.typeof(leaf), "sharding", None) if isinstance(leaf, jax.Array) else None
    found = aval_sharding if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(found, NamedSharding) or found.mesh.empty:
        return None
    return None if isinstance(leaf, Tracer) and not is_explicit(found) else found


def named_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> NamedSharding:
    unknown = [name for entry in spec for name in _names(entry) if name not in mesh.axis_names]
    if unknown:
        raise ValueError(f"{spec} names the axis {unknown[0]!r}, but the mesh has {tuple(mesh.axis_names)}")
    return NamedSharding(mesh, spec)


def checked_sharding(sharding: ShardingType, shape: tuple[int, ...], traced: bool = False) -> NamedSharding:
    """`sharding` with a mesh and one entry per axis of an array of that `shape`."""
    if isinstance(sharding, PartitionSpec):
        mesh = jax.sharding.get_abstract_mesh() if traced else jax.sharding.get_mesh()
        mesh = _entered_mesh() if mesh.empty else mesh
        if mesh is None:
            raise ValueError(f"{sharding} needs a mesh: give a NamedSharding, or call inside `jax.set_mesh(mesh)`")
        sharding = named_sharding(mesh, sharding)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"a sharding must be a NamedSharding, a PartitionSpec or None, got {type(sharding).__name__} {sharding!r}"
        )
    if len(sharding.spec) > len(shape):
        raise ValueError(f"{sharding.spec} has {len(sharding.spec)} entries for an array of {len(shape)} axes {shape}")
    spec = PartitionSpec(*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    for axis, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        if size % shards(sharding.mesh, entry):
            raise ValueError(
                f"axis {axis} of length {size} can't be split over {entry!r}, {shards(sharding.mesh, entry)} devices"
            )
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _entered_mesh() -> Mesh | None:
    """The mesh of the deprecated `with mesh:`, which JAX tells only by using it; None outside of one."""
    try:
        jaxpr = jax.make_jaxpr(lambda x: lax.with_sharding_constraint(x, PartitionSpec()))(0.0)
    except RuntimeError:
        return None
    return jaxpr.eqns[0].params["sharding"].mesh


def place(leaf: Any, sharding: NamedSharding) -> Any:
    """The leaf, an array or the struct of one, laid out by `sharding`."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=sharding)
    if not isinstance(leaf, Tracer):
        return jax.device_put(leaf, sharding)
    if is_explicit(sharding):
        return jax.sharding.reshard(leaf, sharding)
    return lax.with_sharding_constraint(leaf, sharding)


def laid_out(make: Callable[[jax.Array], Made], array: jax.Array) -> Made:
    """`make(array)` with its leaves laid out over devices as the array is."""
    sharding = sharding_of(array)
    if not is_explicit(sharding):
        return make(array).with_sharding(sharding)
    # Where shardings are part of types, JAX would ask each step of `make` for one; only the leaves' matter.
    leaves = jax.eval_shape(make, jax.ShapeDtypeStruct(array.shape, array.dtype))._leaf_shardings(
        checked_sharding(sharding, array.shape, traced=isinstance(array, Tracer))
    )
    typed: Any = jax.sharding.auto_axes(make, out_sharding=leaves)
    return typed(array)


def typed_as(dense: Callable[..., jax.Array], function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` with its result typed as that of `dense`, on meshes where shardings are part of types."""

    def call(*operands: Any) -> jax.Array:
        with unobserved():  # nothing is made dense to know its type
            sharding = jax.eval_shape(dense, *operands).sharding  # raises as dense JAX does, if that is not clear
        typed: Any = jax.sharding.auto_axes(function, out_sharding=sharding)
        return typed(*operands)

    return call


def asked_of(params: Mapping[str, object]) -> set[str]:
    """The parameters of a primitive that ask for something: neither None nor a layout over axes that are XLA's."""
    silent = {name for name, value in params.items() if isinstance(value, NamedSharding) and not is_explicit(value)}
    return {name for name, value in params.items() if value is not None} - silent


def varying_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, in `shard_map` all typed as varying along every mesh axis along which one of them varies."""
    varying = [jax.typeof(operand).mat.varying for operand in operands]
    every = frozenset().union(*varying)
    pairs = zip(operands, varying, strict=True)
    return [lax.pcast(operand, tuple(sorted(every - own)), to="varying") for operand, own in pairs]


def bind_alike(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """`primitive.bind` of leaves and of what a rule was given: of an array's leaves, some vary and some may not."""
    return primitive.bind(*varying_alike(operands), **params)
