"""Write docs/runs-unchanged.md: `python -m tests.unchanged.table`, where all packages are installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import jax

from . import flax_linen, flax_nnx, others, patterns
from .case import Case, row

PAGE = Path(__file__).parents[2] / "docs" / "runs-unchanged.md"
CASES: tuple[Case, ...] = (*flax_linen.CASES, *flax_nnx.CASES, *others.CASES, *patterns.CASES)
_DISTRIBUTIONS = {"haiku": "dm-haiku"}
_TOP = """\
# Runs unchanged

Code that knows nothing of quantization, from packages as they are published and in the ways people put them together.
Two lines are changed:

    model = quantize_model(model, function=f, inputs=(x,))
    y = jax.jit(implicit(f))(model, x)

*Quantized* is the share of the floating point numbers that took a quantized form: NF4, and INT8 for embeddings. The
*largest difference* is to the same code on the same weights made dense, relative to the largest number of the result;
modules that keep state are called four times. *Bytes made dense* is what `explain` counts over the whole program. The
models are small, so that the tests can run them all. `python -m tests.unchanged.table` makes this page, and a test
compares each line with what it gives.

| code | lines changed | quantized | largest difference | bytes made dense |
|---|--:|--:|--:|--:|
"""


def versions(cases: Iterable[Case]) -> str:
    names = dict.fromkeys(["jax", *(package for case in cases for package in case.packages)])
    distributions = [_DISTRIBUTIONS.get(name, name) for name in names]
    return "Made with " + ", ".join(f"{name} {metadata.version(name)}" for name in distributions) + "."


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)  # for what runs on more than one
    rows = "\n".join(str(row(case)) for case in CASES)
    PAGE.write_text(f"{_TOP}{rows}\n\n{versions(CASES)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
