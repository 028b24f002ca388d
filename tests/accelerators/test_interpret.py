"""Every case of the kernels in interpret mode; on TPU races are looked for, and memory that nothing wrote is NaN."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.test_pallas import (
    FORMATS,
    RAGGED,
    SMALL,
    STRICT,
    assert_product,
    example,
    run_on_gpu,
    run_on_tpu,
    x_for,
)

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("it takes minutes: `make test-accelerators` runs it", allow_module_level=True)


@pytest.mark.parametrize("shape", [RAGGED, SMALL], ids=str)
@pytest.mark.parametrize("contracted_axis", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_kernels(name, contracted_axis, shape):
    (matrix, values), x = example(name, shape), x_for(shape, contracted_axis, m=11)
    on_tpu = run_on_tpu(matrix, x, contracted_axis, interpret=STRICT)
    assert_product(on_tpu, x, values, contracted_axis)
    assert_product(run_on_gpu(matrix, x, contracted_axis), x, values, contracted_axis)
