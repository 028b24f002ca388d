"""Runs a program, and sums up what the arrays that are followed through it are multiplied by.

The arrays are followed as `find` follows them. Control flow is entered: the sums of a scan over layers have a row for
each layer. The sums of a loop, or of the branch that was taken, are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eformer._src.model.uses.find import AnyJaxpr, MovedLeaf, moved, of_leaf, opened
from eformer._src.model.uses.movements import INDEXING, contracted_axes, type_of

from .pull import COUNT, FIRST, SECOND, SQUARES, CannotPull, SumKind, pull
from .sums import Sums, sums_of

# Primitives that run a program of their own as it stands there.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
)


class SumKey(NamedTuple):
    """Sums of one input of a program, over these axes of it, counted from the end."""

    source: int
    axes: tuple[int, ...]


Found = dict[SumKey, Sums]
Bring = Callable[[jax.Array, SumKind], jax.Array]  # a sum over elements of a value, for the input that they come from


class ProgramArray(NamedTuple):
    """An array of the running program; `value` is None if no followed input is in it."""

    array: Any
    value: MovedLeaf | None = None
    brings: Mapping[int, Bring] = {}  # by the input
    again: Callable[[], Any] | None = None  # makes the array of its inputs as they are by then, if they may change


@dataclass
class Evaluation:
    """Sums of the inputs so far, for those `with_moment` second moments too, and in what else each input ended."""

    with_moment: Collection[int] = ()
    found: Found = field(default_factory=dict)
    ends: dict[int, dict[str, None]] = field(default_factory=dict)

    def run(self, jaxpr: AnyJaxpr, inputs: Sequence[ProgramArray]) -> list[ProgramArray]:
        """The outputs of the program, whose constants are its own."""
        consts = getattr(jaxpr, "consts", ())
        jaxpr = opened(jaxpr)
        known: dict[Var, ProgramArray] = dict(zip(jaxpr.constvars, map(ProgramArray, consts), strict=False))
        known.update(zip(jaxpr.invars, inputs, strict=True))
        last = _last_uses(jaxpr)

        def read(var: Var | Literal) -> ProgramArray:
            return ProgramArray(var.val) if isinstance(var, Literal) else known[var]

        for i, eqn in enumerate(jaxpr.eqns):
            known.update(zip(eqn.outvars, self.equation(eqn, [read(var) for var in eqn.invars]), strict=True))
            for var in last.get(i, ()):
                known.pop(var, None)
        return [read(var) for var in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: Sequence[ProgramArray]) -> list[ProgramArray]:
        values = [given.value for given in operands]
        name = eqn.primitive.name
        if any(values) and name in CONTROL:
            return CONTROL[name](self, eqn, operands)
        if name in CALLS:
            return self.run(eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"], operands)
        arrays = [given.array for given in operands]
        outs = bound(eqn, arrays)
        if not any(values):
            return list(map(ProgramArray, outs))
        if name == "optimization_barrier":
            return [given._replace(array=out) for given, out in zip(operands, outs, strict=True)]
        went = moved(eqn, values)
        if went is None:
            for at, given in enumerate(operands):
                if given.value is not None:
                    self.note(eqn, arrays, at, given)
            return list(map(ProgramArray, outs))
        brings = [self._brings(eqn, operands, arrays, out) for out in range(len(outs))]
        return [ProgramArray(*each) for each in zip(outs, went, brings, strict=True)]

    def _brings(
        self, eqn: JaxprEqn, operands: Sequence[ProgramArray], arrays: Sequence[Any], out: int
    ) -> dict[int, Bring]:
        brings: dict[int, Bring] = {}
        for at, given in enumerate(operands):
            for source, bring in given.brings.items():
                brings[source] = _then(eqn, arrays, at, out, bring, brings.get(source))
        return brings

    def note(self, eqn: JaxprEqn, arrays: Sequence[Any], at: int, given: ProgramArray) -> None:
        assert given.value is not None
        name = eqn.primitive.name
        axes = contracted_axes(eqn, at)
        ends = "gather" if name in INDEXING and at == 0 else name
        if not axes:
            return self.end(given, ends)
        wants = not given.brings.keys().isdisjoint(self.with_moment)
        try:
            sums = _with_moment_if_possible(lambda wants: _whole(eqn, arrays, at, wants), wants)
        except CannotPull:
            return self.end(given, f"{name} in a form that is not known")
        return self.add(given, axes, sums)

    def end(self, given: ProgramArray, name: str) -> None:
        for source in given.brings:
            self.ends.setdefault(source, {})[name] = None

    def add(self, given: ProgramArray, axes: Sequence[int], sums: Sums) -> None:
        """Add sums over the `axes` of a value to those of the inputs that it comes from."""
        assert given.value is not None
        for source, its_axes in given.value.leaves.items():
            along = tuple(sorted(frozenset().union(*[its_axes[axis] for axis in axes])))
            bring = given.brings[source]
            try:
                brought = Sums(bring(sums.squares, SQUARES), bring(sums.inputs, COUNT))
            except CannotPull:
                self.end(given, "a matmul, moved in a way that is not known")
                continue
            if sums.moment is not None and source in self.with_moment:
                brought = brought._replace(moment=_moment(bring, sums.moment))
            self.merge({SumKey(source, along): brought})

    def merge(self, found: Found) -> None:
        for key, sums in found.items():
            before = self.found.get(key)
            self.found[key] = sums if before is None else added(before, sums)


def added(a: Sums, b: Sums) -> Sums:
    moment = None if a.moment is None or b.moment is None else a.moment + b.moment
    return Sums(a.squares + b.squares, a.inputs + b.inputs, moment)


def bound(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    params = eqn.primitive.get_bind_params(eqn.params)
    if eqn.primitive.name.endswith("_invariant"):  # `shard_map` told varying arrays from others, and here it does not
        return _VARYING[eqn.primitive.name](list(arrays), params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*arrays, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


_VARYING: dict[str, Callable[[list[Any], dict[str, Any]], list[Any]]] = {
    "psum_invariant": lambda arrays, params: lax.psum(arrays, params["axes"]),
    "all_gather_invariant": lambda arrays, params: [
        lax.all_gather(x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"])
        for x in arrays
    ],
}


def _with_moment_if_possible(sums: Callable[[bool], Sums], wants: bool) -> Sums:
    try:
        return sums(wants)
    except CannotPull:
        return sums(False)


def _whole(eqn: JaxprEqn, arrays: Sequence[Any], at: int, wants_moment: bool) -> Sums:
    """`sums_of`; on meshes where shardings are part of types, every device gets the whole of the sums."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    if not any(AxisType.Explicit in mesh.axis_types for mesh in meshes if not mesh.empty):
        return sums_of(eqn, arrays, at, wants_moment)
    out_sharding = NamedSharding(next(mesh for mesh in meshes if not mesh.empty), PartitionSpec())
    run: Any = jax.sharding.auto_axes(lambda *arrays: sums_of(eqn, arrays, at, wants_moment), out_sharding=out_sharding)
    return run(*arrays)


