"""Quantization-aware training from scratch: a small network learns which of three spirals a point lies on.

The same network is trained with float32 weights, and with weights rounded in the forward pass to each format. The
float32 network is also rounded after training, which shows what training with rounding is for.

    python examples/qat_classifier.py
    python examples/qat_classifier.py --format ternary --format binary --plot spirals.png

Two lines make the difference: `fake_quantize(params, rules)` in the loss, and `finalize(params, rules)` at the end. The
first and the last layer are small and stay float32, as `default_rules` leaves small matrices alone.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from eformer import implicit, quantize_model
from eformer._src.atomic_files import atomic_file
from eformer.model import Rule, default_rules, fake_quantize, finalize, stored_bytes
from eformer.ops.quantization import FormatSpec

Params = Mapping[str, Any]

FORMATS = ("float32", "int8", "int4", "nf4", "ternary", "binary")
OPTIONS: dict[str, dict[str, Any]] = {
    "int4": {"fit": False}
}  # each step would search for scales, and training makes the weights fit them
ARMS = 3


def spirals(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`count` points (count, 2) on three noisy spirals in [-1, 1], and the number of the spiral of each."""
    keys = jax.random.split(key, 3)
    arm = jax.random.randint(keys[0], (count,), 0, ARMS)
    radius = jnp.sqrt(jax.random.uniform(keys[1], (count,), minval=0.01, maxval=1.0))
    angle = 2 * jnp.pi * (arm / ARMS + 1.25 * radius)
    points = radius[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return points + 0.03 * jax.random.normal(keys[2], (count, 2)), arm


def start(key: jax.Array, width: int) -> dict[str, jax.Array]:
    shapes = {"first": (2, width), "second": (width, width), "third": (width, width), "last": (width, ARMS)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    kernels = {name: jax.random.normal(keys[name], shape) * (2 / shape[0]) ** 0.5 for name, shape in shapes.items()}
    return {**kernels, **{f"{name}.bias": jnp.zeros(shape[1]) for name, shape in shapes.items()}}


def scores(params: Params, points: jax.Array) -> jax.Array:
    """(count, 3); the code knows no quantization."""
    x = 4 * points
    for name in ("first", "second", "third"):
        x = jax.nn.relu(x @ params[name] + params[f"{name}.bias"][None])
    return x @ params["last"] + params["last.bias"][None]


@functools.partial(jax.jit, static_argnames=("steps", "rate", "rules"))
def train(
    params: Params, points: jax.Array, arms: jax.Array, *, steps: int, rate: float, rules: tuple[Rule, ...]
) -> Params:
    """Adam on all points at once; without rules, in float32."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def loss(params: Params) -> jax.Array:
        rounded = fake_quantize(params, rules) if rules else params
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores(rounded, points), arms))

    def step(carry: Any, _: None) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, optimizer.init(params)), length=steps)[0][0]


def accuracy(params: Params, points: jax.Array, arms: jax.Array) -> float:
    """The share of points whose spiral has the highest score."""
    return float(jnp.mean(jnp.argmax(implicit(scores)(params, points), axis=1) == arms))


class Row(NamedTuple):
    format: str
    bytes: int
    networks: dict[str, Params]  # the float32 one, rounded after training, and the one trained with rounding
    accuracies: dict[str, float]


def compare(formats: Sequence[str], *, steps: int, width: int, count: int, rate: float, seed: int) -> list[Row]:
    keys = jax.random.split(jax.random.key(seed), 3)
    (points, arms), judged = spirals(keys[0], count), spirals(keys[1], 2000)
    fit = functools.partial(train, start(keys[2], width), points, arms, steps=steps, rate=rate)
    dense = fit(rules=())
    rows = []
    for format in formats:
        networks = {"rounded": dense, "trained": dense}
        if format != "float32":
            rules = default_rules(FormatSpec(format), **OPTIONS.get(format, {}))
            networks = {"rounded": quantize_model(dense, rules), "trained": finalize(fit(rules=rules), rules)}
        found = {name: accuracy(params, *judged) for name, params in networks.items()}
        rows.append(Row(format, stored_bytes(networks["trained"]), networks, found))
        print(f"{format:10} {rows[-1].bytes:8,} {found['rounded']:10.1%} {found['trained']:10.1%}", flush=True)
    return rows


def draw(rows: Sequence[Row], path: Path) -> None:
    """Which spiral each network sees at each place."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # optional

    side = jnp.linspace(-1.1, 1.1, 200)
    places = jnp.stack(jnp.meshgrid(side, side), axis=-1).reshape(-1, 2)
    points, arms = spirals(jax.random.key(1), 300)
    figure, axes = plt.subplots(2, len(rows), figsize=(2.4 * len(rows), 6), layout="constrained", squeeze=False)
    for row, column in zip(rows, axes.T, strict=True):
        for (name, params), each in zip(row.networks.items(), column, strict=True):
            seen = jnp.argmax(implicit(scores)(params, places), axis=1).reshape(200, 200)
            each.imshow(seen, extent=(-1.1, 1.1, -1.1, 1.1), origin="lower", cmap="Pastel1", vmin=0, vmax=8)
            each.scatter(*points.T, c=arms, s=3, cmap="Set1", vmin=0, vmax=8)
            each.set(title=f"{row.format}, {name}\n{row.accuracies[name]:.1%}", xticks=[], yticks=[])
    with atomic_file(path, overwrite=True) as file:
        figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--format", action="append", choices=FORMATS, help="may be repeated (all)")
    add("--steps", type=int, default=1000, help="of training (1000)")
    add("--width", type=int, default=128, help="of the two hidden layers (128)")
    add("--points", type=int, default=600, help="to train on (600)")
    add("--rate", type=float, default=3e-3, help="Adam's, at first; it falls to zero (0.003)")
    add("--seed", type=int, default=0, help="of points and of the first weights (0)")
    add("--plot", type=Path, metavar="FILE", help="draw what each network sees; needs matplotlib")
    args = parser.parse_args()
    print(f"{'':10} {'bytes':>8} {'rounded':>10} {'trained':>10}")
    options = {"steps": args.steps, "width": args.width, "count": args.points, "rate": args.rate, "seed": args.seed}
    rows = compare(args.format or FORMATS, **options)
    if args.plot is not None:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
