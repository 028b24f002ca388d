"""MXFP4 and NVFP4: how they round, against their definitions and against other writers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eformer.checkpoint import load, save
from eformer.jaximus import explain, implicit
from eformer.ops.quantization import ArrayGrouped, format_names, quantize

from .cases import assert_product, assert_same_array, assert_same_leaves, assert_within, normal

BLOCKS = {"mxfp4": 32, "nvfp4": 16}
every_format = pytest.mark.parametrize("name", BLOCKS)


def weights(shape: tuple[int, int] = (6, 96)) -> np.ndarray:
    """Blocks of many magnitudes, one of them of zeros."""
    w = np.array(normal(shape)) * 2.0 ** np.arange(-3 * shape[0], 3 * shape[0], 6, dtype=np.float32)[: shape[0], None]
    w[1, :32] = 0
    return w


def by_definition(name: str, w: np.ndarray) -> np.ndarray:
    """What `w` becomes, in NumPy; ml_dtypes rounds to the nearest, and of two that are as near to the even one."""
    blocks = w.reshape(w.shape[0], -1, BLOCKS[name])
    peak = np.abs(blocks).max(-1, keepdims=True)
    if name == "mxfp4":
        scale = np.exp2(np.floor(np.log2(np.where(peak == 0, 1, peak))) - 2)
    else:
        whole = peak.max() / np.float32(6 * 448)
        scale = (peak / np.float32(6) / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
    codes = np.clip(blocks / np.where(scale == 0, 1, scale), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float32) * scale).reshape(w.shape)


@every_format
def test_values_are_those_of_the_definition(name):
    w = weights()
    q = quantize(jnp.asarray(w), format=name, axis=-1)
    assert isinstance(q, ArrayGrouped)
    assert (q.codebook, q.block_size, format_names(q)) == ("e2m1", BLOCKS[name], (name,))
    assert_same_array(q.materialize(), by_definition(name, w))
    assert_within(q.materialize(), w, q.error_bound(jnp.asarray(w)))


def test_ties_go_to_the_even_code_and_large_elements_saturate():
    values = [4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5, 7.9, -0.25, -5.0]
    q = quantize(jnp.asarray(values), format="mxfp4")
    assert_same_array(q.materialize(), jnp.asarray([4.0, 0, 1, 1, 2, 2, 4, 4, 6, 6, 0, -4]))
    assert int(q.packed[5]) == 0xE8  # minus zero, then -4


@pytest.mark.parametrize(("peak", "code"), [(0.0, 0), (1e-40, 0), (2.0**-126, 0), (1.0, 125), (3e38, 252)], ids=str)
def test_scales_at_the_ends_of_e8m0(peak, code):
    q = quantize(jnp.asarray([peak, 0.0], jnp.float32), format="mxfp4")
    assert int(np.asarray(q.scale).view(np.uint8)[0]) == code


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf], ids=str)
@every_format
def test_a_block_with_a_nan_or_an_infinity_is_nan_and_no_other(name, special):
    w = np.array(normal((2, 64)))
    clean = np.asarray(quantize(jnp.asarray(w), format=name, axis=-1).materialize())
    w[1, 40] = special
    dense = np.asarray(quantize(jnp.asarray(w), format=name, axis=-1).materialize())
    spoilt = np.zeros(w.shape, bool)
    spoilt[1, 32 : 32 + BLOCKS[name]] = True
    np.testing.assert_array_equal(np.isnan(dense), spoilt)
    if name == "mxfp4":  # NVFP4 has a scale for all blocks of the matrix
        np.testing.assert_array_equal(dense[~spoilt], clean[~spoilt])


@every_format
def test_matmuls_and_joins_stay_quantized(name, tmp_path):
    q, x = quantize(normal((64, 48)), format=name, axis=0), normal((3, 64), seed=1)

    def function(x: Any, q: Any) -> Any:
        return x @ q, jnp.concatenate([x, x], 1) @ jnp.concatenate([q, q]), x @ jnp.concatenate([q, q], 1)[:, 40:64]

    assert explain(function)(x, q).dense_bytes == 0
    dense = q.materialize()
    one, both, part = jax.jit(implicit(function))(x, q)
    assert_product(one, x, dense)
    assert_product(both, jnp.concatenate([x, x], 1), jnp.concatenate([dense, dense]))
    assert_product(part, x, jnp.concatenate([dense, dense], 1)[:, 40:64])
    assert_same_leaves(load(save(tmp_path / "w", {"w": q}))["w"], q)


@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_arrays_whose_scales_differ_in_dtype_can_be_joined():
    q = quantize(normal((4, 64)), format="mxfp4")
    joined = implicit(lambda q: jnp.concatenate([q, 3 * q]))(q)  # float32 holds the scales of the second
    assert_same_array(jnp.asarray(joined), jnp.concatenate([q.materialize(), 3 * q.materialize()]))


def test_a_stack_has_a_scale_of_scales_for_each_matrix():
    w = normal((3, 8, 32))
    q = quantize(w, format="nvfp4")
    assert q.scale_scale.shape == (3, 1, 1)
    alone = jnp.stack([quantize(each, format="nvfp4").materialize() for each in w])
    assert_same_array(q.materialize(), alone)


# --- the same by other packages ---


def test_mxfp4_as_torchao_writes_it():
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    w = weights()
    mode = config.ScaleCalculationMode.FLOOR  # OCP's
    scale, packed = mx.to_mx(torch.from_numpy(w), torch.float4_e2m1fn_x2, 32, mode)
    q = quantize(jnp.asarray(w), format="mxfp4")
    np.testing.assert_array_equal(np.asarray(q.scale).view(np.uint8), scale.view(torch.uint8).numpy())
    np.testing.assert_array_equal(np.asarray(q.packed), packed.view(torch.uint8).numpy())
