"""A bar for each leaf, as SVG."""

from __future__ import annotations

from collections.abc import Mapping

from eformer._src.svg import element, figure, scale, shorten, text, tick_label, ticks

ROW, LEFT, WIDTH, TOP, NAME = 16.0, 250.0, 640.0, 28.0, 38


def unevenness(values: Mapping[str, float]) -> str:
    """The largest mean square of a channel by the mean of all, for each leaf."""
    highest = max(values.values(), default=1.0)
    height = TOP + ROW * max(len(values), 1) + 8
    x = scale(0, highest, LEFT, WIDTH - 10)
    parts = [text("largest mean square of a channel / mean", LEFT, 12)]
    for value in ticks(0, highest):
        parts.append(element("line", x1=x(value), x2=x(value), y1=TOP - 4, y2=height - 8, stroke="#ddd"))
        parts.append(text(tick_label(value), x(value), TOP - 6, text_anchor="middle"))
    for i, (path, value) in enumerate(values.items()):
        y = TOP + ROW * i
        parts.append(element("rect", x=LEFT, y=y + 2, width=x(value) - LEFT, height=ROW - 4, fill="#4477aa"))
        parts.append(text(shorten(path, NAME), LEFT - 6, y + ROW - 4, text_anchor="end"))
    options = {"xmlns": "http://www.w3.org/2000/svg", "font_family": "sans-serif", "font_size": "11"}
    return figure(WIDTH, height, parts, "how uneven the inputs of each leaf are", **options)
