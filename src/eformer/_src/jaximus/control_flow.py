"""Control flow: a jaxpr inside a primitive is run again on implicit arrays, so weights stay implicit through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import Any

import jax
from jax import lax
from jax import tree_util as jtu
from jax.core import ShapedArray
from jax.extend import core as jexc
from jax.extend.core import Primitive

from .array import Deferred, ImplicitArray, is_implicit, materialize
from .instrumentation import because, mode, repeated
from .rules import Operand, on_register, register
from .trace import UNSPECIFIED, apply, closed, constants_as_arguments, scan_counts, weakref_lru_cache
from .types import Structure, Value

Jaxpr = jexc.Jaxpr | jexc.ClosedJaxpr


def _run(jaxpr: Jaxpr, operands: Sequence[Operand]) -> list[Value]:
    return apply(jexc.jaxpr_as_fun(closed(jaxpr)), *operands)


def _flatten(operands: Sequence[Operand]) -> tuple[list[Value], Structure]:
    return jtu.tree_flatten(tuple(o._deferred() if is_implicit(o) else o for o in operands))


def _trace(
    jaxpr: Jaxpr, leaves: Sequence[Value], treedef: Structure, dense_outs: tuple[bool, ...]
) -> tuple[jexc.ClosedJaxpr, Structure]:
    """The jaxpr of the operands' leaves, and the structure of its outputs; `dense_outs` marks dense outputs."""
    avals = tuple(map(jax.typeof, leaves))
    # While `explain` listens each call is traced anew, to be counted.
    trace = _cached_trace if mode.value.recorder is None else _trace_leaves
    return trace(jaxpr, treedef, avals, dense_outs, mode.value, jax.sharding.get_abstract_mesh())


def _trace_leaves(
    jaxpr: Jaxpr, treedef: Structure, avals: tuple[ShapedArray, ...], dense_outs: tuple[bool, ...], *context: object
) -> tuple[jexc.ClosedJaxpr, Structure]:
    del context  # keys of the cache: the trace depends on them

    def flat(*leaves: Value) -> list[Value]:
        operands = jtu.tree_unflatten(treedef, leaves)
        outs = _run(jaxpr, [o.make(o.array) if isinstance(o, Deferred) else o for o in operands])
        with because("the caller asks for a layout of this output, which only a dense array has"):
            return [materialize(o) if dense else o for o, dense in zip(outs, dense_outs, strict=True)]

    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*avals)
    return traced, jtu.tree_structure(shapes)


_cached_trace = weakref_lru_cache(_trace_leaves)
on_register.append(_cached_trace.cache_clear)


# The parameters of `jit` that have an entry per array, and the entry that leaves it to JAX.
_UNSET = {"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False}
_UNSET |= {"out_shardings": UNSPECIFIED, "out_layouts": None}


@functools.lru_cache(maxsize=4096)
def _per_leaf(values: tuple[object, ...], treedef: Structure, unset: object) -> tuple[object, ...]:
    """A parameter with an entry per array, as one with an entry per leaf: leaves of implicit arrays get `unset`."""
    leaves: list[object] = []
    for value, array in zip(values, treedef.children(), strict=True):
        leaves += [value] if jtu.treedef_is_leaf(array) else [unset] * array.num_leaves
    return tuple(leaves)


@register("jit")
def jit_rule(primitive: Primitive, *operands: Operand, jaxpr: jexc.ClosedJaxpr, **params: Any) -> list[Value]:
    # An output whose sharding or layout the caller asked for must be an array to have it.
    asked = zip(params["out_shardings"], params["out_layouts"], strict=True)
    leaves, treedef = _flatten(operands)
    traced, out_tree = _trace(jaxpr, leaves, treedef, tuple(s is not UNSPECIFIED or la is not None for s, la in asked))
    for name, unset in _UNSET.items():
        params[name] = _per_leaf(params[name], out_tree if name.startswith("out_") else treedef, unset)
    return jtu.tree_unflatten(out_tree, primitive.bind(*leaves, jaxpr=traced, **params))


@register("remat2")
def remat_rule(primitive: Primitive, *operands: Operand, jaxpr: Jaxpr, **params: object) -> list[Value]:
    leaves, treedef = _flatten(operands)
    traced, out_tree = _trace(jaxpr, leaves, treedef, (False,) * len(closed(jaxpr).out_avals))
    opened, consts = constants_as_arguments(traced)
    return jtu.tree_unflatten(out_tree, primitive.bind(*consts, *leaves, jaxpr=opened, **params))


def _same_type(x: Value, y: Value) -> bool:
    return jtu.tree_structure(x) == jtu.tree_structure(y) and all(
        _leaf_type(a) == _leaf_type(b) for a, b in zip(jtu.tree_leaves(x), jtu.tree_leaves(y), strict=True)
    )


def _leaf_type(leaf: Value) -> tuple[object, ...]:
    """Its shape, its dtype, and the axes of a mesh along which it varies in `shard_map`."""
    return leaf.shape, leaf.dtype, jax.typeof(leaf).mat.varying


def _stable_carry(carry: list[Value], step: Callable[[list[Value]], list[Value]]) -> list[Value]:
    """`carry`, where arrays that `step` does not return in the same form are materialized."""
    while any(map(is_implicit, carry)):
        with repeated(0):
            after = jax.eval_shape(step, carry)
        changed = [is_implicit(c) and not _same_type(c, a) for c, a in zip(carry, after, strict=True)]
        if not any(changed):
            break
        with because("a step returns this carried array in another form than it gets it"):
            carry = [materialize(c) if changes else c for c, changes in zip(carry, changed, strict=True)]
    return carry


def _like(carry: Sequence[Value], outs: Sequence[Value]) -> list[Value]:
    with because("a dense array is carried into a step, so the step must return a dense one"):
        return [o if is_implicit(c) else materialize(o) for c, o in zip(carry, outs, strict=True)]


def _stacks(array: ImplicitArray, length: int) -> bool:
    """Whether stacking every leaf of `length` arrays like this one stacks the arrays."""
    stack = jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct((length, *leaf.shape), leaf.dtype), array)
    return stack.is_stacked()


