"""What importing the package does, and which module may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import eformer

ROOT = Path(eformer.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
MODULES = [".".join(("eformer", *path.relative_to(ROOT).with_suffix("").parts)) for path in SOURCES]
MODULES = sorted(name.removesuffix(".__init__") for name in MODULES)
IMPLEMENTATION = [path for path in (ROOT / "_src").rglob("*.py") if path != ROOT / "_src" / "__init__.py"]
PUBLIC = [path for path in ROOT.glob("*/**/*.py") if "_src" not in path.parts]

# Which rooms of `_src` a room may import, besides itself and the shared ones, which know no other room.
SHARED = {"atomic_files", "progress", "public", "svg", "text", "user_warnings"}
MAY_IMPORT: dict[str, set[str]] = {
    **{room: set() for room in SHARED},
    "jaximus": set(),
    "kernels": set(),
    "quantization": {"jaximus", "kernels"},
    "cache": {"quantization", "jaximus"},
    "model": {"quantization", "jaximus"},
    "checkpoint": {"model", "quantization", "jaximus", "kernels"},
    "cli": {"checkpoint", "model", "quantization", "jaximus"},
    "compat": {"checkpoint", "model", "quantization", "jaximus", "kernels"},
}
# What the command line needs of the public packages: the version, and classes that only `compat` knows and files hold.
PUBLIC_OF_CLI = {"eformer", "eformer.checkpoint"}

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
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names if module == "eformer._src")}
    return names


def room_of(source: Path) -> str:
    return source.relative_to(ROOT / "_src").parts[0].removesuffix(".py")


def offenders(sources: list[Path], found: Callable[[Path], set[str]]) -> dict[str, set[str]]:
    """What is found in each file, where there is anything."""
    return {str(source.relative_to(ROOT)): names for source in sources if (names := found(source))}


def test_rooms_import_one_way():
    def wrong(source: Path) -> set[str]:
        room = room_of(source)
        allowed = MAY_IMPORT[room] | SHARED | {room}
        rooms = {name.split(".")[2] for name in imported(source) if name.startswith("eformer._src.")}
        return rooms - allowed

    assert {room_of(source) for source in IMPLEMENTATION} == MAY_IMPORT.keys()
    assert offenders(IMPLEMENTATION, wrong) == {}


def test_the_implementation_knows_no_public_package():
    def public(source: Path) -> set[str]:
        allowed = PUBLIC_OF_CLI if room_of(source) == "cli" else set()
        ours = {name for name in imported(source) if name.split(".")[0] == "eformer"}
        return {name for name in ours if not name.startswith("eformer._src")} - allowed

    assert offenders(IMPLEMENTATION, public) == {}


def test_public_packages_only_export():
    def exports(node: ast.stmt) -> bool:
        match node:
            case ast.ImportFrom():
                return True
            case ast.Assign(value=ast.Name()):  # a documented name of what is here under a better one
                return True
            case ast.Expr(value=ast.Call() as call):
                return ast.unparse(call.func) in ("_name_publicly", "globals().update")
        return False

    def more(source: Path) -> set[str]:
        _, *rest = ast.parse(source.read_text()).body  # after the docstring
        return {ast.unparse(node) for node in rest if not exports(node)}

    assert offenders(PUBLIC, more) == {}


def test_private_names_of_jax_are_in_one_file():
    def private(source: Path) -> set[str]:
        nodes = ast.walk(ast.parse(source.read_text()))
        attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        named = {name for name in imported(source) if name.startswith(("jax._", "jaxlib._"))}
        return named | {name for name in attributes if name.startswith("jax._src")}

    assert offenders(SOURCES, private).keys() == {"_src/jaximus/trace.py"}


def test_each_private_import_says_what_it_is_for():
    lines = (ROOT / "_src" / "jaximus" / "trace.py").read_text().splitlines()
    private = [i for i, line in enumerate(lines) if line.startswith("from jax._src")]
    assert private
    assert all(lines[i - 1].startswith("#") for i in private)
