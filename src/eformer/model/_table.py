"""The numbers of a report as text, and the report as a plain table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eformer._text import as_bits, as_shape, in_bytes, printable, table

if TYPE_CHECKING:
    from ._distance import Distance
    from ._report import Leaf, Report

SORTS = ("error", "bytes_before", "bytes_after")
UNKNOWN = "?"


def in_percent(share: float | None) -> str:
    if share is None or math.isinf(share):
        return UNKNOWN if share is None else "inf"
    return f"{share * 100:.2f}%" if not share or share >= 1e-4 else f"{share * 100:.1e}%"


def in_decibels(snr: float | None) -> str:
    return UNKNOWN if snr is None else f"{snr:.1f}"


def as_cosine(cosine: float | None) -> str:
    return UNKNOWN if cosine is None or math.isnan(cosine) else f"{cosine:.5f}"


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
    leaves, with_nonfinite = sorted_leaves(report.leaves, sort), bool(report.nonfinite)
    header = ["path", "shape", "format", "before", "after", "bits", "error", "SNR dB", "cosine", "NaN or inf"]
    count = f"{len(leaves)} array{'' if len(leaves) == 1 else 's'}"
    sizes = [in_bytes(report.bytes_before), in_bytes(report.bytes_after), as_bits(report.bits)]
    total = [count, "", "", *sizes, *_measures(report.distance, bool(report.quantized))]
    columns = len(header) if with_nonfinite else len(header) - 1
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
    sizes = [in_bytes(leaf.bytes_before), after, as_bits(leaf.bits)]
    return [leaf.path, as_shape(leaf.shape), leaf.format, *sizes, *_measures(leaf.distance, leaf.quantized)]


def _measures(distance: Distance | None, quantized: bool) -> list[str]:
    """Error, SNR, cosine, and the counts of values that are not finite."""
    shown = [""] * 3 if not quantized else [UNKNOWN] * 3
    if quantized and distance is not None:
        shown = [in_percent(distance.relative_error), in_decibels(distance.snr), as_cosine(distance.cosine)]
    return [*shown, as_nonfinite(distance)]
