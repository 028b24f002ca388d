"""Random programs: small functions of quantized, implicit and dense arrays, made of the expressions in `operations`.

A program is Python source, so one that fails can be read and run. `agreement` says what it must do.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import random as jr  # noqa: F401  # inputs are made with it
from jax import tree_util as jtu

from eformer.jaximus import implicit as implicit
from eformer.jaximus import materialize
from eformer.ops.quantization import RSROperatorBinary as RSROperatorBinary
from eformer.ops.quantization import RSROperatorTernary as RSROperatorTernary
from eformer.ops.quantization import quantize as quantize

from . import arrays
from .operations import OPERATIONS, Operation

STACKS = ("vmap", "scan")
BATCH = 2  # the length of what `vmap` and `scan` run over
LARGEST = 300  # elements

MATRICES = [(4, 8), (8, 4), (8, 8)]
SHAPES = [*MATRICES, (8,), (2, 4, 8)]
# What makes an input: from weights, or of some shape from a seed.
QUANTIZED = [
    "quantize(w, dtype='int8')",
    "quantize(w, dtype='int8', axis=-2)",
    "quantize(w, dtype='int8', axis=(-2, -1))",
    "quantize(w.astype(jnp.bfloat16), dtype='int8')",
    "quantize(w, dtype='nf4')",
    "quantize(w, dtype='nf4', block_size=4)",
    "quantize(w, dtype='nf4', block_size=4, axis=-2)",
    "quantize(w, dtype='nf4', block_size=2, double_quantization=True)",
    "quantize(w.astype(jnp.bfloat16), dtype='nf4', block_size=4)",
    "quantize(w, dtype='ternary')",
    "quantize(w, dtype='ternary', scale='channel')",
    "quantize(w.astype(jnp.bfloat16), dtype='ternary', scale='tensor')",
    "quantize(w, dtype='binary')",
    "quantize(w, dtype='binary', scale='channel')",
    "RSROperatorBinary.quantize(w, k=4)",
    "RSROperatorTernary.quantize(w, k=4)",
]
IMPLICIT = [
    f"arrays.{make.__name__}(jr.key({{seed}}), {{shape}})"
    for make in (arrays.scaled, arrays.scaled_int8, arrays.low_rank, arrays.filled, arrays.shifted)
]
DENSE = [
    "normal({shape}, {seed})",
    "normal({shape}, {seed})",
    "normal({shape}, {seed}, jnp.bfloat16)",
    "whole({shape}, {seed})",
]


def normal(shape: tuple[int, ...], seed: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def whole(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Step:
    operation: Operation
    operands: tuple[str, ...]  # names of inputs and results, or elements of them


@dataclasses.dataclass(frozen=True)
class Input:
    template: str
    shape: tuple[int, ...]
    seed: int
    stacked: bool  # whether `vmap` and `scan` take it apart

    def stack_shape(self, in_stack: bool) -> tuple[int, ...]:
        return (BATCH, *self.shape) if in_stack and self.stacked else self.shape

    def text(self, in_stack: bool) -> str:
        shape = self.stack_shape(in_stack)
        if self.template not in QUANTIZED:
            return self.template.format(shape=shape, seed=self.seed)
        w = f"normal({shape}, {self.seed})"
        if in_stack and self.stacked:
            return f"stacked(lambda w: {self.template}, {w})"
        return re.sub(r"\bw\b", w, self.template)

    @property
    def type(self) -> tuple[Any, ...]:
        dtype = jnp.int32 if self.template.startswith("whole") else jnp.float32
        return self.shape, jnp.dtype(jnp.bfloat16 if "bfloat16" in self.template else dtype), False


def stacked(make: Callable[[jax.Array], Any], weights: jax.Array) -> Any:
    """The arrays made of each of the weights as one, as the layers of a model are stacked for `scan`."""
    parts = [jtu.tree_flatten(make(w)) for w in weights]
    leaves = [jnp.asarray(np.stack(each)) for each in zip(*(leaves for leaves, _ in parts), strict=True)]
    return jtu.tree_unflatten(parts[0][1], leaves)


@functools.cache
def made(each: Input, in_stack: bool) -> tuple[Any, jax.Array]:
    """The input, and the same as a dense array."""
    if each.template not in QUANTIZED:
        given = eval(each.text(in_stack), globals())
        return given, jnp.asarray(materialize(given))
    w = normal(each.stack_shape(in_stack), each.seed)
    return stacked(quantizer(each.template), w) if in_stack and each.stacked else quantizer(each.template)(w)


@functools.cache
def quantizer(template: str) -> Callable[[jax.Array], tuple[Any, jax.Array]]:
    """All that makes a quantized array of weights, and the dense one, compiled together to save time."""
    quantized = eval(f"lambda w: {template}", globals())

    def both(w: jax.Array) -> Any:
        q = quantized(w)
        return q, materialize(q)

    return jax.jit(both)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays `a`, `b`, ..., whose results are those steps that no other uses."""

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]

    @property
    def named(self) -> dict[str, Input]:
        return dict(zip("abcd", self.inputs, strict=False))

    def text(self, noisy: bool = False) -> str:
        lines = [f"def program({', '.join(self.named)}):"]
        # A quantized array of low precision has the digits of its scale: a rule that widens it need not drop them.
        low = [name for name, each in self.named.items() if noisy and each.type[1] == jnp.bfloat16]
        lines += [f"    {name} = noisy({name})" for name in low]
        for i, step in enumerate(self.steps):
            mark = noisy and not step.operation.exact
            expression = step.operation.of(*(f"noisy({o})" if mark else o for o in step.operands))
            lines.append(f"    v{i} = " + (f"noisy({expression})" if mark else expression))
        used = {operand.partition("[")[0] for step in self.steps for operand in step.operands}
        results = [f"v{i}" for i in range(len(self.steps)) if f"v{i}" not in used]
        return "\n".join([*lines, f"    return ({', '.join(results)},)"])

    def function(self, noise: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        space = {"jax": jax, "jnp": jnp, "lax": lax, "noisy": noise}
        exec(self.text(noise is not None), space)
        return space["program"]

    def first(self, count: int) -> Program:
        """The steps that the one at `count` needs, and that."""
        needed, kept = {f"v{count}"}, []
        for i in range(count, -1, -1):
            if f"v{i}" in needed:
                kept.append(i)
                needed |= {operand.partition("[")[0] for operand in self.steps[i].operands}
        renamed = {f"v{i}": f"v{j}" for j, i in enumerate(reversed(kept))}

        def rename(operand: str) -> str:
            name, bracket, index = operand.partition("[")
            return renamed.get(name, name) + bracket + index

        steps = [Step(self.steps[i].operation, tuple(map(rename, self.steps[i].operands))) for i in reversed(kept)]
        return dataclasses.replace(self, steps=tuple(steps))


# --- drawing a program ---


@functools.cache
def types_of(operation: Operation, types: tuple[Any, ...]) -> Any:
    """The types of what the operation gives; or the error."""
    operands = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in types]
    try:
        return jax.eval_shape(operation.function, *operands)
    except Exception as error:  # noqa: BLE001  # whatever JAX says to operands that it does not take
        return error.with_traceback(None)


