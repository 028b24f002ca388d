"""`fuse`: matmuls that share x become one operation, and the layers of a `scan` are read where they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend import core as jexc

from eformer._src.jaximus.function import check_function
from eformer._src.jaximus.jaxprs import Writer, inlined, rewritten, without_dead
from eformer._src.jaximus.trace import scan_counts

from .primitive import matmul_p
from .several import MatmulParams, is_indexed, leaves_of, matmuls_p

P = ParamSpec("P")
R = TypeVar("R")
Atom = Any  # `jexc.Var | jexc.Literal`, which JAX does not name publicly

SMALL = 16  # equations of a jitted function with one matmul, at most, for it to be inlined: more compile longer

# Primitives that move or convert elements: a few of them prepare the operands of a matmul.
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
_MOVES = _RESHAPES | {"transpose", "convert_element_type", "copy", "slice"}


def fuse(function: Callable[P, R]) -> Callable[..., R]:
    """`function`, with fewer and larger calls of the native core; its results are the same, to the bit.

    Matmuls of the same activations with several quantized arrays, such as queries, keys and values or gate and up,
    become one call: activations are rounded once, and threads wake once. In a `lax.scan` over stacked layers the core
    gets the whole stack and the number of the layer, where XLA would copy the codes of each layer first.

    It changes the program that is traced, so it stands inside `jit` and outside of `implicit`:

    >>> import jax, jax.numpy as jnp
    >>> from eformer import fuse, implicit, quantize
    >>> def gated(params, x):
    ...     return jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    >>> params = {name: quantize(jnp.ones((64, 128)), "int8") for name in ("gate", "up")}
    >>> jax.jit(fuse(implicit(gated)))(params, jnp.ones((1, 64))).shape
    (1, 128)

    On accelerators, across several devices and in exported programs the matmuls stay single ones. Derivatives of the
    fused function are those of `function`.
    """
    check_function(function, "fuse")
    return rewritten(function, _rewrite)


def _rewrite(jaxpr: jexc.Jaxpr) -> jexc.Jaxpr:
    if not _matmuls_in(jaxpr):
        return jaxpr
    jaxpr = inlined(jaxpr, lambda inner: _matmuls_in(inner) == 1 and len(inner.eqns) <= SMALL)
    return _grouped(_with_indexed_scans(jaxpr))


def _matmuls_in(jaxpr: jexc.Jaxpr) -> int:
    """How many quantized matmuls there are, those inside calls and loops included."""
    return sum(
        (eqn.primitive in (matmul_p, matmuls_p)) + sum(map(_matmuls_in, jexc.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


# --- matmuls that share x ---


class _Matmuls(NamedTuple):
    """An equation of one matmul or several."""

    eqn: jexc.JaxprEqn
    each: tuple[MatmulParams, ...]

    @property
    def number(self) -> Atom | None:
        """The index, if matrices are entries of stacks."""
        return self.eqn.invars[1] if is_indexed(self.each) else None

    @property
    def leaves(self) -> list[Atom]:
        return [leaf for leaves in leaves_of(self.eqn.invars, self.each) for leaf in leaves]


def _as_matmuls(eqn: jexc.JaxprEqn) -> _Matmuls | None:
    if eqn.primitive is matmul_p:
        static = eqn.params["static"]
        return _Matmuls(eqn, (MatmulParams(static, (False,) * static.treedef.num_leaves),))
    return _Matmuls(eqn, eqn.params["each"]) if eqn.primitive is matmuls_p else None


def _grouped(jaxpr: jexc.Jaxpr) -> jexc.Jaxpr:
    """The matmuls that share x, and the index, at the place of the first of them."""
    made_at = {out: i for i, eqn in enumerate(jaxpr.eqns) for out in eqn.outvars}
    same = _same_values(jaxpr)

    def is_ready(atom: Atom, at: int) -> bool:
        """Whether a value is there before equation `at`, or can be: it is then only moved."""
        made = -1 if isinstance(atom, jexc.Literal) else made_at.get(atom, -1)
        eqn = jaxpr.eqns[made]
        return made < at or (eqn.primitive.name in _MOVES and all(is_ready(each, at) for each in eqn.invars))

    groups: dict[int, list[_Matmuls]] = {}  # by the place of their first equation
    placed: dict[int, int] = {}  # of each equation, the first of its group
    for i, eqn in enumerate(jaxpr.eqns):
        matmuls = _as_matmuls(eqn)
        if matmuls is None:
            continue

        def joins(first: int, matmuls: _Matmuls = matmuls) -> bool:
            other = groups[first][0]
            alike = same.get(other.eqn.invars[0]) == same.get(matmuls.eqn.invars[0]) and other.number is matmuls.number
            return alike and all(is_ready(leaf, first) for leaf in matmuls.leaves)

        placed[i] = next(filter(joins, groups), i)
        groups.setdefault(placed[i], []).append(matmuls)
    if all(len(group) == 1 for group in groups.values()):
        return jaxpr
    written: set[int] = set()
    eqns: list[jexc.JaxprEqn] = []

    def write(i: int) -> None:
        if i not in written:
            written.add(i)
            eqns.append(jaxpr.eqns[i])

    def prepare(atom: Atom) -> None:
        made = None if isinstance(atom, jexc.Literal) else made_at.get(atom)
        if made is not None and made not in written:
            for each in jaxpr.eqns[made].invars:
                prepare(each)
            write(made)

    for i in range(len(jaxpr.eqns)):
        group = groups.get(placed.get(i, -1), [])
        if len(group) < 2:
            write(i)
        elif placed[i] == i:
            for matmuls in group:
                for leaf in matmuls.leaves:
                    prepare(leaf)
            eqns.append(_together(group))
    return jaxpr.replace(eqns=eqns)


def _same_values(jaxpr: jexc.Jaxpr) -> dict[Atom, Atom]:
    """For each variable the first that has the same value, as far as moves of the same variable tell."""
    same: dict[Atom, Atom] = {var: var for var in (*jaxpr.constvars, *jaxpr.invars)}
    known: dict[Any, Atom] = {}
    for eqn in jaxpr.eqns:
        same.update((out, out) for out in eqn.outvars)
        if eqn.primitive.name in _MOVES and not any(isinstance(atom, jexc.Literal) for atom in eqn.invars):
            key = (eqn.primitive, str(sorted(eqn.params.items())), *(same[atom] for atom in eqn.invars))
            same[eqn.outvars[0]] = known.setdefault(key, eqn.outvars[0])
    return same


def _together(group: Sequence[_Matmuls]) -> jexc.JaxprEqn:
    first = group[0]
    index = [] if first.number is None else [first.number]
    return first.eqn.replace(
        primitive=matmuls_p,
        invars=[first.eqn.invars[0], *index, *(leaf for matmuls in group for leaf in matmuls.leaves)],
        outvars=[out for matmuls in group for out in matmuls.eqn.outvars],
        params={"each": tuple(one for matmuls in group for one in matmuls.each)},
    )


# --- layers of a scan ---


def _with_indexed_scans(jaxpr: jexc.Jaxpr) -> jexc.Jaxpr:
    writer, changed = Writer(), False
    for eqn in jaxpr.eqns:
        scan = _indexed_scan(eqn) if eqn.primitive.name == "scan" else None
        if scan is None:
            writer.add(eqn)
        else:
            writer.inline(scan, eqn.invars, eqn.outvars)
            changed = True
    return writer.jaxpr(jaxpr) if changed else jaxpr


def _indexed_scan(eqn: jexc.JaxprEqn) -> jexc.Jaxpr | None:
    """The scan with a counter beside its `xs`, by which matmuls find their entries in the whole stacks.

    None where no matmul of the body takes its matrix from `xs`.
    """
    params = dict(eqn.params)
    closed, length = params.pop("jaxpr"), params.pop("length")
    num_consts, num_carry = scan_counts(params)
    fixed = num_consts + num_carry
    if closed.consts or closed.jaxpr.effects or not _matmuls_in(closed.jaxpr) or not length:
        return None
    body = inlined(closed.jaxpr, lambda inner: _matmuls_in(inner) > 0)  # a body is compiled once in any case
    index = jexc.Var(ShapedArray((), jnp.int32))
    stacks: dict[tuple[int, tuple[int, ...]], jexc.Var] = {}  # by the position in `xs` and the shape
    writer, origin = Writer(), {var: i for i, var in enumerate(body.invars[fixed:])}
    for inner in body.eqns:
        writer.add(_indexed(inner, index, origin, stacks, length))
        if (made := _reshape_of(inner)) in origin:
            origin[inner.outvars[0]] = origin[made]
    if not stacks:
        return None
    body = without_dead(writer.jaxpr(body))
    read = {atom for each in body.eqns for atom in each.invars if isinstance(atom, jexc.Var)} | set(body.outvars)
    kept = [i for i, var in enumerate(body.invars[fixed:]) if var in read]
    invars = [*stacks.values(), index, *body.invars[:fixed], *(body.invars[fixed + i] for i in kept)]
    body = body.replace(invars=invars, debug_info=body.debug_info.with_unknown_names())
    step = jexc.jaxpr_as_fun(jexc.ClosedJaxpr(body, ()))

    def run(*operands: jax.Array) -> list[jax.Array]:
        consts, carry, xs = operands[:num_consts], operands[num_consts:fixed], operands[fixed:]
        whole = [lax.reshape(xs[i], shape) for i, shape in stacks]

        def body(carry: Sequence[jax.Array], xs: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            number, *rest = xs
            outs = step(*whole, number, *consts, *carry, *rest)
            return outs[:num_carry], outs[num_carry:]

        numbers = lax.iota(jnp.int32, length)
        carry, ys = lax.scan(body, list(carry), [numbers, *(xs[i] for i in kept)], length=length, **params)
        return [*carry, *ys]

    traced = jax.make_jaxpr(run)(*(atom.aval for atom in eqn.invars))
    return None if traced.consts else traced.jaxpr


def _reshape_of(eqn: jexc.JaxprEqn) -> Atom | None:
    """The operand, if the equation only changes its shape."""
    is_transposed = eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None
    if eqn.primitive.name not in _RESHAPES or is_transposed:
        return None
    operand: Atom
    out: Atom
    (operand, *rest), (out,) = eqn.invars, eqn.outvars
    is_same = not rest and not isinstance(operand, jexc.Literal) and operand.aval.size == out.aval.size
    return operand if is_same else None


def _indexed(
    eqn: jexc.JaxprEqn,
    index: jexc.Var,
    origin: dict[Atom, int],
    stacks: dict[tuple[int, tuple[int, ...]], jexc.Var],
    length: int,
) -> jexc.JaxprEqn:
    """The equation, if it is a matmul with leaves from `xs`, with the stacks in their place."""
    if eqn.primitive is not matmul_p:
        return eqn
    x: Atom
    leaves: list[Atom]
    x, *leaves = eqn.invars
    is_stack = tuple(not isinstance(leaf, jexc.Literal) and leaf in origin for leaf in leaves)
    if not any(is_stack):
        return eqn

    def operands() -> Iterator[Atom]:
        for leaf, is_one in zip(leaves, is_stack, strict=True):
            if is_one:
                key = origin[leaf], (length * leaf.aval.shape[0], *leaf.aval.shape[1:])
                yield stacks.setdefault(key, jexc.Var(leaf.aval.update(shape=key[1])))
            else:
                yield leaf

    each = (MatmulParams(eqn.params["static"], is_stack),)
    return eqn.replace(primitive=matmuls_p, invars=[x, index, *operands()], params={"each": each})
