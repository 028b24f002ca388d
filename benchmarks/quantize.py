"""How fast weights are quantized, and with how much memory; beside bitsandbytes where that is installed.

python benchmarks/quantize.py            # ours
pip install bitsandbytes torch           # then it is measured in the same run
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer.kernels import reference
from eformer.ops.quantization import quantize

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "nf4, blocks along the last axis": {"dtype": "nf4"},
    "nf4, blocks along the first axis": {"dtype": "nf4", "axis": 0},
    "nf4, double quantization": {"dtype": "nf4", "double_quantization": True},
    "ternary": {"dtype": "ternary"},
}


def contenders(weight: jax.Array) -> dict[str, Callable[[], Any]]:
    # The bound by memory for INT8: read the matrix for the scales, read it again, write one byte per element.
    floor = jax.jit(lambda w: (w.sum(), w.astype(jnp.int8)))
    made: dict[str, Callable[[], Any]] = {"sum, then cast to int8": lambda: floor(weight)}
    for name, options in FORMATS.items():
        made[name] = lambda options=options: quantize(weight, **options)
    if importlib.util.find_spec("bitsandbytes"):
        import torch  # pyright: ignore[reportMissingImports]  # optional
        from bitsandbytes import functional  # pyright: ignore[reportMissingImports]  # optional

        tensor = torch.from_numpy(np.array(weight))
        made["bitsandbytes nf4"] = lambda: functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 14336))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    weight = jax.random.normal(jax.random.key(0), tuple(args.shape))
    made = contenders(weight)
    best = dict.fromkeys(made, float("inf"))
    for _ in range(args.repeats + 1):
        for name, call in made.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[name] = min(best[name], time.perf_counter() - start)
    print(f"float32 {tuple(args.shape)}, {weight.nbytes / 1e6:.0f} MB, JAX {jax.__version__}")
    for name, seconds in best.items():
        print(f"{name:34} {seconds * 1e3:9.1f} ms {weight.nbytes / seconds / 1e9:7.2f} GB/s")
    nf4: Any = jax.jit(lambda x: reference.encode_nf4(x, 64, -1)).lower(weight).compile().memory_analysis()
    extra = (nf4.temp_size_in_bytes + nf4.output_size_in_bytes) / weight.nbytes
    print(f"nf4 needs {extra:.2f} times the input in addition to it, its result included")
    if "bitsandbytes nf4" in best:
        ratio = best["bitsandbytes nf4"] / best["nf4, blocks along the last axis"]
        print(f"nf4 is {ratio:.1f} times as fast as bitsandbytes")


if __name__ == "__main__":
    main()
