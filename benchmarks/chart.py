"""A bar chart of speeds, with a column per number of rows of x or per model; it suits light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eformer._src.svg import element, scale, text

Column = int | str  # a number of rows of x, or a heading
Line = tuple[str, str, bool, bool, Mapping[Any, float]]  # group, label, ours, int8 activations, speed by column

LABELS, COLUMN, GAP, BAR, TOP = 350, 170, 46, 17, 66
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .ours { fill: #0969da } .peer { fill: #8c959f }
.title { font-size: 14px; font-weight: 600 } .note { font-size: 11px } .best { font-weight: 700 }
.rounded { opacity: .55 } .one { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .ours { fill: #58a6ff } .peer { fill: #7d8590 } .one { stroke: #3d444d }
}
"""


def bars(
    lines: Sequence[Line],
    columns: Sequence[Column],
    title: str,
    machine: str,
    *,
    shown: str = "{:.2f}x",
    mark: float | None = 1.0,
) -> str:
    """The chart as SVG. Every column has its own scale, the fastest of each group is bold, a thin line is at `mark`."""
    groups = list(dict.fromkeys(group for group, *_ in lines))
    width = LABELS + len(columns) * (COLUMN + GAP)
    parts = [
        element("style", STYLE),
        text(title, 8, 20, class_="title"),
        text(f"{machine}. Pale: x may be rounded to int8.", 8, 38, class_="note"),
    ]
    tops, y = {}, TOP
    for group in groups:
        tops[group] = y
        parts.append(text(group, 8, y + 12, class_="best"))
        y += BAR * (1 + sum(line[0] == group for line in lines)) + 8
    for place, m in enumerate(columns):
        left = LABELS + place * (COLUMN + GAP)
        speeds = [line[4][m] for line in lines if m in line[4]]
        at = scale(0, max(speeds, default=1), 0, COLUMN)
        heading = m if isinstance(m, str) else f"{m} row{'s' * (m != 1)} of x"
        parts.append(text(heading, left, TOP - 6, class_="best"))
        if mark is not None:
            parts.append(element("line", x1=left + at(mark), x2=left + at(mark), y1=TOP, y2=float(y), class_="one"))
        for group in groups:
            members = [line for line in lines if line[0] == group]
            best = max((line[4].get(m, 0) for line in members), default=0)
            for line, (_, label, ours, rounded, speed) in enumerate(members, 1):
                top = tops[group] + BAR * line
                if place == 0:
                    parts.append(
                        text(label, LABELS - 8, top + 12, text_anchor="end", class_="best" if ours else "label")
                    )
                if m in speed:
                    kind = ("ours" if ours else "peer") + (" rounded" if rounded else "")
                    length = max(at(speed[m]), 1.0)
                    parts.append(element("rect", x=left, y=top + 2, width=length, height=BAR - 4, class_=kind))
                    value = "best" if speed[m] == best else "label"
                    parts.append(text(shown.format(speed[m]), left + length + 4, top + 12, class_=value))
    size = {"width": width, "height": y, "viewBox": f"0 0 {width} {y}"}
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", role="img", aria_label=title, **size) + "\n"