def _then(
    eqn: JaxprEqn, arrays: Sequence[Any], at: int, out: int, bring: Bring, other: Bring | None
) -> Callable[[jax.Array, SumKind], jax.Array]:
    def both(total: jax.Array, how: SumKind) -> jax.Array:
        if other is not None and how.power == 1:
            raise CannotPull
        found = bring(pull(total, eqn, arrays, at, out, how), how)
        return found if other is None else found + other(total, how)  # joined from parts of one array

    return both


def _moment(bring: Bring, moment: jax.Array) -> jax.Array | None:
    """First the one factor of the products is brought back, then the other."""
    ndim = moment.ndim // 2
    first, second = moment.shape[:ndim], moment.shape[ndim:]
    try:
        once = jax.vmap(lambda each: bring(each, FIRST), -1, -1)(moment.reshape(*first, -1))
        before = once.shape[:-1]
        twice = jax.vmap(lambda each: bring(each, SECOND))(once.reshape(-1, *second))
    except CannotPull:
        return None
    return twice.reshape(*before, *twice.shape[1:])


def _last_uses(jaxpr: Jaxpr) -> dict[int, list[Var]]:
    """The variables that no later equation reads, by the number of the equation."""
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update((var, i) for var in eqn.invars if not isinstance(var, Literal))
    kept = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    found: dict[int, list[Var]] = {}
    for var, i in last.items():
        if var not in kept:
            found.setdefault(i, []).append(var)
    return found


def follow(source: int, array: Any) -> ProgramArray:
    """An input of a program, to be followed under the number `source`."""
    return ProgramArray(array, of_leaf(source, array.ndim), {source: lambda total, how: total})


# --- control flow: a body is a program of its own, whose inputs are followed by their number ---


def _body(
    outer: Evaluation, operands: Sequence[ProgramArray], but: Collection[int] = ()
) -> tuple[Evaluation, list[bool]]:
    """An evaluation for a body that is given the `operands`, and which of them it follows."""
    followed = [given.value is not None and i not in but for i, given in enumerate(operands)]
    moments = [i for i, each in enumerate(operands) if not each.brings.keys().isdisjoint(outer.with_moment)]
    return Evaluation(moments), followed


def _inputs(arrays: Sequence[Any], followed: Sequence[bool]) -> list[ProgramArray]:
    return [follow(i, x) if one else ProgramArray(x) for i, (x, one) in enumerate(zip(arrays, followed, strict=True))]


