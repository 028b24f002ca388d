"""The path of `x @ q` is short enough to read: how many functions and files of this package its first call runs."""

import ast
import re
import sys
from pathlib import Path
from types import CodeType, FrameType

import jax
import jax.numpy as jnp
import pytest

import eformer
from eformer._src.kernels import cpu
from eformer.ops.quantization import quantize

SOURCE = str(Path(eformer.__file__).parent)
MAX_FUNCTIONS = 60
MAX_FILES = 10


def first_call(form: str) -> list[CodeType]:
    """The functions of this package that the first eager `x @ q` runs, in their order.

    Lambdas and comprehensions count as a part of the function around them.
    """
    x, q = jnp.ones((1, 64)), quantize(jnp.ones((64, 64)), dtype=form)
    met: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            met[code] = None

    jax.clear_caches()
    sys.setprofile(note)
    try:
        x @ q
    finally:
        sys.setprofile(None)
    return list(met)


@pytest.mark.skipif(not cpu.is_available(), reason="the path to the native core")
@pytest.mark.parametrize("form", ["int8", "nf4", "ternary"])
def test_the_path_of_a_matmul_is_short(form):
    met = first_call(form)
    files = {Path(code.co_filename).relative_to(SOURCE).as_posix() for code in met}
    listing = "\n".join(sorted(f"{code.co_filename.removeprefix(SOURCE)} {code.co_qualname}" for code in met))
    assert "_src/kernels/cpu/call.py" in files
    assert len(met) <= MAX_FUNCTIONS, f"{len(met)} functions:\n{listing}"
    assert len(files) <= MAX_FILES, f"{len(files)} files:\n{listing}"


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "life-of-x-at-q.md").read_text()
NAMED = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)  # hop or case, file, function


@pytest.mark.skipif(not cpu.is_available(), reason="the path to the native core")
def test_the_page_names_the_hops_in_their_order():
    run = [
        (f"src/eformer/{Path(c.co_filename).relative_to(SOURCE).as_posix()}", c.co_qualname) for c in first_call("nf4")
    ]
    hops = [(file, function) for hop, file, function in NAMED if hop.isdigit() and file.endswith(".py")]
    assert hops == [each for each in run if each in hops]


@pytest.mark.parametrize(("file", "function"), [(file, function) for _, file, function in NAMED])
def test_the_page_names_functions_that_exist(file, function):
    source = (ROOT / file).read_text()
    if file.endswith(".py"):
        nodes = ast.walk(ast.parse(source))
        assert function.rpartition(".")[2] in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    else:
        assert re.search(rf"\b{function}\b", source)
