"""What tab completion shows of a quantized array, besides the manners of every JAX array and its own fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from eformer.ops.quantization import RSROperatorTernary

from .cases import DEFAULTS, normal

ARRAYS: dict[str, Any] = {str(case): case for case in DEFAULTS} | {"rsr": RSROperatorTernary.quantize}
METHODS = {"quantize", "decode", "materialize", "dequantize", "error_bound", "with_dtype", "with_activation_dtype"}
SHARDING = {"with_sharding", "is_sharded"}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_shows_a_handful_of_methods_of_its_own(name):
    q = ARRAYS[name](normal((4, 8)))
    fields = {field.name for field in dataclasses.fields(q)}
    shown = {each for each in dir(q) if not each.startswith("_")} - set(dir(jnp.zeros(()))) - fields
    assert shown - {"from_matrix"} == METHODS | SHARDING
    assert not [
        each for each in shown | (fields & set(dir(q))) if getattr(q, each) is None and each != "activation_dtype"
    ]
