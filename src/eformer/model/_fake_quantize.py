"""Training with quantization in the loss: weights are rounded in the forward pass, and trained as if they were not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from eformer.jaximus import ste

from ._defaults import default_rules
from ._paths import is_quantized, named_leaves
from ._quantize import quantize_model
from ._rules import Rule, apply_rule, rule_for

Tree = TypeVar("Tree")


def fake_quantize(
    tree: Tree,
    rules: Sequence[Rule] | None = None,
    *,
    format: str = "nf4",
    mix: ArrayLike | None = None,
    freeze: Sequence[str] = (),
) -> Tree:
    """`tree` with the weights that `rules` choose rounded to their formats, dense, with the gradient of the identity.

    For use inside a loss, under `jit` too: the forward pass sees what `quantize_model(tree, rules)` will decode to, bit
    for bit, and the gradient reaches the weights as if they had not been rounded. `mix`, from 0 to 1, goes from the
    weights as they are to rounded ones, as a schedule over steps may. Leaves whose path matches one of the regular
    expressions of `freeze` get no gradient.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import fake_quantize, finalize
    >>> params = {"kernel": jnp.linspace(-1, 1, 64 * 64).reshape(64, 64), "bias": jnp.zeros(64)}
    >>> loss = lambda params, x: jnp.sum((x @ params["kernel"] + params["bias"]) ** 2)
    >>> gradients = jax.grad(lambda p: loss(fake_quantize(p, format="int4"), jnp.ones((2, 64))))(params)
    >>> finalize(params, format="int4")["kernel"]
    ArrayGrouped(float32[64, 64], 2,304 bytes)
    """
    given = default_rules(format) if rules is None else tuple(rules)
    named, structure = named_leaves(tree)
    leaves = []
    for path, leaf in named:
        rule = rule_for(given, path, leaf)
        if rule is not None and rule.format is not None:
            if is_quantized(leaf):
                raise TypeError(
                    f"{path!r} is quantized already, and can't be trained: `dequantize` it first, or train an update "
                    f"of it (`add_lora`)"
                )
            leaf = _mixed(leaf, ste(lambda x, rule=rule, path=path: apply_rule(rule, path, x))(leaf), mix)
        if any(re.search(pattern, path) for pattern in freeze) and isinstance(leaf, jax.Array):
            leaf = lax.stop_gradient(leaf)
        leaves.append(leaf)
    return jax.tree.unflatten(structure, leaves)


def _mixed(dense: jax.Array, rounded: jax.Array, mix: ArrayLike | None) -> jax.Array:
    if mix is None:
        return rounded
    part = jnp.asarray(mix, dense.dtype)
    return jnp.where(part >= 1, rounded, dense + part * (rounded - dense))


def finalize(tree: Tree, rules: Sequence[Rule] | None = None, *, format: str = "nf4") -> Tree:
    """`quantize_model`, at the end of training: its arrays decode to the weights of `fake_quantize`, bit for bit."""
    return quantize_model(tree, rules, format=format)
