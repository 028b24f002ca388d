"""Rules: which function runs a primitive on which arrays; without one, the arrays are materialized."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jexc
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .array import ImplicitArray, is_implicit, materialize
from .instrumentation import UNWATCHED, mode, note_fallback, note_served, serving
from .types import Annotation, Value

Operand = ImplicitArray | Any  # the annotation of operands that are implicit arrays or anything else
Handler = Callable[..., Value]
_DENSE = (jax.Array, np.ndarray, np.generic, int, float, bool, complex)
_RENAMED = {"pjit": "jit", "remat": "remat2", "checkpoint": "remat2"}  # names that people know and JAX changed
_COMMUTATIVE = frozenset(
    {lax.add_p, lax.mul_p, lax.max_p, lax.min_p, lax.and_p, lax.or_p, lax.xor_p, lax.eq_p, lax.ne_p}
)


@dataclasses.dataclass(frozen=True)
class _Operand:
    """What a handler's annotation of one operand admits."""

    classes: tuple[type[ImplicitArray], ...]
    dense: bool  # admits arrays and scalars
    anything: bool  # admits implicit arrays that `classes` does not name

    def distance(self, kind: type) -> tuple[int, int] | None:
        """How specific the annotation is for an operand of this class, smaller is more; None if it does not admit it.

        For an implicit array first the steps from its class to the one named: all of its bases if none is.
        """
        breadth = len(self.classes) + self.dense + self.anything
        if not issubclass(kind, ImplicitArray):
            return (0, breadth) if self.dense or self.anything else None
        steps = [kind.__mro__.index(cls) for cls in self.classes if issubclass(kind, cls)]
        if not steps and not self.anything:
            return None
        return min(steps, default=len(kind.__mro__)), breadth


_NOTHING = _Operand((), dense=False, anything=False)


@dataclasses.dataclass(frozen=True)
class _Rule:
    handler: Handler
    operands: tuple[_Operand, ...]
    rest: _Operand  # the annotation of `*operands`
    required: int
    precedence: int
    order: int

    def specificity(self, kinds: Sequence[type]) -> tuple[int | tuple[int, ...], ...] | None:
        """A sort key, smallest first; None if the handler does not take operands of these classes."""
        count = len(kinds)
        if count < self.required:
            return None
        annotations = [*self.operands, *[self.rest] * count][:count]
        distances = [each.distance(kind) for each, kind in zip(annotations, kinds, strict=True)]
        admitted = [distance for distance in distances if distance is not None]
        if len(admitted) < count:
            return None
        implicit = [(d[0], kind) for d, kind in zip(admitted, kinds, strict=True) if issubclass(kind, ImplicitArray)]
        if implicit and all(steps == len(kind.__mro__) for steps, kind in implicit):  # none is named
            return None
        return (-self.precedence, *zip(*admitted, strict=True), -self.order)


_rules: dict[Primitive, list[_Rule]] = {}
on_register: list[Callable[[], None]] = []  # caches that hold traces of older rules


def register(primitive: Primitive | str, *, precedence: int = 0) -> Callable[[Handler], Handler]:
    """Make a function the rule of a primitive, by name or object, for the arrays its annotations name.

    The handler is called as `handler(primitive, *operands, **params)`, with implicit and dense operands as they are,
    and returns what the primitive would: arrays of that shape and dtype, dense or implicit. Unions admit each member.
    A handler that has no use for the primitive leaves it out: its first argument is then annotated as an operand.
    Several rules are asked in order: the highest `precedence` first, then the rule that names the operands' classes
    most closely, then the latest. A rule that returns `NotImplemented` passes on to the next. If none is left, the
    operands are materialized.

    Register at import time: traces that `jax.jit` has cached keep the rules they were made with.
    """
    primitives = _resolve(primitive)

    def decorate(handler: Handler) -> Handler:
        for each in primitives:
            rules = _rules.setdefault(each, [])
            rules.append(_rule_of(handler, each, precedence, order=len(rules)))
        _plan.cache_clear()
        for clear in on_register:
            clear()
        return handler

    return decorate


