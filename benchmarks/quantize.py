"""How fast weights are quantized, and with how much memory; beside bitsandbytes where that is installed.

python benchmarks/quantize.py            # ours
python benchmarks/quantize.py --fit      # every format rounded and fitted: time, memory and squared error
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

from eformer._src.kernels import reference
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


FITTED: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "nf4, last axis": {"dtype": "nf4"},
    "nf4, first axis": {"dtype": "nf4", "axis": 0},
    "nf4, double quantization": {"dtype": "nf4", "double_quantization": True},
    "ternary, scale per channel": {"dtype": "ternary", "scale": "channel"},
    "binary, scale per channel": {"dtype": "binary", "scale": "channel"},
    **{
        f"{name}, {axis} axis": {"dtype": name, "axis": number}
        for name in ("int2", "int3", "int4", "int5", "int6", "int8_grouped")
        for axis, number in (("last", -1), ("first", 0))
    },
    "int4, symmetric": {"dtype": "int4", "symmetric": True},
    "int4, blocks of 32, double": {"dtype": "int4", "block_size": 32, "double_quantization": True},
    "fp8, scale per row": {"dtype": "fp8"},
    "fp8, blocks of 128 x 128": {"dtype": "fp8", "block_shape": (128, 128)},
    "fp8_e5m2, scale per row": {"dtype": "fp8_e5m2"},
    "mxfp4, last axis": {"dtype": "mxfp4"},
    "mxfp4, first axis": {"dtype": "mxfp4", "axis": 0},
    "nvfp4, last axis": {"dtype": "nvfp4"},
    "nvfp4, first axis": {"dtype": "nvfp4", "axis": 0},
}


def fitting(weight: jax.Array, repeats: int) -> None:
    """CPU seconds of all threads, rounded and fitted in turn; the least of the repeats."""
    print(f"{'':30} {'rounded':>10} {'fitted':>10} {'ratio':>6} {'memory':>7} {'error':>9} {'fitted':>9}")
    total = jnp.sum(weight**2)
    for name, options in FITTED.items():
        best, errors, memory = [float("inf")] * 2, [0.0] * 2, 0.0
        for repeat in range(repeats + 1):  # the first compiles
            for fit in (False, True):
                start = time.process_time()
                q = jax.block_until_ready(quantize(weight, fit=fit, **options))
                if repeat:
                    best[fit] = min(best[fit], time.process_time() - start)
                else:
                    errors[fit] = float(jnp.sum((q.materialize() - weight) ** 2) / total)
        encode: Any = jax.jit(lambda w, options=options: quantize(w, fit=True, **options))
        used = encode.lower(weight).compile().memory_analysis()
        memory = (used.temp_size_in_bytes + used.output_size_in_bytes) / weight.nbytes
        times = " ".join(f"{seconds * 1e3:7.1f} ms" for seconds in best)
        found = " ".join(f"{error:9.5f}" for error in errors)
        print(f"{name:30} {times} {best[1] / best[0]:6.2f} {memory:7.2f} {found}", flush=True)
    print("memory: of fitting, in addition to the input and by its bytes; the result included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 14336))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fit", action="store_true", help="compare fitting with rounding, in every format")
    args = parser.parse_args()
    weight = jax.random.normal(jax.random.key(0), tuple(args.shape))
    if args.fit:
        fitting(weight, args.repeats)
        return
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
