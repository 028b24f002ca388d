"""Every Python example that a reader can copy runs: the blocks of the documents, and the `>>>` lines of docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import textwrap
from pathlib import Path

import jax
import pytest

import eformer

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MODULES = sorted(["eformer", *(m.name for m in pkgutil.walk_packages(eformer.__path__, "eformer."))])
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),  # part of what the documents show
    pytest.mark.usefixtures("compile_quickly"),
]


@pytest.fixture(autouse=True)
def _as_a_reader_runs_them():
    """JAX's own settings, not the strict ones of the other tests."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_documents_are_found():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "implicit-arrays.md"} <= {d.name for d in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_of_a_document_run(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """In order and in one namespace, as a reader who follows the document has them."""
    monkeypatch.chdir(tmp_path)
    text = document.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "a block is not closed, or not indented like its fence"
    namespace = {"__name__": document.stem}
    for block in blocks:
        # Empty lines before it, so that a traceback names the line of the document.
        source = "\n" * (text[: block.start()].count("\n") + 1) + textwrap.dedent(block[2])
        exec(compile(source, str(document), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name: str):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert failed == 0, "the report above says which"
