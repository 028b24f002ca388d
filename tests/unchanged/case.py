"""One line of the table: a function that knows nothing of quantization, and a model for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eformer.jaximus import explain, implicit
from eformer.model import dequantize_model, named_leaves, quantize_model
from eformer.ops.quantization import QuantizedArray


def run_jitted(function: Callable[..., Any], model: Any, inputs: tuple[Any, ...]) -> Any:
    return jax.jit(function)(model, *inputs)


class Program(NamedTuple):
    function: Callable[..., Any]  # of the model and the inputs
    model: Any
    inputs: tuple[Any, ...]
    run: Callable[[Callable[..., Any], Any, tuple[Any, ...]], Any] = run_jitted  # as its users run it


@dataclasses.dataclass(frozen=True)
class Case:
    """`packages` are imported by `make`; the first is the one whose code runs."""

    name: str
    packages: tuple[str, ...]
    make: Callable[[], Program]
    lines: int = 2  # `quantize_model(...)` and `implicit(...)`

    def __str__(self) -> str:
        return self.name


class Row(NamedTuple):
    name: str
    lines: int
    weights: str
    difference: str
    dense_bytes: int

    def __str__(self) -> str:
        return f"| {self.name} | {self.lines} | {self.weights} | {self.difference} | {self.dense_bytes:,} |"


def row(case: Case) -> Row:
    """Run the program on quantized weights, and on the same weights made dense."""
    function, model, inputs, run = case.make()
    quantized = quantize_model(model, function=function, inputs=inputs)
    dense = dequantize_model(quantized)
    dense_bytes = explain(function)(quantized, *inputs).dense_bytes
    actual, expected = run(implicit(function), quantized, inputs), run(function, dense, inputs)
    return Row(case.name, case.lines, _share(quantized), _difference(actual, expected), dense_bytes)


def _share(model: Any) -> str:
    """How many of the floating point numbers are quantized."""
    leaves = [leaf for _, leaf in named_leaves(model)[0] if jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)]
    quantized = sum(leaf.size for leaf in leaves if isinstance(leaf, QuantizedArray))
    return f"{quantized / sum(leaf.size for leaf in leaves):.0%}"


def _difference(actual: Any, expected: Any) -> str:
    """Relative to the largest number; the power of ten above it, at least 1e-5, so that both versions of JAX agree."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    same = [a.shape == b.shape and a.dtype == b.dtype for a, b in pairs]
    assert all(same), "shapes and dtypes are those of dense code"
    arrays = [(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)) for a, b in pairs]
    largest = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in arrays)
    return f"< {10.0 ** max(-5, math.floor(math.log10(max(largest, 1e-30))) + 1):.0e}".replace("e-0", "e-")
