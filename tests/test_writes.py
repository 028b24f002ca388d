"""No code of ours writes a file but through `_src/atomic_files`, and all that writes is in the table of writers."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint.writers import WRITERS

import eformer
import eformer.checkpoint
import eformer.model
from eformer._src.cli.run import make_parser

ROOT = Path(eformer.__file__).parent
EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCES = sorted([*ROOT.rglob("*.py"), *EXAMPLES.rglob("*.py")])
ALLOWED = ROOT / "_src" / "atomic_files"

# Calls that make, change or rename files; `TemporaryDirectory` makes what nobody relies on.
WRITES = {
    *("write_text", "write_bytes", "touch", "truncate", "ftruncate", "rename", "renames", "symlink_to", "hardlink_to"),
    *("symlink", "link", "mkstemp", "mktemp", "NamedTemporaryFile", "copy2", "copyfile", "copytree"),
    *("tofile", "savez_compressed", "savetxt", "memmap", "save_file", "serialize_file", "FileIO"),
}
QUALIFIED = {"os.replace", "shutil.move", "shutil.copy", "np.save", "numpy.save", "jnp.save", "jnp.savez"}
OPENED = {"savefig", "imsave", "savez"}  # into a file that is open already, or into memory
FLAGS = {"O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND"}


def writes(source: str) -> Iterator[str]:
    """The calls in a source text that write a file by its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_write(node, ast.unparse(node.func)):
            yield ast.unparse(node)


def _is_write(call: ast.Call, called: str) -> bool:
    name, first = called.rpartition(".")[2], ast.unparse(call.args[0]) if call.args else ""
    if called == "os.open":
        return first != "os.devnull" and any(flag in ast.unparse(call) for flag in FLAGS)
    if name in ("open", "fdopen"):
        return _opens_to_write(call, method="." in called and called not in ("io.open", "os.fdopen"))
    return name in WRITES or called in QUALIFIED or (name in OPENED and first not in ("file", "memory"))


def _opens_to_write(call: ast.Call, *, method: bool) -> bool:
    """Whether a mode says so, or is computed. A method takes a mode or, as that of an archive does, a name."""
    modes = [each.value for each in call.keywords if each.arg == "mode"]
    modes += [arg for arg in call.args if isinstance(arg, ast.Constant)] if method else call.args[1:2]
    return any(not isinstance(mode, ast.Constant) or set("wax+") & set(str(mode.value)) for mode in modes)


def test_all_writes_are_in_one_place():
    found = {str(path): list(writes(path.read_text())) for path in SOURCES if not path.is_relative_to(ALLOWED)}
    assert {path: calls for path, calls in found.items() if calls} == {}


OFFENDERS = [
    'open(path, "w")',
    'open(path, mode="ab")',
    "open(path, how)",
    'path.open("r+b")',
    'os.fdopen(handle, "wb")',
    "os.open(path, os.O_RDWR | os.O_CREAT)",
    'path.write_text("")',
    "os.replace(a, b)",
    "temporary.rename(path)",
    "shutil.copy(a, b)",
    "np.save(path, x)",
    "figure.savefig(path)",
    "tempfile.NamedTemporaryFile()",
]


@pytest.mark.parametrize("call", OFFENDERS)
def test_the_test_above_finds(call: str):
    assert list(writes(f"def f():\n    return [{call}]")) == [call.replace('"', "'")]


@pytest.mark.parametrize(
    "call", ["open(path)", 'open(path, "rb")', "path.open()", 'text.replace("a", "b")', "x.copy()"]
)
def test_the_test_above_does_not_mind(call: str):
    assert not list(writes(call))


def public() -> dict[str, object]:
    """Public functions and methods by name."""
    found: dict[str, object] = {}
    for package in (eformer, eformer.checkpoint, eformer.model):
        for name in dir(package):
            each = getattr(package, name)
            if name.startswith("_") or getattr(each, "__module__", "").partition(".")[0] != "eformer":
                continue
            found[name] = each
            methods = inspect.getmembers(each, inspect.isfunction) if inspect.isclass(each) else []
            found |= {f"{name}.{method}": function for method, function in methods if not method.startswith("_")}
    return {name: each for name, each in found.items() if inspect.isroutine(each)}


def test_all_functions_that_replace_files_are_in_the_table():
    replacing = {name for name, each in public().items() if "overwrite" in inspect.signature(each).parameters}
    assert replacing == {name.partition(",")[0] for name in WRITERS} & public().keys()


def test_all_commands_that_replace_files_are_in_the_table():
    (commands,) = (each for each in make_parser()._actions if isinstance(each.choices, dict))
    replacing = {f"eformer {name}" for name, each in commands.choices.items() if "--force" in each.format_help()}
    # `Report.to_html` and `Statistics.save` write them; the demo also calls `quantize_checkpoint`.
    single = {"eformer compare", "eformer demo", "eformer calibrate"}
    assert replacing == {name for name, each in WRITERS.items() if each.command} | single
