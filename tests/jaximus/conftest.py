import pytest


@pytest.fixture(autouse=True)
def _all_compile_quickly(compile_quickly):
    """All values here are exact, in whatever order they are computed."""
