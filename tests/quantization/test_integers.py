"""Integers are quantized exactly, or not at all unless it is asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.ops.quantization import Array1B, Array8B, ArrayNF4, RSROperatorBinary, RSROperatorTernary, quantize

from .cases import CASES, Case, assert_same_array, name

RAMP = np.arange(-100, 100, dtype=np.int32).reshape(4, 50)
SIGNS = np.resize([-1, 1, 1], (4, 50)).astype(np.int8)
TRITS = np.resize([-1, 0, 1], (4, 50)).astype(np.int8)
BITS = np.resize([0, 1, 1], (4, 50)).astype(np.int8)
# Each call, and integers that it holds exactly.
EXACT: dict[str, tuple[Any, np.ndarray]] = {
    "int8": (lambda x: quantize(x, dtype="int8"), RAMP),
    "int8 to its edge": (Array8B.quantize, np.array([[-127, 127, 3, 0], [1, 2, 3, -4]], np.int16)),
    "nf4": (lambda x: quantize(x, dtype="nf4"), TRITS),
    "nf4 of more": (ArrayNF4.quantize, np.array([[-4, 3, 2, 0], [1, 2, -3, -4]], np.int64)),
    "ternary": (lambda x: quantize(x, dtype="ternary"), TRITS),
    "binary": (lambda x: quantize(x, dtype="binary"), SIGNS),
    "ternary with a scale": (lambda x: quantize(x, dtype="ternary", scale="tensor"), 100 * TRITS.astype(np.int32)),
    "Array1B": (Array1B.quantize, TRITS),
    "Array1B alone": (Array1B, TRITS),
    "RSR": (RSROperatorBinary.quantize, BITS),
    "ternary RSR": (RSROperatorTernary.quantize, TRITS),
}


@pytest.mark.parametrize(("make", "x"), EXACT.values(), ids=EXACT)
def test_what_is_held_exactly_is_taken(make: Any, x: np.ndarray):
    x = jnp.asarray(x)
    assert_same_array(make(x).materialize(), x)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32], ids=name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_not_raises_and_says_how_to_insist(case: Case, dtype: Any):
    x = jnp.asarray(np.arange(1, 211).reshape(3, 70) * (1 if dtype != jnp.int32 else 7), dtype)
    with pytest.raises(ValueError, match=rf"`{case.name}` can't hold these integers exactly.*astype\(jnp.float32\)"):
        case(x)
    insisted = case(x.astype(jnp.float32))
    assert insisted.dtype == jnp.float32


@pytest.mark.parametrize("case", CASES, ids=str)
def test_under_tracing_the_dtype_decides(case: Case):
    with pytest.raises(ValueError, match="whose values are not known"):
        jax.jit(lambda x: case(x))(jnp.asarray(TRITS))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(Array8B.quantize, jnp.int4), (Array8B.quantize, jnp.uint4), (ArrayNF4.quantize, jnp.int2)],
    ids=["int8 of int4", "int8 of uint4", "nf4 of int2"],
)
def test_under_tracing_small_integers_are_taken(make: Any, dtype: Any):
    made = jax.eval_shape(make, jax.ShapeDtypeStruct((3, 4), dtype))  # XLA's compiler for CPU aborts on int2
    assert made.dtype == dtype


@pytest.mark.parametrize(("make", "largest"), [(Array8B.quantize, 127), (ArrayNF4.quantize, 4)], ids=["int8", "nf4"])
def test_all_integers_up_to_a_size_are_held_exactly(make: Any, largest: int):
    """Each row has another largest magnitude, and all integers up to it."""
    peaks = jnp.arange(1, largest + 1)[:, None]
    x = jnp.clip(jnp.arange(-largest, largest + 1)[None], -peaks, peaks)
    assert_same_array(make(x, block_size=2 * largest + 2).materialize() if largest == 4 else make(x).materialize(), x)


def test_constants_of_a_traced_function_can_be_seen():
    x = jnp.asarray(RAMP)
    assert_same_array(jax.jit(lambda: quantize(x, dtype="int8").materialize())(), x)
    with pytest.raises(ValueError, match="off by up to 15"):
        jax.jit(lambda: quantize(x, dtype="nf4").materialize())()


def test_another_dtype_is_no_way_around():
    with pytest.raises(ValueError, match="can't hold these integers exactly"):
        Array8B.quantize(jnp.asarray(RAMP), dtype=jnp.float32)


def test_moving_what_was_exact_requantizes_it(getkey):
    del getkey
    q = quantize(jnp.asarray(RAMP), dtype="int8")
    moved = q._requantized(jnp.asarray(RAMP).reshape(2, 100))
    assert (moved.shape, moved.dtype) == ((2, 100), jnp.int32)
