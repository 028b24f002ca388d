"""The parts of plots in SVG: elements, a scale, ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .text import escaped

Scale = Callable[[float], float]  # from a value to a coordinate


def element(name: str, *children: str, **attributes: object) -> str:
    """`<name attributes>children</name>`; in an attribute's name `_` stands for `-`, and a last `_` is dropped."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(children)}</{name}>" if children else f"<{name}{given}/>"


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escaped(str(value))


def text(content: str, x: float, y: float, **attributes: object) -> str:
    return element("text", escaped(content), x=float(x), y=float(y), **attributes)


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """A linear map from `low`..`high` to `start`..`end`; if the range is empty, everything goes to the middle."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart."""
    if not high - low > 1e-300:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_label(value: float) -> str:
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}") if abs(value) > 1e-12 else "0"


def shorten(words: str, length: int) -> str:
    """`words` without its middle if it is longer than `length`: the ends tell more."""
    if len(words) <= length:
        return words
    tail = (length - 1) * 2 // 3
    return f"{words[: length - 1 - tail]}…{words[len(words) - tail :]}"


def figure(width: float, height: float, parts: Sequence[str], label: str, **attributes: object) -> str:
    return element("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label, **attributes)
