"""The path of `x @ q` is short enough to read: how many functions and files of this package its first call runs."""

import sys
from pathlib import Path
from types import CodeType, FrameType

import jax
import jax.numpy as jnp
import pytest

import eformer
from eformer.kernels import cpu
from eformer.ops.quantization import quantize

SOURCE = str(Path(eformer.__file__).parent)
MAX_FUNCTIONS = 60
MAX_FILES = 10


def first_call(form: str) -> set[CodeType]:
    """The functions of this package that the first eager `x @ q` runs.

    Lambdas and comprehensions count as a part of the function around them.
    """
    x, q = jnp.ones((1, 64)), quantize(jnp.ones((64, 64)), dtype=form)
    met = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            met.add(code)

    jax.clear_caches()
    sys.setprofile(note)
    try:
        x @ q
    finally:
        sys.setprofile(None)
    return met


@pytest.mark.skipif(not cpu.is_available(), reason="the path to the native core")
@pytest.mark.parametrize("form", ["int8", "nf4", "ternary"])
def test_the_path_of_a_matmul_is_short(form):
    met = first_call(form)
    files = {Path(code.co_filename).relative_to(SOURCE).as_posix() for code in met}
    listing = "\n".join(sorted(f"{code.co_filename.removeprefix(SOURCE)} {code.co_qualname}" for code in met))
    assert "kernels/cpu/_call.py" in files
    assert len(met) <= MAX_FUNCTIONS, f"{len(met)} functions:\n{listing}"
    assert len(files) <= MAX_FILES, f"{len(files)} files:\n{listing}"
