"""What a notebook shows of a quantized array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer

from eformer._src.jaximus.instrumentation import unobserved
from eformer._src.svg import element, figure
from eformer._src.text import as_bits, as_shape, escaped, in_bytes

if TYPE_CHECKING:
    from .base import QuantizedArray

MOST = 2**16  # elements of an array whose values are shown: decoding it takes about a millisecond
BINS, WIDTH, HEIGHT = 48, 240.0, 40.0


def array_html(q: QuantizedArray) -> str:
    """Class, shape, dtype, format, bytes and sharding as an HTML table; with a histogram if the array is small."""
    from .registry import format_names

    try:
        dense = q.size * q.dtype.itemsize
        bits = as_bits(8 * q.nbytes / q.size) if q.size else "0"
        facts = {
            "shape": as_shape(q.shape),
            "dtype": str(q.dtype),
            "format": "/".join(format_names(q)),
            "stored": f"{in_bytes(q.nbytes)}, {bits} bits per element; dense {in_bytes(dense)}",
            "sharding": "" if q.sharding is None else str(q.sharding),
        }
    # As in `__repr__`: JAX puts other things than arrays into trees that it only restructures.
    except (AttributeError, TypeError, ValueError, IndexError):
        return f"<code>{escaped(repr(q))}</code>"
    rows = "".join(f"<tr><th>{name}</th><td>{escaped(value)}</td></tr>" for name, value in facts.items() if value)
    return f"<b>{escaped(type(q).__name__)}</b><table>{rows}</table>{_histogram(q)}"


def _histogram(q: QuantizedArray) -> str:
    """The distribution of the values, as SVG; nothing for an array that is large, traced, abstract, freed or remote."""

    def is_here(leaf: object) -> bool:
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
            return isinstance(leaf, np.ndarray)
        return not leaf.is_deleted() and leaf.is_fully_addressable

    if not all(map(is_here, jtu.tree_leaves(q))) or not 0 < q.size <= MOST:
        return ""
    with unobserved():
        values = np.asarray(q.materialize()).astype(np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return ""
    counts, edges = np.histogram(values, BINS)
    bars = [
        element("rect", x=i * WIDTH / BINS, y=HEIGHT - height, width=WIDTH / BINS, height=height, fill="currentColor")
        for i, height in enumerate((HEIGHT * counts / counts.max()).tolist())
    ]
    picture = figure(WIDTH, HEIGHT, bars, "Distribution of the values", style=f"width: {WIDTH:g}px")
    return f"<div>{picture}<br>{edges[0]:.3g} to {edges[-1]:.3g}</div>"
