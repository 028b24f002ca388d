"""Static cycles of the TPU kernels and of XLA's own program for the same matmul, for every chip that libtpu knows.

Nothing runs: libtpu compiles without a chip. The cycles of a kernel are the bundles of its schedule times the steps of
its grid, plus XLA's estimates for the operations around it. The cycles of XLA's program are the sum of its estimates.
Neither counts waiting for memory. `--write` puts the numbers into the table from which `pallas/choice.py` chooses.
XLA's programs for packed formats are compiled with few rows only: with many they take at least as long.

`make test-accelerators` makes an environment with libtpu; run this with its Python. It takes an hour on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before libtpu is loaded; several processes may, since none has a chip. XLA's own programs are compiled in another
# process than the kernels, without the schedules: to write those, libtpu 0.0.42 aborts for INT8 on v4.
os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={tempfile.mkdtemp()} --xla_jf_dump_llo_text=true" if __name__ == "__main__" else ""
)
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from eformer._src.kernels.pallas import tpu
from eformer._src.kernels.pallas.choice import CYCLES, TOPOLOGIES, permutes_sublanes
from eformer.ops.quantization import quantize

SCHEDULES = Path(os.environ["LIBTPU_INIT_ARGS"].partition("=")[2].partition(" ")[0])
KEYS = ("chip", "weight", "contracted_axis", "m")
SIZE = 4096
ROWS = (8, 512)
WEIGHTS: dict[str, dict[str, Any]] = {
    "int8 packed 0": {"dtype": "int8", "axis": None},  # None: the contracted axis
    "nf4 packed 0": {"dtype": "nf4", "axis": 0},
    "nf4 packed 1": {"dtype": "nf4", "axis": 1},
    "ternary packed 0": {"dtype": "ternary", "scale": "channel"},
    "uint4 packed 0": {"dtype": "int4", "axis": 0},
    "uint4 packed 1": {"dtype": "int4", "axis": 1},
}


def compiled(function: Callable[..., Any], topology: str, *arguments: Any) -> Any:
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device)), arguments
    )
    return jax.jit(function).lower(*placed).compile()


def estimates(program: Any) -> int:
    """XLA's estimates for its own operations; for loops, of one iteration."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program.as_text())))


def scheduled(function: Callable[..., Any], topology: str, *arguments: Any) -> int:
    """Of each Pallas kernel in `function`, the bundles of its loop times its steps; and XLA's estimates of the rest."""
    for old in SCHEDULES.iterdir():
        old.unlink()
    cycles = estimates(compiled(function, topology, *arguments))
    for call in _calls(jax.make_jaxpr(function)(*arguments).jaxpr):
        [schedule] = SCHEDULES.glob(f"*-{call.params['name']}*-final_bundles.txt")
        depths = re.findall(r"^\s*0x[0-9a-f]+\s*:\s*(?:\w+:\s*)?(>*) ?\{", schedule.read_text(), re.MULTILINE)
        looped = len([depth for depth in depths if depth])
        cycles += len(depths) - looped + looped * math.prod(call.params["grid_mapping"].grid)
    return cycles


def _calls(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
                if hasattr(inner, "jaxpr"):
                    yield from _calls(inner.jaxpr)


def arguments(weight: str, contracted_axis: int, m: int) -> tuple[Any, Any]:
    """x and the quantized weight as shapes without values."""
    options: dict[str, Any] = {k: contracted_axis if v is None else v for k, v in WEIGHTS[weight].items()}
    dense = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
    return jax.ShapeDtypeStruct((m, SIZE), jnp.bfloat16), jax.eval_shape(lambda w: quantize(w, **options), dense)


def kernel_cycles(weight: str, contracted_axis: int, m: int, chip: str) -> int:
    def matmul(x: jax.Array, q: Any) -> jax.Array:
        matrix = jax.tree.map(lambda leaf: leaf[None], q)._stored_matrix()
        return tpu.matmul(x[None], matrix, contracted_axis, sublanes=permutes_sublanes(chip))

    return scheduled(matmul, TOPOLOGIES[chip], *arguments(weight, contracted_axis, m))


def xla_cycles(weight: str, contracted_axis: int, m: int, chip: str) -> int:
    def matmul(x: jax.Array, q: Any) -> jax.Array:
        q = replace(q, use_kernel=False)
        return jnp.asarray(x @ q if contracted_axis == 0 else x @ q.T)

    return estimates(compiled(matmul, TOPOLOGIES[chip], *arguments(weight, contracted_axis, m)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chip", choices=TOPOLOGIES, action="append")
    parser.add_argument("--weight", choices=WEIGHTS, action="append")
    parser.add_argument("--show", action="store_true", help="compile nothing; print the table that is kept")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {CYCLES.name}")
    parser.add_argument("--keep-xla", action="store_true", help="leave XLA's figures for packed formats as they are")
    options = parser.parse_args()
    known = {_key(row): row for row in json.loads(CYCLES.read_text())} if CYCLES.exists() else {}
    chips = [] if options.show else options.chip or TOPOLOGIES
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        weights = options.weight or WEIGHTS
        for chip, weight, contracted_axis, m in itertools.product(chips, weights, (0, 1), ROWS):
            key = (chip, weight, contracted_axis, m)
            xla = known.get(key, {}).get("xla")
            if weight.startswith("int8") or (m == ROWS[0] and not options.keep_xla):
                xla = other.submit(xla_cycles, weight, contracted_axis, m, chip)
            row: dict[str, Any] = dict(zip(KEYS, key, strict=True))
            row["kernel"] = kernel_cycles(weight, contracted_axis, m, chip)
            row["xla"] = xla.result() if isinstance(xla, Future) else xla
            print(row, file=sys.stderr)
            known[key] = row
            if options.write:
                rows = sorted(known.values(), key=lambda row: (list(TOPOLOGIES).index(row["chip"]), _key(row)))
                CYCLES.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    show(known.values())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in KEYS)


def show(rows: Iterable[dict[str, Any]]) -> None:
    """A table of kilocycles with a column per chip: the kernel's, and XLA's in brackets."""
    problems = sorted({_key(row)[1:] for row in rows})
    cells = {}
    for row in rows:
        xla = "" if row["xla"] is None else f" ({row['xla'] / 1e3:,.1f})"
        cells[_key(row)] = f"{row['kernel'] / 1e3:,.1f}{xla}"
    print(f"| weight | contracted | rows of x | {' | '.join(TOPOLOGIES)} |\n|---|---|---|{'---|' * len(TOPOLOGIES)}")
    for problem in problems:
        print("|", " | ".join([*map(str, problem), *(cells.get((chip, *problem), "") for chip in TOPOLOGIES)]), "|")


if __name__ == "__main__":
    main()