def _add_sums_of_body(outer: Evaluation, inner: Evaluation, operands: Sequence[ProgramArray], found: Found) -> None:
    """Add what a body found of its inputs to what they come from."""
    for key, sums in found.items():
        outer.add(operands[key.source], key.axes, sums)
    for source, names in inner.ends.items():
        for name in names:
            outer.end(operands[source], name)


def _changed(inner: Jaxpr, carried: Sequence[int]) -> set[int]:
    """The numbers of inputs, of those `carried`, that a step returns changed."""
    return {at for out, at in zip(inner.outvars, carried, strict=False) if out is not inner.invars[at]}


def _passed_on(
    outs: Sequence[Any], carry: Sequence[ProgramArray], changed: Collection[int], first: int
) -> list[ProgramArray]:
    """The outputs of a loop. An output that no step changes is the input it came from."""
    kept = [carry[i] if i < len(carry) and first + i not in changed else None for i in range(len(outs))]
    return [
        ProgramArray(out) if same is None else same._replace(array=out) for out, same in zip(outs, kept, strict=True)
    ]


def _note_changed(outer: Evaluation, operands: Sequence[ProgramArray], changed: Collection[int], name: str) -> None:
    for at in changed:
        outer.end(operands[at], f"{name}, which changes it")


def _scan(outer: Evaluation, eqn: JaxprEqn, operands: Sequence[ProgramArray]) -> list[ProgramArray]:
    jaxpr = eqn.params["jaxpr"]
    inner = opened(jaxpr)
    carries = sum(_ndim(a) == _ndim(b) for a, b in zip(inner.outvars, eqn.outvars, strict=True))
    stacked = [_ndim(a) < _ndim(b) for a, b in zip(inner.invars, eqn.invars, strict=True)]
    first = stacked.count(False) - carries
    start = first + carries
    changed = _changed(inner, range(first, start))
    _note_changed(outer, operands, changed, "scan")
    arrays = [given.array for given in operands]
    evaluations: list[Evaluation] = []

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any], Found]:
        evaluation, followed = _body(outer, operands, changed)
        evaluations.append(evaluation)
        outs = [given.array for given in evaluation.run(jaxpr, _inputs([*arrays[:first], *carry, *xs], followed))]
        return outs[:carries], outs[carries:], evaluation.found

    parts = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays[start:]]
    shapes = jax.eval_shape(step, arrays[first:start], parts)[2]
    total = {key: _zeros(sums) for key, sums in shapes.items() if not stacked[key.source]}

    def body(state: tuple[list[Any], Found], xs: list[Any]) -> tuple[tuple[list[Any], Found], tuple[list[Any], Found]]:
        carry, ys, found = step(state[0], xs)
        ours = {key: added(state[1][key], found[key]) for key in total}
        return (carry, ours), (ys, {key: sums for key, sums in found.items() if key not in total})

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll") if name in eqn.params}
    (carry, total), (ys, rows) = lax.scan(body, (arrays[first:start], total), arrays[start:], **options)
    rows = {key: _of_stack(sums) for key, sums in rows.items()}
    _add_sums_of_body(outer, evaluations[-1], operands, {**total, **rows})
    return _passed_on([*carry, *ys], operands[first:start], changed, first)


