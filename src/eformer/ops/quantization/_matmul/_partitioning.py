"""Products over a mesh of devices, taken apart as XLA takes apart a dense product.

XLA can't look into the call of a kernel: left alone, it would gather every operand on every device. So the call is
described by its axes, and this file says which part of each operand a device needs, what it computes of them, and
which devices add up what they have. What a device computes is for the caller to say, so that every kernel, on every
platform, is taken apart in the same way.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from ._inferred_mesh import infer_mesh, mesh_axes, shard_starts

SUMMED = "k"  # the axis that is summed over; all other names are up to the caller


class Dim(NamedTuple):
    """A dimension of an operand: the axis of the product it runs along, and how much of it an entry stands for."""

    axis: str | None  # None for a length of 1 that is broadcast
    grain: int = 1


Dims: TypeAlias = tuple[Dim, ...]
Parts = Mapping[str, tuple[str, ...]]  # of an axis: the axes of the mesh that divide it, the outermost first


class Problem(NamedTuple):
    """The product of `x` with what the leaves, the codes first, say: static and hashable."""

    x: Dims
    leaves: tuple[Dims, ...]
    out: Dims
    sizes: tuple[tuple[str, int], ...]  # the length of each axis

    @property
    def rows(self) -> set[str]:
        """The axes that only `x` and the result have."""
        return {dim.axis for dim in self.x if dim.axis} - {dim.axis for dim in self.leaves[0]}


# What a device computes: of its parts of x and of the leaves, and of how many elements an entry of each leaf stands
# for now along each of its dimensions.
Local = Callable[[jax.Array, Sequence[jax.Array], tuple[tuple[int, ...], ...]], jax.Array]


def partitioned(
    problem: Problem,
    local: Local,
    identity: str,
    x: jax.Array,
    leaves: Sequence[jax.Array],
    *,
    devices: Sequence[Any],
) -> jax.Array:
    """`local` of the parts of `x` and `leaves` that each device needs, put together again.

    `identity` says what `local` computes. XLA's cache of compiled programs sees the operands of the call and not what
    it stands for: a number made of it goes along as one.
    """
    grains = tuple(tuple(dim.grain for dim in dims) for dims in problem.leaves)

    def whole(mark: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
        del mark
        return local(x, leaves, grains)

    def partition(_: Any, operands: Sequence[Any], result: Any) -> Any:
        _, x, codes, *_ = operands
        starts = [shard_starts(each, devices) for each in (x, codes, result)]
        mesh = infer_mesh(devices, starts)
        dims = (problem.x, problem.leaves[0], problem.out)
        given, stored, wanted = (_parts_of(*each, mesh) for each in zip(dims, starts, strict=True))
        parts = _divide(problem, mesh.shape, x=given, codes=stored, out=wanted)
        scattered = _scattered(problem, mesh.shape, parts, wanted)
        place = lambda dims, parts: NamedSharding(mesh, _spec(problem, mesh.shape, dims, parts))  # noqa: E731
        out = {axis: (*names, *scattered.get(axis, ())) for axis, names in parts.items()}
        places = tuple(place(dims, parts) for dims in all_dims)

        def compute(x: jax.Array, *leaves: jax.Array) -> jax.Array:
            pairs = zip(problem.leaves, leaves, strict=True)
            cut = [_cut(problem, mesh.shape, dims, leaf, parts) for dims, leaf in pairs]
            product = local(x, [leaf for leaf, _ in cut], tuple(grains for _, grains in cut))
            summed = set(parts[SUMMED])
            for position, dim in enumerate(problem.out):
                if dim.axis in scattered:
                    names = scattered[dim.axis]
                    product = lax.psum_scatter(product, names, scatter_dimension=position, tiled=True)
                    summed -= set(names)
            return lax.psum(product, tuple(sorted(summed))) if summed else product

        def on_device(mark: jax.Array, *operands: jax.Array) -> jax.Array:
            del mark
            return on_device_p.bind(*operands, function=compute, mesh=tuple(mesh.shape.items()))

        return mesh, on_device, place(problem.out, out), places

    mark = np.full((1,), zlib.crc32(f"{problem} {identity}".encode()), np.uint32)
    all_dims = ((Dim(None),), problem.x, *problem.leaves)
    call = custom_partitioning(whole)
    call.def_partition(partition, sharding_rule=_rule(problem, all_dims), decode_shardings=False)
    return call(jnp.asarray(mark), x, *leaves)


# What a device does, as an operation of its own: JAX lowers it inside XLA's compiler, in whatever mesh the caller set.
# If the axes of that are explicit, JAX 0.12 writes types of theirs into the program, which XLA then can't read.
on_device_p = Primitive("on_device")


@on_device_p.def_abstract_eval
def _(x: Any, *leaves: Any, function: Any, mesh: Any) -> Any:
    with use_abstract_mesh(_automatic(mesh)):
        out = jax.eval_shape(function, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (x, *leaves)))
    return x.update(shape=out.shape, dtype=out.dtype)


def _lower_on_device(ctx: Any, *operands: Any, function: Any, mesh: Any) -> Any:
    with use_abstract_mesh(_automatic(mesh)):
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _automatic(mesh: tuple[tuple[str, int], ...]) -> AbstractMesh:
    names, sizes = zip(*mesh, strict=True)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


mlir.register_lowering(on_device_p, _lower_on_device)


def _rule(problem: Problem, all_dims: Sequence[Dims]) -> SdyShardingRule:
    """How Shardy carries a layout from one operand to another: along the axes of x, the codes and the result.

    Scales take the layout of the codes and have no say, for their entries may stand for more than a device has.
    """
    codes = {dim.axis: dim.grain for dim in problem.leaves[0] if dim.axis}
    sizes = dict(problem.sizes)
    # Packed codes make of an axis two: that of the codes, and what one of them holds.
    packed = {axis for axis, grain in codes.items() if grain > 1 and sizes[axis] % grain == 0}
    names, factor_sizes = iter(range(10_000)), {}

    def factor(dim: Dim, follows: bool) -> Any:
        if not follows or dim.axis is None or sizes[dim.axis] % dim.grain:
            return f"alone{next(names)}"
        if dim.axis not in packed or dim.grain == codes[dim.axis]:
            return dim.axis if dim.axis not in packed else f"{dim.axis}_codes"
        factor_sizes[f"{dim.axis}_inner"] = codes[dim.axis]
        return CompoundFactor(f"{dim.axis}_codes", f"{dim.axis}_inner")

    operands = tuple(ArrayMapping(*(factor(dim, i < 3) for dim in dims)) for i, dims in enumerate(all_dims))
    result = ArrayMapping(*(factor(dim, True) for dim in problem.out))
    used = {name for mapping in operands for each in mapping for name in (each if isinstance(each, tuple) else (each,))}
    reduced = tuple(sorted(name for name in used if name in (SUMMED, f"{SUMMED}_codes", f"{SUMMED}_inner")))
    return SdyShardingRule(operands, (result,), reduction_factors=reduced, **factor_sizes)


def _parts_of(dims: Dims, starts: np.ndarray, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    found = zip(dims, mesh_axes(starts, mesh.devices.shape), strict=True)
    return {dim.axis: tuple(mesh.axis_names[a] for a in axes) for dim, axes in found if dim.axis is not None}


def _divide(
    problem: Problem, mesh: Mapping[str, int], x: Parts, codes: Parts, out: Parts
) -> dict[str, tuple[str, ...]]:
    """Which axes of the mesh divide each axis of the product.

    The codes stay where they are. Only where the mesh divides the rows of x and of the result by an axis, and the codes
    too, are they gathered along it, as a dense weight is that is stored in parts for its size alone.
    """

    def axis_of(parts: Parts, name: str) -> str | None:
        return next((axis for axis, names in parts.items() if name in names), None)

    def chosen(name: str) -> str | None:
        by_x, by_codes, by_out = (axis_of(parts, name) for parts in (x, codes, out))
        if by_x in problem.rows and (by_x == by_out or by_codes is None):
            return by_x
        if by_codes is not None:
            return by_codes
        if by_x is not None and by_x != SUMMED:
            return by_x
        return by_out

    axes = [axis for axis, _ in problem.sizes]
    found: dict[str, list[str]] = {axis: [] for axis in axes}
    in_order = [name for parts in (codes, x, out) for axis in axes for name in parts.get(axis, ())]
    for name in dict.fromkeys(in_order):
        axis = chosen(name)
        if axis is not None:
            found[axis].append(name)
    return {axis: _fitting(problem, mesh, axis, names) for axis, names in found.items()}


def _fitting(problem: Problem, mesh: Mapping[str, int], axis: str, names: list[str]) -> tuple[str, ...]:
    """As many of the names as divide the axis into parts of whole codes; rows that are left over are filled up."""
    if axis in problem.rows:
        return tuple(names)
    grain = math.lcm(
        *(dim.grain for dims in (problem.x, problem.leaves[0], problem.out) for dim in dims if dim.axis == axis)
    )
    while names and dict(problem.sizes)[axis] % (grain * math.prod(mesh[name] for name in names)):
        names = names[:-1]
    return tuple(names)


def _scattered(problem: Problem, mesh: Mapping[str, int], parts: Parts, out: Parts) -> dict[str, tuple[str, ...]]:
    """Axes of the mesh along which sums are wanted in parts: the last ones of an axis of the result."""
    found: dict[str, tuple[str, ...]] = {}
    for axis, names in out.items():
        rest = names[len(parts[axis]) :]
        last = names[: len(parts[axis])] == parts[axis] and rest and set(rest) <= set(parts[SUMMED])
        if last and dict(problem.sizes)[axis] % math.prod(mesh[name] for name in names) == 0:
            found[axis] = rest
    return found


def _spec(problem: Problem, mesh: Mapping[str, int], dims: Dims, parts: Parts) -> PartitionSpec:
    entries = [parts[dim.axis] if dim.axis and _whole_entries(problem, mesh, dim, parts) else () for dim in dims]
    return PartitionSpec(*(entry or None for entry in entries))


def _whole_entries(problem: Problem, mesh: Mapping[str, int], dim: Dim, parts: Parts) -> bool:
    """Whether a part of the axis holds whole entries of this dimension."""
    if dim.axis is None:
        return True
    return dim.grain == 1 or _length(problem, mesh, dim.axis, parts) % dim.grain == 0


def _length(problem: Problem, mesh: Mapping[str, int], axis: str, parts: Parts) -> int:
    """How many elements of an axis a device has."""
    return -(-dict(problem.sizes)[axis] // math.prod(mesh[name] for name in parts[axis]))


def _cut(
    problem: Problem, mesh: Mapping[str, int], dims: Dims, leaf: jax.Array, parts: Parts
) -> tuple[jax.Array, tuple[int, ...]]:
    """The entries that belong to a device's part, of a leaf that it has whole where a part cuts entries in two.

    An entry is repeated, so that each stands for as many elements as a part and an entry have in common.
    """
    grains = []
    for position, dim in enumerate(dims):
        if dim.axis is None or not parts[dim.axis] or _whole_entries(problem, mesh, dim, parts):
            grains.append(dim.grain)
            continue
        length = _length(problem, mesh, dim.axis, parts)
        grain = math.gcd(length, dim.grain)
        finer = jnp.repeat(leaf, dim.grain // grain, axis=position)
        start = lax.axis_index(parts[dim.axis]) * (length // grain)
        leaf = lax.dynamic_slice_in_dim(finer, start, length // grain, position)
        grains.append(grain)
    return leaf, tuple(grains)
