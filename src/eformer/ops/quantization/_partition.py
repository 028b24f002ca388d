"""Products over a mesh of devices, taken apart as XLA takes apart a dense product.

XLA can't look into the call of a kernel: left alone, it would gather every operand on every device. So the call is
described by its axes, and this file says which part of each operand a device needs, what it computes of them, and
which devices add up what they have. What a device computes is for the caller to say, so that every kernel, on every
platform, is taken apart in the same way.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec



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


def _devices(ctx: Any) -> tuple[jax.Device, ...] | None:
    """As many devices as the program runs on. XLA counts them and does not care which they are."""
    module = ctx.module_context
    known = module.axis_context.device_assignment
    if known is None:
        backend = module.get_backend(optional=True)
        known = () if backend is None else tuple(backend.devices())[: module.axis_context.num_devices]
    return known if len(known) == module.axis_context.num_devices else None


def lower_partitioned(ctx: Any, function: Callable[..., jax.Array], *operands: Any) -> Any:
    """Lower a function that calls `partitioned`, with `devices` for it."""
    devices = _devices(ctx)
    context = dataclasses.replace(ctx.module_context.axis_context, device_assignment=devices)
    ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
    return mlir.lower_fun(functools.partial(function, devices=devices), multiple_results=False)(ctx, *operands)


SUMMED = "k"  # the axis that is summed over; all other names are up to the caller


class Dim(NamedTuple):
    """A dimension of an operand: the axis of the product it runs along, and how much of it an entry stands for."""

    axis: str | None  # None for a length of 1 that is broadcast
    grain: int = 1


Dims = tuple[Dim, ...]
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
    devices: Sequence[jax.Device],
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
        starts = [_starts(each, devices) for each in (x, codes, result)]
        mesh = _mesh(devices, starts)
        dims = (problem.x, problem.leaves[0], problem.out)
        given, stored, wanted = (_parts_of(*each, mesh) for each in zip(dims, starts, strict=True))
        parts = _divide(problem, mesh.shape, x=given, codes=stored, out=wanted)
        scattered = _scattered(problem, mesh.shape, parts, wanted)
        place = lambda dims, parts: NamedSharding(mesh, _spec(problem, mesh.shape, dims, parts))  # noqa: E731
        out = {axis: (*names, *scattered.get(axis, ())) for axis, names in parts.items()}
        places = tuple(place(dims, parts) for dims in all_dims)

        def on_device(mark: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
            del mark
            cut = [_cut(problem, mesh.shape, dims, leaf, parts) for dims, leaf in zip(problem.leaves, leaves, strict=True)]
            product = local(x, [leaf for leaf, _ in cut], tuple(grains for _, grains in cut))
            pieces = [(scattered[dim.axis], i) for i, dim in enumerate(problem.out) if dim.axis in scattered]
            whole = tuple(name for name in parts[SUMMED] if all(name not in names for names, _ in pieces))
            if not parts[SUMMED]:
                return product
            return summed_p.bind(product, whole=whole, pieces=tuple(pieces), mesh=tuple(mesh.shape.items()))

        return mesh, on_device, place(problem.out, out), places

    mark = np.full((1,), zlib.crc32(f"{problem} {identity}".encode()), np.uint32)
    all_dims = ((Dim(None),), problem.x, *problem.leaves)
    call = custom_partitioning(whole)
    call.def_partition(partition, sharding_rule=_rule(problem, all_dims), decode_shardings=False)
    return call(jnp.asarray(mark), x, *leaves)


# What devices add up, as an operation of its own: JAX lowers this inside XLA's compiler, in whatever mesh the caller
# set. If its axes are explicit, JAX 0.12 writes their types into the addition, which XLA then can't read.
summed_p = Primitive("summed_over_mesh")


def _summed(x: jax.Array, *, whole: Any, pieces: Any, mesh: Any) -> jax.Array:
    del mesh
    for names, position in pieces:
        x = lax.psum_scatter(x, names, scatter_dimension=position, tiled=True)
    return lax.psum(x, whole) if whole else x


@summed_p.def_abstract_eval
def _(x: Any, *, whole: Any, pieces: Any, mesh: Any) -> Any:
    del whole
    shape = list(x.shape)
    for names, position in pieces:
        shape[position] //= math.prod(dict(mesh)[name] for name in names)
    return x.update(shape=tuple(shape))


def _lower_summed(ctx: Any, x: Any, *, mesh: Any, **params: Any) -> Any:
    names, sizes = zip(*mesh, strict=True)
    with jax.sharding.use_abstract_mesh(AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))):
        return mlir.lower_fun(_summed, multiple_results=False)(ctx, x, mesh=mesh, **params)


mlir.register_lowering(summed_p, _lower_summed)


def _rule(problem: Problem, all_dims: Sequence[Dims]) -> SdyShardingRule:
    """How Shardy carries a layout from one operand to another: along the axes of x, the codes and the result.

    Scales take the layout that the codes have. They have no say, for their entries may stand for more than a device has.
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


