"""Time `x @ q` on CPU in every format, as a multiple of the speed of JAX float32 `x @ W` in the same run.

python benchmarks/matmul.py                      # the three shapes, all formats
python benchmarks/matmul.py --quick              # one shape, a small ring: a quick check
python benchmarks/matmul.py --threads 1 2        # the gain of a second core
python benchmarks/matmul.py --linear             # GB/s over weights of 1 MB to 1 GB
python benchmarks/matmul.py --int4 --rows 1 8    # int4 beside nf4: microseconds, ratio and GB/s
python benchmarks/matmul.py --int4 --instructions avx2 --rows 1 8
python benchmarks/matmul.py --layouts            # other lengths of blocks, other widths, codes along the other axis

rings.py says how it measures. `--docs` writes the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rings import (
    Contender,
    core_count,
    headline,
    markdown,
    measure,
    random_weights,
    rewrite,
    ring_length,
    ring_of,
    stored_bytes,
)

from eformer._src.kernels import cpu
from eformer.ops.quantization import FormatSpec, RSROperatorTernary, quantize

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096)]
SECONDS = {True: 24.0, False: 8.0}  # for all contenders of a case: with many rows of x, with few
MANY_ROWS = 17  # from here on, half precision is compared too

Make = Callable[[jax.Array], Any]
DENSE: dict[str, Make] = {"JAX float32": lambda w: w, "JAX bfloat16": lambda w: w.astype(jnp.bfloat16)}
FORMATS: dict[str, Make] = {
    "int8, per row": functools.partial(quantize, dtype="int8"),
    "int8, per column": functools.partial(quantize, dtype="int8", axis=0),
    "nf4 along K": functools.partial(quantize, dtype="nf4", axis=0),
    "nf4 along N": functools.partial(quantize, dtype="nf4"),
    "nf4, double": functools.partial(quantize, dtype="nf4", axis=0, double_quantization=True),
    "int4 along K": functools.partial(quantize, dtype="int4", axis=0),
    "int4 along N": functools.partial(quantize, dtype="int4"),
    "ternary": functools.partial(quantize, dtype="ternary", scale="channel"),
}
LAYOUTS: dict[str, Make] = {
    "nf4 32 along K": functools.partial(quantize, dtype="nf4", axis=0, block_size=32),
    **{f"nf4 {size} along N": functools.partial(quantize, dtype="nf4", block_size=size) for size in (16, 32, 64, 96)},
    **{
        f"int{bits} 32 along N": functools.partial(quantize, dtype=FormatSpec(f"int{bits}"), double_quantization=False)
        for bits in (2, 3, 4, 5)
    },
    "int6 16 along N": functools.partial(quantize, dtype="int6", block_size=16, double_quantization=False),
    "int8 32 along N": functools.partial(quantize, dtype="int8_grouped", block_size=32),
    "ternary along N": lambda w: quantize(w.T, dtype="ternary", scale="channel").T,
}
RSR = "RSR ternary"
MAKE: dict[str, Make] = {**DENSE, **FORMATS, RSR: RSROperatorTernary.quantize}

INTRODUCTION = """\
`x @ q` as a multiple of the speed of JAX float32 `x @ W`; after the slash, our goal for a processor with AVX-512, VNNI
and AMX. Each cell is the slowest of three weights, {}, on {}.

