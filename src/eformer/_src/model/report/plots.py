"""The three plots of a report, as SVG; colours come from the page's style sheet."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eformer._src.svg import Scale, element, figure, scale, shorten, text, tick_label, ticks
from eformer._src.text import UNITS, escaped, in_bytes

from .table import in_percent

if TYPE_CHECKING:
    from .histogram import Histogram
    from .report import Leaf

WIDTH, HEIGHT = 340.0, 230.0  # about the width of a telephone in pixels, so that letters keep their size there
LEFT, RIGHT, TOP, BOTTOM = 34.0, 8.0, 24.0, 38.0
MARKS = 4  # shapes and colours; further formats share the last
GROUPS = 8  # shown by name; the rest are shown together
BAR, ROW = 11.0, 37.0


def natural_order(path: str) -> list[tuple[int, int, str]]:
    """A key that sorts "layers.2" before "layers.10"."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", path)]


def group_of(path: str) -> str:
    """The path with a star for the number of the layer: "layers.*.mlp.kernel"."""
    return re.sub(r"(?<![^./_])\d+(?![^./_])", "*", path)


def layer_of(path: str) -> str | None:
    """The first number in the path."""
    found = re.search(r"(?<![^./_])\d+(?![^./_])", path)
    return found and found[0]


def error_plot(leaves: Sequence[Leaf], formats: Sequence[str]) -> str:
    """A mark for each quantized leaf with a finite error, in the order of the layers."""
    known = [(leaf, leaf.error) for leaf in leaves if leaf.error is not None and math.isfinite(leaf.error)]
    known.sort(key=lambda pair: natural_order(pair[0].path))
    highest = max((error for _, error in known), default=0.0) * 100
    round_numbers = ticks(0, highest * 1.05 or 1.0)
    top = round_numbers[-1] if round_numbers[-1] >= highest * 1.05 else round_numbers[-1] + round_numbers[1]
    x = scale(-0.5, len(known) - 0.5, LEFT, WIDTH - RIGHT)
    y = scale(0, top, HEIGHT - BOTTOM, TOP)
    parts = _y_axis(y, ticks(0, top), "relative error, %")
    layers = [layer_of(leaf.path) for leaf, _ in known]
    starts = [i for i, layer in enumerate(layers) if layer is not None and (i == 0 or layers[i - 1] != layer)]
    for i in starts[:: math.ceil(len(starts) / 12) or 1]:
        at = x(i - 0.5) if i else LEFT
        parts.append(element("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="grid"))
        parts.append(text(f"{layers[i]}", at + 2, HEIGHT - BOTTOM + 14))
    name = "layer" if starts else "arrays, in the order of the model"
    parts.append(text(name, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, class_="axis", text_anchor="middle"))
    for i, (leaf, error) in enumerate(known):
        label = element("title", f"{escaped(leaf.path)}: {in_percent(error)}")
        parts.append(mark(min(formats.index(leaf.format), MARKS - 1), x(i), y(error * 100), label))
    return figure(WIDTH, HEIGHT, parts, f"Relative error of {len(known)} quantized arrays")


def mark(kind: int, x: float, y: float, *children: str, size: float = 3.6) -> str:
    """A circle, square, triangle or diamond: formats differ in shape as well as colour."""
    if kind == 0:
        return element("circle", *children, cx=x, cy=y, r=size, class_="m0")
    if kind == 1:
        return element("rect", *children, x=x - size, y=y - size, width=2 * size, height=2 * size, class_="m1")
    corners = [(0, -1.2), (1.2, 1), (-1.2, 1)] if kind == 2 else [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)]
    points = " ".join(f"{x + dx * size:.2f},{y + dy * size:.2f}" for dx, dy in corners)
    return element("polygon", *children, points=points, class_=f"m{kind}")


def size_plot(leaves: Sequence[Leaf]) -> str:
    """Two bars for each group of leaves: bytes after, drawn over bytes before."""
    sums: dict[str, list[int]] = {}
    for leaf in leaves:
        if not leaf.shared:
            entry = sums.setdefault(group_of(leaf.path), [0, 0, 0])
            entry[:] = entry[0] + leaf.bytes_before, entry[1] + leaf.bytes_after, entry[2] + 1
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    rows = [(name, *entry) for name, entry in ranked[:GROUPS]]
    if rest := [entry for _, entry in ranked[GROUPS:]]:
        rows.append((f"{len(rest)} other groups", *(sum(column) for column in zip(*rest, strict=True))))
    largest = max((max(before, after) for _, before, after, _ in rows), default=0)
    power = min(int(math.log10(largest or 1)) // 3, len(UNITS) - 1)
    divisor = 1000.0**power
    height = ROW * max(len(rows), 1) + BOTTOM
    x = scale(0, largest / divisor or 1, 0, WIDTH - 14)
    bottom = height - BOTTOM
    parts = []
    for at in ticks(0, largest / divisor, 4):
        parts.append(element("line", x1=x(at), x2=x(at), y1=0, y2=bottom, class_="grid"))
        parts.append(text(tick_label(at), x(at), bottom + 14, text_anchor="middle" if at else "start"))
    parts.append(text(f"bytes stored, {UNITS[power]}", WIDTH / 2, height - 6, class_="axis", text_anchor="middle"))
    for i, (name, before, after, count) in enumerate(rows):
        y = ROW * i
        label = element("title", escaped(f"{name}, {count} arrays: {in_bytes(before)} before, {in_bytes(after)} after"))
        parts.append(text(shorten(name, 34), 0, y + 11, class_="name"))
        parts.append(text(f"{in_bytes(before)} → {in_bytes(after)}", WIDTH, y + 11, text_anchor="end"))
        for size, kind in ((before, "before"), (after, "after")):
            parts.append(element("rect", label, x=0, y=y + 17, width=x(size / divisor), height=BAR, class_=kind))
    return figure(WIDTH, height, parts, f"Bytes before and after, of {len(sums)} groups of arrays")


def histogram_plot(histogram: Histogram) -> str:
    """The shares of the finite values per bin, in percent: before as an area, after as a line."""
    rows = zip((histogram.before, histogram.after), histogram.beyond, strict=True)
    shares = [[100 * n / (sum(row) + beyond or 1) for n in row] for row, beyond in rows]
    highest = max(map(max, shares))
    x = scale(histogram.edges[0], histogram.edges[-1], LEFT, WIDTH - RIGHT)
    y = scale(0, highest * 1.05 or 1, HEIGHT - BOTTOM, TOP)
    parts = _y_axis(y, ticks(0, highest * 1.05 or 1), "share of the values, %")
    for at in ticks(histogram.edges[0], histogram.edges[-1], 6):
        parts.append(text(tick_label(at), x(at), HEIGHT - BOTTOM + 14, text_anchor="middle"))
    parts.append(text("value", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, class_="axis", text_anchor="middle"))
    xs = [x(edge) for edge in histogram.edges for _ in range(2)]
    for row, kind in zip(shares, ("before", "outline"), strict=True):
        ys = [y(share) for share in (0, *(share for share in row for _ in range(2)), 0)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in zip(xs, ys, strict=True))
        parts.append(element("polygon" if kind == "before" else "polyline", points=points, class_=kind))
    return figure(WIDTH, HEIGHT, parts, f"Values of {histogram.path} before and after")


def _y_axis(y: Scale, at: Sequence[float], name: str) -> list[str]:
    parts = [text(name, 0, 10, class_="axis")]
    for value in at:
        kind = "grid" if value else "base"
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_=kind))
        parts.append(text(tick_label(value), LEFT - 6, y(value) + 4, text_anchor="end"))
    return parts
