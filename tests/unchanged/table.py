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

With this page you can see which libraries and patterns run on quantized weights, and what to change. The code knows
nothing of quantization; two lines are changed:

    model = quantize_model(model, function=f, inputs=(x,))
    y = jax.jit(implicit(f))(model, x)

- *Quantized* is the share of floating point numbers that were quantized: to NF4, and embeddings to INT8.
- *Largest difference* is relative to the largest number of the result, against the same code on the dequantized
  weights. Modules that keep state are called four times.
- *Bytes made dense* is what `explain` counts over the whole program.

The models are small, so that the tests can run them all: `python -m tests.unchanged.table` writes this page, and a test
compares each line.

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
