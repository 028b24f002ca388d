"""Functions with custom derivatives, of implicit arrays: the same function with the same derivative, of the leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.extend.linear_util import WrappedFun, wrap_init
from jax.interpreters import ad

from .array import ImplicitArray, is_implicit, materialize
from .trace import apply
from .types import Tree, Value

Params: TypeAlias = dict[str, Any]


def custom_jvp(
    primitive: Primitive, fun: WrappedFun, jvp: WrappedFun, operands: Sequence[Value], params: Params
) -> Value:
    if not any(map(is_implicit, operands)):
        return primitive.bind(*operands, subfuns=(_dense_inside(fun), _dense_inside(jvp)), **params)

    @jax.custom_jvp
    def call(*operands: Value) -> list[Value]:
        return materialize(apply(fun.call_wrapped, *operands))

    def call_jvp(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        dense_tangents = [_dense_tangent(p, t) for p, t in zip(primals, tangents, strict=True)]
        outs = materialize(apply(jvp.call_wrapped, *primals, *dense_tangents))
        return outs[: len(outs) // 2], outs[len(outs) // 2 :]

    call.defjvp(call_jvp, symbolic_zeros=params["symbolic_zeros"])
    return call(*operands)


def custom_vjp(
    primitive: Primitive, fun: WrappedFun, fwd: WrappedFun, bwd: WrappedFun, operands: Sequence[Value], params: Params
) -> Value:
    """Residuals stay implicit."""
    if not any(map(is_implicit, operands)):
        return primitive.bind(*operands, subfuns=(_dense_inside(fun), _dense_inside(fwd), bwd), **params)

    @jax.custom_vjp
    def call(*operands: Value) -> list[Value]:
        return materialize(list(apply(fun.call_wrapped, *operands)))

    def call_fwd(*marked: Tree) -> tuple[list[Value], Tree]:
        # `marked` leaves say whether they are differentiated; JAX's flat `fwd` takes value, flag, value, flag...
        operands = jtu.tree_map(lambda leaf: leaf.value, marked)
        flags = [any(leaf.perturbed for leaf in jtu.tree_leaves(operand)) for operand in marked]
        outs = apply(fwd.call_wrapped, *[x for pair in zip(operands, flags, strict=True) for x in pair])
        _, residual_tree, forwarded = params["out_trees"]()  # residuals that are operands are named, not returned
        returned = residual_tree.num_leaves - sum(index is not None for index in forwarded)
        own = iter(outs[:returned])
        residuals = [next(own) if index is None else operands[index] for index in forwarded]
        return materialize(list(outs[returned:])), (residuals, [o if is_implicit(o) else None for o in operands])

    def call_bwd(saved: Tree, cotangents: Sequence[Value]) -> tuple[Value, ...]:
        residuals, operands = saved
        given = cotangents if params["symbolic_zeros"] else [_instantiate(ct) for ct in cotangents]
        outs = apply(bwd.call_wrapped, *residuals, *given)
        outs = outs[0] if isinstance(outs, tuple) else outs  # JAX >= 0.12 returns logs beside the cotangents
        outs = materialize([None if isinstance(ct, ad.Zero) else ct for ct in outs])
        pairs = zip(operands, outs, strict=True)
        return tuple(ct if o is None or ct is None else _leaf_cotangents(o, ct) for o, ct in pairs)

    call.defvjp(call_fwd, call_bwd, symbolic_zeros=True)
    return call(*operands)


def _dense_inside(fun: WrappedFun) -> WrappedFun:
    """`fun`, able to close over implicit arrays."""

    def call(*values: Value) -> list[Value]:
        return materialize(apply(fun.call_wrapped, *values))

    return wrap_init(call, debug_info=fun.debug_info)


def _instantiate(x: Value) -> Value:
    aval: Value = getattr(x, "aval", None)
    return np.zeros(aval.shape, aval.dtype) if isinstance(x, SymbolicZero) else x


def _dense_tangent(primal: Value, tangent: Value) -> Value:
    """The tangent of the dense array, from the tangents of the leaves."""
    if not is_implicit(primal):
        return tangent
    if all(isinstance(leaf, SymbolicZero) for leaf in jtu.tree_leaves(tangent)):
        return SymbolicZero(primal.aval)
    _, out = jax.jvp(lambda q: q.materialize(), (primal,), (jtu.tree_map(_instantiate, tangent),))
    return out


def _leaf_cotangents(primal: ImplicitArray, cotangent: jax.Array) -> ImplicitArray:
    """The cotangents of the leaves, from that of the dense array."""
    _, pull_back = jax.vjp(lambda q: q.materialize(), primal)
    return pull_back(cotangent)[0]
