"""Whether a TPU multiplies faster with our kernel or with the program XLA makes: by a table of static cycles.

`benchmarks/tpu_static.py` compiles both for every chip, with 4096 x 4096 values, and keeps what it finds in the table.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from eformer.kernels import Matrix

CYCLES = Path(__file__).with_name("tpu_cycles.json")
# What libtpu compiles for, by the name that devices have.
CHIPS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def permutes_sublanes(chip: str | None) -> bool:
    """Whether a vector can permute its sublanes by index; all chips after v4 can."""
    return chip != "v4"


def kernel_is_faster(matrix: Matrix, contracted_axis: int, m: int, chip: str | None) -> bool:
    """By the number of rows in the table next below `m`; for a chip that is not in it, as on most of those that are."""
    rows = _table().get((f"{matrix.format} packed {matrix.packed_axis}", contracted_axis), {})
    votes = []
    for of_chip, entries in rows.items():
        nearest = max((n for n in entries if n <= m), default=min(entries))
        faster = entries[nearest]
        if of_chip == chip:
            return faster
        votes.append(faster)
    return sum(votes) * 2 >= len(votes)


@functools.cache
def _table() -> dict[tuple[str, int], dict[str, dict[int, bool]]]:
    """(weight, contracted axis) -> chip -> rows of x -> whether the kernel takes fewer cycles."""
    found: dict[tuple[str, int], dict[str, dict[int, bool]]] = {}
    least: dict[tuple[str, int, str], int] = {}  # more rows of x can't take XLA less
    for row in sorted(json.loads(CYCLES.read_text()), key=lambda row: row["m"]):
        problem = row["weight"], row["contracted_axis"]
        xla = row["xla"] if row["xla"] is not None else least.get((*problem, row["chip"]))
        if xla is None:  # not compiled for this chip: it goes by the others
            continue
        least[*problem, row["chip"]] = xla
        found.setdefault(problem, {}).setdefault(row["chip"], {})[row["m"]] = row["kernel"] <= xla
    return found