"""


class Case(NamedTuple):
    rows: int
    dtype: str = "float32"  # of x; "int8": x is float32, and kernels may round it
    transposed: bool = False

    def __str__(self) -> str:
        matmul = "x @ W.T" if self.transposed else "x @ W"
        return f"{matmul}, M={self.rows}, {self.dtype} x"

    def formats(self) -> list[str]:
        """All formats; RSR only for few rows and `x @ W` with exact x."""
        return [*DENSE, *FORMATS, *([RSR] if self == Case(self.rows) and self.rows < MANY_ROWS else [])]


# For a processor with AVX-512, VNNI and AMX.
GOALS: dict[Case, dict[str, float]] = {
    Case(1): {"int8": 4.2, "nf4": 6.8, "nf4 along N": 6.2, "ternary": 12},
    Case(1, "int8"): {"int8": 4.5, "nf4": 8, "ternary": 14},
    Case(8): {"int8": 6, "nf4": 6, "ternary": 6},
    Case(512): {"int8": 0.95, "nf4": 0.95, "ternary": 0.95},
    Case(512, "bfloat16"): {"int8": 5, "nf4": 5, "ternary": 5},
    Case(1, transposed=True): {"int8": 3.8, "nf4": 6, "ternary": 9},
}


def cases(rows: Sequence[int]) -> Iterator[Case]:
    for m in rows:
        yield Case(m)
        yield Case(m, "int8")
    yield from (Case(m, "bfloat16") for m in rows if m >= MANY_ROWS)
    yield from (Case(m, dtype, transposed=True) for m in rows if m == 1 for dtype in ("float32", "int8"))


def contender(case: Case, name: str, ring: Sequence[Any]) -> Contender:
    k, n = ring[0].shape
    if name in FORMATS:  # the stored codes stay the same
        if case.dtype == "int8":
            ring = [q.with_activation_dtype("int8") for q in ring]
        else:
            ring = [q.astype(case.dtype) for q in ring]
    transposed = case.transposed and name != "JAX float32"  # the baseline always runs its fastest layout
    x = jax.random.normal(jax.random.key(1), (case.rows, n if transposed else k)).astype(ring[0].dtype)
    matmul = jax.jit(lambda x, w: x @ (w.T if transposed else w))
    return Contender(lambda w: matmul(x, w).block_until_ready(), ring)


class Settings(NamedTuple):
    ring_bytes: float
    bursts: int
    seconds: float  # a multiple of SECONDS


Times = dict[Case, dict[str, float]]


def measure_shape(shape: tuple[int, int], rows: Sequence[int], settings: Settings) -> Times:
    weights = random_weights(shape)
    names = dict.fromkeys(name for case in cases(rows) for name in case.formats())
    rings = {name: ring_of([MAKE[name](w) for w in weights], settings.ring_bytes) for name in names}
    found: Times = {}
    for case in cases(rows):
        playing = {name: contender(case, name, rings[name]) for name in case.formats()}
        found[case] = measure(playing, settings.bursts, SECONDS[case.rows >= MANY_ROWS] * settings.seconds)
    return found


def goal(case: Case, name: str) -> float | None:
    goals = GOALS.get(case, {})
    return goals.get(name, goals.get(name.replace(",", " ").split()[0]))


def speed_table(speeds: dict[Case, dict[str, float]], ms: dict[Case, float] | None = None) -> str:
    """Multiples of JAX float32's speed, and the goal after a slash."""
    names = [name for name in MAKE if name != "JAX float32"]

    def cell(case: Case, name: str) -> str:
        if name not in speeds[case]:
            return ""
        wanted = goal(case, name)
        return f"{speeds[case][name]:.2f}x" + (f" / {wanted:g}" if wanted else "")

    time = ["JAX float32"] if ms else []
    rows = [[str(c), *([f"{ms[c]:.2f} ms"] if ms else []), *(cell(c, name) for name in names)] for c in speeds]
    return markdown(["speed / goal", *time, *names], rows)


def speeds_of(times: Times) -> dict[Case, dict[str, float]]:
    return {c: {name: t["JAX float32"] / s for name, s in t.items() if name != "JAX float32"} for c, t in times.items()}


def compare_shapes(shapes: Sequence[tuple[int, int]], rows: Sequence[int], settings: Settings, docs: bool) -> None:
    least: dict[Case, dict[str, float]] = {}
    for shape in shapes:
        times = measure_shape(shape, rows, settings)
        speeds = speeds_of(times)
        ms = {case: times[case]["JAX float32"] * 1e3 for case in times}
        print(
            f"\nW of shape {shape}, in multiples of the speed of JAX float32\n\n{speed_table(speeds, ms)}", flush=True
        )
        for case, found in speeds.items():
            least[case] = {name: min(s, least.get(case, found)[name]) for name, s in found.items()}
    if docs:
        rewrite(PAGE, "matmul", INTRODUCTION.format(", ".join(map(str, shapes)), headline()) + speed_table(least))
        print(f"\nwrote the least of these shapes into {PAGE.name}")


