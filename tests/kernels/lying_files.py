"""Checkpoints that are well formed and lie, multiplied by the core: in a process of its own, which must not end early.

Prints a line of JSON for each: the error that it raised, or whether the matmul is that of the decoded array.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from eformer._src.kernels.cpu.library import library
from eformer.checkpoint import CheckpointError, load, save
from eformer.ops.quantization import RSROperatorBinary, RSROperatorTernary, quantize

from .frames import Caller, Refused

W = np.random.default_rng(0).standard_normal((66, 40), np.float32)
BITS = jnp.asarray(W > 0, jnp.int32)
Lie = Callable[[dict[str, np.ndarray], dict[str, Any]], None]  # changes tensors, and the description of "w"


def nf4(**options: Any) -> Any:
    return quantize(jnp.asarray(W), dtype="nf4", axis=0, **options)


def put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Lie:
    return lambda tensors, _: tensors.update({name: np.ascontiguousarray(change(tensors[name]))})


def field(name: str, value: Any, half: str = "") -> Lie:
    def lie(_: Any, described: dict[str, Any]) -> None:
        (described["leaves"][half] if half else described)["static"][name] = value

    return lie


CASES: dict[str, tuple[Callable[[], Any], Lie]] = {
    "rsr codes beyond k=1": (lambda: RSROperatorBinary.from_matrix(BITS, k=1), put("w.codes", lambda c: c | 255)),
    "rsr codes beyond k=9": (lambda: RSROperatorBinary.from_matrix(BITS, k=9), put("w.codes", lambda c: c | 65535)),
    "rsr k smaller": (lambda: RSROperatorBinary.from_matrix(BITS, k=8), field("k", 4)),
    "rsr k of longer codes": (lambda: RSROperatorBinary.from_matrix(BITS, k=8), field("k", 9)),
    "rsr k of 64 bits": (lambda: RSROperatorBinary.from_matrix(BITS, k=8), field("k", 2**62)),
    "rsr k of 0": (lambda: RSROperatorBinary.from_matrix(BITS, k=8), field("k", 0)),
    "rsr halves disagree": (lambda: RSROperatorTernary.from_matrix(BITS, k=8), field("k", 4, "rsr_b2")),
    "rsr half beyond k": (
        lambda: RSROperatorTernary.from_matrix(BITS, k=3),
        put("w.rsr_b2.codes", lambda c: c | 0xF0),
    ),
    "nf4 packed too short": (nf4, put("w.packed", lambda p: p[:-1])),
    "nf4 packed too long": (nf4, put("w.packed", lambda p: np.concatenate([p, p]))),
    "nf4 packed of int8": (nf4, put("w.packed", lambda p: p.view(np.int8))),
    "nf4 absmax too short": (nf4, put("w.absmax", lambda a: a[..., :-1])),
    "nf4 absmax of no number": (nf4, put("w.absmax", lambda a: np.full_like(a, np.nan))),
    "nf4 block near 2**63": (nf4, field("block_size", 2**63 - 2)),
    "nf4 block of half": (nf4, field("block_size", 32)),
    "ternary codes of NaN": (lambda: quantize(jnp.asarray(W), dtype="ternary"), put("w.weight", lambda c: c | 0xAA)),
    "ternary code of NaN behind the end": (
        lambda: quantize(jnp.asarray(W), dtype="ternary"),
        put("w.weight", lambda c: np.concatenate([c[:-1], c[-1:] & 15 | 0xA0])),
    ),
    "int8 weight of uint8": (lambda: quantize(jnp.asarray(W), dtype="int8"), put("w.weight", lambda c: c.view("u1"))),
    "int8 scale too long": (
        lambda: quantize(jnp.asarray(W), dtype="int8"),
        put("w.scale", lambda s: np.concatenate([s, s], -1)),
    ),
}


def outcome(make: Callable[[], Any], lie: Lie, path: Path) -> dict[str, Any]:
    save(path, {"w": make()}, overwrite=True)
    with safe_open(path, "np") as file:
        metadata = dict(file.metadata())
    tensors, ours = load_file(path), json.loads(metadata["eformer"])
    lie(tensors, ours["arrays"]["w"])
    save_file(tensors, path, {**metadata, "eformer": json.dumps(ours)})
    try:
        q = load(path)["w"]
        x = np.random.default_rng(1).standard_normal((9, q.shape[0]), np.float32)
        found = [np.asarray(jnp.asarray(rows) @ q) for rows in (x[:1], x)]
        dense = np.asarray(q.materialize(), np.float64)
    except (CheckpointError, TypeError, ValueError, RuntimeError) as error:
        return {"error": type(error).__name__, "words": str(error)}
    right = [
        np.allclose(out, rows @ dense, atol=1e-3, equal_nan=True) for out, rows in zip(found, (x[:1], x), strict=True)
    ]
    return {"right": all(right), "finite": bool(np.isfinite(found[1]).all())}


def without_memory() -> dict[str, Any]:
    """A call that makes 64 MB of float32 from x, where 16 are left."""
    core = library()
    assert core is not None
    x, y = (np.zeros((1, 1 << 22, 4), dtype) for dtype in (np.float16, np.float32))
    codes = np.zeros((1, 4, 4), np.int8)
    attributes = {"format": "int8", "instruction_set": "", "rows": 4, "cols": 4, "packed_axis": 0, "block_size": 2}
    attributes |= {"superblock_size": 0, "scale_names": ""}
    attributes |= {"contracted_axis": 0, "round_x": False, "round_values": False}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        Caller(core.handlers())("eformer_matmul", [x, codes], [y], attributes)
    except Refused as error:
        return {"error": "Refused", "words": str(error)}
    return {"right": True}


if __name__ == "__main__":
    path = Path(sys.argv[1]) / "lies.safetensors"
    for name, (make, lie) in CASES.items():
        print(json.dumps({"case": name, **outcome(make, lie, path)}), flush=True)
    print(json.dumps({"case": "without memory", **without_memory()}), flush=True)
