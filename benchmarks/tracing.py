"""What `implicit` costs: tracing and lowering a transformer, and calling it once compiled.

Each way of writing the layers is traced and lowered three times: the plain function on dense weights, the same function
through `implicit` on INT8 weights, and a function written by hand for the leaves of those weights. The first ratio is
the price of not rewriting the model. The hand-written function does the same arithmetic without the engine, so it shows
the engine's share, and compiled calls are compared with it. `--format nf4` takes a format of the library, for which
there is no hand-written function: its ratio is engine, rule and decoding together.

Contenders take turns. Every function object is new, and JAX's caches are cleared each time. The shortest time of each
counts: other programs can only add time.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer import quantize_model
from eformer.jaximus import ImplicitArray, implicit, register
from eformer.ops.quantization import FormatSpec, quantize

LAYERS, WIDTH, HEADS, HIDDEN, TOKENS = 24, 64, 4, 256, 16  # sizes matter to a call, not to tracing
GOAL = 1.5

Params = dict[str, Any]
Matmul = Callable[[Any, Any], jax.Array]


class Int8(ImplicitArray):
    """`materialize() == weight * scale`, with one scale per column: as small as a format can be."""

    weight: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def materialize(self) -> jax.Array:
        return self.weight.astype(self.dtype) * self.scale

    def is_stacked(self) -> bool:
        return self.ndim > 2


@register("dot_general")
def int8_dot(primitive: Any, x: jax.Array, q: Int8, *, dimension_numbers: Any, **params: Any) -> Any:
    if x.ndim != 2 or q.ndim != 2 or dimension_numbers != (((1,), (0,)), ((), ())):
        return NotImplemented
    weight = lax.convert_element_type(q.weight, x.dtype)
    return scaled(primitive.bind(x, weight, dimension_numbers=dimension_numbers, **params), q.scale)


def by_hand(x: jax.Array, leaves: tuple[jax.Array, jax.Array]) -> jax.Array:
    """`x @ q`, written by hand on the leaves."""
    weight, scale = leaves
    return scaled(jnp.matmul(x, lax.convert_element_type(weight, x.dtype)), scale)


def scaled(y: jax.Array, scale: jax.Array) -> jax.Array:
    return lax.mul(y, lax.broadcast_in_dim(scale, y.shape, (0, 1)))


def quantized(w: jax.Array) -> Int8:
    scale = jnp.max(jnp.abs(w), axis=-2, keepdims=True) / 127
    return Int8(jnp.round(w / scale).astype(jnp.int8), scale, dtype=w.dtype)


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def layer(p: Params, x: jax.Array, matmul: Matmul) -> jax.Array:
    tokens, width = x.shape
    y = norm(x, p["norm1"])
    q, k, v = (matmul(y, p[name]).reshape(tokens, HEADS, width // HEADS) for name in ("q", "k", "v"))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / (width // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e9)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(tokens, width)
    x = x + matmul(mixed, p["o"])
    y = norm(x, p["norm2"])
    return x + matmul(jax.nn.silu(matmul(y, p["gate"])) * matmul(y, p["up"]), p["down"])


def unrolled(params: Params, x: jax.Array, matmul: Matmul) -> jax.Array:
    for p in params["layers"]:
        x = layer(p, x, matmul)
    return matmul(norm(x, params["norm"]), params["head"])


def jitted_layers(params: Params, x: jax.Array, matmul: Matmul) -> jax.Array:
    step = jax.jit(lambda p, x: layer(p, x, matmul))
    for p in params["layers"]:
        x = step(p, x)
    return matmul(norm(x, params["norm"]), params["head"])


def scanned(params: Params, x: jax.Array, matmul: Matmul) -> jax.Array:
    x, _ = lax.scan(lambda x, p: (layer(p, x, matmul), None), x, params["layers"])
    return matmul(norm(x, params["norm"]), params["head"])


VARIANTS = {"unrolled": unrolled, "jitted layers": jitted_layers, "scan over layers": scanned}


def dense_params(stacked: bool) -> Params:
    keys = iter(jax.random.split(jax.random.key(0), 1 + 7 * LAYERS))
    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN)}
    shapes["down"] = (HIDDEN, WIDTH)
    layers = [
        {name: jax.random.normal(next(keys), shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
        | {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}
        for _ in range(LAYERS)
    ]
    return {
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if stacked else layers,
        "norm": jnp.ones(WIDTH),
        "head": jax.random.normal(next(keys), (WIDTH, HIDDEN)) / WIDTH**0.5,
    }


def map_weights(function: Callable[[Any], Any], params: Params) -> Params:
    """`params` with `function` applied to every weight; the gains of norms stay."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if "norm" in path[-1].key else function(leaf), params, is_leaf=is_weight
    )


def is_weight(x: Any) -> bool:
    return isinstance(x, Int8)


def vision_transformer(format: str) -> tuple[Any, Any, jax.Array]:
    """A ViT of 12 layers in Flax NNX, dense and quantized by its use, and a batch of images."""
    from flax import nnx

    width, heads, rngs = 384, 6, nnx.Rngs(0)

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    patches = nnx.Conv(3, width, (16, 16), strides=(16, 16), padding="VALID", rngs=rngs)
    model = nnx.Sequential(patches, lambda x: x.reshape(x.shape[0], -1, width), *(Block() for _ in range(12)))
    images = jnp.ones((2, 64, 64, 3))
    small = quantize_model(model, function=lambda model, x: model(x), inputs=(images,), format=FormatSpec(format))
    return model, small, images