def compare_layouts(shape: tuple[int, int], rows: Sequence[int], settings: Settings) -> None:
    makers = {"JAX float32": DENSE["JAX float32"], **LAYOUTS}
    weights = random_weights(shape)
    rings = {name: ring_of([make(w) for w in weights], settings.ring_bytes) for name, make in makers.items()}
    lines = []
    for case in (Case(m, transposed=transposed) for m in rows for transposed in (False, True)):
        playing = {name: contender(case, name, ring) for name, ring in rings.items()}
        times = measure(playing, settings.bursts, SECONDS[case.rows >= MANY_ROWS] * settings.seconds)
        lines.append([str(case), *(f"{times['JAX float32'] / times[name]:.2f}x" for name in LAYOUTS)])
    print(f"\nW of shape {shape}, in multiples of the speed of JAX float32\n\n{markdown(['speed', *LAYOUTS], lines)}")


CACHED = (1024, 1024)  # one such weight stays in cache
INT4_LAYOUTS = {  # the blocks of stored weights, and whether those are (N, K)
    "x @ W, blocks along K": ("along K", False),
    "x @ W.T, blocks along K": ("along N", True),
    "x @ W, blocks along N": ("along N", False),
}


def compare_int4(shapes: Sequence[tuple[int, int]], rows: Sequence[int], settings: Settings) -> None:
    lines = []
    for shape in [CACHED, *shapes]:
        ring_bytes = 0 if shape == CACHED else settings.ring_bytes
        for layout, (blocks, transposed) in INT4_LAYOUTS.items():
            weights = [w.T if transposed else w for w in random_weights(shape)]
            names = {kind: f"{kind} {blocks}" for kind in ("int4", "nf4")}
            rings = {kind: ring_of([MAKE[name](w) for w in weights], ring_bytes) for kind, name in names.items()}
            for case in (Case(m, transposed=transposed) for m in rows):
                playing = {kind: contender(case, name, rings[kind]) for kind, name in names.items()}
                times = measure(playing, settings.bursts, SECONDS[case.rows >= MANY_ROWS] * settings.seconds)
                rates = [f"{stored_bytes(rings[kind][0]) / times[kind] / 1e9:.1f}" for kind in names]
                us = [f"{times[kind] * 1e6:.0f}" for kind in names]
                ratio = f"{times['nf4'] / times['int4']:.2f}x"
                lines.append([f"{layout}, {shape}", str(case.rows), *us, ratio, *rates])
    print(
        markdown(["float32 x", "M", "int4 us", "nf4 us", "as fast as nf4", "int4 GB/s", "nf4 GB/s"], lines), flush=True
    )


def compare_threads(threads: Sequence[int], shape: tuple[int, int], rows: Sequence[int], settings: Settings) -> None:
    """Measure each number of threads in a process of its own: XLA sizes its pool by the cores of the process."""
    cores, found = sorted(os.sched_getaffinity(0)), {}
    for count in threads:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, os.sched_setaffinity, (0, cores[:count])) as process:
            found[count] = process.submit(measure_shape, shape, rows, settings).result()
            pool = process.submit(pool_threads).result()
            print(f"{count} core{'s' * (count > 1)}: XLA's pool has {pool} thread{'s' * (pool > 1)}")
    for case in cases(rows):
        header = ["ms", *(f"threads: {count}" for count in threads), "times as fast"]
        lines = []
        for name in found[threads[0]][case]:
            ms = [found[count][case][name] * 1e3 for count in threads]
            lines.append([name, *(f"{each:.3f}" for each in ms), f"{ms[0] / ms[-1]:.2f}"])
        print(f"\n{case}, W of shape {shape}\n\n{markdown(header, lines)}")


def pool_threads() -> int:
    return sum("XLAEigen" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))


SIZES_MB = (1, 4, 16, 64, 256, 1024)
CHAIN_BYTES = 16e6  # one call chains small matmuls up to this size, so that the call itself is not what is timed