@register("scan")
def scan_rule(primitive: Primitive, *operands: Operand, jaxpr: Jaxpr, length: int, **params: Any) -> list[Value]:
    del primitive
    num_consts, num_carry = scan_counts(params)
    consts = operands[:num_consts]
    carry = list(operands[num_consts : num_consts + num_carry])
    with because("slicing its leaves along their first axis does not slice the array"):
        xs = [x if not is_implicit(x) or x.is_stacked() else materialize(x) for x in operands[num_consts + num_carry :]]

    def step(carry: list[Value], xs: list[Value]) -> list[Value]:
        return _run(jaxpr, [*consts, *carry, *xs])

    if any(map(is_implicit, carry)):
        first = [jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x) for x in xs]
        carry = _stable_carry(carry, lambda carry: jax.eval_shape(step, carry, first)[:num_carry])

    def body(carry: list[Value], xs: list[Value]) -> tuple[list[Value], list[Value]]:
        outs = step(carry, xs)
        with because("the outputs of the steps are stacked, and stacking its leaves does not stack the array"):
            ys = [y if not is_implicit(y) or _stacks(y, length) else materialize(y) for y in outs[num_carry:]]
        return _like(carry, outs[:num_carry]), ys

    with repeated(length):
        carry, ys = lax.scan(body, carry, xs, length=length, **params)
    return [*carry, *ys]


@register("while")
def while_rule(
    primitive: Primitive,
    *operands: Operand,
    cond_nconsts: int,
    cond_jaxpr: jexc.ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: jexc.ClosedJaxpr,
    **params: object,
) -> list[Value]:
    del primitive, params
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
    carry = list(operands[cond_nconsts + body_nconsts :])
    carry = _stable_carry(carry, lambda carry: _run(body_jaxpr, [*body_consts, *carry]))
    return lax.while_loop(
        lambda carry: materialize(_run(cond_jaxpr, [*cond_consts, *carry])[0]),
        lambda carry: _like(carry, _run(body_jaxpr, [*body_consts, *carry])),
        carry,
    )


@register("cond")
def cond_rule(
    primitive: Primitive, index: Operand, *operands: Operand, branches: Sequence[jexc.ClosedJaxpr], **params: object
) -> list[Value]:
    del primitive, params
    with repeated(0):
        outs = [jax.eval_shape(functools.partial(_run, jaxpr), list(operands)) for jaxpr in branches]
    keep = [all(is_implicit(o) and _same_type(o, same[0]) for o in same) for same in zip(*outs, strict=True)]

    def branch(jaxpr: jexc.ClosedJaxpr, operands: list[Value]) -> list[Value]:
        outs = _run(jaxpr, operands)
        with because("the branches return it in different forms"):
            return [o if k else materialize(o) for k, o in zip(keep, outs, strict=True)]

    return lax.switch(materialize(index), [functools.partial(branch, j) for j in branches], list(operands))


@register("custom_vmap_call")
def custom_vmap_rule(
    primitive: Primitive, *operands: Operand, call: jexc.ClosedJaxpr, **params: object
) -> list[Value] | NotImplementedType:
    """The function itself; declined under a `vmap` around `implicit`, which has to find the function's own rule."""
    del primitive, params
    mapped = any(hasattr(leaf, "batch_dim") for leaf in jtu.tree_leaves(list(operands)))
    return NotImplemented if mapped else _run(call, operands)


@register("custom_linear_solve")
def linear_solve_rule(
    primitive: Primitive, *operands: Operand, const_lengths: Any, jaxprs: Any, **params: object
) -> list[Value]:
    """The same solver, whose functions close over the leaves of implicit arrays."""
    sizes = [*const_lengths]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    consts = [operands[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    flat = [_flatten(each) for each in consts]

    def on_leaves(jaxpr: jexc.ClosedJaxpr | None, leaves: Sequence[Value], treedef: Structure) -> Any:
        if jaxpr is None:
            return None

        def run(*values: Value) -> list[Value]:
            own = jtu.tree_unflatten(treedef, values[: len(leaves)])
            own = [o.make(o.array) if isinstance(o, Deferred) else o for o in own]
            return materialize(_run(jaxpr, [*own, *values[len(leaves) :]]))

        rest = jaxpr.in_avals[len(treedef.children()) :]
        return jax.make_jaxpr(run)(*map(jax.typeof, leaves), *rest)

    made = type(jaxprs)(*(on_leaves(jaxpr, *each) for jaxpr, each in zip(jaxprs, flat, strict=True)))
    lengths = type(const_lengths)(*(len(leaves) for leaves, _ in flat))
    rest = materialize(list(operands[sum(sizes) :]))
    leaves = [leaf for each, _ in flat for leaf in each]
    return primitive.bind(*leaves, *rest, const_lengths=lengths, jaxprs=made, **params)
