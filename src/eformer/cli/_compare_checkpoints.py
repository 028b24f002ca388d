"""Compare two checkpoints array by array, with one pair in memory at a time."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import NamedTuple

from eformer._progress import Progress
from eformer.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from eformer.model import Leaf, Report, report


class Totals(NamedTuple):
    """The sums over a checkpoint, from its headers alone."""

    arrays: int
    quantized: int
    nbytes: int
    size: int

    @property
    def bits(self) -> float:
        """Bits per weight; NaN if there is none."""
        return 8 * self.nbytes / self.size if self.size else math.nan


def totals(checkpoint: Checkpoint) -> Totals:
    infos = [checkpoint.info(name) for name in checkpoint]
    return Totals(
        len(infos),
        sum(info.format is not None for info in infos),
        sum(info.nbytes for info in infos),
        sum(math.prod(info.shape) for info in infos),
    )


def largest_dense(checkpoint: Checkpoint) -> str | None:
    """The name of the largest array that is not quantized."""
    dense = {name: checkpoint.info(name) for name in checkpoint if checkpoint.info(name).format is None}
    return max(dense, key=lambda name: dense[name].nbytes, default=None)


class Comparison(NamedTuple):
    report: Report  # on the arrays that both checkpoints have
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]


def compare_checkpoints(
    before: str | os.PathLike[str], after: str | os.PathLike[str], progress: Progress | None = None
) -> Comparison:
    """Compare the arrays that both checkpoints have; an array that differs counts as quantized, whatever its dtype.

    Raises a CheckpointError if they have no name in common, and a ValueError if a shape differs.
    """
    with open_checkpoint(before) as old, open_checkpoint(after) as new:
        names = [name for name in old if name in new]
        if not names:
            raise CheckpointError(
                f"it has no array that {before} has: {_some(new)} here, {_some(old)} there", file=str(after)
            )
        total, done = sum(old.info(name).nbytes for name in names), 0
        leaves: list[Leaf] = []
        worst, histogram = 0.0, None
        for name in names:
            found = report({name: old[name]}, {name: new[name]})
            (leaf,) = found.leaves
            changed = leaf.quantized or bool(leaf.distance and leaf.distance.noise)
            leaves.append(dataclasses.replace(leaf, quantized=changed))
            if found.histogram is not None and (leaf.error or 0.0) >= worst:
                worst, histogram = leaf.error or 0.0, found.histogram
            done += old.info(name).nbytes
            if progress is not None:
                progress(name, done, total)
        only = [tuple(name for name in one if name not in other) for one, other in ((old, new), (new, old))]
    return Comparison(Report(tuple(leaves), histogram=histogram), *only)


def _some(checkpoint: Checkpoint) -> str:
    return ", ".join(map(repr, list(checkpoint)[:2])) or "none"
