"""A report as one web page that fetches nothing, since style, plots and script are in it; and as notebooks show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from eformer._src.svg import element
from eformer._src.text import as_bits, escaped, in_bytes

from .plots import MARKS, error_plot, histogram_plot, mark, size_plot
from .table import as_nonfinite, in_percent, measures, row, sorted_leaves

if TYPE_CHECKING:
    from .report import Leaf, Report

# Even if a name in the model were markup, nothing could be fetched.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_COLUMNS = ("array", "shape", "format", "before", "after", "bits a weight", "error", "SNR, dB", "cosine", "NaN or inf")
_WORDS = 3  # the first columns are sorted as words
_NOTEBOOK_ROWS = 50


def page(report: Report, title: str) -> str:
    name = escaped(title)
    facts = (f"<div><dt>{fact}</dt><dd>{value}</dd><dd>{note}</dd></div>" for fact, value, note in _facts(report))
    styles, script = (
        resources.files("eformer._src.model.report").joinpath(file).read_text("utf-8")
        for file in ("page.css", "page.js")
    )
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{name}</title>
<style>\n{styles}</style>
</head>
<body>
<header><h1>{name}</h1><p class="muted">{_described(report)}</p></header>
<dl class="summary">{"".join(facts)}</dl>
{"".join(_notices(report))}
{_plots(report)}
<section><h2>All arrays</h2>
<p class="note">Click a heading to sort. Arrays without an error were kept as they are.</p>
{_table(report, sorted_leaves(report.leaves, "error"), sortable=True)}</section>
<script>\n{script}</script>
</body>
</html>
"""


def fragment(report: Report) -> str:
    """The summary, and the arrays with the largest errors."""
    leaves = sorted_leaves(report.leaves, "error")
    facts = "; ".join(f"{name.lower()} <b>{value}</b> ({note})" for name, value, note in _facts(report))
    rest = len(leaves) - _NOTEBOOK_ROWS
    more = f"<p>and {_counted(rest, 'array')} more, which <code>to_html</code> writes</p>" if rest > 0 else ""
    table = _table(report, leaves[:_NOTEBOOK_ROWS], sortable=False)
    return f"<p>{_described(report)}</p><p>{facts}</p>{''.join(_notices(report))}{table}{more}"