def dispatch(
    primitive: Primitive, operands: Sequence[Value], tracers: Sequence[Value], params: dict[str, Any]
) -> Value:
    """Run `primitive` where an operand is implicit, or a jaxpr in `params` closes over an implicit array.

    `tracers` are the operands as JAX knows them: their types are those of dense arrays.
    """
    kinds = tuple([type(o) if isinstance(o, ImplicitArray) else jax.Array for o in operands])
    classes, candidates = _plan(primitive, kinds)
    # Raises as dense JAX does, before a rule sees operands that do not fit. In control flow each step is checked.
    checked = candidates and next(iter(jexc.jaxprs_in_params(params)), None) is None
    expected = primitive.abstract_eval(*map(jax.typeof, tracers), **params)[0] if checked else None
    for handler, name, swapped in candidates:
        given = operands[::-1] if swapped else operands
        if mode.value is UNWATCHED:
            out = handler(primitive, *given, **params)
        else:
            with serving(primitive, classes, name):
                out = handler(primitive, *given, **params)
                note_served(out)
        if out is not NotImplemented:
            return out if expected is None else _checked(primitive, name, expected, out)
    if not classes:
        return primitive.bind(*operands, **params)
    note_fallback(primitive, dict.fromkeys(type(o) for o in operands if is_implicit(o) and not o._is_part()))
    with serving(primitive, classes, "materialize"):
        note_served()
        return materialize_rule(primitive, *operands, **params)


def materialize_rule(primitive: Primitive, *operands: Operand, **params: object) -> Value:
    """Same primitive, same params, dense operands."""
    return primitive.bind(*map(materialize, operands), **params)


@functools.lru_cache(maxsize=4096)
def _plan(
    primitive: Primitive, kinds: tuple[type, ...]
) -> tuple[tuple[type[ImplicitArray], ...], tuple[tuple[Handler, str, bool], ...]]:
    """For operands of these classes: the implicit ones, and the handlers to ask (name, operands swapped?) in turn."""
    classes = tuple(dict.fromkeys(kind for kind in kinds if issubclass(kind, ImplicitArray)))
    orders = [(kinds, False)]
    if primitive in _COMMUTATIVE and any(cls.commute_ops for cls in classes):
        orders.append((kinds[::-1], True))
    candidates = []
    for order, swapped in orders:
        ranked = [(rule.specificity(order), rule.handler) for rule in _rules.get(primitive, ())]
        admitted = sorted([(key, handler) for key, handler in ranked if key is not None], key=operator.itemgetter(0))
        candidates += [(h, f"{h.__module__}.{h.__qualname__}", swapped) for _, h in admitted]
    return classes, tuple(candidates)


def _checked(primitive: Primitive, name: str, expected: Any, out: Value) -> Value:
    """`out`, if it has the expected shape and dtype, or a list of such."""
    if primitive.multiple_results and isinstance(expected, (list, tuple)):
        if not isinstance(out, (list, tuple)) or len(out) != len(expected):
            raise TypeError(
                f"rule {name} for `{primitive.name}` must return a list of {len(expected)} arrays, got {out!r}"
            )
        return [_checked(primitive, name, e, o) for e, o in zip(expected, out, strict=True)]
    if not (hasattr(out, "shape") and hasattr(out, "dtype")):
        raise TypeError(
            f"rule {name} for `{primitive.name}` must return an array or NotImplemented, got {type(out).__name__}"
        )
    if tuple(out.shape) != expected.shape or out.dtype != expected.dtype:
        raise TypeError(
            f"rule {name} for `{primitive.name}` returned {out.dtype}{list(out.shape)}, but dense operands give "
            f"{expected.dtype}{list(expected.shape)}"
        )
    if not isinstance(out, ImplicitArray) and jax.typeof(out).weak_type and not expected.weak_type:
        return lax.convert_element_type(out, expected.dtype)
    return out


