"""How many functions and files of this package a call runs: few enough to follow the data through them."""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer
import eformer.checkpoint
import eformer.model
from eformer._src.kernels import cpu
from eformer.cli import main
from eformer.ops.quantization import quantize

SOURCE = str(Path(eformer.__file__).parent)
W = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
PARAMS = {str(i): W for i in range(4)}


def functions_of(call: Callable[[], object]) -> list[CodeType]:
    """The functions of this package that a call runs for the first time, in their order.

    Lambdas and comprehensions count as a part of the function around them.
    """
    met: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # no class's body
        if event == "call" and is_function and code.co_filename.startswith(SOURCE):
            met[code] = None

    jax.clear_caches()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(met)


def matmul(form: str) -> Callable[[Path], Callable[[], object]]:
    def prepared(_: Path) -> Callable[[], object]:
        x, q = jnp.ones((1, 64)), quantize(W, format=form)
        return lambda: x @ q

    return prepared


def load_gguf(folder: Path) -> Callable[[], object]:
    path = eformer.save(folder / "a.gguf", {"a": W, "b": W}, type="Q8_0")
    return lambda: eformer.load(path)


def load_safetensors(folder: Path) -> Callable[[], object]:
    path = eformer.save(folder / "a.safetensors", {"a": quantize(W), "b": quantize(W)})
    return lambda: eformer.load(path)


def quantize_model(_: Path) -> Callable[[], object]:
    return lambda: eformer.quantize_model(PARAMS, "nf4")


def quantize_by_use(_: Path) -> Callable[[], object]:
    def model(params: dict[str, Any], x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return x

    return lambda: eformer.quantize_model(PARAMS, function=model, inputs=(jnp.ones((1, 64)),))


def command_line(folder: Path) -> Callable[[], object]:
    path = eformer.save(folder / "b.safetensors", {"a": W, "b": W})
    return lambda: main(["quantize", str(path), str(folder / "c.safetensors")])


# By what is called: the most functions and files, if nothing was called before: today three and one less.
MOST: dict[str, tuple[Callable[[Path], Callable[[], object]], int, int]] = {
    "x @ int8": (matmul("int8"), 58, 12),
    "x @ nf4": (matmul("nf4"), 65, 13),
    "x @ int4": (matmul("int4"), 65, 14),
    "x @ ternary": (matmul("ternary"), 62, 12),
    "load GGUF": (load_gguf, 109, 26),
    "load safetensors": (load_safetensors, 130, 29),
    "quantize_model": (quantize_model, 109, 23),
    "quantize_model(function=...)": (quantize_by_use, 224, 43),
    "eformer quantize": (command_line, 305, 56),
}


@pytest.mark.skipif(not cpu.is_available(), reason="the ways with the native core")
@pytest.mark.parametrize("call", MOST)
def test_the_way_of_a_call_is_short(call, tmp_path):
    prepared, most_functions, most_files = MOST[call]
    met = functions_of(prepared(tmp_path))
    files = {Path(code.co_filename).relative_to(SOURCE).as_posix() for code in met}
    listing = "\n".join(sorted(f"{code.co_filename.removeprefix(SOURCE)} {code.co_qualname}" for code in met))
    assert not call.startswith("x @") or "_src/kernels/cpu/call.py" in files
    found = f"{len(met)} functions in {len(files)} files:\n{listing}"
    assert len(met) <= most_functions, found
    assert len(files) <= most_files, found


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "life-of-x-at-q.md").read_text()
NAMED = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)  # hop or case, file, function


@pytest.mark.skipif(not cpu.is_available(), reason="the path to the native core")
def test_the_page_names_the_hops_in_their_order(tmp_path):
    met = functions_of(matmul("nf4")(tmp_path))
    run = [(f"src/eformer/{Path(c.co_filename).relative_to(SOURCE).as_posix()}", c.co_qualname) for c in met]
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
