"""One step of LoRA over float32, bfloat16 and quantized weights: its memory at 1B weights, its time at a small size.

Memory is that of the compiled step (`memory_analysis`); nothing is run for it, and no weight is made. Times are of the
same step, compiled for a small model of the same shape, in turns.

    python benchmarks/training.py            # both tables
    python benchmarks/training.py --memory   # one of them
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from scaling import MODELS, Shape, block

from eformer.jaximus import implicit
from eformer.model import add_lora, combine, partition, quantize_model, stored_bytes
from eformer.ops.quantization import FormatSpec

RANK = 16
FORMATS = ("float32", "bfloat16", "int8", "nf4", "int4")
SMALL = Shape(layers=4, width=512, inner=2048, heads=8, key_heads=4, head=64, vocabulary=4096)
SIZES = ((1, 16), (1, 128), (4, 128), (8, 256))  # batch and tokens
optimizer = optax.adamw(1e-4)


def weights(shape: Shape, dtype: Any) -> dict[str, Any]:
    """The weights without values: blocks as stacks, for `scan`."""
    layers = {name: {"kernel": (shape.layers, *size)} for name, (size, _) in shape.weights().items()}
    tree = {
        "layers": layers,
        "embed": (shape.vocabulary, shape.width),
        "head": {"kernel": (shape.width, shape.vocabulary)},
    }
    return jax.tree.map(lambda size: jax.ShapeDtypeStruct(size, dtype), tree, is_leaf=lambda x: isinstance(x, tuple))


def loss(params: dict[str, Any], tokens: jax.Array, shape: Shape) -> jax.Array:
    """The cross entropy of the next token; each block is computed again in the backward pass."""

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return block({name: each["kernel"] for name, each in w.items()}, x, shape), None

    x = lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])[0]
    scores = jax.nn.log_softmax((x @ params["head"]["kernel"]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))


def step(trained: Any, state: Any, frozen: Any, tokens: jax.Array, shape: Shape) -> Any:
    value, gradients = jax.value_and_grad(lambda t: implicit(loss)(combine(t, frozen), tokens, shape))(trained)
    updates, state = optimizer.update(gradients, state, trained)
    return optax.apply_updates(trained, updates), state, value


def adapted(params: Any, format: str) -> Any:
    base = params if format.startswith(("float", "bfloat")) else quantize_model(params, FormatSpec(format))
    return add_lora(base, RANK, key=jax.random.key(0), rules=[r"layers.*kernel$"])


def dtype_of(format: str) -> Any:
    return jnp.bfloat16 if format == "bfloat16" else jnp.float32


def compiled(params: Any, format: str, shape: Shape, batch: int, length: int) -> tuple[Any, Any, Any]:
    """The compiled step, and its trained and frozen weights, without values if `params` have none."""
    abstract = isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)
    make: Any = (lambda f, *args: jax.eval_shape(f, *args)) if abstract else (lambda f, *args: f(*args))
    trained, frozen = partition(make(lambda p: adapted(p, format), params))
    state = make(optimizer.init, trained)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    program = jax.jit(step, static_argnums=4, donate_argnums=(0, 1)).lower(trained, state, frozen, tokens, shape)
    return program.compile(), trained, frozen


def memory(size: str, batch: int, length: int) -> None:
    shape = MODELS[size]
    print(f"One step of LoRA (rank {RANK}, AdamW) of a Llama-shaped {size}, batch {batch} x {length} tokens, in MB:\n")
    print("| base | base held | adapters and optimizer | temporaries | peak |\n|---|---|---|---|---|")
    for format in FORMATS:
        program, trained, frozen = compiled(weights(shape, dtype_of(format)), format, shape, batch, length)
        found = program.memory_analysis()
        base, own = stored_bytes(frozen), 3 * stored_bytes(trained)
        peak = base + own + found.temp_size_in_bytes
        print(
            "| "
            + " | ".join([format, *(f"{n / 1e6:,.0f}" for n in (base, own, found.temp_size_in_bytes, peak))])
            + " |"
        )
    # What autodiff must keep under remat: the input of each block; and the scores with their gradient.
    kept = shape.layers * batch * length * shape.width * 4 + 3 * batch * length * shape.vocabulary * 4
    print(f"\nInputs of all blocks, scores and their gradient, in float32: {kept / 1e6:,.0f} MB.")


def speed(turns: int, clock: Callable[[], float], sizes: Sequence[tuple[int, int]] = SIZES) -> None:
    print(f"\nTime of a step beside LoRA over float32 weights ({SMALL.layers} blocks of width {SMALL.width}):\n")
    print("| tokens | " + " | ".join(FORMATS) + " |\n|" + "---|" * (1 + len(FORMATS)))
    draw = np.random.default_rng(0)
    for batch, length in sizes:
        tokens = jnp.asarray(draw.integers(0, SMALL.vocabulary, (batch, length + 1)), jnp.int32)
        runs = {}
        for format in FORMATS:
            structs = weights(SMALL, dtype_of(format))
            params = jax.tree.map(lambda s: jnp.asarray(draw.standard_normal(s.shape) / 32, s.dtype), structs)
            program, trained, frozen = compiled(params, format, SMALL, batch, length)
            runs[format] = [program, trained, optimizer.init(trained), frozen]
        best = dict.fromkeys(FORMATS, float("inf"))
        for _ in range(turns):
            for format, (program, trained, state, frozen) in runs.items():
                start = clock()
                trained, state, value = jax.block_until_ready(program(trained, state, frozen, tokens))
                best[format] = min(best[format], clock() - start)
                assert np.isfinite(value)
                runs[format][1:3] = trained, state
        ratios = [f"{best[format] / best['float32']:.2f}" for format in FORMATS]
        print(f"| {batch} x {length} | {best['float32'] * 1e3:.0f} ms | " + " | ".join(ratios[1:]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="only the table of memory")
    parser.add_argument("--speed", action="store_true", help="only the table of times")
    parser.add_argument("--model", default="1B", choices=MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--busy", action="store_true", help="count CPU time, where other programs run too")
    args = parser.parse_args()
    if args.memory or not args.speed:
        memory(args.model, args.batch, args.length)
    if args.speed or not args.memory:
        speed(args.turns, time.process_time if args.busy else time.perf_counter)


if __name__ == "__main__":
    main()
