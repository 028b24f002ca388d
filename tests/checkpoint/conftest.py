"""An option for a real file, which is too large to be part of the repository."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gguf-file", default=None, help="a GGUF file of a real model, to read with ours and with `gguf`")


@pytest.fixture(autouse=True)
def _all_compile_quickly(compile_quickly: None) -> None:
    """What is saved must come back; how it was computed is for other tests."""
