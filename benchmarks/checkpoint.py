"""Peak memory and time of quantizing and loading a checkpoint on disk, beside a plain copy of the file.

python benchmarks/checkpoint.py                 # a file of 4 GB, made in a temporary folder and removed
pip install bitsandbytes torch                  # then its speed is measured too

Each step runs in a process of its own. Its memory is VmHWM, the peak of resident memory, libraries included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

MATRIX = (4096, 14336)  # the largest of a model of 8 billion parameters, except the embedding
GIGA = 1e9

# Goals: memory for quantizing 4 GB; speed relative to a copy, or to bitsandbytes if that is slower.
MOST_MEMORY = 1.5e9
LEAST_SPEED = 0.5


def make(path: Path, gigabytes: float, dtype: str) -> None:
    """Write a checkpoint that repeats one random matrix: only the size matters."""
    from eformer.checkpoint import save

    width = 2 if dtype == "bfloat16" else 4
    matrix = np.random.default_rng(0).standard_normal(MATRIX, np.float32)
    if dtype == "bfloat16":
        import ml_dtypes

        matrix = matrix.astype(ml_dtypes.bfloat16)
    count = max(1, round(gigabytes * GIGA / (matrix.size * width)))
    save(path, {f"layers.{i}.mlp.weight": matrix for i in range(count)}, overwrite=True)


def copy(source: Path, target: Path) -> None:
    """Copy the bytes to the disk in pieces; a reflink would copy nothing."""
    with open(source, "rb") as original, open(target, "wb") as copied:
        shutil.copyfileobj(original, copied, 1 << 24)
        copied.flush()
        os.fsync(copied.fileno())


def quantize(source: Path, target: Path) -> None:
    from eformer.checkpoint import quantize_checkpoint
    from eformer.model import Rule

    quantize_checkpoint(source, target, [Rule("weight", "nf4")], overwrite=True)


def quantize_with_bitsandbytes(source: Path, target: Path) -> None:
    """Quantize one matrix; the time for all is extrapolated from it."""
    import torch  # pyright: ignore[reportMissingImports]  # optional
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]  # optional

    del source, target
    functional.quantize_4bit(torch.randn(*MATRIX), blocksize=64, quant_type="nf4")


def load(source: Path, target: Path) -> None:
    """Load all weights and multiply once with each."""
    import jax
    import jax.numpy as jnp

    from eformer.checkpoint import load

    del target
    weights = load(source, flat=True)
    x = jnp.ones((1, MATRIX[0]), jnp.float32)
    matmul = jax.jit(lambda x, w: x @ w.astype(x.dtype))
    jax.block_until_ready([matmul(x, w) for w in weights.values()])


def first(source: Path, target: Path) -> None:
    """Load the first array only."""
    import jax

    from eformer.checkpoint import open_checkpoint

    del target
    with open_checkpoint(source) as checkpoint:
        jax.block_until_ready(checkpoint[next(iter(checkpoint))])


STEPS: dict[str, Callable[[Path, Path], None]] = {
    each.__name__: each for each in (copy, quantize, quantize_with_bitsandbytes, load, first)
}


def peak() -> int:
    """Peak memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def run(step: str, source: Path, target: Path) -> tuple[float, int]:
    """Seconds, without imports, and peak bytes of a step in a process of its own."""
    command = [sys.executable, __file__, "--step", step, str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], answer["peak"]


def one_step(step: str, source: Path, target: Path) -> None:
    import jax.numpy as jnp

    import eformer.checkpoint  # noqa: F401  not part of the time

    if step == "quantize_with_bitsandbytes":
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]  # optional
    jnp.zeros(1).block_until_ready()
    start = time.perf_counter()
    STEPS[step](source, target)
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak()}))


def report(folder: Path, gigabytes: float, dtype: str) -> None:
    dense, copied, small = folder / "dense.safetensors", folder / "copy.safetensors", folder / "small.safetensors"
    make(dense, gigabytes, dtype)
    size = dense.stat().st_size
    print(f"{size / GIGA:.2f} GB of {dtype}, matrices {MATRIX}")
    copy_seconds, _ = run("copy", dense, copied)
    copied.unlink()
    seconds, memory = run("quantize", dense, small)
    print(f"copy to disk            {copy_seconds:8.1f} s  {size / copy_seconds / GIGA:6.2f} GB/s")
    print(f"quantize to NF4         {seconds:8.1f} s  {size / seconds / GIGA:6.2f} GB/s  peak {memory / GIGA:.2f} GB")
    ratio, goal = copy_seconds / seconds, LEAST_SPEED
    if importlib.util.find_spec("bitsandbytes"):
        one, _ = run("quantize_with_bitsandbytes", dense, small)
        theirs = one * size / (np.prod(MATRIX) * (2 if dtype == "bfloat16" else 4))
        print(f"bitsandbytes, in memory {theirs:8.1f} s  {size / theirs / GIGA:6.2f} GB/s, reckoned from one matrix")
        goal = min(goal, copy_seconds / theirs)
    print(f"{ratio:.2f} times the speed of the copy; the goal is {goal:.2f}: {verdict(ratio >= goal)}")
    print(f"peak memory; the goal is {MOST_MEMORY / GIGA} GB: {verdict(memory < MOST_MEMORY)}")
    for step in ("first", "load"):
        for name, path in (("dense", dense), ("NF4", small)):
            seconds, memory = run(step, path, path)
            what = "first array" if step == "first" else "load all, multiply once"
            print(f"{name:6} {what:24} {seconds:8.2f} s  peak {memory / GIGA:.2f} GB")


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--folder", type=Path, default=None, help="where to make the files; a temporary folder if none")
    parser.add_argument("--step", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step is not None:
        one_step(args.step[0], Path(args.step[1]), Path(args.step[2]))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        free, needed = shutil.disk_usage(folder).free, 2.5 * args.gigabytes * GIGA
        if free < needed:
            sys.exit(
                f"{folder} has {free / GIGA:.1f} GB free, and this needs {needed / GIGA:.1f}; `--folder` names another"
            )
        report(Path(folder), args.gigabytes, args.dtype)


if __name__ == "__main__":
    main()
