"""What is public: functions that users call, and of a quantized array a handful of methods of its own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest

from eformer.ops.quantization import RSROperatorTernary

from .cases import DEFAULTS, normal

ARRAYS: dict[str, Any] = {str(case): case for case in DEFAULTS} | {"rsr": RSROperatorTernary.quantize}
METHODS = {"quantize", "decode", "materialize", "dequantize", "error_bound", "with_dtype", "with_activation_dtype"}
SHARDING = {"with_sharding", "is_sharded"}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_shows_a_handful_of_methods_of_its_own(name):
    q = ARRAYS[name](normal((4, 8)))
    fields = {field.name for field in dataclasses.fields(q)}
    shown = {each for each in dir(q) if not each.startswith("_")} - set(dir(jnp.zeros(()))) - fields
    assert shown - {"from_matrix"} == METHODS | SHARDING
    assert not [
        each for each in shown | (fields & set(dir(q))) if getattr(q, each) is None and each != "activation_dtype"
    ]


PACKAGES = [
    importlib.import_module(f"eformer.{name}".removesuffix("."))
    for name in ("", "jaximus", "ops.quantization", "model", "checkpoint", "cache", "kernels", "kernels.cpu")
]
ROOT = Path(__file__).parents[2]
# Documented or older names of what has a better one.
OTHERS = {
    *("use_implicit", "nf4_use_kernel", "dequantize_model", "save_gguf", "save_bitsandbytes"),
    *("straight_through_1bit", "straight_through_8bit", "straight_through_nf4"),
    "tree_flatten_with_implicit",
    "tree_map_with_path_with_implicit",
    "tree_structure_with_implicit",
}


def public(package: ModuleType) -> dict[str, Any]:
    found = {name: getattr(package, name) for name in dir(package) if not name.startswith("_")}
    return {name: each for name, each in found.items() if not isinstance(each, ModuleType)}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_functions_are_in_the_documents(package):
    """What is public is what a user calls: an internal never becomes public for another package's sake."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    text = "\n".join(page.read_text() for page in pages)
    text += "\n".join(str(inspect.getdoc(each)) for each in public(package).values())
    functions = {name for name, each in public(package).items() if inspect.isfunction(each)} - OTHERS
    assert {name for name in functions if not re.search(rf"\b{name}\b", text)} == set()


def test_other_names_are_public():
    assert {name for package in PACKAGES for name in public(package)} >= OTHERS