def _resolve(primitive: Primitive | str) -> Sequence[Primitive]:
    if isinstance(primitive, Primitive):
        return [primitive]
    if not isinstance(primitive, str):
        raise TypeError(
            f"register takes a primitive or its name, got {type(primitive).__name__} {primitive!r}; "
            f'`@register("dot_general")` and `@register(jax.lax.dot_general_p)` work'
        )
    known = _known_primitives()
    name = primitive if primitive in known else _RENAMED.get(primitive, primitive)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see jax.extend.core.primitives"
        raise ValueError(f"JAX has no primitive named {primitive!r}; {hint}")
    return known[name]


def _known_primitives() -> dict[str, list[Primitive]]:
    found = [*vars(jexc.primitives).values(), *vars(lax).values()]
    found += [*batching.fancy_primitive_batchers, *ad.primitive_jvps]
    known: dict[str, list[Primitive]] = {}
    for each in dict.fromkeys(p for p in found if isinstance(p, Primitive)):
        known.setdefault(each.name, []).append(each)
    return known


_OPERAND_NAMES = frozenset({"lhs", "rhs", "x", "y", "operand", "operands", "q"})


def _rule_of(handler: Handler, primitive: Primitive, precedence: int, order: int) -> _Rule:
    try:
        hints = typing.get_type_hints(handler)
    except NameError as error:
        raise TypeError(
            f"handler {handler.__qualname__} for `{primitive.name}` has an annotation that its module does not define: "
            f"{error}; define or import the class there, or leave out `from __future__ import annotations`"
        ) from error
    positional, rest = [], _NOTHING
    parameters = list(inspect.signature(handler).parameters.values())
    if parameters and not _is_operand(parameters[0], hints):
        del parameters[0]  # the primitive
        run = handler
    else:
        run = functools.wraps(handler)(lambda primitive, *operands, **params: handler(*operands, **params))
    for parameter in parameters:
        annotation = hints.get(parameter.name, Any)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append((parameter, _operand_of(annotation)))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = _operand_of(annotation)
    operands = tuple(operand for _, operand in positional)
    if not any(operand.classes for operand in (*operands, rest)):
        given = ", ".join(str(p) for p in parameters if p.kind is not p.VAR_KEYWORD) or "none"
        raise TypeError(
            f"handler {handler.__qualname__} for `{primitive.name}` annotates no operand with an ImplicitArray class, "
            f"so it would never run (operands: {given}); write, say, `x: MyArray` or `x: jax.Array | MyArray`"
        )
    required = sum(parameter.default is parameter.empty for parameter, _ in positional)
    return _Rule(run, operands, rest, required, precedence, order)


def _is_operand(parameter: inspect.Parameter, hints: dict[str, Annotation]) -> bool:
    """Whether a handler's first parameter is an operand and not the primitive: its annotation tells, or its name."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return True
    if hints.get(parameter.name, Any) is Any:
        return parameter.name in _OPERAND_NAMES
    admitted = _members(hints[parameter.name])
    return any(inspect.isclass(m) and issubclass(m, (ImplicitArray, *_DENSE)) for m in admitted)


def _operand_of(annotation: Annotation) -> _Operand:
    members = _members(annotation)
    classes = tuple(m for m in members if inspect.isclass(m) and issubclass(m, ImplicitArray))
    dense = any(inspect.isclass(m) and not issubclass(m, ImplicitArray) for m in members)
    return _Operand(classes, dense, anything=Any in members)


def _members(annotation: Annotation) -> list[Annotation]:
    if type(annotation).__name__ == "TypeAliasType":  # `type X = ...`, from Python 3.12 on
        return _members(annotation.__value__)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [m for each in typing.get_args(annotation) for m in _members(each)]
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (list, tuple, collections.abc.Sequence):
        return [m for each in typing.get_args(annotation) if each is not ... for m in _members(each)]
    return [annotation]
