"""Times that can be compared on a machine that does other things as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def interleaved(bursts: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each burst, the least of `repeats` turns.

    They take turns, so that a slow moment of the machine meets all of them; other work can only add time, so the least
    is the nearest to the truth. A burst must wait for its result. Each runs once before, to compile.
    """
    for burst in bursts.values():
        burst()
    best = dict.fromkeys(bursts, float("inf"))
    for _ in range(repeats):
        for name, burst in bursts.items():
            start = time.perf_counter()
            burst()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
