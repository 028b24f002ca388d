"""Time `x @ q` beside JAX float32 over a grid of sizes, row counts and formats, and print the slowest cells.

python benchmarks/grid.py                        # the whole grid: 64 x 64 to 14336 x 4096, 1 to 1,024 rows of x
python benchmarks/grid.py --quick                # few sizes and row counts: a minute or two
python benchmarks/grid.py --small                # the small matrices of encoders and policies, weights in cache
python benchmarks/grid.py --size 384 1536 --rows 1 4 128 --format int8 nf4
python benchmarks/grid.py --ring 0.4             # weights from memory: each call takes another one, 0.4 GB in all
python benchmarks/grid.py --small --instructions avx2
taskset -c 0 python benchmarks/grid.py --cpu-time  # one core, and time that other programs take is not counted

A cell is one call of the jitted matmul: the time of JAX float32 divided by the time of the format. Without `--ring` all
calls multiply by the same weight, which stays in cache if it fits. Contenders take turns of a few milliseconds, and the
shortest call of each counts: other programs can only add time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from rings import Contender, headline, markdown, random_weights, ring_of, shortest_calls, turns_of

from eformer._src.kernels import cpu
from eformer.ops.quantization import quantize

BASELINE = "JAX float32"
FORMATS: dict[str, Callable[[jax.Array], Any]] = {
    "int8": functools.partial(quantize, dtype="int8"),
    "nf4": functools.partial(quantize, dtype="nf4", axis=0),
    "int4": functools.partial(quantize, dtype="int4", axis=0),
    "ternary": functools.partial(quantize, dtype="ternary", scale="channel"),
    # Stored (out, in), as PyTorch's checkpoints are, and used as `x @ w.T`.
    "int8.T": lambda w: quantize(w.T, dtype="int8"),
    "nf4.T": lambda w: quantize(w.T, dtype="nf4"),
    "int4.T": lambda w: quantize(w.T, dtype="int4"),
    "ternary.T": lambda w: quantize(w.T, dtype="ternary", scale="channel"),
}
SMALL: dict[tuple[int, int], tuple[int, ...]] = {  # K, N: rows of x
    (384, 384): (1, 4, 16, 128),
    (384, 1536): (1, 4, 128, 640),
    (1536, 384): (1, 4, 64, 640),
    (1024, 4096): (1, 16, 64, 640),
}
SIZES = [(64, 64), (256, 256), (384, 384), (384, 1536), (1536, 384), (576, 1536), (1024, 1024), (1024, 4096)]
SIZES += [(2048, 2048), (4096, 4096), (14336, 4096)]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 640, 1024)
QUICK_SIZES, QUICK_ROWS = [(64, 64), (384, 384), (384, 1536), (1024, 4096)], (1, 4, 16, 64, 256)
GOAL = 0.95  # one, less the noise


class Cell(NamedTuple):
    size: tuple[int, int]
    rows: int
    format: str
    speed: float  # a multiple of the baseline's

    def __str__(self) -> str:
        return f"{self.size[0]} x {self.size[1]}, M={self.rows}, {self.format}"


def measure_size(
    size: tuple[int, int],
    rows: Sequence[int],
    formats: Sequence[str],
    ring_bytes: float,
    seconds: float,
    clock: Callable[[], float],
) -> Iterator[list[Cell]]:
    """The cells of each row count."""
    weights = random_weights(size)
    rings = {name: ring_of([FORMATS[name](w) for w in weights[:1]], ring_bytes) for name in formats}
    rings[BASELINE] = ring_of(weights[:1], ring_bytes)
    for m in rows:
        x = jax.random.normal(jax.random.key(1), (m, size[0]))
        turns = {name: turns_of(contender(x, ring, name.endswith(".T")), clock) for name, ring in rings.items()}
        times = shortest_calls(turns, seconds)
        yield [Cell(size, m, name, times[BASELINE] / times[name]) for name in formats]


def contender(x: jax.Array, ring: Sequence[Any], transposed: bool) -> Contender:
    matmul = jax.jit(lambda x, w: x @ (w.T if transposed else w))
    return Contender(lambda w: matmul(x, w).block_until_ready(), ring)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=2, action="append", metavar=("K", "N"), help="may be given again")
    parser.add_argument("--rows", type=int, nargs="+", metavar="M")
    parser.add_argument("--format", nargs="+", choices=list(FORMATS), default=list(FORMATS), dest="formats")
    parser.add_argument("--ring", type=float, default=0.0, help="GB of stored weights in each ring (one weight)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each cell (0.5)")
    parser.add_argument("--worst", type=int, default=10, help="how many of the slowest cells to print (10)")
    parser.add_argument("--quick", action="store_true", help="few sizes and row counts")
    parser.add_argument("--small", action="store_true", help="small matrices only")
    parser.add_argument("--instructions", choices=cpu.instruction_sets(), help="the instruction set of our kernels")
    parser.add_argument("--cpu-time", action="store_true", help="time of the processor, not of the clock on the wall")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
    sizes = [(k, n) for k, n in args.size or (QUICK_SIZES if args.quick else SIZES)]
    grid = SMALL if args.small else dict.fromkeys(sizes, tuple(rows))
    print(f"{headline()}\n\n{'K x N':>12} {'M':>5}", *(f"{name:>9}" for name in args.formats))
    found: list[Cell] = []
    with cpu.instruction_set(args.instructions) if args.instructions else contextlib.nullcontext():
        for size, row_counts in grid.items():
            for cells in measure_size(size, row_counts, args.formats, args.ring * 1e9, args.seconds, clock):
                found += cells
                place = f"{size[0]} x {size[1]}"
                print(f"{place:>12} {cells[0].rows:>5}", *(f"{cell.speed:>8.2f}x" for cell in cells), flush=True)
    worst = sorted(found, key=lambda cell: cell.speed)[: args.worst]
    print(f"\n{sum(cell.speed < GOAL for cell in found)} of {len(found)} cells are below {GOAL:g}x; the slowest:\n")
    print(markdown(["matmul", "speed"], [[str(cell), f"{cell.speed:.2f}x"] for cell in worst]))


if __name__ == "__main__":
    main()
