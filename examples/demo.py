"""Each format on one matrix: how small, how near, how fast. `make demo` runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eformer.jaximus import implicit
from eformer.ops.quantization import quantize

SHAPE = (4096, 4096)
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"dtype": "int8"},
    "nf4": {"dtype": "nf4", "axis": 0},
    "nf4, double quantization": {"dtype": "nf4", "axis": 0, "double_quantization": True},
    "ternary, scale per column": {"dtype": "ternary", "scale": "channel"},
    "binary, scale per column": {"dtype": "binary", "scale": "channel"},
}


@jax.jit
@implicit
def model(weight: Any, x: jax.Array) -> jax.Array:
    """Stands for your model: it knows nothing of quantization."""
    return jnp.tanh(x @ weight)


def seconds(call: Callable[[], jax.Array], repeats: int = 20) -> float:
    call().block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        call().block_until_ready()
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))


def main() -> None:
    weight = jax.random.normal(jax.random.key(0), SHAPE) / SHAPE[0] ** 0.5
    x = jax.random.normal(jax.random.key(1), (1, SHAPE[0]))
    expected = model(weight, x)
    print(f"a weight of shape {SHAPE} on {jax.devices()[0].device_kind}, tanh(x @ weight) with one row of x\n")
    print(f"{'format':26} {'MB':>7} {'bits/weight':>12} {'error of weight':>16} {'error of output':>16} {'ms':>7}")
    for name, options in FORMATS.items():
        w = quantize(weight, **options) if options else weight
        dense = w.materialize() if options else w
        weight_error = jnp.linalg.norm(dense - weight) / jnp.linalg.norm(weight)
        output_error = jnp.linalg.norm(model(w, x) - expected) / jnp.linalg.norm(expected)
        milliseconds = seconds(lambda w=w: model(w, x)) * 1e3
        print(
            f"{name:26} {w.nbytes / 1e6:7.1f} {8 * w.nbytes / w.size:12.3f} {weight_error:15.2%} {output_error:16.2%} "
            f"{milliseconds:7.2f}"
        )
    print("\nErrors are relative, in the 2-norm. Times are the best of 20 and depend on the machine.")


if __name__ == "__main__":
    main()
