"""Timing, tables and machine names for the matmul benchmarks.

Every call takes the next weight of a ring that is larger than any cache, so weights are read from memory. Contenders
take turns, so a slow moment of the machine meets all of them. The shortest burst of each counts: other programs can
only add time.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from eformer._src.kernels import cpu

DISTINCT = 2  # weights that are made; the rest of a ring are copies of them
BURST_SECONDS = 0.02
LEAST_BURSTS = 3
PAUSE_SECONDS = 0.01  # until the threads of the last contender stop spinning
TURN_SECONDS = 0.004  # of `turns_of`, for calls that stay in cache
LEAST_TURNS = 5

Key = TypeVar("Key")


class Contender(NamedTuple):
    call: Callable[[Any], Any]  # takes a weight of the ring, and returns when the result is ready
    ring: Sequence[Any]


def measure(contenders: Mapping[str, Contender], bursts: int, seconds: float) -> dict[str, float]:
    """Seconds per call: the shortest of at most `bursts` bursts, within a contender's share of `seconds`."""
    around = {name: itertools.cycle(contender.ring) for name, contender in contenders.items()}
    share = seconds / max(1, len(contenders))
    best = dict.fromkeys(contenders, math.inf)
    calls, used = dict.fromkeys(contenders, 1), dict.fromkeys(contenders, 0.0)
    for name, contender in contenders.items():
        contender.call(next(around[name]))  # compiles
        start = time.perf_counter()
        contender.call(next(around[name]))
        calls[name] = max(1, round(BURST_SECONDS / (time.perf_counter() - start)))
    for turn in range(bursts):
        for name, contender in contenders.items():
            if turn >= LEAST_BURSTS and used[name] > share:
                continue
            time.sleep(PAUSE_SECONDS)
            if calls[name] > 1:
                contender.call(next(around[name]))  # wakes its threads
            start = time.perf_counter()
            for _ in range(calls[name]):
                contender.call(next(around[name]))
            taken = time.perf_counter() - start
            best[name] = min(best[name], taken / calls[name])
            used[name] += taken
    return best


Turn = Callable[[], float]  # calls for TURN_SECONDS, and returns the seconds of the shortest


def turns_of(contender: Contender, clock: Callable[[], float] = time.perf_counter) -> Turn:
    around = itertools.cycle(contender.ring)

    def turn() -> float:
        contender.call(next(around))  # the first compiles, and all bring x and the weight into cache
        best, begin = math.inf, clock()
        now = begin
        while now < begin + TURN_SECONDS:
            start = clock()
            contender.call(next(around))
            now = clock()
            best = min(best, now - start)
        return best

    return turn


def shortest_calls(turns: Mapping[Key, Turn], seconds: float) -> dict[Key, float]:
    """Seconds of the shortest call of each; they take turns, for `seconds` each after the first, which compiles."""
    best = {key: turn() for key, turn in turns.items()}
    begin, count = time.perf_counter(), 1
    while count < LEAST_TURNS or time.perf_counter() < begin + seconds * len(turns):
        best = {key: min(best[key], turn()) for key, turn in turns.items()}
        count += 1
    return best


def stored_bytes(weight: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weight))


def ring_length(each: int, ring_bytes: float) -> int:
    """Number of weights of `each` bytes in a ring of `ring_bytes`."""
    return max(1, math.ceil(ring_bytes / each))


def ring_of(distinct: Sequence[Any], ring_bytes: float) -> list[Any]:
    """`distinct` and copies of them, each in its own buffers, `ring_bytes` in total."""
    count = ring_length(stored_bytes(distinct[0]), ring_bytes)
    copies = [jax.tree.map(jnp.copy, distinct[i % len(distinct)]) for i in range(len(distinct), count)]
    return jax.block_until_ready([*distinct, *copies][:count])


def random_weights(shape: tuple[int, int]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), DISTINCT)
    return [jax.random.normal(key, shape) / math.sqrt(shape[0]) for key in keys]


class Machine(NamedTuple):
    processor: str
    cores: int  # that this process may use
    instructions: tuple[str, ...]  # the sets that matter to matmuls
    cache: str  # the last level

    def __str__(self) -> str:
        known = f", {self.cache} of last-level cache" if self.cache else ""
        return f"{self.processor}, {self.cores} core{'s' * (self.cores != 1)} ({', '.join(self.instructions)}{known})"


INSTRUCTIONS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
}


def machine() -> Machine:
    """As Linux describes it; elsewhere, what Python knows."""
    cpuinfo, size = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    facts: dict[str, str] = {}
    if cpuinfo.exists():
        pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in pairs}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    name = facts.get("model name") or platform.processor() or platform.machine()
    instructions = tuple(word for flag, word in INSTRUCTIONS.items() if flag in flags)
    cache = f"{int(size.read_text().strip().rstrip('K')) // 1024} MiB" if size.exists() else ""
    return Machine(name, core_count(), instructions or (platform.machine(),), cache)


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def headline() -> str:
    core = f"native core with {cpu.instruction_sets()[0]}" if cpu.is_available() else "no native core"
    return f"{machine()}; JAX {jax.__version__}; {core}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """An aligned table; the first `words` columns are flush left, the others flush right."""
    rows = [list(map(str, row)) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return f"| {' | '.join(c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in pairs)} |"

    rule = ["-" * width if i < words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def rewrite(path: Path, marker: str, content: str) -> None:
    """Put `content` between the lines `<!-- marker -->` and `<!-- /marker -->` of the file."""
    begin, end = f"<!-- {marker} -->\n", f"<!-- /{marker} -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no lines {begin.strip()} and {end}: put them where the figures belong")
    path.write_text(f"{before}{begin}{content.strip()}\n{end}{after}")
