"""Which leaf takes how many bits, so that all of them together take no more than a budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eformer._src.jaximus.array import materialize
from eformer._src.jaximus.trace import implicit
from eformer._src.model.paths import is_quantized, named_leaves, nbytes, stored_bytes
from eformer._src.model.rules import Rule, apply_rule, rule_for
from eformer._src.quantization.registry import find_format
from eformer._src.text import in_bytes, table

from .calibrate import as_batches
from .statistics import Statistic, Statistics

_BLOCKS = {size: {"block_size": size, "double_quantization": True} for size in (32, 64)}
# 2.5, 3.3, 3.5, 4.3, 4.5, 5.3, 6.3 and 8 bits a weight.
CANDIDATES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("int2", _BLOCKS[32]),
    *((form, _BLOCKS[size]) for form in ("int3", "int4") for size in (64, 32)),
    *((form, _BLOCKS[64]) for form in ("int5", "int6")),
    ("int8", {}),
)
MOST_BITS = 64  # a budget above is one of bytes
SAMPLES = 8  # of the gradient


class Option(NamedTuple):
    """A leaf in one format: its bytes, and what it adds to the divergence of the outputs, as far as can be told."""

    rule: Rule
    size: int
    cost: float


class Plan(tuple[Rule, ...]):
    """Rules for a budget, one for each leaf; it prints the choice, what it takes, and what it is expected to cost."""

    options: Mapping[str, Sequence[Option]]
    fixed: int  # bytes of leaves that no rule changes
    weights: int

    @property
    def cost(self) -> float:
        """What all choices together add to the divergence of the outputs."""
        return sum(self._chosen(path).cost for path in self.options)

    @property
    def size(self) -> int:
        return self.fixed + sum(self._chosen(path).size for path in self.options)

    def curve(self, points: int = 20) -> list[tuple[float, float]]:
        """Bits a weight and the cost that is expected, from the smallest to the largest."""
        ends = [[pick(o.size for o in each) for each in self.options.values()] for pick in (min, max)]
        least, most = (self.fixed + sum(sizes) for sizes in ends)
        sizes = [least + (most - least) * i / (points - 1) for i in range(points)]
        found = [_knapsack(self.options, size - self.fixed) for size in sizes]
        return [
            (8 * (self.fixed + sum(o.size for o in each.values())) / self.weights, sum(o.cost for o in each.values()))
            for each in found
        ]

    def _chosen(self, path: str) -> Option:
        return next(option for option in self.options[path] if option.rule in self)

    def __repr__(self) -> str:
        rows = []
        for path in self.options:
            rule, size, cost = self._chosen(path)
            rows.append((path, str(rule).split("=", 1)[1], in_bytes(size), f"{cost:.2e}"))
        bits = f"{8 * self.size / self.weights:.2f} bits a weight"
        total = ("", bits, in_bytes(self.size), f"{self.cost:.2e}")
        return "\n".join(table(("leaf", "format", "takes", "costs"), rows, words=2, total=total))


def plan_budget(
    budget: float,
    params: object,
    rules: Sequence[Rule],
    *,
    function: Callable[..., Any] | None = None,
    inputs: Iterator[Any] | Sequence[Any] = (),
    statistics: Statistics | None = None,
    candidates: Sequence[tuple[str, Mapping[str, Any]]] = CANDIDATES,
) -> Plan:
    """The formats among `candidates` for the leaves that `rules` quantize; each keeps the axis of its rule.

    `budget` counts all leaves, in bits a weight or above 64 in bytes. With a function, and inputs for it as a tuple or
    an iterator of batches, backward passes tell what errors of each leaf cost. They draw tokens from the outputs,
    which are logits: the gradient times the error, squared, is on average twice the divergence that the error adds.
    Without a function, the `statistics` of the leaf's inputs tell the cost.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
        raise TypeError(f"`budget` is a number of bits a weight, such as 4.5, or of bytes, got {budget!r}")
    named, _ = named_leaves(params)
    chosen = {path: rule for path, leaf in named if (rule := rule_for(rules, path, leaf)) and rule.format}
    leaves = {path: leaf for path, leaf in named if path in chosen and not is_quantized(leaf)}
    batches = as_batches([inputs] if isinstance(inputs, Iterator) else inputs)
    slopes = [] if function is None else _slopes(function, params, batches, list(leaves))
    options: dict[str, list[Option]] = {}
    for path, leaf in leaves.items():
        statistic = statistics[path] if statistics is not None and path in statistics else None
        options[path] = _options(path, leaf, chosen[path], candidates, statistic, [each[path] for each in slopes])
    everything = stored_bytes(params)
    weights = _weights_in(named)
    fixed = everything - sum(nbytes(leaf) for leaf in leaves.values())
    room = (budget * weights / 8 if budget <= MOST_BITS else budget) - fixed
    least = sum(min(option.size for option in each) for each in options.values())
    if room < least:
        raise ValueError(
            f"`budget={budget}` is too small: {in_bytes(fixed)} are kept as they are, and the others take "
            f"{in_bytes(least)} at least, {8 * (fixed + least) / weights:.2f} bits a weight in all"
        )
    plan = Plan(option.rule for option in _knapsack(options, room).values())
    plan.options, plan.fixed, plan.weights = options, fixed, weights
    return plan


