"""One 4-bit matrix in other libraries beside ours: the memory that it takes, and the time of a matmul.

Each library runs in an environment of its own, since two of them have the same name, and each is compared with its own
float32:

    python -m venv qwix && qwix/bin/pip install qwix flax && qwix/bin/python benchmarks/others.py qwix

In place of qwix: `mlx` (pip install "mlx[cpu]"), `torchao` (torch, torchao), `original` (pip install eformer), and
`eformer`, which is this project. Several runs of one line each, read the ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SIZE, BLOCK, SECONDS = 4096, 64, 3.0


class Made(NamedTuple):
    kept: Any  # what holds the weight
    multiply: Callable[[], object]  # x @ weight, until it is there
    dense: Callable[[], object]  # the same in float32


Maker = Callable[[Any], Made]  # from a weight


def memory() -> float:
    """Megabytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def settle() -> None:
    """Give back what nobody holds, so that the memory of the process is what is used."""
    gc.collect()
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_cache()
    ctypes.CDLL(None).malloc_trim(0)


def in_jax(rows: int, quantize: Callable[[Any], Any], matmul: Callable[[Any, Any], Any]) -> tuple[Any, Maker]:
    import jax
    import jax.numpy as jnp

    w = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    x = jax.random.normal(jax.random.key(1), (rows, SIZE))

    def make(w: Any) -> Made:
        q = jax.block_until_ready(quantize(w))
        run, dense = jax.jit(matmul), jax.jit(jnp.matmul)
        return Made(q, lambda: run(x, q).block_until_ready(), lambda: dense(x, w).block_until_ready())

    return w, make


def with_eformer(rows: int) -> tuple[Any, Maker]:
    import jax.numpy as jnp

    import eformer

    return in_jax(rows, lambda w: eformer.quantize(w, "int4"), eformer.implicit(jnp.matmul))


def with_original(rows: int) -> tuple[Any, Maker]:
    import jax.numpy as jnp

    from eformer.jaximus import implicit
    from eformer.ops.quantization import ArrayNF4

    return in_jax(rows, lambda w: ArrayNF4.quantize(w, block_size=BLOCK), implicit(jnp.matmul))


def with_qwix(rows: int) -> tuple[Any, Maker]:
    import jax.numpy as jnp
    import qwix  # pyright: ignore[reportMissingImports]

    options = {"channelwise_axes": (1,), "tiled_axes": {0: BLOCK}}
    numbers = (((1,), (0,)), ((), ()))
    return in_jax(rows, lambda w: qwix.quantize(w, jnp.int4, **options), lambda x, q: qwix.dot_general(x, q, numbers))


def with_torchao(rows: int) -> tuple[Any, Maker]:
    import torch  # pyright: ignore[reportMissingImports]
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig  # pyright: ignore[reportMissingImports]
    from torchao.quantization import quantize_  # pyright: ignore[reportMissingImports]

    layer = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    x = torch.randn(rows, SIZE)

    def make(layer: Any) -> Made:
        exact = layer.weight.detach().float()
        quantize_(layer, PrototypeInt4WeightOnlyConfig(group_size=BLOCK))
        run, rounded = torch.compile(layer), x.bfloat16()
        return Made(layer, lambda: run(rounded), lambda: torch.nn.functional.linear(x, exact))

    return layer, make


def with_mlx(rows: int) -> tuple[Any, Maker]:
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    w, x = mx.random.normal((SIZE, SIZE)), mx.random.normal((rows, SIZE))
    mx.eval(w, x)

    def make(w: Any) -> Made:
        parts = mx.quantize(w, group_size=BLOCK, bits=4)
        mx.eval(parts)
        multiply = functools.partial(mx.quantized_matmul, x, *parts, transpose=True, group_size=BLOCK, bits=4)
        return Made(parts, lambda: mx.eval(multiply()), lambda: mx.eval(x @ w.T))

    return w, make


LIBRARIES = {
    "eformer": with_eformer,
    "qwix": with_qwix,
    "original": with_original,
    "torchao": with_torchao,
    "mlx": with_mlx,
}


def shortest(call: Callable[[], object]) -> float:
    """Seconds of the quickest call."""
    call()
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--rows", type=int, default=1)
    args = parser.parse_args()
    weight, make = LIBRARIES[args.library](args.rows)
    made = make(weight)
    quick, dense = shortest(made.multiply), shortest(made.dense)
    kept, multiply = made.kept, made.multiply
    del made, weight
    settle()
    rest = memory()
    del kept, multiply
    settle()
    version = importlib.metadata.version("eformer" if args.library == "original" else args.library)
    float32 = SIZE * SIZE * 4 / 2**20
    print(
        f"{args.library} {version}, {len(os.sched_getaffinity(0))} CPUs: stored {rest - memory():.1f} MB of "
        f"{float32:.0f} in float32; ({args.rows}, {SIZE}) @ ({SIZE}, {SIZE}) in "
        f"{1e3 * quick:.2f} ms, float32 there in {1e3 * dense:.2f} ms: {dense / quick:.2f}x"
    )


if __name__ == "__main__":
    main()