def _mesh(devices: Sequence[jax.Device], starts: Sequence[np.ndarray]) -> Mesh:
    """A mesh over all devices with an axis for each prime factor of their number, in an order that names most parts.

    XLA knows devices by their number, and no mesh. What any mesh divides, and parts of its axes, this one can name.
    """

    def named(sizes: tuple[int, ...]) -> int:
        return sum(len(axes) for each in starts for axes in _axes(each, sizes))

    sizes = max(_orders(_primes(len(devices))), key=named)
    return Mesh(np.array(devices, object).reshape(sizes), tuple(f"axis{i}" for i in range(len(sizes))))


def _primes(n: int) -> list[int]:
    """The prime factors of a number, smallest first."""
    smallest = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [] if smallest is None else [smallest, *_primes(n // smallest)]


def _orders(factors: list[int]) -> list[tuple[int, ...]]:
    """All different orders; one for a power of a prime, and few for numbers that machines come in."""
    if not factors:
        return [()]
    without = {factor: [*factors[: factors.index(factor)], *factors[factors.index(factor) + 1 :]] for factor in factors}
    return [(factor, *rest) for factor, others in without.items() for rest in _orders(others)]


def _starts(operand: Any, devices: Sequence[jax.Device]) -> np.ndarray:
    """Where in each dimension the part of a device begins, for each device: of as many elements as there are devices."""
    shape = (len(devices),) * len(operand.shape)
    if operand.sharding.is_fully_replicated:
        return np.zeros((len(devices), len(shape)), int)
    indices = operand.sharding.devices_indices_map(shape)
    return np.array([[part.start or 0 for part in indices[device]] for device in devices])


def _axes(starts: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Which axes of a mesh of `sizes` divide each dimension, the outermost first; none, if these can't say it all."""
    return [_axes_of_dimension(each.reshape(sizes)) for each in starts.T]


def _axes_of_dimension(starts: np.ndarray) -> tuple[int, ...]:
    steps = [int(np.take(starts, 1, axis).flat[0]) for axis in range(starts.ndim)]
    axes = sorted((axis for axis, step in enumerate(steps) if step), key=lambda axis: -steps[axis])
    rest = starts.size
    for axis in axes:
        rest //= starts.shape[axis]
        if steps[axis] != rest:
            return ()
    expected = sum(step * np.indices(starts.shape)[axis] for axis, step in enumerate(steps))
    return tuple(axes) if np.array_equal(starts, expected) else ()


def _parts_of(dims: Dims, starts: np.ndarray, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    found = zip(dims, _axes(starts, mesh.devices.shape), strict=True)
    return {dim.axis: tuple(mesh.axis_names[a] for a in axes) for dim, axes in found if dim.axis is not None}


def _divide(problem: Problem, mesh: Mapping[str, int], x: Parts, codes: Parts, out: Parts) -> dict[str, tuple[str, ...]]:
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
    grain = math.lcm(*(dim.grain for dims in (problem.x, problem.leaves[0], problem.out) for dim in dims if dim.axis == axis))
    while names and dict(problem.sizes)[axis] % (grain * math.prod(mesh[name] for name in names)):
        names = names[:-1]
    return tuple(names)


def _scattered(problem: Problem, mesh: Mapping[str, int], parts: Parts, out: Parts) -> dict[str, tuple[str, ...]]:
    """Axes of the mesh along which sums are wanted in parts: the last ones of an axis of the result."""
    found: dict[str, tuple[str, ...]] = {}
    for axis, names in out.items():
        rest = names[len(parts[axis]) :]
        divided = math.prod(mesh[name] for name in names)
        if names[: len(parts[axis])] == parts[axis] and rest and set(rest) <= set(parts[SUMMED]):
            if dict(problem.sizes)[axis] % divided == 0:
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
