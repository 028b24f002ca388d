"""What quantization did to a model: bytes and errors, per leaf and in total."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eformer._text import as_json

from ._distance import Distance
from ._histogram import Histogram
from ._html import page
from ._table import report_table


@dataclass(frozen=True)
class Leaf:
    """One array of the model. `distance` is None where values could not be compared."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: str  # a name of the registry, or the dtype of a dense leaf
    quantized: bool
    shared: bool  # the array occurred before, so its bytes are counted there
    bytes_before: int
    bytes_after: int
    distance: Distance | None
    reason: str = ""  # of the rule that decided over it

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bits(self) -> float:
        """A weight; NaN where there is none."""
        return 8 * self.bytes_after / self.size if self.size else math.nan

    @property
    def error(self) -> float | None:
        return None if self.distance is None else self.distance.relative_error

    @property
    def snr(self) -> float | None:
        return None if self.distance is None else self.distance.snr

    @property
    def cosine(self) -> float | None:
        return None if self.distance is None else self.distance.cosine


@dataclass(frozen=True)
class Report:
    """Of `report(before, after)`. Bytes are of all arrays, each counted once; errors of those that were quantized.

    `str(report)` is a table; `to_json` and `to_html` write the same for machines and for browsers.
    """

    leaves: tuple[Leaf, ...]
    unused_rules: tuple[str, ...] = ()
    histogram: Histogram | None = None

    @property
    def quantized(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.quantized)

    @property
    def bytes_before(self) -> int:
        return sum(leaf.bytes_before for leaf in self.leaves if not leaf.shared)

    @property
    def bytes_after(self) -> int:
        return sum(leaf.bytes_after for leaf in self.leaves if not leaf.shared)

    @property
    def size(self) -> int:
        """Elements of all arrays."""
        return sum(leaf.size for leaf in self.leaves if not leaf.shared)

    @property
    def bits(self) -> float:
        """A weight of the whole model; NaN if it has none."""
        return 8 * self.bytes_after / self.size if self.size else math.nan

    @property
    def distance(self) -> Distance | None:
        """Over all quantized leaves together; None if none of them could be compared."""
        known = [leaf.distance for leaf in self.quantized if leaf.distance is not None]
        return sum(known, Distance()) if known else None

    @property
    def worst(self) -> Leaf | None:
        """The quantized leaf with the largest relative error."""
        known = [leaf for leaf in self.quantized if leaf.error is not None]
        return max(known, key=lambda leaf: leaf.error or 0.0, default=None)

    @property
    def nonfinite(self) -> tuple[Leaf, ...]:
        """Leaves that have a NaN or an infinity, before or after."""
        found = [(leaf, leaf.distance) for leaf in self.leaves]
        return tuple(leaf for leaf, d in found if d and (d.nonfinite_before or d.nonfinite_after))

    def table(self, sort: str | None = None) -> str:
        """As plain text, by the tree's order; `sort` is "error", "bytes_before" or "bytes_after", largest first."""
        return report_table(self, sort)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Strict JSON: null for what is unknown or no finite number, such as the SNR of a leaf that is exact."""
        distance = self.distance
        total = {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "size": self.size,
            "bits": self.bits,
            **_measures(distance),
        }
        leaves = [
            {
                "path": leaf.path,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "format": leaf.format,
                "quantized": leaf.quantized,
                "shared": leaf.shared,
                "reason": leaf.reason,
                "bytes_before": leaf.bytes_before,
                "bytes_after": leaf.bytes_after,
                "bits": leaf.bits,
                **_measures(leaf.distance),
            }
            for leaf in self.leaves
        ]
        found = {"total": total, "leaves": leaves, "unused_rules": list(self.unused_rules)}
        return as_json(found)

    def to_html(self, path: str | os.PathLike[str], *, title: str = "Quantization report") -> Path:
        """Write one page that needs nothing else: no network, no other file. Returns where it is."""
        target = Path(path)
        target.write_text(page(self, title), encoding="utf-8")
        return target


def _measures(distance: Distance | None) -> dict[str, Any]:
    if distance is None:
        return dict.fromkeys(("error", "snr_db", "cosine", "max_error", "nonfinite_before", "nonfinite_after"))
    return {
        "error": distance.relative_error,
        "snr_db": distance.snr,
        "cosine": distance.cosine,
        "max_error": distance.max_error,
        "nonfinite_before": distance.nonfinite_before,
        "nonfinite_after": distance.nonfinite_after,
    }
