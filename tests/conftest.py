"""Strict settings for every test. Warnings are errors too: see `filterwarnings` in pyproject.toml."""

import os
from importlib.metadata import version

# Before JAX is imported: eight devices on the host, so that sharding is real; and what makes XLA compile small programs
# faster, unless flags are given. JAX 0.10 has two ways to make code of a fusion.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)

import gc
import itertools
from collections.abc import Callable, Iterator

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking the modules and the thousands of test items at each full collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def getkey() -> Callable[[], jax.Array]:
    """A function that gives a new random key at each call, the same ones in every run of the test."""
    seeds = itertools.count()
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def compile_quickly() -> Iterator[None]:
    """For tests that compile many programs to run each once, and ask what a program computes, not how it rounds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
