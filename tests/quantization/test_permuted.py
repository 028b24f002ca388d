"""Arrays whose elements are stored in another order: matmuls read them as they are stored."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from eformer.checkpoint import CheckpointError, load, save
from eformer.jaximus import MaterializationWarning, explain, implicit
from eformer.ops.quantization import ArrayGrouped, ArrayPermuted

from .cases import normal

ORDER = np.random.default_rng(0).permutation(64).astype(np.int32)
W = normal((24, 64))


@functools.cache
def permuted() -> ArrayPermuted:
    """(24, 64), with the 64 in another order."""
    return ArrayPermuted(ArrayGrouped.quantize(W[:, ORDER], block_size=16), jnp.asarray(ORDER))


def test_values():
    q = permuted()
    expected = q.array.materialize()[:, np.argsort(ORDER)]
    assert (q.shape, q.dtype) == (expected.shape, expected.dtype)
    assert jnp.array_equal(q.materialize(), expected)
    assert jnp.all(jnp.abs(expected - W) <= q.error_bound(W))
    moved = implicit(jnp.transpose)(q)
    assert (moved.shape, moved.axis) == ((64, 24), -2)
    assert jnp.array_equal(moved.materialize(), expected.T)


MATMULS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "x @ q.T": (lambda x, q: x @ q.T, (3, 64)),
    "x @ q": (lambda x, q: x @ q, (3, 24)),
    "q @ x": (lambda x, q: q @ x, (64, 5)),
    "a vector": (lambda x, q: q @ x, (64,)),
    "einsum of outputs": (lambda x, q: jnp.einsum("oi,bto->ibt", q, x), (2, 3, 24)),
}


@pytest.mark.parametrize(("function", "shape"), MATMULS.values(), ids=MATMULS)
def test_matmuls_stay_quantized(function: Any, shape: tuple[int, ...]):
    x, q = normal(shape, seed=1), permuted()
    assert explain(function)(x, q).dense_bytes == 0
    found, expected = jax.jit(implicit(function))(x, q), function(x, q.materialize())
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def moved_codes(jaxpr: Any) -> list[Any]:
    """The equations of a program that transpose codes, for something that uses them."""
    used = {id(each) for eqn in jaxpr.eqns for each in eqn.invars} | {id(each) for each in jaxpr.outvars}
    found = []
    for eqn in jaxpr.eqns:
        codes = eqn.primitive.name == "transpose" and eqn.outvars[0].aval.dtype == jnp.uint8
        found += [eqn] if codes and id(eqn.outvars[0]) in used else []
        found += [each for inner in jaxprs_in_params(eqn.params) for each in moved_codes(inner)]
    return found


def test_a_transpose_moves_no_codes():
    def twice(x: Any, q: Any) -> Any:
        return x @ q.T, jnp.transpose(q)

    x, q = normal((3, 64), seed=1), permuted()
    assert not moved_codes(jax.make_jaxpr(implicit(lambda x, q: x @ q.T))(x, q).jaxpr)
    assert moved_codes(jax.make_jaxpr(implicit(twice))(x, q).jaxpr)  # which has to


def test_gradients_and_casts():
    x, q = normal((3, 64), seed=1), permuted()
    gradient = jax.grad(implicit(lambda x: jnp.sum(jnp.sin(x @ q.T))))(x)
    dense = q.materialize()
    np.testing.assert_allclose(gradient, jnp.cos(x @ dense.T) @ dense, rtol=1e-4, atol=1e-4)
    half = implicit(lambda q: q.astype(jnp.bfloat16))(q)
    assert isinstance(half, ArrayPermuted)
    assert jnp.array_equal(half.materialize(), dense.astype(jnp.bfloat16))


def test_two_permuted_arrays():
    with pytest.warns(MaterializationWarning, match="of ArrayPermuted"):
        found = implicit(lambda a, b: a @ b.T)(permuted(), permuted())
    dense = permuted().materialize()
    np.testing.assert_allclose(found, dense @ dense.T, rtol=1e-4, atol=1e-4)


def test_saved_and_laid_out(tmp_path: Path):
    mesh = jax.make_mesh((2,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x", None))
    found = load(save(tmp_path / "a.safetensors", {"w": permuted()}), sharding=sharding)["w"]
    assert found.sharding.is_equivalent_to(sharding, 2)
    assert jnp.array_equal(found.materialize(), permuted().materialize())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"order": jnp.arange(63)}, "order .63,. must have an entry for each of 64"),
        ({"order": jnp.arange(64.0)}, "order must be int32"),
        ({"axis": -3}, "`axis=-3` is counted from the end"),
        ({"axis": 1}, "`axis=1` is counted from the end"),
        ({"array": W}, "`array` must be a quantized array"),
    ],
)
def test_what_is_no_array(change: dict[str, Any], error: str):
    given = {"array": permuted().array, "order": jnp.arange(64), "axis": -1, **change}
    with pytest.raises((TypeError, ValueError), match=error):
        ArrayPermuted(**given)


def test_a_file_has_each_position_once(tmp_path: Path):
    q = ArrayPermuted(permuted().array, jnp.zeros(64, jnp.int32))
    with pytest.raises(CheckpointError, match="each position once"):
        load(save(tmp_path / "a.safetensors", {"w": q}))
