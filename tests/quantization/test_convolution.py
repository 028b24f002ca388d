"""Convolutions with a quantized kernel: as matmuls, against the dense ones."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer._src.quantization.matmul import convolution as convolution_module
from eformer.jaximus import MaterializationWarning, explain, implicit, materialization_error

from .cases import Case, dense, eqns_of, example, f64, name, normal

KERNELS = [Case.of("int8"), Case.of("int8", axis=0), Case.of("nf4", block_size=4), Case.of("ternary", scale="tensor")]
by_patches = pytest.mark.parametrize("growth", [4, 0], ids=["patches", "positions"])


def assert_convolved(x: Any, q: Any, **params: Any) -> None:
    """As the dense convolution in float64, as exactly as float32 sums over the window can be."""
    convolve = functools.partial(lax.conv_general_dilated, **params)
    with materialization_error():
        out = jax.jit(implicit(convolve))(x, q)
    w = dense(q)
    like = jax.eval_shape(convolve, x, w)
    assert (out.shape, out.dtype) == (like.shape, like.dtype)
    params.pop("preferred_element_type", None)
    exact = lambda x, w: lax.conv_general_dilated(x, w, precision="highest", **params)  # noqa: E731
    single = [a.astype(jnp.float32) for a in (x, w)]
    expected, magnitude = exact(*single), exact(*map(jnp.abs, single))
    terms = q.size // min(q.shape)
    eps = 2 * float(jnp.finfo(jnp.float32).eps) * terms + 2 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_array_less(np.abs(f64(out) - f64(expected)), f64(magnitude) * eps + 1e-30)


@by_patches
@pytest.mark.parametrize(
    "params",
    [
        {"window_strides": (1, 1), "padding": "SAME"},
        {"window_strides": (2, 1), "padding": "VALID"},
        {"window_strides": (1, 2), "padding": ((0, 2), (-1, 1)), "rhs_dilation": (2, 1)},
        {"window_strides": (1, 1), "padding": ((1, 1), (2, 0)), "lhs_dilation": (2, 3)},
    ],
    ids=["same", "strides", "dilated", "transposed"],
)
def test_windows(params, growth, monkeypatch):
    monkeypatch.setattr(convolution_module, "MAX_GROWTH", growth)
    q, _ = example(Case.of("int8", axis=(0, 1, 2)), (3, 2, 4, 6))
    assert_convolved(normal((2, 9, 8, 4)), q, dimension_numbers=("NHWC", "HWIO", "NHWC"), **params)


@pytest.mark.parametrize(
    ("layout", "x_shape", "q_shape"),
    [
        (("NCHW", "OIHW", "NCHW"), (2, 4, 9, 8), (6, 4, 3, 2)),
        (("NHWC", "OIHW", "NCHW"), (2, 9, 8, 4), (6, 4, 3, 2)),
        (("HWNC", "IOHW", "CNHW"), (9, 8, 2, 4), (4, 6, 3, 2)),
        (("NCH", "OIH", "NCH"), (2, 4, 9), (6, 4, 3)),
        (("NHC", "HIO", "NHC"), (2, 9, 4), (3, 4, 6)),
        (("NCDHW", "OIDHW", "NCDHW"), (1, 4, 5, 4, 3), (6, 4, 2, 1, 3)),
        (("NC", "OI", "NC"), (3, 4), (6, 4)),
    ],
    ids=str,
)
def test_layouts(layout, x_shape, q_shape):
    q, _ = example(Case.of("int8"), q_shape)
    spatial = len(x_shape) - 2
    assert_convolved(normal(x_shape), q, window_strides=(1,) * spatial, padding="SAME", dimension_numbers=layout)


@by_patches
@pytest.mark.parametrize("shape", [(1, 1, 8, 6), (3, 3, 8, 6)], ids=str)
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_formats(case, shape, growth, monkeypatch):
    monkeypatch.setattr(convolution_module, "MAX_GROWTH", growth)
    q, _ = example(case, shape)
    numbers = ("NHWC", "HWIO", "NHWC")
    assert_convolved(normal((2, 5, 4, 8)), q, window_strides=(1, 1), padding="SAME", dimension_numbers=numbers)


@pytest.mark.parametrize("growth", [4, 0], ids=["patches", "positions"])
@pytest.mark.parametrize(
    ("dtype", "asked"), [(jnp.bfloat16, None), (jnp.bfloat16, jnp.float32), (jnp.float16, None)], ids=name
)
def test_dtypes(dtype, asked, growth, monkeypatch):
    monkeypatch.setattr(convolution_module, "MAX_GROWTH", growth)
    q, _ = example(Case.of("int8"), (3, 4, 6), dtype)
    layout = ("NHC", "HIO", "NHC")
    params = {"window_strides": (2,), "padding": "SAME", "dimension_numbers": layout}
    assert_convolved(normal((2, 9, 4), dtype), q, preferred_element_type=asked, **params)


def test_gradient_of_the_input():
    q, w = example(Case.of("int8", axis=0), (3, 4, 6))
    x, ct = normal((2, 9, 4)), normal((2, 5, 6), seed=1)
    convolve = functools.partial(
        lax.conv_general_dilated, window_strides=(2,), padding="SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    loss = lambda x, w: jnp.sum(ct * convolve(x, w))  # noqa: E731
    with materialization_error():
        gradient = jax.jit(jax.grad(implicit(loss)))(x, q)
    np.testing.assert_allclose(gradient, jax.grad(loss)(x, w), atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ((3, 4, 8), {"batch_group_count": 2}),
        ((80, 4, 8), {}),
    ],
    ids=["by batch", "wide window"],
)
def test_what_is_left_to_dense_is_told(shape, params, monkeypatch):
    monkeypatch.setattr(convolution_module, "MAX_GROWTH", 0)
    q, w = example(Case.of("int8"), shape)
    x = normal((8, 90, 4))
    convolve = lambda x, w: lax.conv_general_dilated(  # noqa: E731
        x, w, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"), **params
    )
    assert explain(convolve)(x, q).dense_bytes == w.nbytes
    with warnings.catch_warnings(action="ignore", category=MaterializationWarning):
        np.testing.assert_allclose(implicit(convolve)(x, q), convolve(x, w), atol=1e-3)


GROUPS = {"few": (2, 24), "depthwise": (24, 24), "several for each": (24, 48), "many": (12, 24)}  # and outputs


@pytest.mark.parametrize(("groups", "outputs"), GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"window_strides": (2, 1)},
        {"lhs_dilation": (2, 1), "padding": [(1, 1), (1, 1)]},
        {"rhs_dilation": (1, 2)},
        {"padding": [(2, 0), (1, 1)]},
    ],
    ids=["plain", "strides", "dilated", "window dilated", "padded"],
)
@pytest.mark.parametrize("case", [*KERNELS, Case.of("int4", block_size=4)], ids=str)
def test_groups_of_features(case, params, groups, outputs):
    q, _ = example(case, (3, 2, 24 // groups, outputs))
    given = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **params}
    assert_convolved(normal((2, 6, 5, 24)), q, feature_group_count=groups, **given)


@pytest.mark.parametrize("size", [(8, 8), (9, 11)], ids=str)
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_patches_side_by_side_take_one_reshape(case, size):
    """As a vision transformer cuts its images: the program does not grow with the patches."""
    q, _ = example(case, (4, 4, 8, 6))
    params = {"window_strides": (4, 4), "padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x = normal((2, *size, 8))
    assert_convolved(x, q, **params)
    made = [e.primitive.name for e in eqns_of(implicit(functools.partial(lax.conv_general_dilated, **params)), x, q)]
    assert made.count("slice") + made.count("concatenate") < 4
