"""Quantize a whole model, leaf by leaf, and back."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import jax

from eformer._src.model.calibration.budget import plan_budget
from eformer._src.model.calibration.calibrate import as_batches
from eformer._src.model.calibration.sequential import in_order
from eformer._src.model.calibration.statistics import Statistic, Statistics, check_statistics
from eformer._src.model.uses.rules_from_use import rules_from_use
from eformer._src.progress import Meter, Progress, progress_bar
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.registry import Format
from eformer._src.quantization.spelling import FormatLike
from eformer._src.user_warnings import warn

from .defaults import default_rules
from .paths import is_abstract, is_quantized, is_weight, named_leaves, nbytes
from .rules import Rule, UnusedRuleWarning, apply_rule, rule_for, warn_unused_rules

Tree = TypeVar("Tree")
DEFAULT: FormatLike = "int4"


class _Step(NamedTuple):
    path: str
    leaf: Any  # of the tree: an array, or whatever else it holds
    rule: Rule | None  # None also for a leaf that is no weight

    @property
    def key(self) -> Hashable:
        """Equal for steps that make the same array: one that occurs twice is quantized once."""
        return (id(self.leaf), self.rule.format, self.rule.options, self.rule.method) if self.rule else None


def quantize_model(
    tree: Tree,
    rules: FormatLike | Sequence[Rule] | None = None,
    *,
    format: FormatLike | None = None,
    function: Callable[..., object] | None = None,
    inputs: Sequence[object] = (),
    donate: bool = False,
    progress: Progress | bool | None = None,
    statistics: Statistics | None = None,
    method: Literal["gptq"] | None = None,
    sequential: bool = False,
    budget: float | None = None,
    **options: object,
) -> Tree:
    """`tree`, of the same structure, with its weights in 4 bits, or in the formats that `rules` choose.

    The tree is any pytree: dicts and lists of arrays, parameters of Flax Linen and Haiku, modules of NNX and Equinox.
    `implicit` runs the model's own code on the result.

    A format, "int4" unless it is given, goes to the matrices of the tree: `quantize_model(params, "int8")`,
    `quantize_model(params, "int4", block_size=64, embeddings="int8")`. `default_rules` finds them by names and shapes,
    and takes the options; with a `function`, `function(tree, *inputs)` is traced, and `rules_from_use` decides by how
    it uses them, and takes the options. The inputs may be `jax.ShapeDtypeStruct`s.

    With `rules`, the first rule that matches a leaf decides, and those above decide over the leaves that no rule
    matches if there is a function. A leaf without a rule stays, as do quantized arrays, integers, and whatever is no
    array. A rule that matches nothing warns (`UnusedRuleWarning`).

    A tree of `jax.ShapeDtypeStruct`s (from `jax.eval_shape`, `nnx.eval_shape`) becomes a tree of quantized arrays that
    hold `ShapeDtypeStruct`s, sharded as the leaves say: compile for it ahead of time, or load a checkpoint into it.

    With `statistics` of what the weights are multiplied by (`calibrate`), errors count as much as they change products:
    scales are fitted for that. `method="gptq"`, also of a single rule, then chooses codes so that errors make up for
    each other, for which it needs second moments. A quantized leaf without statistics warns (`UncalibratedWarning`).
    With `sequential=True` the function runs once more on the inputs, which may be an iterator of batches as `calibrate`
    takes it. Each leaf is quantized when it is reached, so that it makes up for what became of those before it. Leaves
    of a loop, such as layers of a scan, are quantized together.

    A `budget`, in bits a weight or above 64 in bytes, of all leaves together, chooses formats from 2 to 8 bits in place
    of those of the rules, whose axes stay: `plan_budget` tells which, and why.

    Leaves are quantized one after the other. With `donate`, the buffer of a leaf is deleted as soon as its quantized
    form is there, so that memory peaks near one copy of the model; afterwards only the leaves of `tree` that stayed can
    be used. An array that occurs twice is quantized once. `progress` is called with path, bytes done and bytes in all,
    counted in the dense arrays; True shows a bar.

    >>> import jax.numpy as jnp
    >>> from eformer import quantize_model
    >>> quantize_model({"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)}, "int8")["kernel"]
    Array8B(float32[256, 512], 133,120 bytes)
    """
    if isinstance(tree, (str, os.PathLike)):
        raise TypeError(
            f"quantize_model takes a tree of arrays, got the text {str(tree)!r}: `quantize_checkpoint` takes files"
        )
    if inspect.isroutine(tree):
        raise TypeError("quantize_model takes a tree of arrays, got a function: give it as `function`, after the tree")
    if "free" in options:
        raise TypeError("`free` is called `donate` here, as in JAX: `quantize_model(tree, donate=True)`")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"`progress` must be None, True or a function of path, done and total, got {progress!r}")
    batches: list[tuple[Any, ...]] = []
    if function is None:
        if sequential or not (isinstance(inputs, Sequence) and not len(inputs)):
            raise TypeError("`inputs` and `sequential` go with a `function` of the tree and the inputs: none was given")
        given = asked_rules(rules, format, options)
    else:
        rules, format = asked_format(rules, format)
        batches = as_batches(checked_inputs(function, inputs))
        from_use = rules_from_use(function, tree, *batches[0], format=format or DEFAULT, **cast(Any, options))
        given = (*(() if rules is None else checked_rules(rules)), *from_use)
    if method is not None:
        given = tuple(replace(rule, method=method) if rule.format and not rule.method else rule for rule in given)
    if budget is not None:
        planned = plan_budget(
            budget, tree, given, function=function, inputs=iter(batches) if batches else (), statistics=statistics
        )
        given = (*planned, Rule("", None, optional=True))
    named, structure = named_leaves(tree)
    steps = [_Step(path, leaf, rule_for(given, path, leaf)) for path, leaf in named]
    weights = [step for step in steps if is_weight(step.leaf)]
    if not warn_unused_rules(given, {step.path: step.rule for step in weights}):
        _warn_nothing_quantized(weights)

    todo = [step for step in weights if step.rule and step.rule.format and not is_quantized(step.leaf)]
    _check_possible(todo)
    if statistics is not None:
        check_statistics(statistics, named, [step.path for step in todo])
    uses = Counter(id(leaf) for _, leaf in named)  # leaves that stay keep their array alive
    made: dict[Hashable, object] = {}
    known: Mapping[str, Statistic] = {} if statistics is None else statistics
    told = progress if callable(progress) else None
    with progress_bar() if progress is True else contextlib.nullcontext(told) as show:
        meter = Meter(show, sum(nbytes(step.leaf) for step in todo))
        if sequential:
            made = _made_in_order(function, tree, batches, steps, todo, known, meter)
            todo = [step for step in todo if step.key not in made]
        for step in todo:
            leaf = step.leaf
            if step.key not in made:
                # Wait: else dense leaves and temporaries of many steps would be alive at once.
                made[step.key] = jax.block_until_ready(apply_rule(step.rule, step.path, leaf, known.get(step.path)))
            uses[id(leaf)] -= 1
            if donate and not uses[id(leaf)] and isinstance(leaf, jax.Array):
                leaf.delete()
            meter.add(step.path, nbytes(leaf))
    return jax.tree.unflatten(structure, [made.get(step.key, step.leaf) for step in steps])


def _made_in_order(
    function: Callable[..., object] | None,
    tree: object,
    batches: Sequence[tuple[Any, ...]],
    steps: Sequence[_Step],
    todo: Sequence[_Step],
    known: Mapping[str, Statistic],
    meter: Meter,
) -> dict[Hashable, object]:
    """What `sequential` makes; it leaves out leaves that the function does not use."""
    assert function is not None
    numbers = {step.path: i for i, step in enumerate(steps)}
    chosen = {numbers[step.path]: step for step in todo}

    def quantize(i: int, statistic: Statistic | None) -> object:
        path, leaf, rule = chosen[i]
        found = statistic or known.get(path)
        if found is None and rule is not None:
            rule = replace(rule, method=None)  # a leaf that no matmul uses
        made = jax.block_until_ready(apply_rule(rule, path, leaf, found))
        meter.add(path, nbytes(leaf))
        return made

    return {steps[i].key: made for i, made in in_order(function, tree, batches, chosen, quantize).items()}


# A lone array becomes a dense one; type checkers take the first that fits.
@overload
def dequantize(tree: QuantizedArray) -> jax.Array: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def dequantize(tree: Tree) -> Tree: ...
def dequantize(tree: Any) -> Any:
    """`tree` with each quantized array made dense, in the dtype it had; an array that occurs twice is made once.

    A single quantized array is a tree too, and becomes one dense array. Dense arrays, and whatever is no array, stay.

    >>> import jax.numpy as jnp
    >>> from eformer import dequantize, quantize
    >>> dequantize(quantize(jnp.ones(4), "int8"))
    Array([1., 1., 1., 1.], dtype=float32)
    """
    named, structure = named_leaves(tree)
    made: dict[int, object] = {}
    for _, leaf in named:
        if is_quantized(leaf) and id(leaf) not in made:
            if is_abstract(leaf):
                made[id(leaf)] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            else:
                made[id(leaf)] = jax.block_until_ready(leaf.materialize())
    return jax.tree.unflatten(structure, [made.get(id(leaf), leaf) for _, leaf in named])


def _check_possible(todo: Sequence[_Step]) -> None:
    """Raise what a leaf would raise, before the first leaf is quantized, or freed."""
    distinct = {(step.leaf.shape, step.leaf.dtype, id(step.rule)): step for step in reversed(todo)}
    for path, leaf, rule in distinct.values():
        apply_rule(rule, path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def asked_format(
    rules: FormatLike | Sequence[Rule] | None, format: FormatLike | None
) -> tuple[Sequence[Rule] | None, FormatLike | None]:
    """The rules and the format: the second argument of a function may be either."""
    if not isinstance(rules, (str, Format)):
        return rules, format
    if isinstance(rules, str) and "=" in rules.partition(",")[0]:
        raise TypeError(
            f"`rules` must be a format or a sequence of `Rule`s, got {rules!r}: `[parse_rule(text)]` reads it"
        )
    if format is not None:
        raise TypeError(f"the format is given twice: the second argument is {str(rules)!r}, and `format` {format!r}")
    return None, rules


def asked_rules(
    rules: FormatLike | Sequence[Rule] | None,
    format: FormatLike | None,
    options: Mapping[str, object],
    default: FormatLike = DEFAULT,
) -> tuple[Rule, ...]:
    """The `rules`, or `default_rules` of the format with these options."""
    rules, format = asked_format(rules, format)
    if rules is None:
        return default_rules(default if format is None else format, **cast(Any, options))
    given = [*["format"] * (format is not None), *options]
    if given:
        raise TypeError(f"{', '.join(map(repr, given))} can't be given beside `rules`: say it in the rules themselves")
    return checked_rules(rules)


def checked_inputs(function: object, inputs: Any) -> Sequence[object]:
    if not callable(function):
        raise TypeError(f"`function` must be a function of the tree and the inputs, got {type(function).__name__}")
    if isinstance(inputs, (list, tuple)):
        return inputs
    what = f"{inputs.dtype}{list(inputs.shape)}" if hasattr(inputs, "dtype") else type(inputs).__name__
    raise TypeError(
        f"`inputs` must be a tuple of what `function` takes after the tree, got {what}: for one input, write "
        f"`inputs=(x,)`"
    )


def checked_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    if isinstance(rules, Rule) or not isinstance(rules, Iterable):
        raise TypeError(
            f"`rules` must be a format or a sequence of `Rule`s, got {type(rules).__name__} {rules!r}: "
            f"{'put it into a list' if isinstance(rules, Rule) else 'options of a format are given by name'}"
        )
    if isinstance(rules, Mapping):
        raise TypeError(
            f"`rules` must be a format or a sequence of `Rule`s, got {type(rules).__name__}: write "
            f"`[Rule(pattern, format), ...]`"
        )
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"`rules` must hold `Rule`s, got {type(rule).__name__} {rule!r}: `Rule(pattern, format)` makes one, "
                f"and `parse_rule` reads a text"
            )
    return tuple(rules)


def _warn_nothing_quantized(weights: Sequence[_Step]) -> None:
    if not weights or any(is_quantized(step.leaf) or (step.rule and step.rule.format) for step in weights):
        return
    path, leaf, rule = max(weights, key=lambda step: math.prod(step.leaf.shape))
    warn(
        f"the rules quantize nothing: the largest leaf is {path!r}, {leaf.dtype}{list(leaf.shape)}, and its rule is "
        f"{repr(str(rule)) if rule else 'none'}",
        UnusedRuleWarning,
    )
