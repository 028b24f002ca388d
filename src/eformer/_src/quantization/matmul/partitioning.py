"""Matmuls partitioned over a mesh of devices as XLA partitions a dense matmul.

XLA can't look into the call of a kernel: left alone, it would gather every operand on every device. So this file says
which shard of each operand a device needs, and which devices add up their results. The caller says what each computes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from .inferred_mesh import infer_mesh, mesh_axes, shard_starts

SUMMED = "k"  # the contracted axis; the caller chooses all other names


class Dim(NamedTuple):
    """A dimension of an operand: the axis of the matmul that it follows, and the elements that one entry covers."""

    axis: str | None  # None for a length of 1 that is broadcast
    grain: int = 1


Dims: TypeAlias = tuple[Dim, ...]
Grains: TypeAlias = tuple[tuple[int, ...], ...]  # of every dimension of every leaf
MeshAxes: TypeAlias = Mapping[str, tuple[str, ...]]  # the mesh axes that divide each axis, the outermost first


class Problem(NamedTuple):
    """The matmul of `x` and a quantized array with these leaves, the codes first: static and hashable."""

    x: Dims
    leaves: tuple[Dims, ...]
    out: Dims
    sizes: tuple[tuple[str, int], ...]  # the length of each axis

    @property
    def rows(self) -> set[str]:
        """The axes that only `x` and the result have."""
        return {dim.axis for dim in self.x if dim.axis} - {dim.axis for dim in self.leaves[0]}


def partitioned(
    problem: Problem,
    local: Callable[[jax.Array, Sequence[jax.Array], Grains], jax.Array],
    identity: str,
    x: jax.Array,
    leaves: Sequence[jax.Array],
    *,
    devices: Sequence[object],
) -> jax.Array:
    """The matmul, where each device computes `local` on the shards it needs.

    `identity` says what `local` computes. XLA's cache of compiled programs sees the operands of the call and not what
    it stands for, so a hash of `identity` is one of the operands.
    """
    grains = tuple(tuple(dim.grain for dim in dims) for dims in problem.leaves)

    def whole(mark: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
        del mark
        return local(x, leaves, grains)

    def partition(_: object, operands: Sequence[Any], result: Any) -> Any:
        _, x, codes, *_ = operands
        starts = [shard_starts(each.sharding, len(each.shape), devices) for each in (x, codes, result)]
        mesh = infer_mesh(devices, starts)
        dims = (problem.x, problem.leaves[0], problem.out)
        given, stored, wanted = (_divided_by(*each, mesh) for each in zip(dims, starts, strict=True))
        plan = _Plan(problem, mesh.shape, _divide(problem, mesh.shape, x=given, codes=stored, out=wanted))
        scattered = plan.scattered(wanted)
        out_plan = _Plan(
            problem, mesh.shape, {axis: (*names, *scattered.get(axis, ())) for axis, names in plan.divided_by.items()}
        )

        def compute(x: jax.Array, *leaves: jax.Array) -> jax.Array:
            cut = [plan.cut(dims, leaf) for dims, leaf in zip(problem.leaves, leaves, strict=True)]
            out = local(x, [leaf for leaf, _ in cut], tuple(grains for _, grains in cut))
            summed = set(plan.divided_by[SUMMED])
            for position, dim in enumerate(problem.out):
                names = scattered.get(dim.axis or "", ())
                if names:
                    out = lax.psum_scatter(out, names, scatter_dimension=position, tiled=True)
                    summed -= set(names)
            return lax.psum(out, tuple(sorted(summed))) if summed else out

        def on_device(mark: jax.Array, *operands: jax.Array) -> jax.Array:
            del mark
            return on_device_p.bind(*operands, function=compute, mesh=mesh.abstract_mesh)

        shardings = tuple(NamedSharding(mesh, plan.spec(dims)) for dims in all_dims)
        return mesh, on_device, NamedSharding(mesh, out_plan.spec(problem.out)), shardings

    mark = np.full((1,), zlib.crc32(f"{problem} {identity}".encode()), np.uint32)
    all_dims = ((Dim(None),), problem.x, *problem.leaves)
    call = custom_partitioning(whole)
    call.def_partition(partition, sharding_rule=_rule(problem, all_dims), decode_shardings=False)
    return call(jnp.asarray(mark), x, *leaves)


# What a device computes is a primitive, because JAX lowers it inside XLA's compiler, in whatever mesh the caller has
# set. If the axes of that mesh are explicit, JAX 0.12 writes their types into the program, which XLA can't read then.
on_device_p = Primitive("on_device")


@on_device_p.def_abstract_eval
def _(x: ShapedArray, *leaves: ShapedArray, function: Callable[..., jax.Array], mesh: AbstractMesh) -> ShapedArray:
    with use_abstract_mesh(mesh):
        out = jax.eval_shape(function, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (x, *leaves)))
    return x.update(shape=out.shape, dtype=out.dtype)


def _lower_on_device(
    ctx: mlir.LoweringRuleContext, *operands: Any, function: Callable[..., jax.Array], mesh: AbstractMesh
) -> Any:
    with use_abstract_mesh(mesh):
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


mlir.register_lowering(on_device_p, _lower_on_device)


def _rule(problem: Problem, all_dims: Sequence[Dims]) -> SdyShardingRule:
    """How Shardy propagates shardings: along the axes of x, the codes and the result.

    Scales take the sharding of the codes and propagate none: an entry may cover more than a device's shard.
    """
    codes = {dim.axis: dim.grain for dim in problem.leaves[0] if dim.axis}
    sizes = dict(problem.sizes)
    # Codes that are packed along an axis make two factors of it: the codes, and the values in one code.
    packed = {axis for axis, grain in codes.items() if grain > 1 and sizes[axis] % grain == 0}
    numbers, factor_sizes = itertools.count(), {}

    def factor(dim: Dim, follows: bool) -> str | CompoundFactor:
        if not follows or dim.axis is None or sizes[dim.axis] % dim.grain:
            return f"alone{next(numbers)}"
        if dim.axis not in packed or dim.grain == codes[dim.axis]:
            return dim.axis if dim.axis not in packed else f"{dim.axis}_codes"
        factor_sizes[f"{dim.axis}_inner"] = codes[dim.axis]
        return CompoundFactor(f"{dim.axis}_codes", f"{dim.axis}_inner")

    operands = tuple(ArrayMapping(*(factor(dim, i < 3) for dim in dims)) for i, dims in enumerate(all_dims))
    result = ArrayMapping(*(factor(dim, True) for dim in problem.out))
    used = {name for mapping in operands for each in mapping for name in (each if isinstance(each, tuple) else (each,))}
    reduced = tuple(sorted(used & {SUMMED, f"{SUMMED}_codes", f"{SUMMED}_inner"}))
    return SdyShardingRule(operands, (result,), reduction_factors=reduced, **factor_sizes)


def _divided_by(dims: Dims, starts: np.ndarray, mesh: Mesh) -> MeshAxes:
    """The mesh axes that divide an operand with these shards."""
    found = zip(dims, mesh_axes(starts, mesh.devices.shape), strict=True)
    return {dim.axis: tuple(mesh.axis_names[a] for a in axes) for dim, axes in found if dim.axis is not None}


def _divide(problem: Problem, mesh: Mapping[str, int], x: MeshAxes, codes: MeshAxes, out: MeshAxes) -> MeshAxes:
    """The mesh axes that divide the matmul: `x` and `codes` divide its operands, and `out` should divide its result.

    The codes stay where they are. Only along a mesh axis that also divides the rows of x and of the result are they
    gathered, like a dense weight that is sharded only because it is large.
    """

    axes = [axis for axis, _ in problem.sizes]
    found: dict[str, tuple[str, ...]] = dict.fromkeys(axes, ())
    for name in dict.fromkeys(name for each in (codes, x, out) for axis in axes for name in each.get(axis, ())):
        by_x, by_codes, by_out = (
            next((axis for axis, names in each.items() if name in names), None) for each in (x, codes, out)
        )
        if by_x in problem.rows and (by_x == by_out or by_codes is None):
            axis = by_x
        elif by_codes is None:
            axis = by_out if by_x in (None, SUMMED) else by_x
        else:
            axis = by_codes
        if axis is not None:
            found[axis] += (name,)
    return {axis: _fitting(problem, mesh, axis, names) for axis, names in found.items()}


def _fitting(problem: Problem, mesh: Mapping[str, int], axis: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The first of the mesh axes, as long as they divide the axis into whole codes; XLA pads rows."""
    if axis in problem.rows:
        return names
    dims = (*problem.x, *problem.leaves[0], *problem.out)
    grain = math.lcm(*(dim.grain for dim in dims if dim.axis == axis))
    while names and dict(problem.sizes)[axis] % (grain * math.prod(mesh[name] for name in names)):
        names = names[:-1]
    return names


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which mesh axes divide each axis of the matmul."""

    problem: Problem
    mesh: Mapping[str, int]  # the length of each mesh axis
    divided_by: MeshAxes

    def scattered(self, out: MeshAxes) -> MeshAxes:
        """The mesh axes along which sums are scattered: the innermost ones that should divide an axis of the result."""
        found = {}
        for axis, names in out.items():
            own = self.divided_by[axis]
            rest = names[len(own) :]
            innermost = names[: len(own)] == own and rest and set(rest) <= set(self.divided_by[SUMMED])
            if innermost and dict(self.problem.sizes)[axis] % math.prod(self.mesh[name] for name in names) == 0:
                found[axis] = rest
        return found

    def spec(self, dims: Dims) -> PartitionSpec:
        entries = [self.divided_by[dim.axis] if dim.axis and self._holds_whole_entries(dim) else () for dim in dims]
        return PartitionSpec(*(entry or None for entry in entries))

    def cut(self, dims: Dims, leaf: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        """The entries that a device's shard needs of a leaf, and their grains.

        Where shards would cut entries, a device has the whole leaf, and repeats entries to get a grain that fits both.
        """
        grains = []
        for position, dim in enumerate(dims):
            if dim.axis is None or not self.divided_by[dim.axis] or self._holds_whole_entries(dim):
                grains.append(dim.grain)
                continue
            length = self._length(dim.axis)
            grain = math.gcd(length, dim.grain)
            finer = jnp.repeat(leaf, dim.grain // grain, axis=position)
            start = lax.axis_index(self.divided_by[dim.axis]) * (length // grain)
            leaf = lax.dynamic_slice_in_dim(finer, start, length // grain, position)
            grains.append(grain)
        return leaf, tuple(grains)

    def _holds_whole_entries(self, dim: Dim) -> bool:
        return dim.axis is None or dim.grain == 1 or self._length(dim.axis) % dim.grain == 0

    def _length(self, axis: str) -> int:
        """How many elements of an axis a device has."""
        return -(-dict(self.problem.sizes)[axis] // math.prod(self.mesh[name] for name in self.divided_by[axis]))