def _weights_in(named: Sequence[tuple[str, Any]]) -> int:
    """How many numbers the arrays have; an array that occurs twice counts once."""
    arrays = {id(leaf): leaf for _, leaf in named if hasattr(leaf, "shape")}
    return sum(math.prod(leaf.shape) for leaf in arrays.values())


def _options(
    path: str,
    leaf: Any,
    rule: Rule,
    candidates: Sequence[tuple[str, Mapping[str, Any]]],
    statistic: Statistic | None,
    slopes: Sequence[jax.Array],
) -> list[Option]:
    axis = {"axis": rule.options["axis"]} if "axis" in rule.options else {}
    exact = f"^{re.escape(path)}$"
    found: list[tuple[Rule, int, float, float]] = []
    for name, options in candidates:
        plain = Rule(exact, find_format(name), {**axis, **options}, reason="for the budget")
        chosen = replace(plain, method=rule.method)
        made = apply_rule(plain, path, leaf, statistic)
        importance = jnp.ones((1,) * leaf.ndim) if statistic is None else statistic.mean_square
        error, moved = jax.device_get(_errors(leaf, made, importance, list(slopes)))
        found.append((chosen, nbytes(made), float(error), float(moved)))
    if not slopes:
        inputs = 1.0 if statistic is None else float(jnp.max(statistic.inputs))
        return [Option(chosen, size, error * inputs) for chosen, size, error, _ in found]
    # Both grow as the square of the error; a few gradients tell one factor between them better than each cost.
    factors = [moved / error for *_, error, moved in found if error]
    factor = sum(factors) / max(len(factors), 1)
    return [Option(chosen, size, error * factor) for chosen, size, error, _ in found]


@jax.jit
def _errors(leaf: jax.Array, made: Any, importance: jax.Array, slopes: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    off = materialize(made).astype(jnp.float32) - leaf.astype(jnp.float32)
    moved = [jnp.sum(off * slope.astype(jnp.float32)) ** 2 / 2 for slope in slopes]
    return jnp.sum(importance * off**2), sum(moved, jnp.zeros(())) / max(len(moved), 1)


def _slopes(
    function: Callable[..., Any], params: object, batches: Sequence[tuple[Any, ...]], paths: Sequence[str]
) -> list[dict[str, jax.Array]]:
    """Gradients whose product with a small change is, squared, twice what it adds to the divergence, on average.

    For logits, that of the log-likelihood of choices drawn from them, by output (Fisher's information).
    """
    named, structure = named_leaves(params)
    ours = {path: leaf for path, leaf in named if path in set(paths)}

    @jax.jit
    def slope(ours: dict[str, Any], batch: Any, key: jax.Array) -> dict[str, jax.Array]:
        def drawn(ours: dict[str, Any]) -> jax.Array:
            out = implicit(function)(jax.tree.unflatten(structure, [ours.get(p, leaf) for p, leaf in named]), *batch)
            total, count = jnp.zeros(()), 0
            for logits in jax.tree.leaves(out):
                if jnp.issubdtype(logits.dtype, jnp.floating) and logits.ndim and logits.shape[-1] > 1:
                    logits = logits.astype(jnp.float32)
                    choice = jax.random.categorical(key, jax.lax.stop_gradient(logits))
                    likely = jnp.take_along_axis(jax.nn.log_softmax(logits), choice[..., None], axis=-1)
                    total, count = total + jnp.sum(likely), count + likely.size
            return total / jnp.sqrt(jnp.float32(max(count, 1)))

        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.grad(drawn)(ours))

    keys = jax.random.split(jax.random.key(0), SAMPLES)
    return [slope(ours, batches[i % len(batches)], key) for i, key in enumerate(keys)]


def _knapsack(options: Mapping[str, Sequence[Option]], room: float) -> dict[str, Option]:
    """The cheapest choice that fits: by a price of bytes, and then with what is left."""

    def at(price: float) -> dict[str, Option]:
        return {path: min(each, key=lambda o: (o.cost + price * o.size, o.size)) for path, each in options.items()}

    def size(chosen: Mapping[str, Option]) -> int:
        return sum(option.size for option in chosen.values())

    low, high = 1e-30, 1e30
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if size(at(middle)) <= room else (middle, high)
    chosen = at(high)
    while True:
        left = room - size(chosen)
        better = [
            ((chosen[path].cost - o.cost) / (o.size - chosen[path].size), path, o)
            for path, each in options.items()
            for o in each
            if 0 < o.size - chosen[path].size <= left and o.cost < chosen[path].cost
        ]
        if not better:
            return chosen
        _, path, option = max(better, key=lambda each: each[0])
        chosen[path] = option