def compiled_in(model: Any, x: jax.Array, wrap: Callable[..., Any]) -> tuple[float, float]:
    """Seconds to trace and lower, and to compile."""
    from flax import nnx

    definition, state = nnx.split(model)
    jax.clear_caches()
    gc.collect()
    function = jax.jit(lambda state, x: wrap(lambda model, x: model(x))(nnx.merge(definition, state), x))
    start = time.thread_time()
    lowered = function.lower(state, x)
    traced, begun = time.thread_time() - start, time.perf_counter()
    lowered.compile()
    return traced, time.perf_counter() - begun


def print_vision_transformer(format: str, repeats: int) -> None:
    dense, small, images = vision_transformer(format)
    runs = [(compiled_in(dense, images, lambda f: f), compiled_in(small, images, implicit)) for _ in range(repeats)]
    for step, name in enumerate(("trace and lower", "compile")):
        plain, ours = (min(run[which][step] for run in runs) for which in (0, 1))
        met = "met" if ours / plain <= GOAL else "MISSED"
        print(f"{name:18}{plain * 1e3:9.1f}{'':9}{ours * 1e3:10.1f}{ours / plain:10.2f}{'':11}  {met}")


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    make: Callable[[], Callable[..., Any]]  # a new function object each time
    args: tuple[Any, ...]


def contenders(variant: str, format: str | None) -> list[Contender]:
    model = VARIANTS[variant]
    dense = dense_params(stacked=model is scanned)
    weights = map_weights(quantized if format is None else lambda w: quantize(w, dtype=FormatSpec(format)), dense)
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))
    rivals = [
        Contender("plain", lambda: lambda p, x: model(p, x, jnp.matmul), (dense, x)),
        Contender("implicit", lambda: implicit(lambda p, x: model(p, x, jnp.matmul)), (weights, x)),
    ]
    if format is None:
        leaves = map_weights(lambda q: (q.weight, q.scale), weights)
        rivals.append(Contender("by hand", lambda: lambda p, x: model(p, x, by_hand), (leaves, x)))
    return rivals


def tracing_times(rivals: Sequence[Contender], repeats: int) -> dict[str, float]:
    """CPU seconds of this thread, which does all the work; other programs disturb them less than wall time."""
    best = {rival.name: float("inf") for rival in rivals}
    for _ in range(repeats):
        for rival in rivals:
            jax.clear_caches()
            gc.collect()
            function = jax.jit(rival.make())
            start = time.thread_time()
            function.lower(*rival.args)
            best[rival.name] = min(best[rival.name], time.thread_time() - start)
    return best


def call_times(rivals: Sequence[Contender], calls: int) -> dict[str, float]:
    compiled = {rival.name: jax.jit(rival.make()) for rival in rivals}
    best = {rival.name: float("inf") for rival in rivals}
    for rival in rivals:
        jax.block_until_ready(compiled[rival.name](*rival.args))
    for _ in range(calls):
        for rival in rivals:
            function, args = compiled[rival.name], rival.args
            start = time.perf_counter()
            function(*args).block_until_ready()
            best[rival.name] = min(best[rival.name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=500, help="calls of each compiled function (default: %(default)s)")
    parser.add_argument("--format", help="a format of the library, such as nf4 (default: the smallest possible)")
    parser.add_argument("--vit", action="store_true", help="a ViT of Flax NNX, in a format of the library, instead")
    given = parser.parse_args()

    machine = f"JAX {jax.__version__}, Python {platform.python_version()}, {platform.machine()}"
    if given.vit:
        print(f"a ViT of 12 layers in Flax NNX, {given.format or 'nf4'}, {machine}")
        print(f"{'ms, the shortest':18}{'plain':>9}{'':9}{'implicit':>10}{'/ plain':>10}")
        print_vision_transformer(given.format or "nf4", given.repeats)
        return
    print(f"{LAYERS} layers, {given.format or 'the smallest format'}, {machine}")
    print(f"\ntrace and lower, ms (shortest of {given.repeats}); goal: at most {GOAL} times plain")
    print(f"{'':18}{'plain':>9}{'by hand':>9}{'implicit':>10}{'/ plain':>10}{'/ by hand':>11}")
    for variant in VARIANTS:
        t = tracing_times(contenders(variant, given.format), given.repeats)
        ratio = t["implicit"] / t["plain"]
        by_hand_time, engine = "", ""
        if "by hand" in t:
            by_hand_time, engine = f"{t['by hand'] * 1e3:.1f}", f"{t['implicit'] / t['by hand']:.2f}"
        times = f"{t['plain'] * 1e3:9.1f}{by_hand_time:>9}{t['implicit'] * 1e3:10.1f}"
        print(f"{variant:18}{times}{ratio:10.2f}{engine:>11}  {'met' if ratio <= GOAL else 'MISSED'}")
    if given.format is not None:
        return

    print(f"\na call once compiled, us (shortest of {given.calls}); goal: the same as by hand")
    print(f"{'':18}{'':9}{'by hand':>9}{'implicit':>10}{'':10}{'/ by hand':>11}")
    for variant in VARIANTS:
        t = call_times(contenders(variant, None)[1:], given.calls)
        times = f"{'':9}{t['by hand'] * 1e6:9.0f}{t['implicit'] * 1e6:10.0f}"
        print(f"{variant:18}{times}{'':10}{t['implicit'] / t['by hand']:11.2f}")


if __name__ == "__main__":
    main()
