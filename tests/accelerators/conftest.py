"""Compiling ahead of time for devices that are not here: libtpu and the CUDA plugin need none."""

import importlib.util
import os

import pytest

os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # none of the processes has a chip


@pytest.fixture(scope="session")
def libtpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: `make test-accelerators` does it")


@pytest.fixture(scope="session")
def cuda_plugin() -> None:
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("JAX's CUDA plugin is not installed: `make test-accelerators` does it")
