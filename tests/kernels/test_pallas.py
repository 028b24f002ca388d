"""The kernels for TPU and GPU against the oracle, in interpret mode, and lowered for their platforms."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from eformer.kernels import Matrix
from eformer.kernels.pallas import tpu

from .matrices import int8, nested_nf4, nf4, oracle, ternary

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
# Of several tiles along both axes, the last of them not full, and of less than a tile.
RAGGED, SMALL = (1, 330, 140), (2, 70, 33)
FORMATS = {
    "int8 per row": lambda w: int8(w, (2,)),
    "int8 per column": lambda w: int8(w, (1,)),
    "int8 per matrix": lambda w: int8(w, (1, 2)),
    "nf4 along 1": lambda w: nf4(w, 1, 32),
    "nf4 along 2": lambda w: nf4(w, 2, 16),
    "nf4 nested": lambda w: nested_nf4(w, 1, 64),
    "ternary": lambda w: ternary(w, 1, None),
    "ternary per column": lambda w: ternary(w, 1, (1,)),
    "ternary along 2": lambda w: ternary(w, 2, (1, 2)),
}
CASES = [(name, RAGGED, axis) for name in FORMATS for axis in (0, 1)]
CASES += [(name, SMALL, 0) for name in ("int8 per row", "nf4 along 2", "ternary")]
every_case = pytest.mark.parametrize(("name", "shape", "contracted_axis"), CASES, ids=str)


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.cache
def example(name: str, shape: tuple[int, ...]) -> tuple[Matrix, np.ndarray]:
    matrix = FORMATS[name](jnp.asarray(normal(shape)))
    return matrix, np.asarray(oracle(matrix))


def assert_product(out: Any, x: Any, values: np.ndarray, contracted_axis: int, roundings: int = 3) -> None:
    """x, a code and a scaled code may be rounded to bfloat16 each; sums are exact beside that."""
    x, values = np.asarray(x, np.float64), values.astype(np.float64)
    values = values if contracted_axis == 0 else values.swapaxes(1, 2)
    bound = np.abs(x) @ np.abs(values) * roundings * 2.0**-8 * 1.01
    assert out.dtype == jnp.float32
    np.testing.assert_array_less(np.abs(np.asarray(out) - x @ values), bound)


@pytest.mark.usefixtures("compile_quickly")
@every_case
def test_tpu_kernels_by_interpretation(name, shape, contracted_axis):
    matrix, values = example(name, shape)
    x = jnp.asarray(normal((shape[0], 5, shape[1 + contracted_axis]), seed=1))
    tiles = tpu.default_tiles(matrix, 5)._replace(cols=128)
    tiles = tiles._replace(rows=min(tiles.rows, max(128, 4 * matrix.block_size)))
    run = jax.jit(
        lambda x, codes, scales: tpu.matmul(
            x, replace(matrix, codes=codes, scales=scales), contracted_axis, tiles=tiles, interpret=STRICT
        )
    )
    assert_product(run(x, matrix.codes, matrix.scales), x, values, contracted_axis)