def _described(report: Report) -> str:
    names = ", ".join(_formats(report)) or "nothing"
    return (
        f"{len(report.quantized):,} of {_counted(len(report.leaves), 'array')} quantized to {escaped(names)}. "
        "Errors are those of the quantized arrays, in the 2-norm, relative to the array before."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _formats(report: Report) -> list[str]:
    return list(dict.fromkeys(leaf.format for leaf in report.quantized))


def _facts(report: Report) -> list[tuple[str, str, str]]:
    """Name, value and note of what matters most, as HTML."""
    before, after, distance, worst = report.bytes_before, report.bytes_after, report.distance, report.worst
    ratio = f", {before / after:.2f} times smaller" if after else ""
    facts = [
        ("Size", in_bytes(after), f"from {in_bytes(before)}{ratio}"),
        ("Bits a weight", as_bits(report.bits) or "none", _counted(report.size, "weight")),
    ]
    if distance is not None:
        error, snr, cosine = measures(distance)
        facts.append(("Relative error", error, "all quantized arrays together"))
        facts.append(("Signal to noise", f"{snr} dB", f"cosine {cosine}"))
    if worst is not None:
        facts.append(("Largest relative error", in_percent(worst.error), escaped(worst.path)))
    return facts


def _notices(report: Report) -> list[str]:
    found = [
        f"{_path(leaf.path)} has NaN or infinite values: {as_nonfinite(leaf.distance).replace('->', 'before,')} after. "
        "The errors are of the others."
        for leaf in report.nonfinite
    ]
    found += [f"The rule {_path(rule)} matched nothing." for rule in report.unused_rules]
    if unknown := sum(leaf.distance is None for leaf in report.quantized):
        found.append(
            f"The values of {_counted(unknown, 'quantized array')} could not be compared: they were freed, or abstract."
        )
    return [f'<p class="notice">{notice}</p>' for notice in found]


def _path(path: str) -> str:
    return f'<span class="path">{escaped(path)}</span>'


def _plots(report: Report) -> str:
    formats, figures = _formats(report), []
    if any(leaf.error is not None and math.isfinite(leaf.error) for leaf in report.quantized):
        legend = [(mark(min(i, MARKS - 1), 7, 7), name) for i, name in enumerate(formats)]
        plot = error_plot(report.quantized, formats)
        figures.append(_figure("Error per layer", "Each mark is a quantized array.", plot, legend))
    shapes = {kind: element("rect", x=0, y=2, width=14, height=10, class_=kind) for kind in ("before", "after")}
    if report.leaves:
        legend = [(shapes["before"], "before"), (shapes["after"], "after")]
        note = "Arrays of all layers together; * stands for the number of a layer."
        figures.append(_figure("Size per group", note, size_plot(report.leaves), legend))
    if report.histogram is not None:
        line = element("line", x1=0, x2=14, y1=7, y2=7, class_="outline")
        plot, legend = histogram_plot(report.histogram), [(shapes["before"], "before"), (line, "after")]
        note, beyond = _path(report.histogram.path), report.histogram.beyond
        if any(beyond):
            note += f"; {beyond[0]:,} values before and {beyond[1]:,} after lie beyond the plot"
        figures.append(_figure("Values before and after", note, plot, legend))
    return f'<section class="plots">{"".join(figures)}</section>'


def _figure(title: str, note: str, plot: str, legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span><svg viewBox="0 0 14 14" aria-hidden="true">{s}</svg>{escaped(n)}</span>' for s, n in legend)
    caption = f"<figcaption><h2>{title}</h2><p>{note}</p></figcaption>"
    return f'<figure>{caption}{plot}<div class="legend">{keys}</div></figure>'


def _table(report: Report, leaves: Sequence[Leaf], *, sortable: bool) -> str:
    columns = len(_COLUMNS) if report.nonfinite else len(_COLUMNS) - 1
    head = "".join(_heading(i, name) if sortable else f"<th>{name}</th>" for i, name in enumerate(_COLUMNS[:columns]))
    rows = "\n".join(f"<tr>{_cells(leaf, columns)}</tr>" for leaf in leaves)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"


def _heading(column: int, name: str) -> str:
    kind = "words" if column < _WORDS else "numbers"
    order = ' aria-sort="descending"' if name == "error" else ""
    return f'<th scope="col" data-kind="{kind}"{order}><button type="button">{name}</button></th>'


def _cells(leaf: Leaf, columns: int) -> str:
    shown = list(map(escaped, row(leaf)))
    shown[0] = _path(leaf.path) + (f'<div class="muted">{escaped(leaf.reason)}</div>' if leaf.reason else "")
    shown[1] = shown[1].replace("x", " \N{MULTIPLICATION SIGN} ")
    shown[4] = f"{in_bytes(leaf.bytes_after)}{' (shared)' if leaf.shared else ''}"
    shown[9] = as_nonfinite(leaf.distance).replace("->", "→")
    sizes = [leaf.path, leaf.size, leaf.format, leaf.bytes_before, leaf.bytes_after, leaf.bits]
    errors = [leaf.error, leaf.snr, leaf.cosine] if leaf.quantized else [""] * 3
    lost = (leaf.distance.nonfinite_after if leaf.distance else 0) or ""
    cells = list(zip(_COLUMNS, shown, [*sizes, *errors, lost], strict=True))[:columns]
    return "".join(
        f'<td data-value="{_value(value)}"{f" data-label={chr(34)}{name}{chr(34)}" if i else ""}>{text}</td>'
        for i, (name, text, value) in enumerate(cells)
    )


def _value(value: object) -> str:
    """The value that the script compares: a number that JavaScript knows, or words; empty if it is unknown."""
    if isinstance(value, float):
        return "" if math.isnan(value) else str(value).replace("inf", "Infinity")
    return "" if value is None else escaped(str(value))