def _of_stack(sums: Sums) -> Sums:
    """The sums of all layers of a scan as the sums of the stack: a layer's second moment belongs to its matrix."""
    if sums.moment is None:
        return sums
    return sums._replace(moment=jnp.expand_dims(sums.moment, 1 + (sums.moment.ndim - 1) // 2))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)


def _ndim(var: Var | Literal) -> int:
    return type_of(var).ndim


def _while(outer: Evaluation, eqn: JaxprEqn, operands: Sequence[ProgramArray]) -> list[ProgramArray]:
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    first = [given.array for given in operands[:of_condition]]
    ours = operands[of_condition:]  # of the body
    changed = _changed(opened(jaxpr), range(of_body, len(ours)))
    _note_changed(outer, ours, changed, "while")
    arrays = [given.array for given in ours]
    evaluations: list[Evaluation] = []

    def step(carry: list[Any]) -> tuple[list[Any], Found]:
        evaluation, followed = _body(outer, ours, changed)
        evaluations.append(evaluation)
        outs = evaluation.run(jaxpr, _inputs([*arrays[:of_body], *carry], followed))
        return [given.array for given in outs], evaluation.found

    def body(state: tuple[list[Any], Found]) -> tuple[list[Any], Found]:
        carry, found = step(state[0])
        return carry, {key: added(state[1][key], found[key]) for key in state[1]}

    def holds(state: tuple[list[Any], Found]) -> jax.Array:
        return Evaluation().run(condition, list(map(ProgramArray, [*first, *state[0]])))[0].array

    total = _zeros(jax.eval_shape(step, arrays[of_body:])[1])
    carry, total = lax.while_loop(holds, body, (arrays[of_body:], total))
    _add_sums_of_body(outer, evaluations[-1], ours, total)
    return _passed_on(carry, ours[of_body:], changed, of_body)


def _cond(outer: Evaluation, eqn: JaxprEqn, operands: Sequence[ProgramArray]) -> list[ProgramArray]:
    index, ours = operands[0].array, operands[1:]
    arrays = [given.array for given in ours]
    evaluations: list[Evaluation] = []

    def run(jaxpr: AnyJaxpr, arrays: list[Any]) -> tuple[list[Any], Found]:
        evaluation, followed = _body(outer, ours)
        evaluations.append(evaluation)
        outs = evaluation.run(jaxpr, _inputs(arrays, followed))
        return [given.array for given in outs], evaluation.found

    branches = eqn.params["branches"]
    shapes: dict[SumKey, Any] = {}
    for jaxpr in branches:
        for key, sums in jax.eval_shape(lambda arrays, jaxpr=jaxpr: run(jaxpr, arrays), arrays)[1].items():
            before = shapes.get(key)
            shapes[key] = sums if before is None else jax.eval_shape(added, before, sums)

    def branch(jaxpr: AnyJaxpr) -> Callable[[list[Any]], tuple[list[Any], Found]]:
        def taken(arrays: list[Any]) -> tuple[list[Any], Found]:
            outs, found = run(jaxpr, arrays)
            zeros = _zeros(shapes)
            return outs, {key: added(zero, found[key]) if key in found else zero for key, zero in zeros.items()}

        return taken

    outs, found = lax.switch(index, [branch(jaxpr) for jaxpr in branches], arrays)
    for evaluation in evaluations[:-1]:
        evaluations[-1].ends.update(
            {at: {**evaluations[-1].ends.get(at, {}), **n} for at, n in evaluation.ends.items()}
        )
    _add_sums_of_body(outer, evaluations[-1], ours, found)
    return list(map(ProgramArray, outs))


def _shard_map(outer: Evaluation, eqn: JaxprEqn, operands: Sequence[ProgramArray]) -> list[ProgramArray]:
    """Each device sums up its own inputs; then sums over parts that have the same weights are added."""
    params = eqn.params
    specs, manual = (
        params["in_specs"],
        set(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]),
    )
    arrays = [given.array for given in operands]
    evaluation, followed = _body(outer, operands)
    types = [type_of(var).shape for var in opened(params["jaxpr"]).invars]
    sharded: dict[SumKey, Any] = {}

    def spec_of(sums: jax.Array, of: int) -> PartitionSpec:
        """That of the weight, along the axes that have a sum for each element."""
        spec = (*specs[of], *[None] * (len(types[of]) - len(specs[of])))
        own = [each if size == n else None for each, size, n in zip(spec, sums.shape, types[of], strict=False)]
        return PartitionSpec(*own, *[None] * (sums.ndim - len(own)))

    def over(sums: Sums, of: int) -> tuple[str, ...]:
        """The axes of the mesh along which devices have different inputs for the same elements."""
        entries = [each if isinstance(each, tuple) else (each,) for each in spec_of(sums.squares, of)]
        return tuple(
            name for name in params["mesh"].axis_names if name in manual and not any(name in each for each in entries)
        )

    def body(*arrays: Any) -> tuple[list[Any], Found]:
        outs = evaluation.run(params["jaxpr"], _inputs(arrays, followed))
        found: Found = {}
        for key, sums in evaluation.found.items():
            spec = (*specs[key.source], *[None] * len(types[key.source]))
            if any(spec[axis % len(types[key.source])] is not None for axis in key.axes):
                sums = sums._replace(moment=None)  # products of inputs on different devices are missing
            names = over(sums, key.source)
            found[key] = jax.tree.map(lambda each, names=names: lax.psum(each, names), sums)
            sharded[key] = jax.tree.map(lambda each, of=key.source: spec_of(each, of), sums)
        return [given.array for given in outs], found

    # A first trace tells the sums, and so their specs.
    inside = {"mesh": params["mesh"], "in_specs": tuple(specs), "axis_names": manual, "check_vma": False}
    outs = [PartitionSpec() for _ in params["out_specs"]]
    jax.eval_shape(jax.shard_map(lambda *xs: body(*xs)[0], out_specs=outs, **inside), *arrays)
    evaluation.found.clear()
    out_specs = (list(params["out_specs"]), dict(sharded))
    outs, found = jax.shard_map(body, out_specs=out_specs, **inside)(*arrays)
    _add_sums_of_body(outer, evaluation, operands, found)
    return list(map(ProgramArray, outs))


CONTROL: dict[str, Callable[[Evaluation, JaxprEqn, Sequence[ProgramArray]], list[ProgramArray]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