def type_of(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape), jnp.dtype(x.dtype), bool(getattr(x, "weak_type", False))


def welcome(types: Any) -> bool:
    """Whether results of these types are worth computing with."""
    leaves = jtu.tree_leaves(types)
    return bool(leaves) and all(
        0 < leaf.size <= LARGEST and len(leaf.shape) <= 4 and not jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        for leaf in leaves
    )


@functools.cache
def draw(seed: int) -> Program:
    """The program of this seed, the same in every run."""
    chance = random.Random(seed)
    templates = [chance.choice(QUANTIZED), chance.choice(chance.choice([QUANTIZED, IMPLICIT])), *DENSE[:1]]
    templates += chance.choices(DENSE, k=chance.randint(0, 1))
    inputs = []
    for template in templates:
        shape = chance.choice(MATRICES if re.search("RSR|arrays|-2", template) else SHAPES)
        inputs.append(Input(template, shape, chance.randrange(3), stacked=chance.random() < 0.6))
    if not any(each.stacked for each in inputs):
        inputs[-1] = dataclasses.replace(inputs[-1], stacked=True)
    pool = [(name, each.type) for name, each in zip("abcd", inputs, strict=False)]
    steps: list[Step] = []
    wanted, may_fail = chance.randint(2, 6), chance.random() < 0.1
    while len(steps) < wanted:
        operation = chance.choice(OPERATIONS)
        operands, found = fitting(operation, pool, len(inputs), chance, may_fail=may_fail and bool(steps))
        if found is None:
            continue
        name = f"v{len(steps)}"
        steps.append(Step(operation, operands))
        if isinstance(found, Exception):
            break
        pool += elements(name, found)
    return Program(seed, tuple(inputs), tuple(steps))


def fitting(
    operation: Operation, pool: Sequence[Any], inputs: int, chance: random.Random, may_fail: bool
) -> tuple[tuple[str, ...], Any]:
    """Operands that the operation takes, and the types of what it gives: None if there are none among some drawn."""
    for _ in range(10):
        drawn = chance.choices(pool, weights=weights(pool, inputs), k=len(operation.operands))
        found = types_of(operation, tuple(kind for _, kind in drawn))
        if may_fail if isinstance(found, Exception) else welcome(found):
            return tuple(name for name, _ in drawn), found
    return (), None


def weights(pool: Sequence[Any], inputs: int) -> list[float]:
    """The two implicit arrays, and what was made last, are drawn more often."""
    return [3.0, 3.0, *[1.0] * (inputs - 2), *[0.5] * (len(pool) - inputs - 1), *[3.0] * (len(pool) > inputs)]


def elements(name: str, types: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    if isinstance(types, (tuple, list)):
        for i in {0, len(types) - 1}:
            yield from elements(f"{name}[{i}]", types[i])
    else:
        yield name, type_of(types)
