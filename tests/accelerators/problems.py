"""What is compiled for every device: kinds of weight, orientations, rows of x, and sizes that do not fill tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eformer._src.kernels.matrix import Matrix
from tests.kernels.matrices import from_codebook, int8, integers, nested_nf4, nf4, ternary

WEIGHTS: dict[str, Callable[[jax.Array], Matrix]] = {
    "int8 per row": lambda w: int8(w, (2,)),
    "int8 per column": lambda w: int8(w, (1,)),
    "nf4 along 1": lambda w: nf4(w, 1, 64),
    "nf4 along 2": lambda w: nf4(w, 2, 64),
    "nf4 16 along 2": lambda w: nf4(w, 2, 16),
    "nf4 256 along 1": lambda w: nf4(w, 1, 256),
    "nf4 nested": lambda w: nested_nf4(w, 1, 64),
    "ternary": lambda w: ternary(w, 1, (1,)),
    "ternary along 2": lambda w: ternary(w, 2, (1,)),
    "uint4 along 1": lambda w: integers(w, 1, 64, 4),
    "uint4 along 2": lambda w: integers(w, 2, 64, 4),
    "uint3 along 1": lambda w: integers(w, 1, 32, 3),
    "uint5 along 2": lambda w: integers(w, 2, 16, 5, symmetric=True),
    "uint8 along 1": lambda w: integers(w, 1, 128, 8, symmetric=True),
    "e2m1 along 1": lambda w: from_codebook(w, 1, 32, "e2m1"),
    "uint6 along 1": lambda w: integers(w, 1, 32, 6),
    "uint2 along 2": lambda w: integers(w, 2, 64, 2),
}


class Problem(NamedTuple):
    weight: str
    shape: tuple[int, int, int]
    contracted_axis: int
    m: int
    dtype: Any = jnp.bfloat16

    def arguments(self, sharding: jax.sharding.Sharding) -> tuple[Any, ...]:
        """x, codes and scales."""
        k = self.shape[1 + self.contracted_axis]
        made = (jax.ShapeDtypeStruct((self.shape[0], self.m, k), self.dtype), *self._leaves())
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), made)

    def _leaves(self) -> Any:
        def leaves(w: jax.Array) -> Any:
            matrix = WEIGHTS[self.weight](w)
            return matrix.codes, matrix.scales

        return jax.eval_shape(leaves, jax.ShapeDtypeStruct(self.shape, jnp.float32))

    def matrix(self, codes: tuple[jax.Array, ...], scales: tuple[jax.Array, ...]) -> Matrix:
        """The matrix with these leaves; what is static of it is that of a small one."""
        small = WEIGHTS[self.weight](jnp.ones((1, 64, 64), jnp.float32))
        return replace(small, codes=codes, scales=scales, rows=self.shape[1], cols=self.shape[2])

    @property
    def dense_bytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1] * self.shape[2]


SQUARE, WIDE, RAGGED, STACK = (1, 4096, 4096), (1, 4096, 14336), (1, 1111, 333), (4, 512, 256)
IN_STACKS = {"uint6 along 1": 1, "uint2 along 2": 0}  # only, and contracted along this axis
COMMON = [weight for weight in WEIGHTS if weight not in IN_STACKS]
PROBLEMS = [Problem(weight, SQUARE, axis, 8) for weight in COMMON for axis in (0, 1)]
PROBLEMS += [Problem(weight, RAGGED, axis, 3, jnp.float32) for weight in COMMON for axis in (0, 1)]
PROBLEMS += [Problem(weight, SQUARE, 0, 512) for weight in ("int8 per column", "nf4 along 1", "ternary")]
PROBLEMS += [
    Problem("nf4 along 1", WIDE, 0, 1),
    Problem("nf4 along 2", WIDE, 1, 1),
    Problem("nf4 along 1", STACK, 1, 20),
    *(Problem(weight, STACK, axis, 20) for weight, axis in IN_STACKS.items()),
    *(Problem("uint3 along 1", SQUARE, axis, 512) for axis in (0, 1)),
    *(Problem("uint5 along 2", SQUARE, axis, 512) for axis in (0, 1)),
]
