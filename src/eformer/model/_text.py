"""Numbers and names for readers, and the report as a plain table."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eformer._text import as_bits, as_shape, in_bytes, printable

if TYPE_CHECKING:
    from ._distance import Distance
    from ._report import Leaf, Report

SORTS = ("error", "bytes_before", "bytes_after")
UNKNOWN = "?"


def escaped(text: str) -> str:
    """`printable` text for a page."""
    return html.escape(printable(text))


def in_percent(share: float | None) -> str:
    if share is None or math.isinf(share):
        return UNKNOWN if share is None else "inf"
    return f"{share * 100:.2f}%" if not share or share >= 1e-4 else f"{share * 100:.1e}%"


def in_decibels(snr: float | None) -> str:
    return UNKNOWN if snr is None else f"{snr:.1f}"


def as_cosine(cosine: float | None) -> str:
    return UNKNOWN if cosine is None or math.isnan(cosine) else f"{cosine:.5f}"


def as_nonfinite(distance: Distance | None) -> str:
    """How many are NaN or infinite, before and after; nothing where all are finite."""
    if distance is None or not (distance.nonfinite_before or distance.nonfinite_after):
        return ""
    return f"{distance.nonfinite_before:,} -> {distance.nonfinite_after:,}"


def sorted_leaves(leaves: Sequence[Leaf], sort: str | None) -> list[Leaf]:
    """Largest first; leaves that were not quantized have no error."""
    if sort is None:
        return list(leaves)
    if sort not in SORTS:
        raise ValueError(f"`sort={sort!r}` must be None or one of {', '.join(map(repr, SORTS))}")
    if sort == "error":
        return sorted(leaves, key=lambda leaf: -(leaf.error or 0.0) if leaf.quantized else 1.0)
    return sorted(leaves, key=lambda leaf: -getattr(leaf, sort))


def table(report: Report, sort: str | None) -> str:
    shown, reasons = bool(report.nonfinite), any(leaf.reason for leaf in report.leaves)
    header = ["path", "shape", "format", "before", "after", "bits", "error", "SNR dB", "cosine"]
    header += ["NaN or inf"] if shown else []
    rows = [
        _row(leaf) + ([as_nonfinite(leaf.distance)] if shown else []) for leaf in sorted_leaves(report.leaves, sort)
    ]
    count = f"{len(report.leaves)} array{'' if len(report.leaves) == 1 else 's'}"
    sizes = [in_bytes(report.bytes_before), in_bytes(report.bytes_after), as_bits(report.bits)]
    total = [count, "", "", *sizes, *_measures(report.distance, bool(report.quantized))]
    total += [as_nonfinite(report.distance)] if shown else []
    widths = [max(map(len, column)) for column in zip(header, *rows, total, strict=True)]
    rule = ["-" * width for width in widths]
    lines = [_line(row, widths) for row in (header, rule, *rows, rule, total)]
    if reasons:
        ends = ["reason", "------", *(printable(leaf.reason) for leaf in sorted_leaves(report.leaves, sort))]
        width = max(map(len, lines))
        lines[: len(ends)] = [f"{line:{width}}  {end}".rstrip() for line, end in zip(lines, ends, strict=False)]
    lines += [f"matched nothing: {printable(rule)}" for rule in report.unused_rules]
    return "\n".join(lines)


def _row(leaf: Leaf) -> list[str]:
    after = "shared" if leaf.shared else in_bytes(leaf.bytes_after)
    sizes = [in_bytes(leaf.bytes_before), after, as_bits(leaf.bits)]
    return [
        printable(leaf.path),
        as_shape(leaf.shape),
        printable(leaf.format),
        *sizes,
        *_measures(leaf.distance, leaf.quantized),
    ]


def _measures(distance: Distance | None, quantized: bool) -> list[str]:
    if not quantized:
        return [""] * 3
    if distance is None:
        return [UNKNOWN] * 3
    return [in_percent(distance.relative_error), in_decibels(distance.snr), as_cosine(distance.cosine)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    words = 3  # columns of words stand to the left, numbers to the right
    cells = [c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
    return "  ".join(cells).rstrip()
