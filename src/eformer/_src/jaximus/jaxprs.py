"""Programs as data: the jaxpr of a function is changed before it runs, and so are those of its calls and loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import tree_util as jtu
from jax.extend import core as jexc

from .trace import asks_nothing

P = ParamSpec("P")
R = TypeVar("R")
Atom = Any  # `jexc.Var | jexc.Literal`, which JAX does not name publicly

# Primitives whose parameters hold programs that run as they stand there.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
    | {"while", "cond", "scan"}
)


def rewritten(function: Callable[P, R], rewrite: Callable[[jexc.Jaxpr], jexc.Jaxpr]) -> Callable[P, R]:
    """`function`, in which `rewrite` changes every jaxpr before it runs: first the outer one, then those inside.

    The arrays among its arguments are traced. All other arguments, such as the static ones of a `jit` around it, reach
    `function` as they are.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
        out_tree: Any = None

        def flat(*arrays: jax.Array) -> list[Any]:
            nonlocal out_tree
            given = dict(zip(places, arrays, strict=True))
            args, kwargs = jtu.tree_unflatten(treedef, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            outs, out_tree = jtu.tree_flatten(function(*args, **kwargs))  # pyright: ignore[reportCallIssue]  # P's own
            return outs

        arrays = [leaves[i] for i in places]
        traced = jax.make_jaxpr(flat)(*arrays)
        outs = jexc.jaxpr_as_fun(_Rewriting(rewrite).of_closed(traced))(*arrays)
        return jtu.tree_unflatten(out_tree, outs)

    return wrapped


class _Rewriting:
    """Rewrites a jaxpr that many calls share once: JAX compiles it once, too."""

    def __init__(self, rewrite: Callable[[jexc.Jaxpr], jexc.Jaxpr]) -> None:
        self.rewrite = rewrite
        self.done: dict[int, tuple[object, Any]] = {}  # by identity; the first of a pair is kept alive for that

    def of_closed(self, closed: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
        if id(closed) not in self.done:
            jaxpr = self.of_open(closed.jaxpr)
            same = jaxpr is closed.jaxpr
            self.done[id(closed)] = closed, closed if same else jexc.ClosedJaxpr(jaxpr, closed.consts)
        return self.done[id(closed)][1]

    def of_open(self, jaxpr: jexc.Jaxpr) -> jexc.Jaxpr:
        if id(jaxpr) not in self.done:
            found = self.rewrite(jaxpr)
            eqns = [self.of_equation(eqn) for eqn in found.eqns]
            changed = any(new is not old for new, old in zip(eqns, found.eqns, strict=True))
            self.done[id(jaxpr)] = jaxpr, found.replace(eqns=eqns) if changed else found
        return self.done[id(jaxpr)][1]

    def of_equation(self, eqn: jexc.JaxprEqn) -> jexc.JaxprEqn:
        if eqn.primitive.name not in _CALLS:
            return eqn
        changed = {name: new for name, old in eqn.params.items() if (new := self.of_parameter(old)) is not old}
        return eqn.replace(params={**eqn.params, **changed}) if changed else eqn

    def of_parameter(self, value: Any) -> Any:
        if isinstance(value, jexc.ClosedJaxpr):
            return self.of_closed(value)
        if isinstance(value, jexc.Jaxpr):
            return self.of_open(value)
        if type(value) is tuple and any(isinstance(each, jexc.Jaxpr | jexc.ClosedJaxpr) for each in value):
            new = tuple(map(self.of_parameter, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        return value


class Writer:
    """Equations that are written one after the other, in which some variables stand for others."""

    def __init__(self) -> None:
        self.eqns: list[jexc.JaxprEqn] = []
        self.stands_for: dict[Atom, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, jexc.Literal) else self.stands_for.get(atom, atom)

    def add(self, eqn: jexc.JaxprEqn) -> None:
        self.eqns.append(eqn.replace(invars=[self.read(atom) for atom in eqn.invars]))

    def inline(self, jaxpr: jexc.Jaxpr, operands: Sequence[Atom], outs: Sequence[Atom]) -> None:
        """Write the equations of `jaxpr`, which has no constants; from here on `outs` stand for its results."""
        inner = Writer()
        inner.stands_for = dict(zip(jaxpr.invars, map(self.read, operands), strict=True))
        for eqn in jaxpr.eqns:
            own = [out if isinstance(out, jexc.DropVar) else jexc.Var(out.aval) for out in eqn.outvars]
            inner.add(eqn.replace(outvars=own))
            inner.stands_for.update(zip(eqn.outvars, own, strict=True))
        self.eqns += inner.eqns
        self.stands_for.update(zip(outs, map(inner.read, jaxpr.outvars), strict=True))

    def jaxpr(self, like: jexc.Jaxpr) -> jexc.Jaxpr:
        """`like` with these equations."""
        return like.replace(eqns=self.eqns, outvars=[self.read(out) for out in like.outvars])


def inlined(jaxpr: jexc.Jaxpr, which: Callable[[jexc.Jaxpr], bool]) -> jexc.Jaxpr:
    """`jaxpr` in which jits of jaxprs that `which` chooses are replaced by their equations."""
    writer, changed = Writer(), False
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        if inner is None or inner.consts or not asks_nothing(eqn.params) or not which(inner.jaxpr):
            writer.add(eqn)
        else:
            writer.inline(inlined(inner.jaxpr, which), eqn.invars, eqn.outvars)
            changed = True
    return writer.jaxpr(jaxpr) if changed else jaxpr


def without_dead(jaxpr: jexc.Jaxpr) -> jexc.Jaxpr:
    """`jaxpr` without equations whose results nobody reads."""
    live, kept = {out for out in jaxpr.outvars if isinstance(out, jexc.Var)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(out in live for out in eqn.outvars):
            live |= {atom for atom in eqn.invars if isinstance(atom, jexc.Var)}
            kept.append(eqn)
    return jaxpr.replace(eqns=kept[::-1])
