"""`implicit`: run a JAX function on implicit arrays. All that touches JAX's private tracing names is in this file.

A `Trace` sits on top of whatever JAX is doing (evaluating, tracing to a jaxpr, differentiating, batching). Its tracers
carry implicit arrays; a primitive that meets one goes to `dispatch`, and runs one level below.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

# Stands for "no sharding asked for" in the parameters of `jit`.
from jax._src import sharding_impls

# The trace that runs now, and the one of plain evaluation: every operator asks whether anything is traced.
from jax._src.core import eval_trace, trace_ctx

# Makes the constants of a jaxpr its first arguments: `remat` takes a jaxpr without constants.
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr

# Caches on jaxprs without keeping them, and the arrays they hold, alive.
from jax._src.util import weakref_lru_cache as weakref_lru_cache

# The two base classes of the engine; `ShapedArray` is the type of an array in JAX's eyes.
from jax.core import ShapedArray, Trace, Tracer
from jax.extend import core as jexc
from jax.extend.core import Primitive
from jax.extend.linear_util import WrappedFun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from eformer._src.jaximus.function import check_function

from .array import ImplicitArray, is_implicit, materialize
from .array_methods import ArrayMethods, check_matmul, dense_method
from .generators import in_steps
from .instrumentation import UNWATCHED, because, in_function, mode, serving, unobserved
from .rules import dispatch, on_register
from .state import ArgumentCopies
from .types import Leaf, Structure, Tree, Value

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
    def to_concrete_value(self) -> Any:  # JAX declares it to return None
        if self.size != 1:
            return None
        dense = self.materialize()
        return None if isinstance(dense, Tracer) else dense

    __array__, __float__, __complex__ = map(dense_method, ("__array__", "__float__", "__complex__"))
    item, tolist = map(dense_method, ("item", "tolist"))

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

    def wrap(self, x: Value) -> Value:
        if not isinstance(x, ImplicitArray):
            return x
        x._check_leaves()
        return ImplicitTracer(self, x)

    def stage_value(self, val: Value) -> Value:
        return val if isinstance(val, ImplicitTracer) else self.parent_trace.stage_value(val)

    def cur_qdd(self, x: Value) -> Value:
        return self.parent_trace.cur_qdd(x)  # pyright: ignore[reportAttributeAccessIssue]  # all but the base have it

    def process_primitive(self, primitive: Primitive, tracers: Sequence[Value], params: dict[str, Any], /) -> Value:
        if ImplicitTracer not in map(type, tracers) and not _closes_over_implicit(primitive, params):
            # Most primitives of most functions; `bind` has checked the operands already.
            return self.parent_trace.process_primitive(primitive, tracers, params)
        operands = [t.value if type(t) is ImplicitTracer else t for t in tracers]
        if primitive is implicit_array_p:
            return self.wrap(jtu.tree_unflatten(params["treedef"], operands))
        with jexc.set_current_trace(self.parent_trace):
            out = dispatch(primitive, operands, tracers, params)
        return [self.wrap(o) for o in out] if primitive.multiple_results else self.wrap(out)

    def process_call(self, primitive: Primitive, fun: WrappedFun, tracers: Sequence[Value], params: object, /) -> Value:
        del primitive, params  # a call is its body; only JAX < 0.11 has such primitives
        with jexc.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_jvp_call(
        self, primitive: Primitive, fun: WrappedFun, jvp: WrappedFun, tracers: Sequence[Value], /, **params: Any
    ) -> Value:
        return self._differentiated(primitive, (fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Primitive, fun: WrappedFun, fwd: WrappedFun, bwd: WrappedFun, tracers: Any, /, **params: Any
    ) -> Value:
        return self._differentiated(primitive, (fun, fwd, bwd), tracers, params)

    def _differentiated(self, primitive: Primitive, funs: Tree, tracers: Sequence[Value], params: Tree) -> Value:
        from .derivatives import custom_jvp, custom_vjp  # built on this file

        operands = [unwrap(t) for t in tracers]
        with jexc.set_current_trace(self.parent_trace), _serving(primitive, operands):
            run: Callable[..., Value] = custom_jvp if len(funs) == 2 else custom_vjp
            return run(primitive, *funs, operands, params)

    def process_shard_map(
        self, primitive: Primitive, fun: Callable[..., Tree], tracers: Sequence[Value], /, **params: Any
    ) -> Value:
        operands = [unwrap(t) for t in tracers]
        specs = list(params.pop("in_specs"))
        with jexc.set_current_trace(self.parent_trace), _serving(primitive, operands):
            for i, (operand, spec) in enumerate(zip(operands, specs, strict=True)):
                if is_implicit(operand):
                    with because(f"its leaves can't be sharded as {spec} has it, a device would cut a block"):
                        operands[i], specs[i] = _sharded(operand, spec, params["mesh"])
            leaves, treedef = jtu.tree_flatten(operands)
            leaf_specs = jtu.tree_leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))

            def body(*leaves: Value) -> Tree:
                # `fun` gives JAX's flat tree of outputs, with their specs beside them; `map` reaches the outputs.
                trace = ImplicitTrace(trace_ctx.trace)
                with jexc.set_current_trace(trace):
                    outs = fun(*map(trace.wrap, jtu.tree_unflatten(treedef, leaves)))
                return outs.map(lambda out: materialize(unwrap(out)))

            params["debug_info"] = params["debug_info"].with_unknown_names()
            return primitive.bind(*leaves, subfuns=(body,), in_specs=tuple(leaf_specs), **params)


def _sharded(operand: ImplicitArray, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> tuple[Value, Tree]:
    """An equal operand whose leaves `shard_map` can shard, and a tree of their specs; dense where there is none."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh):
        for form in (operand, operand._divisible(), operand._finer()):
            leaf_specs = form.leaf_specs(spec)
            if leaf_specs is not None:
                return form, leaf_specs
    return materialize(operand), spec


