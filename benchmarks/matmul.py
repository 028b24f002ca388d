"""Matmuls with quantized weights against JAX float32 and bfloat16, as multiples of float32's speed.

A ring of distinct weights larger than any cache, contenders interleaved, the minimum of many bursts: other work on the
machine slows some bursts, never speeds one up. Run `python benchmarks/matmul.py --help` for what can be chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eformer.ops.quantization import RSROperatorBinary, RSROperatorTernary, quantize


class Contender(NamedTuple):
    call: Callable[[Any, Any], Any]
    x: jax.Array
    ring: list[Any]


FORMATS: dict[str, dict[str, Any]] = {
    "int8, scale per row": {"dtype": "int8"},
    "int8, scale per column": {"dtype": "int8", "axis": 0},
    "nf4, blocks along K": {"dtype": "nf4", "axis": 0},
    "nf4, blocks along N": {"dtype": "nf4"},
    "nf4, double quantization": {"dtype": "nf4", "axis": 0, "double_quantization": True},
    "ternary": {"dtype": "ternary", "scale": "channel"},
}


def contenders(rows: int, shape: tuple[int, int], ring_bytes: int, transposed: bool) -> dict[str, Contender]:
    keys = jax.random.split(jax.random.key(0), max(2, -(-ring_bytes // (4 * shape[0] * shape[1]))))
    weights = [jax.random.normal(key, shape) for key in keys]
    x = jax.random.normal(jax.random.key(1), (rows, shape[transposed]))

    def dense(x: jax.Array, w: Any) -> jax.Array:
        return x @ (w.T if transposed else w)

    made = {
        "jax float32": Contender(jax.jit(dense), x, weights),
        "jax bfloat16": Contender(jax.jit(dense), x.astype(jnp.bfloat16), [w.astype(jnp.bfloat16) for w in weights]),
    }
    for name, options in FORMATS.items():
        made[name] = Contender(jax.jit(dense), x, [quantize(w, **options) for w in weights])
    for operator in (RSROperatorBinary, RSROperatorTernary):
        made[f"{operator.__name__}, k=8"] = Contender(jax.jit(dense), x, [operator.quantize(w) for w in weights])
    return made


def measure(made: dict[str, Contender], bursts: int) -> dict[str, float]:
    """Seconds a call, the least over all bursts."""
    for contender in made.values():
        jax.block_until_ready(contender.call(contender.x, contender.ring[0]))
    best = dict.fromkeys(made, float("inf"))
    for _ in range(bursts):
        for name, contender in made.items():
            start = time.perf_counter()
            for weight in contender.ring:
                contender.call(contender.x, weight).block_until_ready()
            best[name] = min(best[name], (time.perf_counter() - start) / len(contender.ring))
    return best


def temporary_bytes(contender: Contender) -> int:
    lowered: Any = contender.call  # a jitted function
    return lowered.lower(contender.x, contender.ring[0]).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512], help="rows of x (default: 1 8 512)")
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("K", "N"))
    parser.add_argument("--ring", type=float, default=0.8, help="GB of float32 weights to go around (default: 0.8)")
    parser.add_argument("--bursts", type=int, default=7)
    parser.add_argument("--transposed", action="store_true", help="x @ w.T, as with tied embeddings")
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, weights {tuple(args.shape)}")
    for rows in args.rows:
        made = contenders(rows, tuple(args.shape), int(args.ring * 1e9), args.transposed)
        best = measure(made, args.bursts)
        print(f"\nx of shape ({rows}, {args.shape[args.transposed]}){', x @ w.T' if args.transposed else ''}")
        print(f"{'':26} {'ms':>9} {'of float32 speed':>17} {'temporary MB':>13}")
        for name, seconds in best.items():
            ratio, temporary = best["jax float32"] / seconds, temporary_bytes(made[name]) / 1e6
            print(f"{name:26} {seconds * 1e3:9.2f} {ratio:16.2f}x {temporary:13.1f}")


if __name__ == "__main__":
    main()
