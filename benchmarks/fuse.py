"""What `fuse` brings: the matmuls of a language model for one token, by layer.

    python benchmarks/fuse.py                              # the shapes of SmolLM2-135M: 30 layers of 3.5M weights
    python benchmarks/fuse.py --format nf4 --activations int8

The layers stand one behind the other, or are a `lax.scan` over stacked weights; each as it is and with `fuse`. Beside
them are weights whose queries, keys and values, and gate and up, were joined by hand. Attention and norms are left out.
Contenders take turns, and the shortest time of each counts: other programs can only add time. Read the ratios.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer import fuse, implicit, quantize
from eformer.ops.quantization import FormatName

LAYERS, WIDTH, KEYS, HIDDEN = 30, 576, 192, 1536
SHAPES = {  # (out, in)
    "query": (WIDTH, WIDTH),
    "key": (KEYS, WIDTH),
    "value": (KEYS, WIDTH),
    "output": (WIDTH, WIDTH),
    "gate": (HIDDEN, WIDTH),
    "up": (HIDDEN, WIDTH),
    "down": (WIDTH, HIDDEN),
}
JOINED = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}

Layer = dict[str, Any]


def several(layer: Layer, joined: str, x: jax.Array) -> list[jax.Array]:
    names = JOINED[joined]
    if joined not in layer:
        return [x @ layer[name].T for name in names]
    ends = np.cumsum([SHAPES[name][0] for name in names])[:-1]
    return jnp.split(x @ layer[joined].T, ends, axis=-1)


def run_layer(x: jax.Array, layer: Layer) -> jax.Array:
    query, key, value = several(layer, "query_key_value", x)
    x = x + (query + jnp.tile(key + value, WIDTH // KEYS)) @ layer["output"].T
    gate, up = several(layer, "gate_up", x)
    return jnp.tanh(x + (jax.nn.silu(gate) * up) @ layer["down"].T)


def unrolled(layers: list[Layer], x: jax.Array) -> jax.Array:
    return functools.reduce(run_layer, layers, x)


def scanned(layers: Layer, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, layer: (run_layer(x, layer), None), x, layers)[0]


def contenders(form: FormatName, activations: str) -> dict[str, tuple[Callable[..., Any], Any]]:
    rng = np.random.default_rng(0)

    def quantized(array: np.ndarray) -> Any:
        unfitted: dict[str, Any] = {"fit": False} if form.startswith("int") else {}
        q = quantize(jnp.asarray(array), dtype=form, **unfitted)
        return q.with_activation_dtype("int8") if activations == "int8" else q

    dense = {
        name: rng.standard_normal((LAYERS, *shape), np.float32) / shape[1] ** 0.5 for name, shape in SHAPES.items()
    }
    rest = [name for name in dense if not any(name in names for names in JOINED.values())]
    joined = {new: np.concatenate([dense[name] for name in names], 1) for new, names in JOINED.items()}
    joined |= {name: dense[name] for name in rest}
    single, by_hand = (
        [{name: quantized(array[i]) for name, array in arrays.items()} for i in range(LAYERS)]
        for arrays in (dense, joined)
    )
    stacked = {name: quantized(array) for name, array in dense.items()}
    return {
        "layers": (jax.jit(implicit(unrolled)), single),
        "layers, fused": (jax.jit(fuse(implicit(unrolled))), single),
        "layers, joined by hand": (jax.jit(implicit(unrolled)), by_hand),
        "scan": (jax.jit(implicit(scanned)), stacked),
        "scan, fused": (jax.jit(fuse(implicit(scanned))), stacked),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What fuse brings.")
    parser.add_argument("--format", default="int8", help="default: int8")
    parser.add_argument("--activations", default="float", choices=("float", "int8"))
    parser.add_argument("--rows", type=int, default=1, help="tokens at a time; default: 1")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    x, all_of = jnp.ones((args.rows, WIDTH)), contenders(args.format, args.activations)
    best = dict.fromkeys(all_of, float("inf"))
    results = {name: np.asarray(run(layers, x)) for name, (run, layers) in all_of.items()}
    for _ in range(args.rounds):
        for name, (run, layers) in all_of.items():
            begun = time.perf_counter()
            jax.block_until_ready(run(layers, x))
            best[name] = min(best[name], time.perf_counter() - begun)
    print(f"{args.format}, {args.activations} activations, {args.rows} rows, {LAYERS} layers")
    for name, seconds in best.items():
        same = np.array_equal(results[name], results["layers"])
        ratio, note = best["layers"] / seconds, "" if same else ", other last digits"
        print(f"{name:24} {seconds / LAYERS * 1e6:8.1f} us a layer, {ratio:5.2f} times as fast as layers{note}")


if __name__ == "__main__":
    main()