def _serving(primitive: Primitive, operands: Sequence[Value]) -> AbstractContextManager[None]:
    """Around the work for a primitive in this file: the dense copies made inside are put down to it."""
    return serving(primitive, tuple(dict.fromkeys(type(o) for o in operands if is_implicit(o))), "materialize")


def unwrap(x: Value) -> Value:
    return x.value if isinstance(x, ImplicitTracer) else x


def implicit(function: Callable[P, R]) -> Callable[..., R]:
    """`function`, taking implicit arrays wherever it takes arrays, as arguments or from its closure.

    Each primitive that meets one runs by the rule registered for it; without a rule the array is made dense. The result
    is that of dense arrays, and may be implicit itself where a rule returns such (a transpose, say). It composes with
    every JAX transformation, inside and outside. A generator or a coroutine runs so in each of its steps.
    """

    check_function(function, "implicit")

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        trace = _trace_on(trace_ctx.trace)
        copies = ArgumentCopies(trace.wrap, unwrap)
        steps = None

        @contextlib.contextmanager
        def running() -> Iterator[None]:
            with in_function(), jexc.set_current_trace(trace):
                yield

        with in_function():
            try:
                with jexc.set_current_trace(trace):
                    # The function may itself hold arrays: a module, a method bound to one, a `Partial`.
                    method = function if isinstance(function, types.MethodType) else None
                    own = function if method is None else method.__self__
                    run, *given = copies.copies_of(own, *args, *kwargs.values())
                    run = run if method is None else types.MethodType(method.__func__, run)
                    out = run(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
                steps = in_steps(out, running, lambda sent: copies.copies_of(sent)[0], copies.given, copies.write_back)
            finally:
                if steps is None:
                    copies.write_back()
        return copies.restored(out) if steps is None else steps

    return wrapped


def apply(function: Callable[..., Tree], *operands: Value) -> Tree:
    """`implicit(function)(*operands)`, of operands that are arrays and not containers of arrays."""
    trace = _trace_on(trace_ctx.trace)
    with jexc.set_current_trace(trace):
        if mode.value is UNWATCHED:
            out = function(*map(trace.wrap, operands))
        else:
            with in_function():
                out = function(*map(trace.wrap, operands))
    return jtu.tree_map(unwrap, out)


_ARRAYS = (ArrayMethods, jax.Array, np.ndarray, np.generic, int, float, complex)


def eager_matmul(lhs: Value, rhs: Value) -> Value:
    """`lhs @ rhs` by the rules; compiled if nothing is traced, as dispatch in Python takes longer than the matmul."""
    if not (isinstance(lhs, _ARRAYS) and isinstance(rhs, _ARRAYS)):
        for other in (lhs, rhs):
            if other is None or isinstance(other, (str, list, tuple, dict)):
                names = " and ".join(type(each).__name__ for each in (lhs, rhs))
                raise TypeError(f"`@` takes two arrays, got {names}: `jnp.asarray` makes one")
        return apply(operator.matmul, lhs, rhs)  # JAX refuses, or the type of the other operand takes it
    if trace_ctx.trace is eval_trace and mode.value.recorder is None:
        return _compiled_matmul(lhs, rhs)
    check_matmul(lhs, rhs)
    return apply(jnp.matmul, lhs, rhs)


@jax.jit
def _compiled_matmul(lhs: Value, rhs: Value) -> Value:
    check_matmul(lhs, rhs)
    return apply(_MATMUL, lhs, rhs)


_MATMUL = inspect.unwrap(jnp.matmul)  # without the `jit` that `jnp.matmul` has itself
on_register.append(lambda: _compiled_matmul.clear_cache())  # pyright: ignore[reportAttributeAccessIssue]  # untyped


def _trace_on(parent: Trace) -> ImplicitTrace:
    if isinstance(parent, ImplicitTrace):
        return parent
    return _ON_EVALUATION if parent is eval_trace else ImplicitTrace(parent)


# JAX caches programs per trace object: evaluation, which never ends, always gets the same one.
_ON_EVALUATION = ImplicitTrace(eval_trace)


def lift_closed_over(array: ImplicitArray) -> Callable[[], jax.Array]:
    """A function giving an array that the surrounding `implicit` understands; an AttributeError outside `implicit`.

    There, with `__jax_array__`, JAX's own operators would make the array dense before `__rmatmul__` is asked.
    """
    trace = trace_ctx.trace
    while trace is not None and not isinstance(trace, ImplicitTrace):
        trace = getattr(trace, "parent_trace", None)
    if trace is None:
        raise AttributeError(
            f"{type(array).__name__} is no JAX array outside `implicit`; wrap the function, `implicit(f)(...)`, or use "
            f"an operator such as `x @ q`"
        )
    leaves, treedef = jtu.tree_flatten(array)
    return lambda: implicit_array_p.bind(*leaves, treedef=treedef)


# How JAX sees an implicit array that a function closes over, or that reaches a `jit` inside `implicit`: the output of a
# primitive that takes its leaves. Under `implicit`, however deep in jits, scans or branches, it turns back into the
# implicit array; elsewhere it is dense.
implicit_array_p = Primitive("implicit_array")


@implicit_array_p.def_impl
def _materialize(*leaves: Leaf, treedef: Structure) -> jax.Array:
    array = jtu.tree_unflatten(treedef, leaves)
    with serving(implicit_array_p, (type(array),), "materialize"):
        return array.materialize()


@implicit_array_p.def_abstract_eval
def _abstract_eval(*avals: ShapedArray, treedef: Structure) -> ShapedArray:
    return abstract_value(jtu.tree_unflatten(treedef, avals))


def _jvp(primals: Sequence[Leaf], tangents: Sequence[Leaf], *, treedef: Structure) -> tuple[jax.Array, jax.Array]:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    _, tangent = jax.jvp(lambda *leaves: _materialize(*leaves, treedef=treedef), primals, tangents)
    return implicit_array_p.bind(*primals, treedef=treedef), tangent


def _batch(leaves: Sequence[Leaf], axes: Sequence[int | None], *, treedef: Structure) -> tuple[jax.Array, int]:
    return jax.vmap(lambda *leaves: _materialize(*leaves, treedef=treedef), axes)(*leaves), 0


ad.primitive_jvps[implicit_array_p] = _jvp
batching.primitive_batchers[implicit_array_p] = _batch
mlir.register_lowering(implicit_array_p, mlir.lower_fun(_materialize, multiple_results=False))


def abstract_value(array: ImplicitArray) -> ShapedArray:
    """The type JAX knows the dense array by; leaves may be types themselves."""
    for leaf in jtu.tree_leaves(array):
        sharding = getattr(getattr(leaf, "aval", leaf), "sharding", None)  # numbers have none
        if sharding is not None and not sharding.mesh.empty:
            leaves, treedef = jtu.tree_flatten(array)
            avals = tuple(leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf) for leaf in leaves)
            return _sharded_abstract_value(treedef, avals, jax.sharding.get_abstract_mesh())
    return ShapedArray(array.shape, array.dtype)


