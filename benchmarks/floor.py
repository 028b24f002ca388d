"""Time every format in every layout beside JAX float32, and fail where one of them falls below the floor.

python benchmarks/floor.py --quick                     # 1, 8 and 64 rows of x: two minutes
python benchmarks/floor.py                             # 1 to 512 rows, and one row by weights from memory
python benchmarks/floor.py --formats mxfp4 nvfp4 --rows 1 --shapes 4096x4096 --activations float32
python benchmarks/floor.py --formats nf4 iq4_nl int4,double   # layouts that have no name in the registry, too
python benchmarks/floor.py --instruction-set avx2      # beside JAX float32 in AVX2
python benchmarks/floor.py --core NEW.so               # a core that was built elsewhere
python benchmarks/floor.py --compare OLD.so            # this core's speed as a multiple of that of another
python benchmarks/floor.py --compare ../old/.venv/bin/python  # the same beside another installation, sources and all

A cell is a format, the axis that its codes are packed along (with scales of slices: that one scale covers), `x @ q` or
`x @ q.T`, a number of rows of x, a shape K x N, and whether x may be rounded to int8. Its speed is a multiple of JAX
float32's `x @ w` for the same K and N. All of a shape take turns of a few milliseconds, and the shortest call of each
counts. A cell a little below 0.95x is timed again, longer, beside its baseline alone.

From memory, each call takes another weight of a ring that is larger than the last level of cache. A format should read
its bytes at 70% of the GB/s that NF4 reads at in its fastest layout.

With `--compare`, two processes take turns, each with its own core.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from rings import Contender, Turn, headline, markdown, random_weights, ring_of, shortest_calls, stored_bytes, turns_of

from eformer._src.kernels import cpu
from eformer._src.kernels.cpu import library
from eformer.ops.quantization import ArrayGrouped, find_format, formats

FLOOR, MEMORY_FLOOR = 0.95, 0.7  # of JAX float32's speed, less the noise; of NF4's GB/s
HOPELESS = 0.75  # no noise explains a speed below this
DENSE, YARDSTICK = "float32", "nf4"
SHAPES, ROWS = ((4096, 4096), (1536, 384), (384, 1536)), (1, 2, 4, 8, 16, 64, 512)
QUICK_ROWS = (1, 8, 64)
ACTIVATIONS = ("float32", "int8")
SECONDS, LONGER = 0.02, 10  # for each cell; for one that is timed again, this many times longer

# For speed: no search for the best scales, and the scales that matmuls are used with.
OPTIONS: dict[str, Any] = {"fit": False, "scale": "channel"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4,double": ("nf4", {"double_quantization": True}),
    "int4,64": ("int4", {"block_size": 64}),
    "int6,64": ("int6", {"block_size": 64}),
    "int4,symmetric": ("int4", {"symmetric": True}),
    "int4,symmetric,64": ("int4", {"symmetric": True, "block_size": 64}),
    "fp8,blocks": ("fp8", {"block_shape": (128, 128)}),
}

# XLA's dot chooses its own instructions, whatever `--xla_cpu_max_isa` says, unless YNNPACK is off and oneDNN, which
# Eigen then calls, is told too. One core of Zen 5 sums 260 GFLOPS in AVX-512 and 136 so, as OpenBLAS does in AVX2.
OLDER = {"avx2": "AVX2", "avx2_vnni": "AVX2", "portable": "SSE4_2"}
ONEDNN = {"AVX2": "AVX2", "SSE4_2": "SSE41"}

Key = TypeVar("Key")


class Cell(NamedTuple):
    format: str
    size: tuple[int, int]  # K, N
    rows: int
    axis: int = 0
    transposed: bool = False
    activations: str = "float32"
    ring_bytes: float = 0.0  # of distinct weights, or none

    @property
    def layout(self) -> str:
        rounded = ", int8 x" if self.activations == "int8" else ""
        return f"x @ q{'.T' * self.transposed}, axis={self.axis}{rounded}"

    @property
    def baseline(self) -> Cell:
        return Cell(DENSE, self.size, self.rows, ring_bytes=self.ring_bytes)

    def __str__(self) -> str:
        k, n = self.size
        memory = ", from memory" if self.ring_bytes else ""
        return f"{self.format}, {k} x {n}, M={self.rows}{memory}: {self.layout}"


# --- what a cell calls ---


@functools.lru_cache(maxsize=128)
def weight(name: str, shape: tuple[int, int], axis: int) -> Any:
    dense = random_weights(shape)[0]
    if name == DENSE:
        return dense
    if name == "iq4_nl":  # known from GGUF files alone
        made: Any = find_format("int4").encode(
            dense, 32, axis=axis, symmetric=True, double_quantization=False, fit=False
        )
        return ArrayGrouped(made.packed, made.scale, block_size=32, axis=made.axis, padding=made.padding, codebook=name)
    name, own = VARIANTS.get(name, (name, {}))
    form = find_format(name)
    options = {key: value for key, value in {**OPTIONS, "axis": axis, **own}.items() if key in form.options}
    if "block_shape" in own:
        del options["axis"]
    return form.encode(dense, **options)


@functools.lru_cache(maxsize=4)
def ring(name: str, shape: tuple[int, int], axis: int, ring_bytes: float) -> list[Any]:
    return ring_of([weight(name, shape, axis)], ring_bytes)


def contender(cell: Cell) -> Contender:
    shape = cell.size[::-1] if cell.transposed else cell.size
    weights = ring(cell.format, shape, cell.axis, cell.ring_bytes)
    if cell.activations == "int8":
        weights = [q.with_activation_dtype("int8") for q in weights]
    x = jax.random.normal(jax.random.key(1), (cell.rows, cell.size[0]))
    matmul = jax.jit(lambda x, w: x @ (w.T if cell.transposed else w))
    return Contender(lambda w: matmul(x, w).block_until_ready(), weights)


def turn_of(cell: Cell) -> Turn:
    return turns_of(contender(cell))


# --- groups of cells that are timed together ---


def grouped_cells(
    names: Sequence[str], sizes: Sequence[tuple[int, int]], rows: Sequence[int], activations: Sequence[str]
) -> Iterator[list[Cell]]:
    for size, m in itertools.product(sizes, rows):
        layouts = itertools.product(names, (0, 1), (False, True), activations)
        yield [Cell(name, size, m, axis, transposed, x) for name, axis, transposed, x in layouts]


def memory_cells(
    names: Sequence[str], size: tuple[int, int], activations: Sequence[str], ring_bytes: float
) -> Iterator[list[Cell]]:
    """One row; a group for each ring, because all rings together fill the memory."""
    for name, axis in itertools.product(names, (0, 1)):
        layouts = itertools.product((False, True), activations)
        yield [Cell(name, size, 1, axis, transposed, x, ring_bytes) for transposed, x in layouts]


# --- beside float32 ---


def speeds(cells: Sequence[Cell], seconds: float) -> dict[Cell, float]:
    """Multiples of the baseline's speed, of cells that have the same baseline."""
    times = shortest_calls({cell: turn_of(cell) for cell in (cells[0].baseline, *cells)}, seconds)
    return {cell: times[cell.baseline] / times[cell] for cell in cells}


