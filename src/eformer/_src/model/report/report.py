"""What quantization did to a model: bytes and errors, per leaf and in total."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from eformer._src.atomic_files import write_file
from eformer._src.text import as_json

from .distance import Distance
from .histogram import Histogram
from .html import fragment, page
from .table import report_table

# The fields of a leaf in JSON; then those of its distance, by their names there.
_SHOWN = ("path", "shape", "dtype", "format", "quantized", "shared", "reason", "bytes_before", "bytes_after", "bits")
_MEASURED = {
    "error": "relative_error",
    "snr_db": "snr",
    "cosine": "cosine",
    "max_error": "max_error",
    "nonfinite_before": "nonfinite_before",
    "nonfinite_after": "nonfinite_after",
}


@dataclass(frozen=True)
class Leaf:
    """One array of the model. `distance` is None where values could not be compared."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: str  # a name of the registry, or the dtype of a dense leaf
    quantized: bool
    shared: bool  # the array occurs in an earlier leaf, where its bytes are counted
    bytes_before: int
    bytes_after: int
    distance: Distance | None
    reason: str = ""  # of the rule that decided over it

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bits(self) -> float:
        """Bits per weight; NaN if there is none."""
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
    """What `report(before, after)` found. Bytes count each array once; errors count the arrays that were quantized.

    `str(report)` is a table; `to_json` and `to_html` give the same to machines and browsers.
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
        """The number of weights: elements of all arrays."""
        return sum(leaf.size for leaf in self.leaves if not leaf.shared)

    @property
    def bits(self) -> float:
        """Bits per weight of the whole model; NaN if it has none."""
        return 8 * self.bytes_after / self.size if self.size else math.nan

    @property
    def distance(self) -> Distance | None:
        """The distance over all quantized leaves together; None if none of them could be compared."""
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
        """Plain text, in the tree's order; or sorted by "error", "bytes_before" or "bytes_after", largest first."""
        return report_table(self, sort)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Strict JSON; null for what is unknown or not finite, such as the SNR of a leaf that is exact."""
        sizes = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "size": self.size}
        total = {**sizes, "bits": self.bits, **_measures(self.distance)}
        leaves = [{name: getattr(leaf, name) for name in _SHOWN} | _measures(leaf.distance) for leaf in self.leaves]
        return as_json({"total": total, "leaves": leaves, "unused_rules": self.unused_rules})

    def to_html(
        self, path: str | os.PathLike[str], *, title: str = "Quantization report", overwrite: bool = False
    ) -> Path:
        """Write one page that needs no network and no other file; it replaces a file only with `overwrite`."""
        target = Path(path)
        write_file(target, page(self, title).encode(), overwrite=overwrite)
        return target

    def _repr_html_(self) -> str:
        return fragment(self)


def _measures(distance: Distance | None) -> dict[str, float | None]:
    return {name: distance and getattr(distance, field) for name, field in _MEASURED.items()}
