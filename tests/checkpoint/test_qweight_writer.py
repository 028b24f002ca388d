"""What auto-round and transformers write today, read here. `qweight.safetensors` stands in where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer.checkpoint import load

from .layout_examples import write_folder

MISSING = [each for each in ("torch", "transformers", "auto_round") if importlib.util.find_spec(each) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")
def test_codes_and_zeros_of_the_writer(tmp_path: Path):
    """With all scales one, weights are the integers that the writer's own reader gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports, which take seconds, and of the packages
        writers: Any = importlib.import_module(".make_golden_qweight", __package__)
        cases = list(itertools.chain(writers.gptq(), writers.awq(), writers.ternary()))
    different = []
    for case in cases:
        scale = "weight_scale" if "weight" in case.tensors else "scales"
        ones = np.ones(tuple(case.tensors[scale].shape), np.float32)
        tensors = {end: np.asarray(tensor) for end, tensor in case.tensors.items() if end != scale}
        found = load(write_folder(tmp_path, {**tensors, scale: ones}, case.config))["weight"]
        if not np.array_equal(found.materialize(), case.expected.to(writers.torch.float32)):
            different.append(case.name)
    assert len(cases) > 10
    assert not different
    assert found.dtype == jnp.float32