def steady(found: Mapping[Cell, float], again: Callable[[Cell], float]) -> dict[Cell, float]:
    """`found`, with the cells a little below the floor as they are when they are timed again."""
    return {cell: again(cell) if HOPELESS < speed < FLOOR else speed for cell, speed in found.items()}


def beside_float32(groups: Iterable[Sequence[Cell]], seconds: float) -> dict[Cell, float]:
    found: dict[Cell, float] = {}
    for cells in groups:
        size, m = cells[0].size, cells[0].rows
        measured = steady(speeds(cells, seconds), lambda cell: speeds([cell], seconds * LONGER)[cell])
        found |= measured
        layouts = dict.fromkeys(cell.layout for cell in cells)
        of = {(cell.format, cell.layout): speed for cell, speed in measured.items()}
        lines = [
            [name, *(f"{of[name, layout]:.2f}x" for layout in layouts)]
            for name in dict.fromkeys(cell.format for cell in cells)
        ]
        print(f"\n{size[0]} x {size[1]}, M={m}\n\n{markdown(['format', *layouts], lines)}", flush=True)
    return found


def from_memory(groups: Iterable[Sequence[Cell]], yardsticks: Sequence[Cell], seconds: float) -> dict[Cell, float]:
    """The share of NF4's GB/s of each cell, and a table."""
    best = {}
    times = shortest_calls({cell: turn_of(cell) for cell in yardsticks}, seconds)
    for x in dict.fromkeys(cell.activations for cell in yardsticks):
        best[x] = min((cell for cell in yardsticks if cell.activations == x), key=times.__getitem__)
    found, lines = {}, []
    for cells in groups:
        times = shortest_calls({cell: turn_of(cell) for cell in {*cells, *best.values(), cells[0].baseline}}, seconds)

        def rate(cell: Cell, times: Mapping[Cell, float] = times) -> float:
            shape = cell.size[::-1] if cell.transposed else cell.size
            return stored_bytes(weight(cell.format, shape, cell.axis)) / times[cell] / 1e9

        for cell in cells:
            found[cell] = rate(cell) / rate(best[cell.activations])
            speed = times[cell.baseline] / times[cell]
            lines.append([cell.format, cell.layout, f"{speed:.2f}x", f"{rate(cell):.1f}", f"{found[cell]:.0%}"])
    title = ["from memory, M=1", "layout", "speed", "GB/s", "of NF4's"]
    print(f"\n{markdown(title, lines, words=2)}", flush=True)
    return found


