"""The numbers of a report as text, and the report as a plain table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eformer._src.text import as_bits, as_shape, in_bytes, printable, table

if TYPE_CHECKING:
    from .distance import Distance
    from .report import Leaf, Report

SORTS = ("error", "bytes_before", "bytes_after")
UNKNOWN = "?"


def in_percent(share: float | None) -> str:
    if share is None or math.isinf(share):
        return UNKNOWN if share is None else "inf"
    return f"{share * 100:.2f}%" if not share or share >= 1e-4 else f"{share * 100:.1e}%"


def measures(distance: Distance | None) -> list[str]:
    """Error, SNR in decibels, and cosine."""
    if distance is None:
        return [UNKNOWN] * 3
    cosine = UNKNOWN if math.isnan(distance.cosine) else f"{distance.cosine:.5f}"
    return [in_percent(distance.relative_error), f"{distance.snr:.1f}", cosine]


def as_nonfinite(distance: Distance | None) -> str:
    """The counts of NaN and infinite values before and after; an empty string where all are finite."""
    if distance is None or not (distance.nonfinite_before or distance.nonfinite_after):
        return ""
    return f"{distance.nonfinite_before:,} -> {distance.nonfinite_after:,}"


def sorted_leaves(leaves: Sequence[Leaf], sort: str | None) -> list[Leaf]:
    """The leaves, largest first; for "error", leaves that were not quantized come last."""
    if sort is None:
        return list(leaves)
    if sort not in SORTS:
        raise ValueError(f"`sort={sort!r}` must be None or one of {', '.join(map(repr, SORTS))}")
    if sort == "error":
        return sorted(leaves, key=lambda leaf: -(leaf.error or 0.0) if leaf.quantized else 1.0)
    return sorted(leaves, key=lambda leaf: -getattr(leaf, sort))


def report_table(report: Report, sort: str | None) -> str:
    leaves = sorted_leaves(report.leaves, sort)
    header = ["path", "shape", "format", "before", "after", "bits", "error", "SNR dB", "cosine", "NaN or inf"]
    count = f"{len(leaves)} array{'' if len(leaves) == 1 else 's'}"
    total = [count, "", "", *_cells(report, in_bytes(report.bytes_after), bool(report.quantized))]
    columns = len(header) if report.nonfinite else len(header) - 1
    lines = table(header[:columns], [row(leaf)[:columns] for leaf in leaves], words=3, total=total[:columns])
    if any(leaf.reason for leaf in leaves):
        ends = ["reason", "------", *(printable(leaf.reason) for leaf in leaves)]
        width = max(map(len, lines))
        lines[: len(ends)] = [f"{line:{width}}  {end}".rstrip() for line, end in zip(lines, ends, strict=False)]
    lines += [f"matched nothing: {printable(rule)}" for rule in report.unused_rules]
    return "\n".join(lines)


def row(leaf: Leaf) -> list[str]:
    """The cells of a leaf, under the header of the table."""
    after = "shared" if leaf.shared else in_bytes(leaf.bytes_after)
    return [leaf.path, as_shape(leaf.shape), leaf.format, *_cells(leaf, after, leaf.quantized)]


def _cells(of: Leaf | Report, after: str, quantized: bool) -> list[str]:
    errors = measures(of.distance) if quantized else [""] * 3
    return [in_bytes(of.bytes_before), after, as_bits(of.bits), *errors, as_nonfinite(of.distance)]
