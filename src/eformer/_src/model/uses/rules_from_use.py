"""Rules from use: a function is traced, and each leaf is quantized along the axis that the function contracts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from eformer._src.jaximus.function import check_function_first
from eformer._src.jaximus.trace import implicit
from eformer._src.model.defaults import MIN_SIZE
from eformer._src.model.paths import is_abstract, is_quantized, is_weight, named_leaves
from eformer._src.model.rules import Rule
from eformer._src.quantization.registry import find_format
from eformer._src.quantization.spelling import FormatLike, read_format
from eformer._src.quantization.validation import an_int

from .choose import Decision, FormatChooser
from .find import Use, find_uses


def rules_from_use(
    function: Callable[..., object],
    params: object,
    *inputs: object,
    format: FormatLike = "int4",
    embeddings: FormatLike | None = "int8",
    min_size: int = MIN_SIZE,
    **options: object,
) -> tuple[Rule, ...]:
    """Rules for the leaves of `params`, by what `function(params, *inputs)` does with them.

    The function is traced, not run: parameters and inputs may be `jax.ShapeDtypeStruct`s. Blocks run along the axis
    that a matmul or a convolution contracts; if uses differ, along the axis with the most work. If several axes serve,
    the first with which nothing is made dense is taken. A leaf that is gathered is an embedding, even if a matmul uses
    it too: it takes the format `embeddings`, with blocks along its features, or stays if that is None. Leaves also stay
    if every use would make them dense (a leaf that is added), if the function does not use them, or if they have fewer
    than `min_size` elements. Each rule tells its `reason`. `options` go to `format`.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import rules_from_use
    >>> params = {"w": jnp.ones((256, 4, 64)), "scale": jnp.ones(4096)}
    >>> for rule in rules_from_use(lambda p, x: jnp.einsum("bd,dhf->bhf", x, p["w"]), params, jnp.ones((2, 256))):
    ...     print(rule, "|", rule.reason)
    ^scale$=keep | the function does not use it
    ^w$=int4,axis=-3 | summed over axis -3 by dot_general
    """
    check_function_first(function, "rules_from_use(function, params, *inputs)")
    an_int("min_size", min_size)
    form, options = read_format(format, options, also=("method", "embeddings", "min_size"))
    method: Any = options.pop("method", None)
    theirs = None if embeddings is None else read_format(embeddings)
    if theirs is not None and theirs == (form, {}):
        theirs = (form, options)
    named, arguments, call = flat_call(function, params, inputs)
    leaves = [leaf for _, leaf in named]
    weights = {i: leaf for i, leaf in enumerate(leaves) if is_weight(leaf) and not is_quantized(leaf)}
    large = {i: leaf for i, leaf in weights.items() if math.prod(leaf.shape) >= max(min_size, 1)}
    found = find_uses(call, arguments, large)
    # An array that occurs twice is quantized once, for all its uses; of abstract ones that can't be told.
    array = {i: i if is_abstract(leaf) else id(leaf) for i, leaf in large.items()}
    of_array: dict[int, list[Use]] = {}
    for i in large:
        of_array.setdefault(array[i], []).extend(found.get(i, []))

    structs = {i: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for i, leaf in large.items()}
    choose = FormatChooser(structs, {i: of_array[array[i]] for i in large}, (form, options), theirs)
    small = Decision(f"fewer than {min_size:,} elements")
    rules = _as_rules({named[i][0]: choose(i) if i in large else small for i in weights})
    return tuple(replace(rule, method=method) if method and rule.format == form.name else rule for rule in rules)


def flat_call(
    function: Callable[..., object], params: object, inputs: Sequence[object]
) -> tuple[list[tuple[str, Any]], list[Any], Callable[[list[Any]], object]]:
    """The leaves of `params` with their paths, those and the leaves of the inputs, and the function of the latter."""
    named, structure = named_leaves(params)
    leaves = [leaf for _, leaf in named]
    flat_inputs, input_structure = jax.tree.flatten(tuple(inputs))
    run = implicit(function) if any(map(is_quantized, leaves)) else function

    def call(flat: list[Any]) -> object:
        params = jax.tree.unflatten(structure, flat[: len(leaves)])
        return run(params, *jax.tree.unflatten(input_structure, flat[len(leaves) :]))

    return named, [*leaves, *flat_inputs], call


def _as_rules(decided: Mapping[str, Decision]) -> Iterator[Rule]:
    """A rule for each leaf, or one rule for leaves with the same decision whose paths differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for path in decided:
        groups.setdefault(re.sub(r"\d+", r"\\d+", re.escape(path)), []).append(path)
    for pattern, paths in groups.items():
        alike = len(paths) > 1 and len({decided[path] for path in paths}) == 1
        for name, path in [(pattern, paths[0])] if alike else [(re.escape(path), path) for path in paths]:
            reason, form, options = decided[path]
            yield Rule(f"^{name}$", None if form is None else find_format(form), options, optional=True, reason=reason)
