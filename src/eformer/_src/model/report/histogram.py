"""The values of a weight, counted before and after."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .distance import Dense, has_values, pairs

BINS = 64
REACH = 6  # standard deviations to each side of the mean; a few outliers must not press the rest into one bin


@dataclass(frozen=True)
class Histogram:
    """Counts of finite values in bins of equal width between `edges`; `beyond` counts the values outside the bins."""

    path: str
    edges: tuple[float, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    beyond: tuple[int, int] = (0, 0)


def histogram_of(path: str, before: object, after: object) -> Histogram | None:
    """A histogram over the range of both arrays without outliers; None where there is no value to count."""
    if not has_values(before) or not has_values(after):
        return None
    parts = np.array([_summary(_values(x)) for pair in pairs(before, after) for x in pair]).reshape(-1, 5)
    count, total, squares = parts[:, 2:].sum(axis=0)
    if not count:
        return None
    mean = total / count
    reach = REACH * np.sqrt(max(squares / count - mean * mean, 0.0))
    low, high = max(parts[:, 0].min(), mean - reach), min(parts[:, 1].max(), mean + reach)
    edges = np.linspace(low, high, BINS + 1) if low < high else np.linspace(mean - 0.5, mean + 0.5, BINS + 1)
    counts, sizes = np.zeros((2, BINS), np.int64), np.zeros(2, np.int64)
    for pair in pairs(before, after):
        values = [_values(x) for x in pair]
        counts += [np.histogram(x, edges)[0] for x in values]
        sizes += [x.size for x in values]
    beyond = sizes - counts.sum(axis=1)
    rows = (tuple(row.tolist()) for row in counts)
    return Histogram(path, tuple(edges.tolist()), *rows, beyond=(int(beyond[0]), int(beyond[1])))


def _values(x: Dense) -> np.ndarray:
    found = np.asarray(x)
    found = found.astype(np.promote_types(found.dtype, np.float32)).ravel()
    return found[np.isfinite(found)]


def _summary(values: np.ndarray) -> tuple[float, ...]:
    """The smallest and largest value, the count, the sum and the sum of squares."""
    values = values.astype(np.float64)
    bounds = np.min(values, initial=np.inf), np.max(values, initial=-np.inf)
    return *bounds, values.size, np.sum(values), np.sum(values * values)
