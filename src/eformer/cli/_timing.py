"""Times that can be compared even on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import jax


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
