"""Compare a model with its quantized form."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eformer._src.model.paths import Typed, is_quantized, named_leaves, nbytes
from eformer._src.model.rules import Rule, rule_for, unused_rules
from eformer._src.quantization.registry import format_names

from .distance import distance
from .histogram import histogram_of
from .report import Leaf, Report


def report(before: object, after: object, *, rules: Sequence[Rule] = (), histogram: str | None = None) -> Report:
    """Compare a model with its quantized form, leaf by leaf.

    `before` may have been freed, or be abstract (from `jax.eval_shape`): then the report has sizes and no errors. With
    `rules`, it also lists the rules that matched nothing, and the reason of each decision where a rule has one (those
    of `rules_from_use` do). `histogram` is the path of the leaf whose values are counted; by default the quantized leaf
    with the largest error.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import quantize_model, report
    >>> before = {"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)}
    >>> print(report(before, quantize_model(before, "nf4")))
    path      shape    format    before    after   bits  error  SNR dB   cosine
    --------  -------  -------  -------  -------  -----  -----  ------  -------
    bias      512      float32  2.05 kB  2.05 kB  32.00
    kernel    256x512  nf4       524 kB  73.7 kB   4.50  0.00%     inf  1.00000
    --------  -------  -------  -------  -------  -----  -----  ------  -------
    2 arrays                     526 kB  75.8 kB   4.61  0.00%     inf  1.00000
    """
    named_before, named_after = named_leaves(before)[0], named_leaves(after)[0]
    paths, paths_after = [path for path, _ in named_before], [path for path, _ in named_after]
    if paths != paths_after:
        only = ", ".join(map(repr, sorted({*paths} ^ {*paths_after})[:3]))
        raise ValueError(
            f"the trees must have the same leaves, but {len(paths)} before and {len(paths_after)} after differ in "
            f"{only or 'their order'}"
        )
    leaves, seen_before, seen_after = [], set[int](), set[int]()
    chosen = [rule_for(rules, path, leaf) for path, leaf in named_before]
    for (path, old), (_, new), rule in zip(named_before, named_after, chosen, strict=True):
        if not (hasattr(old, "dtype") and hasattr(new, "dtype")):
            continue  # a function, a flag, a Python number
        if tuple(old.shape) != tuple(new.shape):
            raise ValueError(f"{path!r} was {list(old.shape)} and is {list(new.shape)}: that is another array")
        shared = id(old) in seen_before and id(new) in seen_after
        kind = tuple(new.shape), str(new.dtype), _format_name(new), is_quantized(new) and new is not old, shared
        reason = rule.reason if rule else ""
        leaves.append(Leaf(path, *kind, nbytes(old), nbytes(new), distance(old, new), reason))
        seen_before.add(id(old))
        seen_after.add(id(new))
    found = Report(tuple(leaves), unused_rules(rules, chosen))
    counted = histogram or (found.worst.path if found.worst else None)
    if counted is None:
        return found
    if counted not in (leaf.path for leaf in leaves):
        raise ValueError(
            f"there is no leaf {counted!r} to count the values of; there are "
            f"{', '.join(repr(leaf.path) for leaf in leaves[:3])}"
        )
    values = histogram_of(counted, dict(named_before)[counted], dict(named_after)[counted])
    return dataclasses.replace(found, histogram=values)


def _format_name(leaf: Typed) -> str:
    if not is_quantized(leaf):
        return str(leaf.dtype)
    return "/".join(format_names(leaf)) or type(leaf).__name__