@functools.lru_cache(maxsize=4096)
def _sharded_abstract_value(treedef: Structure, avals: tuple[ShapedArray, ...], mesh: AbstractMesh) -> ShapedArray:
    del mesh  # a key of the cache: the answer depends on it
    with unobserved():
        (out,) = jax.make_jaxpr(lambda *leaves: jtu.tree_unflatten(treedef, leaves).materialize())(*avals).out_avals
    return out


# The classes of arrays, which this file is built on, need these of it.
ArrayMethods._apply = staticmethod(apply)
ArrayMethods._matmul = staticmethod(eager_matmul)
ArrayMethods._abstract_value = staticmethod(abstract_value)
setattr(ImplicitArray, "__jax_array__", property(lift_closed_over))  # noqa: B010  (pyright: not declared)


_MAY_HOLD_JAXPRS = {jexc.Jaxpr, jexc.ClosedJaxpr, tuple}  # types of parameters


def _closes_over_implicit(primitive: Primitive, params: dict[str, Any]) -> bool:
    """Whether the primitive, or one in its jaxprs, makes an implicit array from leaves it was given or holds."""
    if _MAY_HOLD_JAXPRS.isdisjoint(map(type, params.values())):
        return primitive is implicit_array_p
    return any(map(_makes_implicit, jexc.jaxprs_in_params(params)))


