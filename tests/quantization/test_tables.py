"""Formats that are a table of values: `register_table_format`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.kernels import grouped, reference
from eformer._src.kernels.pallas.formats import has_kernel
from eformer._src.quantization import registry
from eformer._src.quantization.tables import register_table_format
from eformer.ops.quantization import format_names, quantize

from .cases import assert_product, assert_same_array, assert_within, normal

ROOT = Path(__file__).parents[2]
TABLES = {
    "powers": [sign * 2.0**-i for sign in (-1, 1) for i in range(8)],
    "iq4": grouped.CODEBOOKS["iq4_nl"],  # the last value is nearer to 0 than the first
    "three": (1, 0, -1),
    "positive": (0.5, 1, 2, 4),
    "unsorted": (3, -1, 0, 2, -3, 1, -2),
}
W = normal((40, 24))


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    for name, values in TABLES.items():
        register_table_format(name, values, block_size=16)
    yield
    for name in TABLES:
        del registry._formats[name], grouped.CODEBOOKS[name]


every_table = pytest.mark.parametrize("name", TABLES)


@pytest.mark.parametrize("axis", [0, 1])
@every_table
def test_every_element_has_the_nearest_value(name, axis):
    q = quantize(W, format=name, axis=axis)
    blocks = np.split(np.moveaxis(np.array(W), axis, 0), range(16, W.shape[axis], 16))
    scales = np.moveaxis(np.array(q.scale, np.float32), axis, 0)
    table = np.unique(np.asarray(TABLES[name], np.float32))
    expected = [
        scale * table[np.abs(block[..., None] - scale[:, None] * table).argmin(-1)]
        for block, scale in zip(blocks, scales, strict=True)
    ]
    assert_same_array(np.moveaxis(np.array(q.materialize()), axis, 0), np.concatenate(expected))
    assert_within(q.materialize(), W, q.error_bound(W))


@every_table
def test_a_scale_spreads_the_table_over_its_block(name):
    table = np.asarray(TABLES[name], np.float32)
    reached = np.array([table.min(), table.max(), 0, 0])  # the scale is 1
    q = quantize(jnp.asarray(reached), format=name, block_size=4)
    assert float(q.scale[0]) == 1


@every_table
def test_fit_has_no_larger_error(name):
    fitted, plain = (quantize(W, format=name, fit=fit).materialize() for fit in (True, False))
    assert jnp.sum((fitted - W) ** 2) < jnp.sum((plain - W) ** 2)


@every_table
def test_the_array_tells_its_format(name):
    q = quantize(W, format=name)
    assert format_names(q) == (name,)
    assert format_names(q._encoded_again(W)) == (name,)


@every_table
def test_matmuls(name):
    x, q = normal((3, 40), seed=1), quantize(W, format=name, axis=0)
    assert_product(x @ q, x, q)


def test_a_core_of_other_values_is_not_asked(monkeypatch):
    q = quantize(W[None], format="powers")
    name = q._stored_matrix().format
    monkeypatch.setitem(grouped.CODEBOOKS, "powers", grouped.CODEBOOKS["powers"] * 2)
    assert name.startswith("powers_")
    assert q._stored_matrix().format != name


def test_the_header_has_the_name_that_the_array_asks_for(tmp_path):
    lines = [
        f"from {register_table_format.__module__} import register_table_format",
        "register_table_format('three', (1, 0, -1))",
    ]
    (tmp_path / "three.py").write_text("\n".join(lines))
    subprocess.run([sys.executable, ROOT / "csrc" / "table_formats.py", tmp_path, tmp_path / "out"], check=True)
    asked = quantize(W[None], format="three")._stored_matrix().format
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"{asked}.h"]


def test_accelerators_know_the_table():
    assert has_kernel(quantize(W[None], format="powers", axis=-1)._stored_matrix())


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_block_that_is_not_finite_decodes_to_nan(bad):
    q = quantize(W.at[3, 5].set(bad), format="powers", axis=-1)
    assert_same_array(jnp.isnan(q.materialize()), jnp.zeros(W.shape, bool).at[3, :16].set(True))


def test_the_largest_floats_are_held():
    w = jnp.full((1, 16), jnp.finfo(jnp.float32).max)
    assert_within(quantize(w, format="powers").materialize(), w, quantize(w, format="powers").error_bound(w))


WRONG = {"one value": [1.0], "only zeros": [0, 0], "too many": range(17), "not finite": [1, np.nan], "nested": [[1, 2]]}


@pytest.mark.parametrize("values", WRONG.values(), ids=WRONG.keys())
def test_a_table_that_is_none_is_refused(values):
    with pytest.raises(ValueError, match="2 to 16 finite values"):
        register_table_format("wrong", values)


def test_scales_are_floats_of_16_bits_or_more():
    with pytest.raises(ValueError, match=r"`scale_dtype` of the format 'wrong'.*bfloat16.*float8_e8m0fnu"):
        register_table_format("wrong", [0, 1], scale_dtype=jnp.float8_e8m0fnu)


@pytest.mark.parametrize("name", ["powers", "integer", "e2m1", "int8"])
def test_a_name_is_given_once(name):
    with pytest.raises(ValueError, match=f"'{name}' already"):
        register_table_format(name, [0, 1])
    assert "int8" not in grouped.CODEBOOKS


def test_of_two_as_near_the_lower():
    table = np.array([1, 0, 2, 0], np.float32)
    x = jnp.asarray([-1, 0.5, 1.5, 1.6, 9, jnp.nan])
    assert_same_array(reference.nearest_in_table(x, table), jnp.asarray([1, 1, 0, 2, 2, 1], jnp.uint8))
    assert_same_array(reference.nearest_in_table(x, table, as_values=True), jnp.asarray([0.0, 0, 1, 2, 2, 0]))
    assert reference.nearest_in_table(x.astype(jnp.float16), table, as_values=True).dtype == jax.numpy.float16


@pytest.mark.parametrize("block_size", [16, 64])  # the latter longer than the axis
@every_table
def test_importance_counts(name, block_size):
    importance = jnp.exp(normal((40, 24), seed=1))
    options = {"format": name, "block_size": block_size, "axis": 0}
    plain, weighed = quantize(W, **options, fit=True), quantize(W, **options, importance=importance)
    before, after = (float(jnp.sum(importance * (q.materialize() - W) ** 2)) for q in (plain, weighed))
    assert after < before
