"""Finite in, finite out: the largest and the smallest numbers of a dtype in every format, within the format's bound."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.ops.quantization import formats, quantize

from .cases import Case, about, assert_within, f64, in_turn, name, normal

SHAPE = (64, 48)
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2)
OPTIONS = [
    Case.of(form.name, **options)
    for form in formats()
    for options in (
        {},
        {"axis": 0},
        {"fit": True},
        {"symmetric": True},
        {"double_quantization": True},
        {"scale": "tensor"},
    )
    if options.keys() <= form.options.keys()
]


def largest(w, info):
    return np.sign(w) * float(info.max)


def some_largest(w, info):
    return np.where(np.abs(w) > 1, largest(w, info), w)


def up_to_largest(w, info):
    return w / np.max(np.abs(w)) * float(info.max)


def a_quarter(w, info):
    return up_to_largest(w, info) / 4.5


def four_tenths(w, info):
    return up_to_largest(w, info) / 2.5


def tiny(w, info):
    return w * float(info.tiny)


def subnormal(w, info):
    return np.round(w * 8) * float(info.smallest_subnormal)


def small(w, info):
    return w * max(1e-36, float(info.tiny))


def zeros(w, info):
    del info
    return w * 0


def mixed(w, info):
    return np.where(w > 0, tiny(w, info), a_quarter(w, info))


KINDS = (largest, some_largest, up_to_largest, four_tenths, a_quarter, tiny, subnormal, small, zeros, mixed)


@jax.jit
def there_and_back(q, w):
    return q.materialize(), q.error_bound(w)


@functools.cache
def weights(kind, dtype):
    info = jnp.finfo(dtype)
    values = np.clip(kind(f64(normal(SHAPE)), info), float(info.min), float(info.max))
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize(("case", "dtype"), in_turn(OPTIONS, DTYPES, 2), ids=str)
def test_extremes_stay_finite(case, dtype):
    in_blocks = case.name.startswith("int") and case.name != "int8"
    for kind in KINDS:
        w = weights(kind, dtype)
        with about(kind):
            if in_blocks and np.max(np.abs(f64(w))) > np.finfo(np.float32).max * 0.98:
                with pytest.raises(ValueError, match="codes times their scale would overflow; divide"):
                    case(w)
                continue
            q = case(w)
            made, bound = there_and_back(q, w)
            assert np.all(np.isfinite(f64(made)))
            assert_within(made, w, bound)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=name)
@pytest.mark.parametrize("form", formats(), ids=str)
def test_matmuls_with_extremes_are_those_of_the_dense_array(form, dtype):
    """Each term is rounded as usual; `tiny` is what a float32 may lose in each of the sums."""
    x, info = (normal((2, SHAPE[0])) / 64).astype(dtype), jnp.finfo(dtype)
    relative = SHAPE[0] * float(jnp.finfo(jnp.float32).eps) + 2 * float(info.eps)
    matmul = jax.jit(lambda x, q: x @ q)
    for kind in (a_quarter, tiny, subnormal, small, zeros, mixed):
        q = quantize(weights(kind, dtype), dtype=form.name)
        dense = f64(q.materialize())
        bound = np.abs(f64(x)) @ np.abs(dense) * relative + SHAPE[0] * float(info.tiny)
        with about(kind):
            assert_within(matmul(x, q), f64(x) @ dense, bound)


@pytest.mark.parametrize("form", formats(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_format_takes_every_floating_point_dtype(dtype, form):
    w = normal(SHAPE).astype(dtype)
    q = quantize(w, dtype=form.name)
    assert q.dtype == dtype
    assert_within(q.materialize(), w, q.error_bound(w))
