"""Compare a model with its quantized form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eformer.ops.quantization import formats

from ._distance import distance
from ._histogram import histogram_of
from ._paths import is_quantized, named_leaves, nbytes
from ._quantize import rule_for, unused_rules
from ._report import Leaf, Report
from ._rules import Rule


def report(before: Any, after: Any, *, rules: Sequence[Rule] = (), histogram: str | None = None) -> Report:
    """Compare a model with its quantized form, leaf by leaf.

    `before` may have been freed, or be abstract (of `jax.eval_shape`): then there are sizes and no errors. `rules` are
    asked which of them matched nothing, and why they decided as they did (those of `rules_from_use` tell). `histogram`
    is the path of the leaf whose values are counted; by default the quantized leaf with the largest error.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import quantize_model, report
    >>> before = {"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)}
    >>> print(report(before, quantize_model(before)))
    path      shape    format    before    after   bits  error  SNR dB   cosine
    --------  -------  -------  -------  -------  -----  -----  ------  -------
    bias      512      float32  2.05 kB  2.05 kB  32.00
    kernel    256x512  nf4       524 kB  73.7 kB   4.50  0.00%     inf  1.00000
    --------  -------  -------  -------  -------  -----  -----  ------  -------
    2 arrays                     526 kB  75.8 kB   4.61  0.00%     inf  1.00000
    """
    named_before, named_after = named_leaves(before)[0], named_leaves(after)[0]
    paths = [[path for path, _ in named] for named in (named_before, named_after)]
    if paths[0] != paths[1]:
        only = sorted(set(paths[0]) ^ set(paths[1]))
        raise ValueError(
            f"the trees must have the same leaves, but {len(paths[0])} before and {len(paths[1])} after differ in "
            f"{', '.join(map(repr, only[:3])) or 'their order'}"
        )
    leaves, seen_before, seen_after = [], set[int](), set[int]()
    for (path, old), (_, new) in zip(named_before, named_after, strict=True):
        if not (hasattr(old, "dtype") and hasattr(new, "dtype")):
            continue  # a function, a flag, a Python number
        _check_shapes(path, old, new)
        shared = id(old) in seen_before and id(new) in seen_after
        rule = rule_for(rules, path, old)
        leaves.append(_leaf(path, old, new, shared, rule.reason if rule else ""))
        seen_before.add(id(old))
        seen_after.add(id(new))
    found = Report(tuple(leaves), tuple(map(str, unused_rules(before, rules))))
    chosen = histogram or (found.worst.path if found.worst else None)
    if chosen is None:
        return found
    if chosen not in (leaf.path for leaf in leaves):
        raise ValueError(f"there is no leaf {chosen!r} to count the values of; there are {_some(leaves)}")
    return Report(
        found.leaves, found.unused_rules, histogram_of(chosen, dict(named_before)[chosen], dict(named_after)[chosen])
    )


def _some(leaves: Sequence[Leaf]) -> str:
    return ", ".join(repr(leaf.path) for leaf in leaves[:3])


def _check_shapes(path: str, before: Any, after: Any) -> None:
    if tuple(before.shape) != tuple(after.shape):
        raise ValueError(f"{path!r} was {list(before.shape)} and is {list(after.shape)}: that is another array")


def _leaf(path: str, before: Any, after: Any, shared: bool, reason: str) -> Leaf:
    return Leaf(
        path,
        tuple(after.shape),
        str(after.dtype),
        _format_name(after),
        is_quantized(after) and after is not before,
        shared,
        nbytes(before),
        nbytes(after),
        distance(before, after),
        reason,
    )


def _format_name(leaf: Any) -> str:
    if not is_quantized(leaf):
        return str(leaf.dtype)
    names = [form.name for form in formats() if form.array_type is type(leaf)]
    return "/".join(names) or type(leaf).__name__  # the array does not tell a ternary from a binary one
