"""The distance of a weight from what it was, with little memory and without overflow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from eformer._src.jaximus.array import materialize
from eformer._src.model.paths import is_abstract, is_array, is_quantized
from eformer._src.quantization.base import QuantizedArray

Values = jax.Array | np.ndarray | QuantizedArray
Dense = jax.Array | np.ndarray
Rows = dict[str, jax.Array]  # sums over rows, by the name of a field below

_ROW = 4096  # elements that are added in float32; the sums of rows are added in float64, on the host


@dataclasses.dataclass(frozen=True)
class Distance:
    """Sums, in float64, over the elements that are finite in both arrays."""

    signal: float = 0.0  # squares of the array before
    result: float = 0.0  # squares of the array after
    noise: float = 0.0  # squares of their difference
    product: float = 0.0  # the dot product
    max_error: float = 0.0
    nonfinite_before: int = 0
    nonfinite_after: int = 0

    def __add__(self, other: Distance) -> Distance:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Distance(**{**sums, "max_error": max(self.max_error, other.max_error)})

    @property
    def relative_error(self) -> float:
        """`|after - before| / |before|` in the 2-norm; 0 for equal arrays, even if they are zero or empty."""
        if not self.noise:
            return 0.0
        return math.sqrt(self.noise) / math.sqrt(self.signal) if self.signal else math.inf

    @property
    def snr(self) -> float:
        """Signal to noise in decibels: `-20 log10(relative_error)`."""
        error = self.relative_error
        return 0.0 - 20 * math.log10(error) if error else math.inf

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the arrays; 1 for equal arrays, NaN if only one of them is all zero."""
        if not self.noise:
            return 1.0
        lengths = math.sqrt(self.signal) * math.sqrt(self.result)
        return max(-1.0, min(1.0, self.product / lengths)) if lengths else math.nan


def distance(before: object, after: object) -> Distance | None:
    """The distance between an array and its quantized form; None where values can't be compared.

    That is where `before` has no values (any more), or is not floating point and not the same object as `after`.
    """
    if not has_values(before) or not has_values(after):
        return None
    floating = jnp.issubdtype(before.dtype, jnp.floating)
    if before is after and (is_quantized(before) or not floating):
        return Distance()
    return sum((_of_pair(*pair) for pair in pairs(before, after)), Distance()) if floating else None


def has_values(leaf: object) -> TypeGuard[Values]:
    """False for abstract arrays, and for arrays whose buffers were freed."""
    if not is_array(leaf) or isinstance(leaf, Tracer) or is_abstract(leaf):
        return False
    return not any(isinstance(part, jax.Array) and part.is_deleted() for part in jax.tree.leaves(leaf))


def pairs(before: Values, after: Values) -> Iterator[tuple[Dense, Dense]]:
    """Both arrays, dense; for a stack, one pair per matrix, so that only one is made dense at a time."""
    if is_quantized(after) and after.ndim > 2 and after.is_stacked():
        for i in range(len(after)):
            # Slice the leaves, as `is_stacked` allows: not every format has a rule for an index.
            yield from pairs(materialize(before[i]), jax.tree.map(lambda leaf, i=i: leaf[i], after))
    else:
        yield materialize(before), materialize(after)


def _of_pair(before: Dense, after: Dense) -> Distance:
    if not before.size:
        return Distance()
    peak, half_gap, sums, counts = jax.device_get(_moments(before, after))
    peak, gap = float(peak), 2 * float(half_gap)
    units = {"signal": peak**2, "result": peak**2, "product": peak**2, "noise": gap**2}
    return Distance(
        **{name: float(np.sum(sums[name], dtype=np.float64)) * unit for name, unit in units.items()},
        **{name: int(np.sum(count, dtype=np.int64)) for name, count in counts.items()},
        max_error=gap,
    )


@jax.jit
def _moments(before: jax.Array, after: jax.Array) -> tuple[jax.Array, jax.Array, Rows, Rows]:
    """The largest magnitude `peak`, half the largest difference, and sums and counts over rows of 4096 elements.

    Before they are squared, the arrays are divided by `peak` and their difference by its largest magnitude.
    """
    wide = np.promote_types(before.dtype, np.float32)
    x, y = (jnp.ravel(a).astype(wide) for a in (before, after))
    finite_x, finite_y = jnp.isfinite(x), jnp.isfinite(y)
    both, zero = finite_x & finite_y, jnp.zeros((), wide)
    x, y = jnp.where(both, x, zero), jnp.where(both, y, zero)
    peak = jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))
    half = x / 2 - y / 2  # half of it: the difference of large numbers with two signs may overflow
    largest = jnp.max(jnp.abs(half))
    x, y, d = _over(x, peak), _over(y, peak), _over(half, largest)

    def rows(a: jax.Array) -> jax.Array:
        return jnp.sum(jnp.pad(a, (0, -a.size % _ROW)).reshape(-1, _ROW), axis=1, dtype=a.dtype)

    sums = {"signal": rows(x * x), "result": rows(y * y), "product": rows(x * y), "noise": rows(d * d)}
    lost = {"nonfinite_before": ~finite_x, "nonfinite_after": ~finite_y}
    return peak, largest, sums, {name: rows(each.astype(jnp.int32)) for name, each in lost.items()}


def _over(x: jax.Array, largest: jax.Array) -> jax.Array:
    # XLA multiplies by the reciprocal; a subnormal reciprocal would be flushed to zero.
    shrunk = jnp.where(largest > 1, 1 / 16, 1.0).astype(x.dtype)
    return x * shrunk / jnp.where(largest > 0, largest * shrunk, jnp.ones_like(largest))