def compare_sizes(settings: Settings) -> None:
    """Time one row of x. Weights are a small one repeated: values do not change the time."""
    names = ["JAX float32", "int8, per row", "int8, per column", "nf4 along K", "nf4 along N", "ternary"]
    print("\none row of x: milliseconds and GB/s, by stored bytes of the weight")
    for varied in ("K", "N"):
        lines = []
        for name in names:
            small = MAKE[name](random_weights((4096, 4096))[0])
            each = stored_bytes(small)
            chains = {}
            for mb in SIZES_MB:
                length = max(64, round(4096 * mb * 1e6 / each / 64) * 64)
                shape = (length, 4096) if varied == "K" else (4096, length)
                chains[f"{mb} MB"] = chain(resized(MAKE[name], small, shape), settings.ring_bytes)
            times = measure({size: c.contender for size, c in chains.items()}, settings.bursts, SECONDS[False])
            for size, c in chains.items():
                times[size] /= c.length
            lines.append([name, *(f"{1e3 * s:.2f} ms {chains[size].each / s / 1e9:4.1f}" for size, s in times.items())])
        fixed = "N" if varied == "K" else "K"
        header = [f"{fixed} = 4096, {varied} varied", *(f"{mb} MB" for mb in SIZES_MB)]
        print(f"\n{markdown(header, lines)}", flush=True)


def resized(make: Make, small: Any, shape: tuple[int, int]) -> Any:
    """A weight of `shape` whose leaves are those of `small`, repeated or cut."""
    like = jax.eval_shape(make, jax.ShapeDtypeStruct(shape, jnp.float32))

    def fit(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        repeats = [math.ceil(want / have) for want, have in zip(like.shape, leaf.shape, strict=True)]
        return jnp.tile(leaf, repeats)[tuple(map(slice, like.shape))]

    leaves = map(fit, jax.tree.leaves(small), jax.tree.leaves(like))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class Chain(NamedTuple):
    contender: Contender
    length: int  # matmuls in a call
    each: int  # stored bytes of a weight


def chain(weight: Any, ring_bytes: float) -> Chain:
    """Matmuls in one call, each waiting for the one before."""
    count = ring_length(stored_bytes(weight), CHAIN_BYTES)
    ring = ring_of([weight], ring_bytes)
    x = jnp.ones((1, weight.shape[0]))

    @jax.jit
    def matmuls(x: jax.Array, weights: Sequence[Any]) -> jax.Array:
        y = x @ weights[0]
        for w in weights[1:]:
            y = (x + 0 * y[:, :1]) @ w
        return y

    links = [ring[i : i + count] for i in range(0, len(ring) - count + 1, count)]
    played = Contender(lambda weights: matmuls(x, weights).block_until_ready(), links)
    return Chain(played, count, stored_bytes(weight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("K", "N"), help="may be given again")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512], metavar="M", help="default: 1 8 512")
    parser.add_argument("--ring", type=float, default=0.8, help="GB of stored weights in each ring (0.8)")
    parser.add_argument("--bursts", type=int, default=60, help="most bursts of each contender (60)")
    parser.add_argument("--quick", action="store_true", help="the first shape, a small ring, few bursts")
    parser.add_argument("--threads", type=int, nargs="+", metavar="COUNT", help="compare numbers of threads")
    parser.add_argument("--linear", action="store_true", help="compare sizes of weights")
    parser.add_argument("--layouts", action="store_true", help="compare lengths and directions of blocks")
    parser.add_argument("--int4", action="store_true", help="compare int4 with nf4, in cache and from memory")
    parser.add_argument("--instructions", choices=cpu.instruction_sets(), help="the instruction set of our kernels")
    parser.add_argument("--docs", "--readme", action="store_true", help="write the table into docs/benchmarks.md")
    args = parser.parse_args()
    shapes = [(k, n) for k, n in args.shape or SHAPES]
    settings = Settings(args.ring * 1e9, args.bursts, 1.0)
    if args.quick:
        shapes, settings = shapes[:1], Settings(0.1e9, 5, 0.2)
    if max(args.threads or [1]) > core_count():
        parser.error(f"--threads {max(args.threads)}: this process may use {core_count()} cores")
    print(headline())
    with cpu.instruction_set(args.instructions) if args.instructions else contextlib.nullcontext():
        compare(args, shapes, settings)


def compare(args: argparse.Namespace, shapes: Sequence[tuple[int, int]], settings: Settings) -> None:
    if args.int4:
        compare_int4(shapes, args.rows, settings)
    elif args.threads:
        compare_threads(args.threads, shapes[0], args.rows, settings)
    elif args.linear:
        compare_sizes(settings)
    elif args.layouts:
        compare_layouts(shapes[0], args.rows, settings)
    else:
        compare_shapes(shapes, args.rows, settings, args.docs)


if __name__ == "__main__":
    main()
