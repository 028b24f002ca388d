"""Time `x @ W` with quantized weights here and in other libraries, in turns in one process on the same cores.

make peers                                       # in an environment of its own; writes benchmarks/results
python benchmarks/peers.py --shape 4096 14336    # with the libraries that are installed

Each result is first compared with x times the weight that its library decodes; an error above 5% is not timed. rings.py
says how it measures, libraries.py how each library is called.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import glance
import numpy as np
from chart import Line, bars
from libraries import BITS2, BITS4, DENSE, INT8, LIBRARIES, Problem, Product, as_numpy
from rings import core_count, headline, machine, markdown, measure, random_weights, rewrite

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BASELINE = "JAX: float32, float32 x"
LARGEST_ERROR = 0.05
# torch forks to compile, and OpenVINO to send statistics; forking a process with JAX's threads can hang.
NO_FORKS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "CI": "true"}
SECONDS = 75.0  # for all contenders together, per number of rows


class Result(NamedTuple):
    library: str
    weight: str
    group: str
    activations: str
    bits: float  # stored bits per weight
    error: float  # relative, against x times the decoded weight
    ms: dict[int, float]  # by rows of x
    speed: dict[int, float]  # as a multiple of JAX float32


def absent() -> dict[str, str]:
    """Packages that are not installed, and how to install them."""
    needed = dict.fromkeys(package for packages in LIBRARIES.values() for package in packages)
    pinned = {"torch": "torch==2.13.0"}
    return {p: f"pip install {pinned.get(p, p)}" for p in needed if importlib.util.find_spec(p) is None}


def relative_error(product: Product, x: np.ndarray) -> float:
    found = as_numpy(product.contender.call(product.contender.ring[0]))
    expected = x @ as_numpy(product.decoded())
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def ready(problem: Problem) -> tuple[dict[str, Product], dict[str, float]]:
    """The contenders whose result is right, and the error of each."""
    products, errors = {}, {}
    missing = absent()
    for library, packages in LIBRARIES.items():
        if any(package in missing for package in packages):
            continue
        for make in library(problem):
            try:
                product = make()
                error = relative_error(product, problem.x)
            except Exception as failure:  # noqa: BLE001  # a library that fails does not stop the others
                reason = str(failure).strip().splitlines() or [type(failure).__name__]
                print(f"not measured, {library.__name__.removeprefix('with_')}: {reason[0][:160]}")
                continue
            if not error < LARGEST_ERROR:  # NaN too
                print(f"not measured, since its result is off by {error:.2g}: {product.name}")
                continue
            products[product.name], errors[product.name] = product, error
    return products, errors


def compare(shape: tuple[int, int], rows: Sequence[int], ring_bytes: float, threads: int, bursts: int) -> list[Result]:
    weights = [np.asarray(w) for w in random_weights(shape)]
    found: dict[str, Result] = {}
    for m in rows:
        x = np.random.default_rng(m).standard_normal((m, shape[0]), dtype=np.float32)
        products, errors = ready(Problem(weights, x, ring_bytes, threads))
        times = measure({name: product.contender for name, product in products.items()}, bursts, SECONDS)
        for name, p in products.items():
            bits = p.nbytes * 8 / (shape[0] * shape[1])
            new = Result(p.library, p.weight, p.group, p.activations, bits, 0.0, {}, {})
            old = found.setdefault(name, new)
            old.ms[m], old.speed[m] = times[name] * 1e3, times[BASELINE] / times[name]
            found[name] = old._replace(error=max(old.error, errors[name]))
        print(f"measured {m} row{'s' * (m > 1)} of x", flush=True)
        del products
        gc.collect()
    order = [DENSE, INT8, BITS4, BITS2]
    return sorted(found.values(), key=lambda r: (order.index(r.group), -r.speed.get(rows[0], 0)))


def fastest(results: Sequence[Result], group: str, m: int) -> float:
    return max((r.speed[m] for r in results if r.group == group and m in r.speed), default=0.0)


def table(results: Sequence[Result], rows: Sequence[int]) -> str:
    """A table with the fastest of each group and number of rows in bold."""

    def cell(r: Result, m: int) -> str:
        if m not in r.speed:
            return ""
        text = f"{r.speed[m]:.2f}x"
        return f"**{text}**" if r.speed[m] == fastest(results, r.group, m) else text

    def named(r: Result) -> str:
        return f"**{r.library}**" if r.library == "eformer" else r.library

    header = ["library", "weight", "x", "bits a weight", "error", *(f"M={m}" for m in rows)]
    lines = [
        [named(r), r.weight, r.activations, f"{r.bits:.2f}", f"{r.error:.0e}", *(cell(r, m) for m in rows)]
        for r in results
    ]
    return markdown(header, lines, words=3)


def versions() -> dict[str, str]:
    packages = dict.fromkeys(package for packages in LIBRARIES.values() for package in packages)
    installed = [p for p in ["eformer", *packages] if importlib.util.find_spec(p)]
    return {p: importlib.metadata.version(p) for p in installed}


def line(r: Result) -> Line:
    ours, rounded = r.library == "eformer", r.activations == "int8"
    return r.group, f"{r.library} {r.weight}, {r.activations} x", ours, rounded, r.speed


def write(results: Sequence[Result], shape: tuple[int, int], rows: Sequence[int], out: Path) -> str:
    """Write the results as JSON, table and chart; return the table with its heading."""
    where = machine()
    title = f"x (M, {shape[0]}) @ W {shape}: speed as a multiple of JAX float32"
    names = ", ".join(f"{package} {version}" for package, version in versions().items())
    facts: dict[str, Any] = {"machine": where._asdict(), "versions": versions(), "shape": shape}
    text = f"{title}.\nOn {where}; {names}.\n\n{table(results, rows)}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "peers.json").write_text(json.dumps({**facts, "results": [r._asdict() for r in results]}, indent=1) + "\n")
    (out / "peers.md").write_text(f"{text}\n")
    (out / "peers.svg").write_text(bars(list(map(line, results)), rows, title, str(where)))
    return text


def page(text: str, out: Path) -> str:
    picture = os.path.relpath(out / "peers.svg", PAGE.parent)
    return f"![Speed of matmuls with quantized weights, beside other libraries]({picture})\n\n{text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("K", "N"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512], metavar="M", help="default: 1 8 512")
    parser.add_argument("--ring", type=float, default=0.25, help="GB of stored weights in each ring (0.25)")
    parser.add_argument("--bursts", type=int, default=60, help="most bursts of each contender (60)")
    parser.add_argument("--threads", type=int, default=core_count(), help="threads of each library (all cores)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where table, chart and JSON go")
    parser.add_argument(
        "--docs", "--readme", action="store_true", help="write docs/benchmarks.md and the picture of the README"
    )
    args = parser.parse_args()
    if not 1 <= args.threads <= core_count():
        parser.error(f"--threads {args.threads}: this process has {core_count()} cores to run on")
    if hasattr(os, "sched_setaffinity"):  # XLA takes its threads from this
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    os.environ.update(NO_FORKS)
    print(headline())
    for package, how in absent().items():
        print(f"absent: {package} ({how})")
    shape = (args.shape[0], args.shape[1])
    results = compare(shape, args.rows, args.ring * 1e9, args.threads, args.bursts)
    text = write(results, shape, args.rows, args.out)
    print(f"\n{text}\n\nwrote peers.md, peers.svg and peers.json to {args.out}")
    if args.docs:
        rewrite(PAGE, "peers", page(text, args.out))
        glance.main()


if __name__ == "__main__":
    main()
