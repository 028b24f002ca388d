"""Every Python example that a reader can copy runs, and the documents agree with the code and with the results."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest

import eformer
from eformer.ops.quantization import QuantizationType, find_format

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGES = [*DOCUMENTS, ROOT / "benchmarks" / "README.md"]
SOURCE = Path(eformer.__file__).parent  # files alone: the core is no module, but has the name of one
FILES = [path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCE.rglob("*.py")]
MODULES = sorted(".".join(path.parts).removesuffix(".__init__") for path in FILES)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),  # part of what the documents show
]


@pytest.fixture(autouse=True)
def _as_a_reader_runs_them():
    """JAX's own settings, not the strict ones of the other tests."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_documents_are_found():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "implicit-arrays.md"} <= {d.name for d in DOCUMENTS}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_python_blocks_of_a_document_run(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The blocks run in order, in one namespace, as a reader who follows the document runs them."""
    monkeypatch.chdir(tmp_path)
    text = document.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "a block is not closed, or not indented like its fence"
    namespace = {"__name__": document.stem}
    for block in blocks:
        # Empty lines go first, so that a traceback names the line of the document.
        source = "\n" * (text[: block.start()].count("\n") + 1) + textwrap.dedent(block[2])
        exec(compile(source, str(document), "exec", dont_inherit=True), namespace)


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its cells in order, in one namespace; calibration must have made the outputs better."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]
    namespace: dict[str, Any] = {"__name__": "tour"}
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert not any(output["output_type"] == "error" for output in cell["outputs"])
            exec(compile("".join(cell["source"]), f"tour.ipynb, cell {i}", "exec", dont_inherit=True), namespace)
    compare, of = namespace["compare_outputs"], (namespace["model"], namespace["params"])
    before, after = (compare(*of, namespace[name], namespace["held_out"]).divergence for name in ("small", "tuned"))
    assert after < before / 2


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name: str):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert failed == 0, "the report above says which"


# --- documents agree with the code ---


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as Markdown viewers derive them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text())
    targets = [(page.parent / (link.partition("#")[0] or page.name), link.partition("#")[2]) for link in links]
    assert not [target for target, _ in targets if not target.exists()]
    assert not [(target, anchor) for target, anchor in targets if anchor and anchor not in anchors(target)]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_make_targets_exist(page: Path):
    named = set(re.findall(r"[`\n]make ([a-z-]+)", page.read_text()))
    assert named <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_map_names_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"\w+\.(?:py|h|cc)\b", page.partition("## Where things are")[2].partition("## Glossary")[0]))
    assert len(named) > 30
    assert named <= {path.name for folder in ("src", "csrc") for path in (ROOT / folder).rglob("*.*")}


@pytest.mark.parametrize("form", [*map(find_format, QuantizationType)], ids=lambda form: form.name)
def test_the_readme_lists_every_format_of_the_package(form):
    row = rf'^\| `"{re.escape(form.name)}"` \| `{form.array_type.__name__}` \|'
    assert re.search(row, (ROOT / "README.md").read_text(), re.MULTILINE)


def test_picture_and_table_of_the_readme_show_the_results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    glance = importlib.import_module("glance")
    measured = json.loads(glance.RESULTS.read_text())
    picture = glance.picture(measured, glance.qualities(glance.MODELS.read_text()))
    again = "are out of date: run `python benchmarks/glance.py`"
    assert glance.PICTURE.read_text() == picture, f"{glance.PICTURE.name} {again}"
    assert glance.table(measured["results"]) in glance.BENCHMARKS.read_text(), f"the numbers of the page {again}"