def report(found: Mapping[Cell, float], count: int, floor: float, what: str, write: Callable[[float], str]) -> bool:
    """Whether all cells are above the floor; prints the `count` worst."""
    below = sum(speed < floor for speed in found.values())
    worst = sorted(found, key=found.__getitem__)[:count]
    print(f"\n{below} of {len(found)} cells are below {write(floor)} of {what}; the slowest:\n")
    print(markdown(["cell", "speed"], [[str(cell), write(found[cell])] for cell in worst]), flush=True)
    return not below


# --- beside another core ---


class Served:
    """Another process of this script, which measures cells when it is told to."""

    def __init__(self, python: str, arguments: Sequence[str]) -> None:
        self._python = python
        command = [python, "-W", "ignore", __file__, "--serve", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._python} ended, and said above why")
        return json.loads(answer)

    def ask(self, question: Any) -> Any:
        assert self._process.stdin
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def turn_of(self, cell: Cell) -> Turn:
        self.ask(cell)
        return lambda: self.ask("turn")


def serve() -> None:
    """Answer each line of the input: a cell is prepared, "turn" gives the seconds of the shortest call of a turn."""
    answers, turn = os.fdopen(os.dup(1), "w"), None
    os.dup2(2, 1)  # what a library prints is no answer
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if question == "turn":
            assert turn
            answer = turn()
        else:
            name, size, *rest = question
            turn, answer = turn_of(Cell(name, tuple(size), *rest)), "ready"
        print(json.dumps(answer), file=answers, flush=True)


def beside_core(groups: Iterable[Sequence[Cell]], new: Served, old: Served, seconds: float) -> dict[Cell, float]:
    """The speed of the new core, as a multiple of the old one's."""

    def speed(cell: Cell, seconds: float) -> float:
        times = shortest_calls({"new": new.turn_of(cell), "old": old.turn_of(cell)}, seconds)
        return times["old"] / times["new"]

    found: dict[Cell, float] = {}
    for cells in groups:
        measured = {cell: speed(cell, seconds) for cell in cells}
        measured = steady(measured, lambda cell: speed(cell, seconds * LONGER))
        found |= measured
        first = cells[0]
        memory = f", {first.format} from memory" if first.ring_bytes else ""
        where = f"{first.size[0]} x {first.size[1]}, M={first.rows}{memory}"
        worst = min(measured, key=measured.__getitem__)
        print(f"{where}: {mean(measured.values()):.3f}x; {measured[worst]:.2f}x is {worst}", flush=True)
    for name in dict.fromkeys(cell.format for cell in found):
        print(f"{name:>16}: {mean(speed for cell, speed in found.items() if cell.format == name):.3f}x")
    print(f"\nThe geometric mean of new : old is {mean(found.values()):.3f}x")
    return found


