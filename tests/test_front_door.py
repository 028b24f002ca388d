"""What `import eformer` offers: every public name, imported when it is first used."""

from __future__ import annotations

import ast
import importlib
import pydoc
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer
from eformer.ops.quantization import QuantizationType, find_format

DECLARED = {
    alias.name: f"eformer.{node.module}"
    for node in ast.walk(ast.parse(Path(eformer.__file__).read_text()))
    if isinstance(node, ast.ImportFrom) and node.level
    for alias in node.names
}
PROMISED = [
    *("quantize", "dequantize", "straight_through", "quantize_model", "report", "load", "save", "convert"),
    *("implicit", "explain", "ste", "register", "ImplicitArray", "rules_from_use", "default_rules", "partition"),
    *("combine", "Array8B", "ArrayNF4", "Array1B", "RSROperatorBinary", "RSROperatorTernary", "use_kernels"),
]


@pytest.mark.parametrize(("name", "home"), DECLARED.items())
def test_a_name_is_that_of_its_home(name, home):
    assert getattr(eformer, name) is getattr(importlib.import_module(home), name)


def test_type_checkers_see_the_names_that_there_are():
    assert {name: f"eformer.{home}" for name, home in eformer._HOME.items()} == DECLARED


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_completed(name):
    assert name in dir(eformer)
    assert name in (eformer.__doc__ or "")


def test_completion_shows_public_names_only():
    assert {name for name in dir(eformer) if not name.startswith("__")} == {*DECLARED, *eformer._PACKAGES}


@pytest.mark.parametrize("name", ["cache", "checkpoint", "cli", "jaximus", "kernels", "model", "ops"])
def test_packages_need_no_import_of_their_own(name):
    assert getattr(eformer, name) is importlib.import_module(f"eformer.{name}")


@pytest.mark.parametrize("form", [*map(find_format, QuantizationType)], ids=str)
def test_every_format_of_the_package_is_there_and_in_the_help(form):
    assert form.name in (eformer.__doc__ or "")
    assert getattr(eformer, form.array_type.__name__) is form.array_type


def test_help_is_short_and_begins_with_what_it_is():
    text = pydoc.plain(pydoc.render_doc(eformer))
    assert "Quantized arrays for JAX" in text.splitlines()[3]
    assert len(text.splitlines()) < 70


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_it_imports_no_jax():
    assert (
        run("import sys, eformer; dir(eformer); print('jax' in sys.modules, 'numpy' in sys.modules)") == "False False"
    )


def test_names_of_a_fresh_process():
    code = "import eformer; print(eformer.quantize.__module__, eformer.ops.quantization.quantize is eformer.quantize)"
    assert run(code) == "eformer.ops.quantization True"


@pytest.mark.parametrize(("name", "meant"), [("quantise", "quantize"), ("ArrayNf4", "ArrayNF4")])
def test_an_unknown_name_gets_pythons_suggestion(name, meant):
    done = subprocess.run(
        [sys.executable, "-c", f"import eformer; eformer.{name}"], capture_output=True, text=True, check=False
    )
    assert done.stderr.rstrip().endswith(
        f"AttributeError: module 'eformer' has no attribute '{name}'. Did you mean: '{meant}'?"
    )


def test_importing_an_unknown_name():
    with pytest.raises(ImportError, match="quantise"):
        from eformer import quantise  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_dequantize_takes_arrays_and_trees(transform):
    w = jnp.linspace(-1, 1, 64).reshape(8, 8)
    q = eformer.quantize(w, dtype="int8")
    found = transform(eformer.dequantize)({"q": q, "w": w})
    np.testing.assert_array_equal(transform(eformer.dequantize)(q), q.materialize())
    np.testing.assert_array_equal(found["q"], q.materialize())
    np.testing.assert_array_equal(found["w"], w)


def test_dequantize_leaves_dense_arrays_alone():
    w = jnp.ones(3)
    assert eformer.dequantize(w) is w
