"""Options for what takes long, or a file that is too large to be part of the repository."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gguf-file", default=None, help="a GGUF file of a real model, to read with ours and with `gguf`")
    parser.addoption("--fuzz", type=int, default=2000, metavar="COUNT", help="mutated files to try of each kind")
    parser.addoption("--kills", type=int, default=4, metavar="COUNT", help="saves of each writer to kill")
    parser.addoption("--races", type=int, default=2, metavar="COUNT", help="rounds of saves of each writer at once")
    parser.addoption("--lies", type=int, default=400, metavar="COUNT", help="well-formed files that lie, of all kinds")
