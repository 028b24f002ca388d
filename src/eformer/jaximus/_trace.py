"""`implicit`: run a JAX function on implicit arrays. All that touches JAX's private tracing names is in this file.

A `Trace` sits on top of whatever JAX is doing (evaluating, tracing to a jaxpr, differentiating, batching). Its tracers
carry implicit arrays; a primitive that meets one goes to `dispatch`, and runs one level below.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import tree_util as jtu

# Stands for "no sharding asked for" in the parameters of `jit`.
from jax._src import sharding_impls

# Makes the constants of a jaxpr its first arguments: `remat` takes a jaxpr without constants.
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr

# Caches on jaxprs without keeping them, and the arrays they hold, alive.
from jax._src.util import weakref_lru_cache as weakref_lru_cache

# The two base classes of the engine; `ShapedArray` is the type of an array in JAX's eyes.
from jax.core import ShapedArray, Trace, Tracer, eval_context
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jexc
from jax.extend import linear_util as lu
from jax.interpreters import ad

from ._array import ImplicitArray, is_implicit, materialize
from ._closure import bind_implicit, implicit_array_p
from ._observe import because, in_function, mode, serving, unobserved
from ._rules import dispatch, on_register
from ._state import Loan

UNSPECIFIED: Any = sharding_impls.UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
P = ParamSpec("P")
R = TypeVar("R")


class ImplicitTracer(Tracer):
    """Holds the place of an implicit array inside `implicit`."""

    __slots__ = ("value",)

    def __init__(self, trace: ImplicitTrace, value: ImplicitArray) -> None:
        super().__init__(trace, abstract_value(value))
        self.value = value

    def materialize(self) -> jax.Array:
        with jexc.set_current_trace(self._trace.parent_trace):
            return self.value.materialize()

    # Where JAX itself is only evaluating, so may Python: `float(q[0, 0])`. JAX asks it of larger arrays too, only to
    # know whether they are traced: that must not make them dense.
    def to_concrete_value(self) -> Any:
        if self.size != 1:
            return None
        dense = self.materialize()
        return None if isinstance(dense, Tracer) else dense

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.materialize(), *args, **kwargs)

    def __float__(self) -> float:
        return float(self.materialize())

    def __complex__(self) -> complex:
        return complex(self.materialize())

    def item(self, *index: int) -> Any:
        return self.materialize().item(*index)

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def __repr__(self) -> str:
        return f"ImplicitTracer<{self.value!r}>"


class ImplicitTrace(Trace):
    def __init__(self, parent: Trace) -> None:
        super().__init__()
        self.parent_trace = parent
        self.requires_low = parent.requires_low
        # State that belongs to a level of tracing, such as a variable of NNX, can be written inside `implicit` as
        # outside: whoever asks JAX for the level gets this reference, which is the parent's.
        self._weakref = parent._weakref

    def wrap(self, x: Any) -> Any:
        if not is_implicit(x):
            return x
        x.check_leaves()
        return ImplicitTracer(self, x)

    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, ImplicitTracer) else self.parent_trace.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        return self.parent_trace.cur_qdd(x)  # pyright: ignore[reportAttributeAccessIssue]  # all but the base have it

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if primitive is implicit_array_p:
            out = jtu.tree_unflatten(params["treedef"], [unwrap(t) for t in tracers])
        elif ImplicitTracer in map(type, tracers) or _closes_over_implicit(params):
            with jexc.set_current_trace(self.parent_trace):
                out = dispatch(primitive, [unwrap(t) for t in tracers], params)
        else:  # most primitives of most functions; `bind` has checked the operands already
            return self.parent_trace.process_primitive(primitive, tracers, params)
        return [self.wrap(o) for o in out] if primitive.multiple_results else self.wrap(out)

    def process_call(self, primitive: Any, fun: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        del primitive, params  # a call is its body; only JAX < 0.11 has such primitives
        with jexc.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        operands = [unwrap(t) for t in tracers]
        with jexc.set_current_trace(self.parent_trace), _serving(primitive, operands):
            if any(map(is_implicit, operands)):
                return _custom_jvp(fun, jvp, operands, params["symbolic_zeros"])
            return primitive.bind(*operands, subfuns=(_dense_inside(fun), _dense_inside(jvp)), **params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        operands = [unwrap(t) for t in tracers]
        with jexc.set_current_trace(self.parent_trace), _serving(primitive, operands):
            if any(map(is_implicit, operands)):
                return _custom_vjp(fun, fwd, bwd, operands, params["out_trees"], params["symbolic_zeros"])
            return primitive.bind(*operands, subfuns=(_dense_inside(fun), _dense_inside(fwd), bwd), **params)

    def process_shard_map(
        self, primitive: Any, fun: Callable[..., Any], tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        operands, specs = [], []
        with jexc.set_current_trace(self.parent_trace), _serving(primitive, map(unwrap, tracers)):
            for tracer, spec in zip(tracers, params.pop("in_specs"), strict=True):
                operand = unwrap(tracer)
                if is_implicit(operand):
                    with because(f"its leaves can't be laid out as {spec} has it, a device would cut a block"):
                        operand, spec = _divided(operand, spec, params["mesh"])
                operands.append(operand)
                specs.append(spec)
            leaves, treedef = jtu.tree_flatten(operands)
            leaf_specs = jtu.tree_leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))

            def body(*leaves: Any) -> Any:
                # `fun` gives JAX's flat tree of outputs, with their specs beside them; `map` reaches the outputs.
                operands = jtu.tree_unflatten(treedef, leaves)
                with jexc.take_current_trace() as parent:
                    trace = ImplicitTrace(parent)
                    with jexc.set_current_trace(trace):
                        outs = fun(*map(trace.wrap, operands))
                    with jexc.set_current_trace(parent):
                        return outs.map(lambda out: materialize(unwrap(out)))

            params["debug_info"] = params["debug_info"].with_unknown_names()
            return primitive.bind(*leaves, subfuns=(body,), in_specs=tuple(leaf_specs), **params)


def _divided(operand: ImplicitArray, spec: Any, mesh: Any) -> tuple[Any, Any]:
    """The operand in a form whose leaves `shard_map` can divide, and their specs; dense where there is none."""
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        for form in (operand, operand.divisible()):
            leaf_specs = form.leaf_specs(spec)
            if leaf_specs is not None:
                return form, leaf_specs
    return materialize(operand), spec


def _serving(primitive: Any, operands: Iterable[Any]) -> AbstractContextManager[None]:
    """Around what this file does for a primitive: what is materialized inside is put down to it."""
    return serving(primitive, tuple(dict.fromkeys(type(o) for o in operands if is_implicit(o))), "materialize")


def unwrap(x: Any) -> Any:
    return x.value if isinstance(x, ImplicitTracer) else x


def implicit(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, taking implicit arrays wherever it takes arrays, as arguments or from its closure.

    Each primitive that meets one goes to the rule registered for it, else to the dense array; the result is what dense
    arrays would have given, and may be implicit itself where a rule says so (a transpose, say). Composes with
    every JAX transformation, inside and outside.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_implicit(function, args, kwargs)

    return wrapped


use_implicit = implicit


def call_implicit(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    with jexc.take_current_trace() as parent, in_function():
        trace = _trace_on(parent)
        loan = Loan(trace.wrap, _implicit_of)
        try:
            with jexc.set_current_trace(trace):
                # The function may itself hold arrays: a module, a method bound to one, a `Partial`.
                if isinstance(function, types.MethodType):
                    function = types.MethodType(function.__func__, loan.lend(function.__self__))
                else:
                    function = loan.lend(function)
                out = function(
                    *map(loan.lend, args), **{name: loan.lend(each) for name, each in (kwargs or {}).items()}
                )
        finally:
            with jexc.set_current_trace(parent):
                loan.give_back()
    return loan.restored(out)


def _implicit_of(x: Any) -> ImplicitArray | None:
    return x.value if type(x) is ImplicitTracer else None


@jax.jit
def _compiled_matmul(lhs: Any, rhs: Any) -> Any:
    return call_implicit(operator.matmul, (lhs, rhs))


on_register.append(lambda: _compiled_matmul.clear_cache())  # pyright: ignore[reportAttributeAccessIssue]  # untyped


def matmul(lhs: Any, rhs: Any) -> Any:
    """`lhs @ rhs` by the rules; compiled where nothing is traced, as dispatch in Python costs more than the product."""
    if _current_trace() is _trace_on_evaluation().parent_trace and mode().recorder is None:
        return _compiled_matmul(lhs, rhs)
    return call_implicit(operator.matmul, (lhs, rhs))


def _trace_on(parent: Trace) -> ImplicitTrace:
    if isinstance(parent, ImplicitTrace):
        return parent
    # JAX caches what it traces per trace object: evaluation, which never ends, always gets the same one.
    on_evaluation = _trace_on_evaluation()
    return on_evaluation if on_evaluation.parent_trace is parent else ImplicitTrace(parent)


@functools.cache
def _trace_on_evaluation() -> ImplicitTrace:
    with eval_context():
        return ImplicitTrace(_current_trace())


def _current_trace() -> Trace:
    with jexc.take_current_trace() as current:
        return current


def lift_closed_over(array: ImplicitArray) -> Callable[[], Any]:
    """For `ImplicitArray.__jax_array__`: a function giving an array that the surrounding `implicit` understands."""
    trace: Any = _current_trace()
    while trace is not None and not isinstance(trace, ImplicitTrace):
        trace = getattr(trace, "parent_trace", None)
    if trace is None:
        raise AttributeError(
            f"{type(array).__name__} is no JAX array outside `implicit`; wrap the function, `implicit(f)(...)`, or use "
            f"an operator such as `x @ q`"
        )
    return functools.partial(bind_implicit, array)


def abstract_value(array: ImplicitArray) -> Any:
    """The type JAX knows the dense array by."""
    return abstract_value_of(array, tuple(map(jax.typeof, jtu.tree_leaves(array))))


def abstract_value_of(array: ImplicitArray, avals: tuple[Any, ...]) -> Any:
    """`abstract_value` of an array whose leaves have these types."""
    if all(aval.sharding.mesh.empty for aval in avals):
        return ShapedArray(array.shape, array.dtype)
    return _sharded_abstract_value(jtu.tree_structure(array), avals, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=4096)
def _sharded_abstract_value(treedef: Any, avals: tuple[Any, ...], mesh: Any) -> Any:
    del mesh  # part of what the answer depends on
    with unobserved():
        (out,) = jax.make_jaxpr(lambda *leaves: jtu.tree_unflatten(treedef, leaves).materialize())(*avals).out_avals
    return out


_MAY_HOLD_JAXPRS = {jexc.Jaxpr, jexc.ClosedJaxpr, tuple}  # types of parameters


def _closes_over_implicit(params: dict[str, Any]) -> bool:
    """Whether a jaxpr in `params`, or one inside it, makes an implicit array from leaves it was given or holds."""
    if _MAY_HOLD_JAXPRS.isdisjoint(map(type, params.values())):
        return False
    return any(map(_makes_implicit, jexc.jaxprs_in_params(params)))


@weakref_lru_cache
def _makes_implicit(jaxpr: Any) -> bool:
    return any(eqn.primitive is implicit_array_p or _closes_over_implicit(eqn.params) for eqn in jaxpr.eqns)


def _dense_inside(fun: Any) -> Any:
    """`fun`, a function as JAX passes it to traces, able to close over implicit arrays."""

    def call(*values: Any) -> Any:
        return materialize(call_implicit(fun.call_wrapped, values))

    return lu.wrap_init(call, debug_info=fun.debug_info)


def _custom_jvp(fun: Any, jvp: Any, operands: Sequence[Any], symbolic_zeros: bool) -> Any:
    """The same function with the same derivative, of the operands' leaves."""

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return materialize(call_implicit(fun.call_wrapped, operands))

    def call_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        dense_tangents = [_dense_tangent(p, t) for p, t in zip(primals, tangents, strict=True)]
        outs = materialize(call_implicit(jvp.call_wrapped, (*primals, *dense_tangents)))
        return outs[: len(outs) // 2], outs[len(outs) // 2 :]

    call.defjvp(call_jvp, symbolic_zeros=symbolic_zeros)
    return call(*operands)


def _custom_vjp(
    fun: Any, fwd: Any, bwd: Any, operands: Sequence[Any], out_trees: Callable[[], Any], symbolic_zeros: bool
) -> Any:
    """The same function with the same derivative, of the operands' leaves. Residuals stay implicit."""

    @jax.custom_vjp
    def call(*operands: Any) -> Any:
        return materialize(list(call_implicit(fun.call_wrapped, operands)))

    def call_fwd(*marked: Any) -> Any:
        # `marked` leaves say whether they are differentiated; JAX's flat `fwd` takes value, flag, value, flag...
        operands = jtu.tree_map(lambda leaf: leaf.value, marked)
        flags = [any(leaf.perturbed for leaf in jtu.tree_leaves(operand)) for operand in marked]
        outs = call_implicit(fwd.call_wrapped, [x for pair in zip(operands, flags, strict=True) for x in pair])
        _, residual_tree, forwarded = out_trees()  # residuals that are operands are named, not returned
        returned = residual_tree.num_leaves - sum(index is not None for index in forwarded)
        own = iter(outs[:returned])
        residuals = [next(own) if index is None else operands[index] for index in forwarded]
        return materialize(list(outs[returned:])), (residuals, [o if is_implicit(o) else None for o in operands])

    def call_bwd(saved: Any, cotangents: Any) -> Any:
        residuals, operands = saved
        given = cotangents if symbolic_zeros else [_instantiate(ct) for ct in cotangents]
        outs = call_implicit(bwd.call_wrapped, (*residuals, *given))
        outs = outs[0] if isinstance(outs, tuple) else outs  # JAX >= 0.12 returns logs beside the cotangents
        outs = materialize([None if isinstance(ct, ad.Zero) else ct for ct in outs])
        pairs = zip(operands, outs, strict=True)
        return tuple(ct if o is None or ct is None else _leaf_cotangents(o, ct) for o, ct in pairs)

    call.defvjp(call_fwd, call_bwd, symbolic_zeros=True)
    return call(*operands)


def _instantiate(x: Any) -> Any:
    aval: Any = getattr(x, "aval", None)
    return np.zeros(aval.shape, aval.dtype) if isinstance(x, SymbolicZero) else x


def _dense_tangent(primal: Any, tangent: Any) -> Any:
    """The tangent of the dense array, from those of the leaves."""
    if not is_implicit(primal):
        return tangent
    if all(isinstance(leaf, SymbolicZero) for leaf in jtu.tree_leaves(tangent)):
        return SymbolicZero(abstract_value(primal))
    _, out = jax.jvp(lambda q: q.materialize(), (primal,), (jtu.tree_map(_instantiate, tangent),))
    return out


def _leaf_cotangents(primal: ImplicitArray, cotangent: Any) -> ImplicitArray:
    """The cotangents of the leaves, from that of the dense array; None for leaves that have none."""
    leaves, treedef = jtu.tree_flatten(primal)
    inexact = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) for leaf in leaves]

    def dense(variable: Sequence[Any]) -> jax.Array:
        chosen = iter(variable)
        mixed = [next(chosen) if v else leaf for v, leaf in zip(inexact, leaves, strict=True)]
        return jtu.tree_unflatten(treedef, mixed).materialize()

    _, pull_back = jax.vjp(dense, [leaf for v, leaf in zip(inexact, leaves, strict=True) if v])
    (found,) = pull_back(cotangent)
    found = iter(found)
    return jtu.tree_unflatten(treedef, [next(found) if v else None for v in inexact])


def vmapped_axes(leaf: Any) -> Iterator[tuple[Any, int]]:
    """The axes that the `vmap`s around have taken off a leaf, the inner first, each with the leaf as it is without."""
    while isinstance(axis := getattr(leaf, "batch_dim", None), int):  # JAX's tracers of `vmap` have it
        yield leaf, axis
        leaf = leaf.val


# What follows is what control flow needs to know of how JAX writes it down.


def closed(jaxpr: Any) -> Any:
    """A jaxpr with its constants; until JAX 0.11 `remat` has one without."""
    return jaxpr if isinstance(jaxpr, jexc.ClosedJaxpr) else jexc.ClosedJaxpr(jaxpr, ())


def constants_as_arguments(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The open jaxpr that takes its constants first, and the constants."""
    return convert_constvars_jaxpr(jaxpr.jaxpr), jaxpr.consts


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried; removes what says so from `params`."""
    if "ft_in" in params:  # JAX >= 0.12
        del params["ft_out"]
        consts, carry, _ = params.pop("ft_in").unpack()
        return len(consts), len(carry)
    return params.pop("num_consts"), params.pop("num_carry")
