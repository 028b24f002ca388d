"""Weights that meet the same activations, fused into one array behind views of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import explain, implicit, materialize, quantize, stored_bytes
from eformer.kernels import cpu
from eformer.model import Fused, fuse

SIZES = (64, 32, 32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((3, 64), np.float32))


def matrices(**options: str) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    dense = [jnp.asarray(draw.standard_normal((size, 64), np.float32)) for size in SIZES]
    return [quantize(w, axis=1, **options) for w in dense] if options else dense  # pyright: ignore[reportArgumentType]


@jax.jit  # a part of the model that is traced for itself
def attention_inputs(q: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array) -> list[jax.Array]:
    return [x @ w.T for w in (q, k, v)]


def fused_inputs(fused: Fused, x: jax.Array) -> list[jax.Array]:
    parts: Any = fused.parts()  # they stand for arrays
    return attention_inputs(*parts, x)


@pytest.mark.parametrize("options", [{}, {"format": "int8"}, {"format": "nf4", "activation_dtype": "int8"}], ids=str)
def test_parts_are_the_matrices(options: dict[str, str]):
    given = matrices(**options)
    fused = fuse(given)
    assert stored_bytes(fused) == stored_bytes(given)
    found = jax.jit(implicit(fused_inputs))(fused, X)
    for part, matrix, y in zip(fused.parts(), given, found, strict=True):
        assert part.shape == matrix.shape
        np.testing.assert_array_equal(materialize(part), materialize(matrix))
        expected = implicit(jnp.matmul)(X, matrix.T)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.skipif(not cpu.is_available(), reason="counts calls of the native core")
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_program_has_one_matmul_for_all_parts(form: str):
    fused = fuse(matrices(format=form))
    assert explain(fused_inputs)(fused, X).dense_bytes == 0
    program = jax.jit(implicit(fused_inputs)).lower(fused, X).compile().as_text()
    assert program is not None
    assert program.count('custom_call_target="eformer_matmul"') == 1
    assert "transpose(" not in program  # codes stay as they are stored


@pytest.mark.filterwarnings("ignore:no rule serves")
def test_a_part_can_be_used_as_any_array():
    given = matrices(format="int8")
    part: Any = fuse(given).parts()[1]
    dense = materialize(given[1])
    np.testing.assert_allclose(implicit(jnp.matmul)(part, X.T), dense @ X.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(implicit(jnp.sin)(part), jnp.sin(dense))
    grad = jax.grad(lambda x: jnp.sum(implicit(jnp.matmul)(x, part.T) ** 2))(X)
    expected = jax.grad(lambda x: jnp.sum((x @ dense.T) ** 2))(X)
    np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_what_can_not_be_fused_is_refused():
    dense = matrices()
    with pytest.raises(ValueError, match="can't hold these matrices: Array8B, ArrayNF4 differ"):
        fuse([quantize(dense[0], format="int8", axis=1), quantize(dense[1], format="nf4", axis=1)])
    with pytest.raises(ValueError, match=r"the same `in`, got \[\(64, 64\), \(3,\)\]"):
        fuse([dense[0], jnp.zeros(3)])
