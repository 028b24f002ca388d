"""`eformer bench`: matmuls with quantized weights against float32, on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import (
    Problem,
    add_format,
    byte_count,
    format_rule,
    format_text,
    formats_help,
    positive,
    problem,
)
from eformer._src.cli.progress import stage
from eformer._src.model.defaults import default_rules
from eformer._src.model.quantize import quantize_model
from eformer._src.model.rules import Rule
from eformer._src.quantization.registry import find_format
from eformer._src.text import in_bytes, table

EXAMPLE = """\
examples:
  eformer bench
  eformer bench 1x4096x4096 32x4096x11008 --format int8 --format nf4,block_size=32

MxKxN is x (M, K) @ weight (K, N). The contenders take turns around a ring of distinct weights, so that they are read
from memory and not from a cache. The least time of many turns counts. Read the ratios.
"""
more_help = formats_help
DENSE = "float32"
MOST_WEIGHTS = 64  # in a ring, if they are small


class Timed(NamedTuple):
    format: str
    seconds: float  # per matmul
    nbytes: int  # per weight


def configure(parser: argparse.ArgumentParser) -> None:
    default = [Problem(1, 4096, 4096)]
    parser.add_argument(
        "problems", type=problem, nargs="*", default=default, metavar="MxKxN", help="default: 1x4096x4096"
    )
    add_format(parser, "--format", "a contender, may be repeated (default: int8, int4, ternary)", action="append")
    parser.add_argument("--repeats", type=positive, default=20, metavar="COUNT", help="turns of each (default: 20)")
    parser.add_argument(
        "--ring",
        type=byte_count,
        default="800MB",
        metavar="SIZE",
        help="bytes of float32 weights in the ring (default: 800MB)",
    )


def run(args: argparse.Namespace) -> Answer:
    contenders = args.format or [format_rule(name) for name in ("int8", "int4", "ternary")]
    if any(each.format is None for each in contenders):
        raise ValueError("--format keep is float32, which is always there; name a format to compare it with")
    device = jax.devices()[0].device_kind
    text, found = [f"JAX {jax.__version__} on {device}"], []
    for each in args.problems:
        stage(f"measuring {each} ...", sys.stderr)
        timed = measure(each, contenders, args.repeats, args.ring)
        text += ["", f"x ({each.m}, {each.k}) @ weight ({each.k}, {each.n})", *_table(timed)]
        results = [{**row._asdict(), "speed": timed[0].seconds / row.seconds} for row in timed]
        found.append({**each._asdict(), "results": results})
    return Answer(text, {"jax": jax.__version__, "device": device, "problems": found})


def measure(problem: Problem, contenders: Sequence[Rule], repeats: int, ring_bytes: int) -> list[Timed]:
    """The times of float32, then of each contender."""
    m, k, n = problem
    count = min(MOST_WEIGHTS, max(1, ring_bytes // (4 * k * n)))
    weights = [jax.random.normal(key, (k, n)) for key in jax.random.split(jax.random.key(0), count)]
    rings: dict[str, list[jax.Array]] = {DENSE: weights}
    for each in contenders:
        assert each.format is not None  # `run` checks it
        rules = default_rules(find_format(each.format), min_size=1, **each.options)
        rings[format_text(each) or DENSE] = [quantize_model({"w": w}, rules)["w"] for w in weights]
    x = jax.random.normal(jax.random.key(1), (m, k))
    times = interleaved({name: _burst(x, ring) for name, ring in rings.items()}, repeats)
    return [Timed(name, times[name] / count, ring[0].nbytes) for name, ring in rings.items()]


def interleaved(bursts: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The seconds of each burst: the least of `repeats` turns.

    Bursts take turns, so that a slow moment of the machine affects all of them. Other work can only add time, so the
    least time is the most accurate. Each runs once first, to compile.
    """
    for burst in bursts.values():
        jax.block_until_ready(burst())
    best = dict.fromkeys(bursts, float("inf"))
    for _ in range(repeats):
        for name, burst in bursts.items():
            start = time.perf_counter()
            jax.block_until_ready(burst())
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _burst(x: jax.Array, ring: Sequence[jax.Array]) -> Callable[[], None]:
    matmul = jax.jit(lambda x, w: x @ w)

    def burst() -> None:
        for w in ring:
            matmul(x, w).block_until_ready()

    return burst


def _table(timed: Sequence[Timed]) -> list[str]:
    rows = [
        [t.format, in_bytes(t.nbytes), f"{t.seconds * 1e3:.3f}", f"{timed[0].seconds / t.seconds:.2f}x"] for t in timed
    ]
    return table(["weight", "bytes", "ms", "of float32 speed"], rows)
