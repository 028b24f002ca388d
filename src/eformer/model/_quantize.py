"""Quantize a whole model, leaf by leaf, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from eformer._warnings import warn
from eformer.ops.quantization import QuantizedArray

from ._defaults import default_rules
from ._from_use import rules_from_use
from ._paths import is_abstract, is_quantized, is_weight, named_leaves, nbytes
from ._progress import Progress, showing
from ._rules import Rule, apply_rule, find_rule

Tree = TypeVar("Tree")


class UnusedRuleWarning(UserWarning):
    """A rule that matched no leaf, or rules that changed none: often a misspelt pattern."""


class _Step(NamedTuple):
    path: str
    leaf: Any
    rule: Rule | None  # None also where there is nothing to do


def quantize_model(
    tree: Tree,
    rules: Sequence[Rule] | None = None,
    *,
    format: str = "nf4",
    function: Callable[..., Any] | None = None,
    inputs: Sequence[Any] = (),
    free: bool = False,
    progress: Progress | bool | None = None,
) -> Tree:
    """`tree`, of the same structure, with its floating point leaves in the formats that `rules` say.

    Any pytree: dicts and lists of arrays, parameters of Flax Linen and Haiku, modules of NNX and Equinox. The first
    rule that matches a leaf decides; a leaf that none matches stays, and so do quantized arrays, integers, and all that
    is no array. A rule that matches nothing warns (`UnusedRuleWarning`). Run the model's own code on the result with
    `implicit`.

    With a `function`, `function(tree, *inputs)` is traced, and `rules_from_use` decide over the leaves that `rules` do
    not match; the inputs may be `jax.ShapeDtypeStruct`s. With neither, `default_rules(format)` guess by names.

    A tree of `jax.ShapeDtypeStruct`s (`jax.eval_shape`, `nnx.eval_shape`) becomes one of quantized arrays that hold
    such, laid out as the leaves say: to compile for ahead of time, and to load a checkpoint into.

    One leaf after the other: with `free`, the buffer of a leaf is deleted as soon as its quantized form is there, so
    that memory peaks near one copy of the model; `tree` can't be used any more then, but for the leaves that stayed.
    An array that occurs twice is quantized once. `progress` is called with path, bytes done and bytes in all, of the
    dense arrays; True shows a bar.

    >>> import jax.numpy as jnp
    >>> from eformer.model import quantize_model
    >>> quantize_model({"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)}, format="int8")["kernel"]
    Array8B(float32[256, 512], 133,120 bytes)
    """
    given = () if rules is None else _checked(rules)
    if function is not None:
        given += rules_from_use(function, tree, *inputs, format=format)
    elif inputs:
        raise TypeError("`inputs` are the arguments of `function` after the tree, and no `function` was given")
    elif rules is None:
        given = default_rules(format)
    named, structure = named_leaves(tree)
    steps = [_Step(path, leaf, rule_for(given, path, leaf)) for path, leaf in named]
    _warn_unused(given, steps)

    todo = [
        (path, leaf, rule) for path, leaf, rule in steps if rule and rule.format is not None and not is_quantized(leaf)
    ]
    _check_possible(todo)
    uses = Counter(id(leaf) for _, leaf in named)  # those that stay keep their array alive
    made: dict[Any, Any] = {}
    total, done = sum(nbytes(leaf) for _, leaf, _ in todo), 0
    with showing(progress) as show:
        for path, leaf, rule in todo:
            key = _key(leaf, rule)
            if key not in made:
                # Waited for: else dense leaves and temporaries of many steps would be alive at once.
                made[key] = jax.block_until_ready(apply_rule(rule, path, leaf))
            uses[id(leaf)] -= 1
            done += nbytes(leaf)
            if free and not uses[id(leaf)] and isinstance(leaf, jax.Array):
                leaf.delete()
            show(path, done, total)
    return jax.tree.unflatten(structure, [made.get(_key(leaf, rule), leaf) for _, leaf, rule in steps])


def _key(leaf: Any, rule: Rule | None) -> Any:
    return (id(leaf), rule.format, rule.options) if rule else None


def dequantize(tree: Tree) -> Tree:
    """`tree` with each quantized array made dense, in the dtype it had; one that occurs twice, once.

    A single quantized array is a tree too, and becomes one dense array. Dense arrays, and whatever is no array, stay.

    >>> import jax.numpy as jnp
    >>> from eformer import dequantize, quantize
    >>> dequantize(quantize(jnp.ones(4), dtype="int8"))
    Array([1., 1., 1., 1.], dtype=float32)
    """
    named, structure = named_leaves(tree)
    made: dict[int, Any] = {}
    for _, leaf in named:
        if is_quantized(leaf) and id(leaf) not in made:
            made[id(leaf)] = _dense_type(leaf) if is_abstract(leaf) else jax.block_until_ready(leaf.materialize())
    return jax.tree.unflatten(structure, [made.get(id(leaf), leaf) for _, leaf in named])


dequantize_model = dequantize


def _dense_type(leaf: QuantizedArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def unused_rules(tree: Any, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Those that decide over no leaf of `tree`, and are not optional."""
    used = {id(rule_for(rules, path, leaf)) for path, leaf in named_leaves(tree)[0]}
    return tuple(rule for rule in rules if id(rule) not in used and not rule.optional)


def rule_for(rules: Sequence[Rule], path: str, leaf: Any) -> Rule | None:
    """The rule that decides over a leaf; None if none does."""
    # Integers are counts and indices, which have to stay exact; a quantized array stays, but its rule is in use.
    return find_rule(rules, path, leaf) if is_weight(leaf) else None


def _check_possible(todo: Sequence[tuple[str, Any, Rule]]) -> None:
    """Raise what the leaves would, before the first is quantized, or freed."""
    distinct = {(leaf.shape, leaf.dtype, id(rule)): (path, leaf, rule) for path, leaf, rule in reversed(todo)}
    for path, leaf, rule in distinct.values():
        apply_rule(rule, path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def _checked(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    if isinstance(rules, (Rule, str)):
        raise TypeError(f"`rules` must be a sequence of rules, got one {type(rules).__name__}: put it into a list")
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"`rules` must hold `Rule`s, got {type(rule).__name__} {rule!r}; `parse_rule` reads strings"
            )
    return tuple(rules)


def _warn_unused(rules: Sequence[Rule], steps: Sequence[_Step]) -> None:
    used = {id(step.rule) for step in steps}
    unused = [str(rule) for rule in rules if id(rule) not in used and not rule.optional]
    weights = [step for step in steps if is_weight(step.leaf)]
    if unused:
        some = ", ".join(repr(step.path) for step in weights[:3]) or "there are no floating point arrays"
        _warn(f"no leaf is left for {_quoted(unused)}: paths look like this: {some}")
    elif weights and not any(is_quantized(s.leaf) or (s.rule and s.rule.format) for s in weights):
        largest = max(weights, key=lambda step: np.prod(step.leaf.shape))
        _warn(
            f"the rules quantize nothing: the largest leaf is {largest.path!r}, {largest.leaf.dtype}"
            f"{list(largest.leaf.shape)}, and its rule is {f'{str(largest.rule)!r}' if largest.rule else 'none'}"
        )


def _quoted(rules: Sequence[str]) -> str:
    return f"the rule{'s' if len(rules) > 1 else ''} {', '.join(map(repr, rules))}"


def _warn(message: str) -> None:
    warn(message, UnusedRuleWarning)
