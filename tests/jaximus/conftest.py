import jax
import pytest


@pytest.fixture(autouse=True)
def _compile_quickly():
    """These tests compile many small programs to run each once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
