"""The product of a stack of dense and a stack of quantized matrices, as one operation that JAX sees.

So that its derivative runs the same kernels on the transposed matrices, `vmap` makes longer stacks, and the kernel is
chosen when it is lowered, which is when it is known where it will run, and on how many devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax import tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from eformer.jaximus import note_materialized, serving, unobserved
from eformer.kernels import pallas

from ._contraction import Contraction, product, varying_alike
from ._divisible import DivisibleArray
from ._leafwise import LeafwiseArray
from ._partition import SUMMED, Dim, Problem, partitioned
from ._placement import Placement, device_kind, lower_partitioned, placement

quantized_matmul_p = Primitive("quantized_matmul")
_PARTLY_MANUAL = "`shard_map` over some axes of the mesh leaves the others to XLA, which can't divide a kernel"


@functools.singledispatch
def multiply(q: Any, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    """What `quantized_matmul` gives, in JAX's own operations, of a float dtype of at least 32 bits or an integer one.

    Without `in_tiles` there is no loop over parts of `q`.
    """
    del x, contracted_axis, in_tiles
    raise TypeError(f"{type(q).__name__} has no product of stacks")


@multiply.register
def _(q: LeafwiseArray, x: jax.Array, contracted_axis: int, *, in_tiles: bool = True) -> jax.Array:
    contraction = Contraction((x.ndim - 1,), (contracted_axis + 1,), (0,), (0,))
    return (
        product(x, q, contraction, in_tiles=in_tiles)
        if in_tiles
        else product(x, q, contraction, in_tiles=False, why=_PARTLY_MANUAL)
    )


def quantized_matmul(x: jax.Array, q: DivisibleArray, contracted_axis: int, dtype: Any) -> jax.Array:
    """`x @ q`, or `x @ q.mT` for `contracted_axis=1`, as `dtype` (count, ..., n): of x (count, ..., k) and q of 3 axes.

    Every leaf of `q` has the stack's axis first. Sums are float32; what devices add up among them is of `dtype`.
    """
    if _partly_manual(jax.sharding.get_abstract_mesh()):
        note_materialized(q, _PARTLY_MANUAL)
    leaves, treedef = jtu.tree_flatten(q)
    x, *leaves = varying_alike([x, *leaves])
    dtype = jnp.dtype(dtype)
    return quantized_matmul_p.bind(x, *leaves, treedef=treedef, contracted_axis=contracted_axis, dtype=dtype)


def _partly_manual(mesh: Any) -> bool:
    """Whether this is inside a `shard_map` over some axes of the mesh only: `Placement.UNKNOWN`, when it is lowered."""
    manual = set(mesh.manual_axes)
    return bool(manual) and any(size > 1 and name not in manual for name, size in mesh.shape.items())


def _in_jax(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> jax.Array:
    return multiply(jtu.tree_unflatten(treedef, leaves), x, contracted_axis).astype(dtype)


def _for_xla_to_divide(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves).divisible()
    return multiply(q, x, contracted_axis, in_tiles=False).astype(dtype)  # a loop over tiles would gather them


def _on_cpu(x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves)
    return _by_kernel(q.product_on_cpu, q, x, contracted_axis, dtype)


def _on_accelerator(
    x: jax.Array, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any, device: pallas.Device
) -> jax.Array:
    q = jtu.tree_unflatten(treedef, leaves)
    with unobserved():  # where no kernel is better, XLA fuses the decoding into its own product
        return _by_kernel(functools.partial(q.product_on_accelerator, device), q, x, contracted_axis, dtype)


def _by_kernel(
    kernel: Callable[..., jax.Array | None], q: DivisibleArray, x: jax.Array, contracted_axis: int, dtype: Any
) -> jax.Array:
    """What the kernel gives for x of 3 axes, or XLA's own operations where it gives None."""
    rows = x.shape[1:-1]
    out = kernel(lax.reshape(x, (x.shape[0], math.prod(rows), x.shape[-1])), contracted_axis)
    if out is None:
        return multiply(q, x, contracted_axis).astype(dtype)
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
        return quantized_matmul(x, part, contracted_axis, dtype)

    identity = f"quantized_matmul {jtu.tree_structure(q)} {contracted_axis} {dtype}"
    return partitioned(problem, local, identity, x, [q.named_leaves()[name] for name in dims], devices=devices)


