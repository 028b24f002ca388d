"""Training with quantization in the loss: weights are rounded in the forward pass, and trained as if they were not."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from eformer._src.jaximus.ste import ste
from eformer._src.model.paths import is_quantized, is_weight, named_leaves
from eformer._src.model.quantize import asked_rules, quantize_model
from eformer._src.model.rules import Rule, apply_rule, named_errors, rule_for, warn_unused_rules
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.learned_scales import quantize_with_scale, straight_through_with_scale
from eformer._src.quantization.spelling import FormatLike

from .fake_quantized_array import FakeQuantizedArray
from .init_scales import Scales, check_scales

Tree = TypeVar("Tree")


def fake_quantize(
    tree: Tree,
    rules: FormatLike | Sequence[Rule] | None = None,
    *,
    format: FormatLike | None = None,
    scales: Scales | None = None,
    mix: ArrayLike | None = None,
    freeze: Sequence[str] = (),
    **options: object,
) -> Tree:
    """`tree` with its weights rounded, dense, with the gradient of the identity: what `quantize_model` will make of it.

    A format with options, or `rules`, are given as to `quantize_model`.

    For use inside a loss, under `jit` too: the forward pass sees what `quantize_model(tree, rules)` will decode to, bit
    for bit, and the gradient reaches the weights as if they had not been rounded. `mix`, from 0 to 1, goes from the
    weights as they are to rounded ones, as a schedule over steps may. Leaves whose path matches one of the regular
    expressions of `freeze` get no gradient.

    `scales`, from `init_scales`, are trained with the weights: leaves that have one are rounded to its multiples.

    Where a rule has `activation_dtype="int8"`, matmuls round activations as those of the final model do: the leaf is a
    `FakeQuantizedArray`, and the model must run under `implicit`. Below a `mix` of 1 activations are not rounded.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import fake_quantize, finalize
    >>> params = {"kernel": jnp.linspace(-1, 1, 64 * 64).reshape(64, 64), "bias": jnp.zeros(64)}
    >>> loss = lambda params, x: jnp.sum((x @ params["kernel"] + params["bias"]) ** 2)
    >>> gradients = jax.grad(lambda p: loss(fake_quantize(p, "int4"), jnp.ones((2, 64))))(params)
    >>> finalize(params, "int4")["kernel"]
    ArrayGrouped(float32[64, 64], 2,560 bytes)
    """
    given = asked_rules(rules, format, options)
    named, structure = named_leaves(tree)
    chosen = {path: rule_for(given, path, leaf) for path, leaf in named if is_weight(leaf)}
    warn_unused_rules(given, chosen)
    check_scales(scales, chosen)
    frozen = _frozen(freeze, [path for path, _ in named])
    leaves = []
    for path, leaf in named:
        if path in frozen and isinstance(leaf, jax.Array):
            leaf = lax.stop_gradient(leaf)
        rule = chosen.get(path)
        if rule is not None and rule.format is not None:
            leaf = _fake_quantized(path, leaf, rule, rule.format, (scales or {}).get(path), mix)
        leaves.append(leaf)
    return jax.tree.unflatten(structure, leaves)


def _fake_quantized(
    path: str, leaf: Any, rule: Rule, format: str, scale: jax.Array | None, mix: ArrayLike | None
) -> Any:
    if is_quantized(leaf):
        raise TypeError(
            f"{path!r} is quantized already, and can't be trained: `dequantize` it first, or train an update "
            f"of it (`add_lora`)"
        )
    q = _quantized(path, lax.stop_gradient(leaf), rule, scale)
    if scale is None:
        rounded = ste(lambda _: q)(leaf)
    else:
        rounded = straight_through_with_scale(leaf, scale, format, **rule.options_for(path, leaf))
    if mix is not None:
        part = jnp.asarray(mix, leaf.dtype)
        rounded = jnp.where(part >= 1, rounded, leaf + part * (rounded - leaf))
    if rule.options.get("activation_dtype") is None:
        return rounded
    rounds = None if mix is None else jnp.full(leaf.shape[:-2], jnp.asarray(mix) >= 1)
    return FakeQuantizedArray(rounded, q, rounds)


def _quantized(path: str, leaf: jax.Array, rule: Rule, scale: jax.Array | None) -> QuantizedArray:
    if scale is None or rule.format is None:
        return apply_rule(rule, path, leaf)
    options = rule.options_for(path, leaf)
    encode = functools.partial(quantize_with_scale, leaf, lax.stop_gradient(scale), rule.format, **options)
    with named_errors(path, leaf, rule):
        return encode()


def _frozen(freeze: Sequence[str], paths: Sequence[str]) -> set[str]:
    """The paths that a pattern of `freeze` matches; a pattern that matches none raises a ValueError."""
    if isinstance(freeze, str):
        raise TypeError(f"`freeze` must be a sequence of regular expressions, got one str {freeze!r}: put it in a list")
    found = {pattern: {path for path in paths if re.search(pattern, path)} for pattern in freeze}
    unused = [pattern for pattern, matched in found.items() if not matched]
    if unused:
        some = ", ".join(map(repr, paths[:3]))
        raise ValueError(f"no leaf matches `freeze` {', '.join(map(repr, unused))}; paths look like this: {some}")
    return set().union(*found.values())


def finalize(
    tree: Tree,
    rules: FormatLike | Sequence[Rule] | None = None,
    *,
    format: FormatLike | None = None,
    scales: Scales | None = None,
    **options: object,
) -> Tree:
    """`quantize_model`, at the end of training: its arrays decode to the weights of `fake_quantize`, bit for bit."""
    given = asked_rules(rules, format, options)
    if scales is not None:
        named, structure = named_leaves(tree)
        chosen: Mapping[str, Rule | None] = {path: rule_for(given, path, leaf) for path, leaf in named}
        check_scales(scales, chosen)
        leaves = [_quantized(p, x, r, scales[p]) if p in scales and (r := chosen[p]) else x for p, x in named]
        tree = jax.tree.unflatten(structure, leaves)
    return quantize_model(tree, given)