@weakref_lru_cache
def _makes_implicit(jaxpr: jexc.Jaxpr) -> bool:
    return any(_closes_over_implicit(eqn.primitive, eqn.params) for eqn in jaxpr.eqns)


def note_misuse(array: ImplicitArray, leaf: Value) -> None:
    """Keep why a surrounding `vmap`, the inner first, should not have taken an axis off the leaf, if it should not."""
    while isinstance(axis := getattr(leaf, "batch_dim", None), int):  # JAX's tracers of `vmap` have it
        if (error := array._vmap_error(leaf, axis)) is not None:
            return array._keep(misuse=error)
        leaf = leaf.val
    return None


# How JAX writes control flow down, which differs between versions.


def closed(jaxpr: jexc.Jaxpr | jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """A jaxpr with its constants; until JAX 0.11 `remat` has one without."""
    return jaxpr if isinstance(jaxpr, jexc.ClosedJaxpr) else jexc.ClosedJaxpr(jaxpr, ())


def constants_as_arguments(jaxpr: jexc.ClosedJaxpr) -> tuple[jexc.Jaxpr, Sequence[Value]]:
    """The open jaxpr that takes its constants first, and the constants."""
    return convert_constvars_jaxpr(jaxpr.jaxpr), jaxpr.consts


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried; takes these counts out of `params`."""
    if "ft_in" in params:  # JAX >= 0.12
        del params["ft_out"]
        consts, carry, _ = params.pop("ft_in").unpack()
        return len(consts), len(carry)
    return params.pop("num_consts"), params.pop("num_carry")


def asks_nothing(params: dict[str, Any]) -> bool:
    """Whether a `jit` with these parameters asks for no sharding, layout or option, so that it may be inlined."""
    unset = {id(UNSPECIFIED), id(None)}
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    asked = any(id(value) not in unset for name in names for value in params[name])
    return not asked and not params.get("compiler_options_kvs")