def lowering(on_device: Callable[..., jax.Array]) -> Callable[..., Any]:
    """How a platform lowers the product: `on_device` where one device, or each of several, is on its own.

    Where XLA divides the work, each device calls it on its parts. XLA's own operations are used where a call of the
    kernel can't be: in a program written to a file, and under `shard_map` over some axes of a mesh only.
    """

    functions = {Placement.ALONE: on_device, Placement.UNKNOWN: _for_xla_to_divide, Placement.EXPORT: _in_jax}

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        where = placement(ctx)
        kind, _ = params["treedef"].node_data()
        with serving(quantized_matmul_p, (kind,), f"{__name__}.quantized_matmul"):
            return _lowered(where, ctx, *operands, **params)

    def _lowered(where: Placement, ctx: Any, *operands: Any, **params: Any) -> Any:
        if where is Placement.DEVICES:
            return lower_partitioned(ctx, functools.partial(_over_devices, **params), *operands)
        return mlir.lower_fun(functions[where], multiple_results=False)(ctx, *operands, **params)

    return lower


def _lower_on_accelerator(platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    on_device = functools.partial(_on_accelerator, device=pallas.Device(platform, device_kind(ctx)))
    return lowering(on_device)(ctx, *operands, **params)


@functools.partial(jax.jit, static_argnames=("treedef", "contracted_axis", "dtype"))
def _compiled(*operands: Any, **params: Any) -> jax.Array:
    return quantized_matmul_p.bind(*operands, **params)


def _run(*operands: Any, **params: Any) -> jax.Array:
    with jax.disable_jit(False):  # one operation has to be compiled to run at all
        return _compiled(*operands, **params)


def _abstract_eval(x: Any, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> Any:
    shape = jtu.tree_unflatten(treedef, leaves).shape
    return x.update(shape=(*x.shape[:-1], shape[2 - contracted_axis]), dtype=dtype, weak_type=False)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, *leaves), (dx, *dleaves) = primals, tangents
    parts = []
    if not isinstance(dx, ad.Zero):
        parts.append(quantized_matmul_p.bind(dx, *leaves, **params))
    if not all(isinstance(d, ad.Zero) for d in dleaves):  # scales are numbers too
        of_leaves = functools.partial(_in_jax, x, **params)
        parts.append(jax.jvp(of_leaves, leaves, [ad.instantiate_zeros(d) for d in dleaves])[1])
    return quantized_matmul_p.bind(*primals, **params), sum(parts[1:], parts[0])  # one at least: else JAX does not ask


def _transpose(ct: Any, x: Any, *leaves: Any, treedef: Any, contracted_axis: int, dtype: Any) -> Any:
    del dtype
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *[None] * len(leaves)]
    params = {"treedef": treedef, "contracted_axis": 1 - contracted_axis, "dtype": x.aval.dtype}
    return [quantized_matmul_p.bind(ct, *leaves, **params), *[None] * len(leaves)]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    size = next(o.shape[a] for o, a in zip(operands, axes, strict=True) if a is not None)
    (x, *leaves), (x_axis, *leaf_axes) = operands, axes
    if all(axis is None for axis in leaf_axes):  # more rows of x
        return quantized_matmul_p.bind(jnp.moveaxis(x, x_axis, 1), *leaves, **params), 1

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
mlir.register_lowering(quantized_matmul_p, lowering(_in_jax))
mlir.register_lowering(quantized_matmul_p, lowering(_on_cpu), platform="cpu")
for _platform in pallas.PLATFORMS:
    mlir.register_lowering(quantized_matmul_p, functools.partial(_lower_on_accelerator, _platform), platform=_platform)
