"""How far a function's outputs move when its weights are quantized: all of them, or one leaf at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._src.jaximus.function import check_function_first
from eformer._src.jaximus.trace import implicit
from eformer._src.model.paths import is_quantized, named_leaves
from eformer._src.text import table

from .tune import divergence, in_batches


@dataclasses.dataclass(frozen=True)
class OutputErrors:
    """Of outputs that are logits: the mean divergence, and how often the likeliest is the same. Of all, the error.

    `alone` has the divergence that each quantized leaf causes by itself, if it was asked for, the largest first.
    """

    divergence: float
    same: float
    relative_error: float
    alone: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        line = (
            f"divergence {self.divergence:.4f}, the likeliest is the same at {self.same:.1%}, relative error "
            f"{self.relative_error:.1%}"
        )
        rows = [(path, f"{each:.2e}") for path, each in self.alone.items()]
        return "\n".join([line, *(table(("leaf", "divergence of it alone"), rows) if rows else [])])


def compare_outputs(
    function: Callable[..., Any], before: object, after: object, inputs: Any, *, each_leaf: bool = False
) -> OutputErrors:
    """How far `function(after, *inputs)` is from `function(before, *inputs)`; inputs are batches as `tune` takes them.

    With `each_leaf` the function also runs once for every quantized leaf, with the others as they were before.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import compare_outputs, quantize_model
    >>> params = {"w": jax.random.normal(jax.random.key(0), (64, 128))}
    >>> small = quantize_model(params, format="int8")
    >>> errors = compare_outputs(lambda p, x: x @ p["w"], params, small, jnp.ones((4, 64)), each_leaf=True)
    >>> errors.divergence == errors.alone["w"], errors.same
    (True, 1.0)
    """
    check_function_first(function, "compare_outputs(function, before, after, inputs)")
    batches = in_batches(inputs)
    run = jax.jit(implicit(function))
    wanted = [run(before, *batch) for batch in batches]

    def measured(params: object) -> np.ndarray:
        found = [_compare(run(params, *batch), out) for batch, out in zip(batches, wanted, strict=True)]
        return np.mean(np.asarray(jax.device_get(found), np.float64), axis=0)

    (named, structure), dense = named_leaves(after), dict(named_leaves(before)[0])
    alone = {}
    for path, leaf in named if each_leaf else ():
        if is_quantized(leaf):
            leaves = [leaf if other == path else dense[other] for other, _ in named]
            alone[path] = float(measured(jax.tree.unflatten(structure, leaves))[0])
    off, same, moved, size = measured(after)
    alone = dict(sorted(alone.items(), key=lambda item: -item[1]))
    return OutputErrors(float(off), float(same), float((moved / size) ** 0.5) if size else 0.0, alone)


@jax.jit
def _compare(after: Any, before: Any) -> tuple[jax.Array, ...]:
    pairs = list(zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))
    pairs = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs if jnp.issubdtype(b.dtype, jnp.floating)]
    same = [jnp.mean(jnp.argmax(a, -1) == jnp.argmax(b, -1)) for a, b in pairs if b.ndim]
    squares = [(jnp.sum((a - b) ** 2), jnp.sum(b**2)) for a, b in pairs]
    moved, size = (sum(each, jnp.zeros(())) for each in zip(*squares, strict=True))
    return divergence(after, before), jnp.mean(jnp.stack(same)), moved, size
