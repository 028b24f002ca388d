"""`tune`: train scales, offsets and norms until the outputs of the quantized model are near those of the original."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from eformer._src.jaximus.function import check_function_first
from eformer._src.jaximus.trace import implicit
from eformer._src.model.defaults import NORMS_AND_BIASES
from eformer._src.model.paths import is_quantized, is_weight, named_leaves
from eformer._src.progress import Meter, Progress, progress_bar
from eformer._src.quantization.trained import dense_with_scales, scales_of, with_scales

Tree = TypeVar("Tree")
Trained = dict[str, dict[str, jax.Array]]  # by path, and by the name of the leaf of a quantized array
Loss = Callable[[Any, Any], jax.Array]  # of the function's outputs, after and before

FIRST, SECOND, LEAST = 0.9, 0.95, 1e-8  # of Adam (arXiv 1412.6980)


def divergence(after: Any, before: Any) -> jax.Array:
    """The mean of KL(before || after) over all but the last axis of the outputs, which are logits."""

    def of_leaf(after: jax.Array, before: jax.Array) -> jax.Array:
        p, q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (before, after))
        return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))

    pairs = list(zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))
    logits = [(a, b) for a, b in pairs if jnp.issubdtype(b.dtype, jnp.floating) and b.ndim and b.shape[-1] > 1]
    if not logits:
        raise ValueError(
            f"the outputs, of shapes {[b.shape for _, b in pairs]}, are no logits, whose last axis has a number for "
            f"each choice: give a `loss` of the outputs after and before"
        )
    return sum((of_leaf(a, b) for a, b in logits), jnp.zeros(()))


def tune(
    function: Callable[..., Any],
    small: Tree,
    inputs: Any,
    *,
    reference: object,
    loss: Loss = divergence,
    epochs: int = 2,
    learning_rate: float = 1e-3,
    trainable: Callable[[str, Any], bool] | None = None,
    progress: Progress | bool | None = None,
) -> Tree:
    """`small` with scales, offsets, norms and biases for which `function(small, *inputs)` is nearest to the reference.

    Codes stay, and so do bytes and speed. `reference` is the model before it was quantized, and the default `loss` the
    Kullback-Leibler divergence from its outputs, logits, on the same inputs; another is called with the outputs after
    and before. `inputs` is a list or an iterator of batches, each a tuple of inputs or the one input, or a single
    batch. A batch is a step of Adam, and each of them is taken `epochs` times; the rate falls to 0. It is relative: of
    1e-3, a scale may change by a thousandth of itself in a step. `trainable(path, leaf)` chooses other leaves.
    `progress` is called with the step and its loss, the number of steps done and that of all; True shows a bar.

    >>> import jax, jax.numpy as jnp
    >>> from eformer.model import quantize_model, tune
    >>> params = {"w": jax.random.normal(jax.random.key(0), (64, 128))}
    >>> x = jax.random.normal(jax.random.key(1), (16, 64))
    >>> model = lambda params, x: x @ params["w"]
    >>> small = quantize_model(params, format="int2")
    >>> tuned = tune(model, small, [x], reference=params, epochs=20)
    """
    check_function_first(function, "tune(function, small, inputs, reference=before)")
    batches = in_batches(inputs)
    named, structure = named_leaves(small)
    choose = trainable or _by_default
    chosen: dict[str, Any] = {path: leaf for path, leaf in named if is_weight(leaf) and choose(path, leaf)}
    start: Trained = {
        path: scales_of(leaf) if is_quantized(leaf) else {"": leaf.astype(jnp.float32)} for path, leaf in chosen.items()
    }
    start = {path: leaves for path, leaves in start.items() if leaves}
    if not start:
        raise ValueError("no leaf of the model is quantized with scales, or trainable: there is nothing to tune")
    units = {path: _units(leaves) for path, leaves in start.items()}

    def moved(moves: Trained) -> Trained:
        return jax.tree.map(lambda x, unit, move: x + unit * move, start, units, moves)

    def dense(moves: Trained, rest: dict[str, Any]) -> Any:
        values = moved(moves)
        made = {
            path: dense_with_scales(leaf, values[path]) if is_quantized(leaf) else values[path][""].astype(leaf.dtype)
            for path, leaf in chosen.items()
            if path in values
        }
        return jax.tree.unflatten(structure, [made.get(path, rest.get(path, leaf)) for path, leaf in named])

    rest = {path: leaf for path, leaf in named if path not in start and hasattr(leaf, "dtype")}
    steps = epochs * len(batches)
    before = jax.jit(implicit(function))

    @jax.jit
    def step(
        moves: Trained, means: Trained, squares: Trained, number: jax.Array, rest: Any, batch: Any, wanted: Any
    ) -> tuple[Trained, Trained, Trained, jax.Array]:
        def cost(moves: Trained) -> jax.Array:
            return loss(implicit(function)(dense(moves, rest), *batch), wanted)

        value, slopes = jax.value_and_grad(cost)(moves)
        rate = learning_rate * (1 + jnp.cos(math.pi * number / steps)) / 2
        means = jax.tree.map(lambda m, g: FIRST * m + (1 - FIRST) * g, means, slopes)
        squares = jax.tree.map(lambda s, g: SECOND * s + (1 - SECOND) * g * g, squares, slopes)

        def after(move: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
            mean, square = mean / (1 - FIRST ** (number + 1)), square / (1 - SECOND ** (number + 1))
            return move - rate * mean / (jnp.sqrt(square) + LEAST)

        return jax.tree.map(after, moves, means, squares), means, squares, value

    moves = jax.tree.map(jnp.zeros_like, start)
    state = moves, moves, moves
    told = progress if callable(progress) else None
    with progress_bar() if progress is True else contextlib.nullcontext(told) as show:
        meter = Meter(show, steps)
        for number in range(steps):
            batch = batches[number % len(batches)]
            *state, value = step(*state, jnp.float32(number), rest, batch, before(reference, *batch))
            if not math.isfinite(value):
                raise ValueError(f"the loss is {value} in step {number + 1} of {steps}: take a smaller `learning_rate`")
            meter.add(f"step {number + 1}, loss {value:.4f}", 1)
    values = jax.jit(moved)(state[0])
    finished = {
        path: with_scales(leaf, values[path]) if is_quantized(leaf) else values[path][""].astype(leaf.dtype)
        for path, leaf in chosen.items()
        if path in values
    }
    return jax.tree.unflatten(structure, [finished.get(path, leaf) for path, leaf in named])


def in_batches(inputs: Any) -> list[tuple[Any, ...]]:
    """A list or an iterator of batches, or a single one; each is a tuple of inputs, or the one input."""
    several = inputs if isinstance(inputs, (list, Iterator)) else [inputs]
    batches = [each if isinstance(each, tuple) else (each,) for each in several]
    if not batches:
        raise ValueError("there are no inputs to tune with")
    return batches


def _by_default(path: str, leaf: Any) -> bool:
    return is_quantized(leaf) or leaf.ndim == 1 or re.search(NORMS_AND_BIASES, path) is not None


def _units(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """By how much a number may change: a scale by itself, an offset by its scale, others by their mean magnitude."""
    scale: Sequence[jax.Array] = [jnp.abs(leaf) for name, leaf in leaves.items() if name in ("scale", "absmax")]

    def unit(name: str, leaf: jax.Array) -> jax.Array:
        if name == "offset" and scale and scale[0].shape == leaf.shape:
            return scale[0]
        if name:
            return jnp.abs(leaf)
        return jnp.full_like(leaf, jnp.sqrt(jnp.mean(leaf**2)))

    return {name: unit(name, leaf) for name, leaf in leaves.items()}