def mean(numbers: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(number) for number in numbers]
    return math.exp(sum(logs) / len(logs))


# --- the processor and the core ---


def use_core_file(path: str) -> None:
    """Take the core from this file, in place of the installed one."""
    library.core_file = lambda: path


def slow_down_float32(instruction_set: str) -> None:
    """Let XLA's float32 use the instruction set and no better one. Only before XLA starts."""
    isa = OLDER.get(instruction_set)
    if isa:
        flags = f"--xla_cpu_max_isa={isa} --xla_cpu_experimental_ynn_fusion_type="
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN[isa]


def peak() -> str:
    """What float32 reaches here, so that a reader sees which instructions it had."""
    cell = Cell(DENSE, (1024, 1024), 512)
    seconds = shortest_calls({cell: turn_of(cell)}, 0.3)[cell]
    return f"JAX float32 reaches {2 * 1024 * 1024 * 512 / seconds / 1e9:.0f} GFLOPS"


def a_shape(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"a shape is written 4096x1024, K and N; got {text!r}")
    k, n = map(int, text.split("x"))
    return k, n


def main() -> None:
    registered = [form.name for form in formats()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=[*registered, "iq4_nl", *VARIANTS], default=registered)
    parser.add_argument("--rows", type=int, nargs="+", metavar="M")
    parser.add_argument("--shapes", type=a_shape, nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=ACTIVATIONS)
    parser.add_argument("--instruction-set", default="", help="of our kernels, and of float32")
    parser.add_argument("--ring", type=float, default=0.3, help="GB of weights from memory, 0 for none (0.3)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for each cell ({SECONDS})")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="cells to print (10)")
    parser.add_argument("--quick", action="store_true", help="few row counts, and nothing from memory")
    parser.add_argument("--core", help="the file of a core, in place of the installed one")
    parser.add_argument("--compare", help="the file of another core, or the Python of another installation")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # what `Served` starts
    args = parser.parse_args()
    if args.core:
        use_core_file(args.core)
    slow_down_float32(args.instruction_set)
    chosen = cpu.instruction_set(args.instruction_set) if args.instruction_set else contextlib.nullcontext()
    with chosen:
        if not cpu.is_available():
            raise SystemExit("there is no native core to time; `make install` builds it, `--core FILE` takes one")
        if args.serve:
            serve()
        elif not measure_all(args):
            sys.exit(1)


def measure_all(args: argparse.Namespace) -> bool:
    start = time.perf_counter()
    print(f"{headline()}{f'; {args.instruction_set}' if args.instruction_set else ''}")
    rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
    groups = grouped_cells(args.formats, args.shapes, rows, args.activations)
    ring_bytes = 0.0 if args.quick or 1 not in rows else args.ring * 1e9
    size = max(args.shapes, key=math.prod)
    memory = memory_cells(args.formats, size, args.activations, ring_bytes) if ring_bytes else ()
    if args.compare:
        same = [f"--instruction-set={args.instruction_set}"] * bool(args.instruction_set)
        is_core = ".so" in Path(args.compare).suffixes
        other = (sys.executable, [*same, f"--core={args.compare}"]) if is_core else (args.compare, same)
        new, old = Served(sys.executable, [*same, *[f"--core={args.core}"] * bool(args.core)]), Served(*other)
        found = beside_core(itertools.chain(groups, memory), new, old, args.seconds)
        passed = report(found, args.worst, FLOOR, "the other core's speed", "{:.2f}x".format)
    else:
        print(peak())
        found = beside_float32(groups, args.seconds)
        passed = report(found, args.worst, FLOOR, "JAX float32's speed", "{:.2f}x".format)
        if memory:
            yardsticks = [
                cell for cells in memory_cells([YARDSTICK], size, args.activations, ring_bytes) for cell in cells
            ]
            shares = from_memory(memory, yardsticks, max(args.seconds, 0.1))
            passed &= report(shares, args.worst, MEMORY_FLOOR, "NF4's GB/s", "{:.0%}".format)
    print(f"\n{time.perf_counter() - start:.0f} s")
    return passed


if __name__ == "__main__":
    main()
