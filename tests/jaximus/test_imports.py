"""What importing the package does, and which module may import which."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import eformer

ROOT = Path(eformer.__file__).parent
MODULES = ["eformer", *sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "eformer."))]
SOURCES = sorted(ROOT.rglob("*.py"))

# Modules and a package beside the others, which know none of them and which all may import.
SHARED = {path.stem for path in ROOT.glob("_*") if not path.stem.startswith("__")}

# Which packages of ours a package may import, besides itself and the shared modules.
MAY_IMPORT = {
    **{module: set() for module in SHARED},
    "jaximus": set(),
    "kernels": set(),
    "ops": {"jaximus", "kernels"},
    "model": {"ops", "jaximus"},
    "checkpoint": {"model", "ops", "jaximus", "kernels"},
    "cli": {"checkpoint", "model", "ops", "jaximus"},
    "__main__": {"cli"},
}

# Run in a fresh interpreter: what our code does while it is imported, once the packages it stands on are there.
HYGIENE = """
import importlib, os, sys
import jax, ml_dtypes, numpy
from jax._src import xla_bridge

root, names = sys.argv[1], sys.argv[2:]
found = []

def ours():
    frame = sys._getframe(2)
    while frame is not None and "importlib" not in frame.f_code.co_filename:
        if frame.f_code.co_filename.startswith(root):
            return True
        frame = frame.f_back
    return False

class Watched(type(os.environ)):
    def __getitem__(self, key):
        if ours():
            found.append(f"reads {key}")
        return super().__getitem__(key)

    def __contains__(self, key):
        if ours():
            found.append(f"looks for {key}")
        return super().__contains__(key)

    def __iter__(self):
        if ours():
            found.append("reads them all")
        return super().__iter__()

os.environ.__class__ = Watched
for name in names:
    importlib.import_module(name)
    if xla_bridge._backends:
        found.append(f"{name} starts a backend")
        break
for each in dict.fromkeys(found):
    print(each)
"""


def hygiene(root: Path, *modules: str) -> list[str]:
    """What the modules do that they should not; code counts as theirs if its file is below `root`."""
    command = [sys.executable, "-c", HYGIENE, str(root), *modules]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_importing_touches_nothing():
    assert hygiene(ROOT, *MODULES) == []


def test_the_test_above_can_fail(tmp_path, monkeypatch):
    (tmp_path / "offender.py").write_text(
        "import os, jax\nos.environ.get('A'), os.getenv('B'), 'C' in os.environ, list(os.environ)\njax.numpy.ones(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    expected = {"reads A", "reads B", "looks for C", "reads them all", "offender starts a backend"}
    assert expected <= set(hygiene(tmp_path, "offender"))


def imported(source: Path) -> set[str]:
    """The modules a file imports, by their full names."""
    package = ["eformer", *source.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def relative(source: Path) -> str:
    return str(source.relative_to(ROOT))


def package_of(source: Path) -> str:
    return source.relative_to(ROOT).parts[0].removesuffix(".py")


def of_ours(source: Path) -> list[list[str]]:
    """What a file imports of ours: the parts of each name after "eformer"."""
    return [name.split(".")[1:] for name in imported(source) if name.startswith("eformer.")]


def offenders(found: Callable[[Path], set[str]]) -> dict[str, set[str]]:
    """What is found in each file, where there is anything."""
    return {relative(source): names for source in SOURCES if (names := found(source))}


def test_imports_point_one_way():
    def wrong(source: Path) -> set[str]:
        package = package_of(source)
        allowed = MAY_IMPORT.get(package, set(MAY_IMPORT)) | {package} | SHARED
        return {path[0] for path in of_ours(source) if path[0] in MAY_IMPORT} - allowed

    assert offenders(wrong) == {}
    assert {package_of(source) for source in SOURCES} == MAY_IMPORT.keys() | {"__init__"}


def test_no_private_name_crosses_a_package():
    def private(source: Path) -> set[str]:
        others = [path for path in of_ours(source) if path[0] != package_of(source)]
        return {".".join(path) for path in others if any(part.startswith("_") for part in path[1:])}

    assert offenders(private) == {}


def test_every_package_has_its_place():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= MAY_IMPORT.keys()


def test_private_names_of_jax_are_in_one_file():
    def private(source: Path) -> set[str]:
        nodes = ast.walk(ast.parse(source.read_text()))
        attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        named = {name for name in imported(source) if name.startswith(("jax._", "jaxlib._"))}
        return named | {name for name in attributes if name.startswith("jax._src")}

    assert offenders(private).keys() == {"jaximus/_trace.py"}


def test_each_private_import_says_what_it_is_for():
    lines = (ROOT / "jaximus" / "_trace.py").read_text().splitlines()
    private = [i for i, line in enumerate(lines) if line.startswith("from jax._src")]
    assert private
    assert all(lines[i - 1].startswith("#") for i in private)
