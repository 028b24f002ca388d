"""Which kernel runs on which device; on TPU, whether ours is faster than the program XLA makes.

`benchmarks/tpu_static.py` compiles both for every chip, with 4096 x 4096 values, and writes the table of static cycles.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax

from eformer._src.kernels.matrix import Matrix

PLATFORMS = ("tpu", "cuda", "rocm")
CYCLES = Path(__file__).with_name("tpu_cycles.json")
# What libtpu compiles for, by the name that devices have.
CHIPS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


class Device(NamedTuple):
    """JAX's name of a platform, and the kind of its devices if it is known."""

    platform: str
    kind: str | None = None


def matmul(
    x: jax.Array, matrix: Matrix, contracted_axis: int, device: Device, *, round_x: bool = False
) -> jax.Array | None:
    """`x @ matrix`, or `x @ matrix.T` for `contracted_axis=1`: float32 (count, m, n) of x (count, m, k).

    None where there is no kernel, or XLA's own program is faster. With `round_x`, x may be rounded to 8 bits.
    """
    if 0 in x.shape or 0 in matrix.codes[0].shape:
        return None
    if device.platform != "tpu":
        from . import gpu  # imports Triton's side of Pallas

        return gpu.matmul(x, matrix, contracted_axis) if gpu.supports(matrix) else None
    from . import tpu

    chip = CHIPS.get(device.kind or "")
    if not tpu.supports(matrix):
        return None
    round_x = round_x and matrix.format == "int8" and chip != "v4"  # which has no int8 matmul
    if not round_x and not kernel_is_faster(matrix, contracted_axis, x.shape[1], chip):
        return None
    return tpu.matmul(x, matrix, contracted_axis, sublanes=permutes_sublanes(chip), round_x=round_x)


def permutes_sublanes(chip: str | None) -> bool:
    """Whether a vector can permute its sublanes by index; all chips after v4 can."""
    return chip != "v4"


def kernel_is_faster(matrix: Matrix, contracted_axis: int, m: int, chip: str | None) -> bool:
    """By the entry for the nearest m that is not larger; for a chip without entries, as on most of the others."""
    rows = _table().get((f"{matrix.format} packed {matrix.packed_axis}", contracted_axis), {})
    nearest = {each: max((n for n in entries if n <= m), default=min(entries)) for each, entries in rows.items()}
    faster = {each: entries[nearest[each]] for each, entries in rows.items()}
    return faster.get(chip or "", 2 * sum(faster.values()) >= len(faster))


@functools.cache
def _table() -> dict[tuple[str, int], dict[str, dict[int, bool]]]:
    """(weight, contracted axis) -> chip -> m -> whether the kernel takes fewer cycles."""
    found: dict[tuple[str, int], dict[str, dict[int, bool]]] = {}
    least: dict[tuple[str, int, str], int] = {}  # XLA takes no fewer cycles for a larger m
    for row in sorted(json.loads(CYCLES.read_text()), key=lambda row: row["m"]):
        problem = row["weight"], row["contracted_axis"]
        xla = row["xla"] if row["xla"] is not None else least.get((*problem, row["chip"]))
        if xla is None:  # not compiled for this chip, which goes by the others
            continue
        least[*problem, row["chip"]] = xla
        found.setdefault(problem, {}).setdefault(row["chip"], {})[row["m"]] = row["kernel"] <= xla
    return found
