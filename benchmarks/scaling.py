"""Bytes that each device holds, and bytes that collectives move, for a model of Llama's shape on many devices.

Nothing is run. Each transformer block is compiled ahead of time for a mesh of CPU devices, of which XLA makes any
number, and the program for one device is read. `python benchmarks/scaling.py` prints the tables of docs/distributed.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eformer.jaximus import implicit
from eformer.ops.quantization import quantize

P = PartitionSpec
MODEL = 8  # devices that share a matmul, one per head of keys; the others share the batch
DEVICES = (1, 8, 64, 256, 1024)
LENGTH = 1024  # tokens of the one sequence per row of devices along "data"
FORMATS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda w: w,
    "int8": partial(quantize, dtype="int8", axis=0),
    "nf4": partial(quantize, dtype="nf4", axis=0),
    "2 bit": partial(quantize, dtype="ternary", scale="channel"),
}
# Memory of a chip in GB (10**9 bytes), as its vendor states it.
CHIPS = {"TPU v5e": 16, "TPU v6e": 32, "A100 / H100": 80, "TPU v5p": 95, "H200": 141, "TPU7x": 192}
SIZES = {"f32": 4, "bf16": 2, "f16": 2, "u8": 1, "s8": 1, "u16": 2, "s32": 4, "u32": 4, "pred": 1}


@dataclass(frozen=True)
class Shape:
    """A Llama 3 by its published configuration."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int = 128_256

    def weights(self) -> dict[str, tuple[tuple[int, int], PartitionSpec]]:
        """Of a block: columns, then rows over "model"; the other axis is stored in parts over "data"."""
        columns, rows = P("data", "model"), P("model", "data")
        queries, keys = self.heads * self.head, self.key_heads * self.head
        return {
            "query": ((self.width, queries), columns),
            "key": ((self.width, keys), columns),
            "value": ((self.width, keys), columns),
            "out": ((queries, self.width), rows),
            "gate": ((self.width, self.inner), columns),
            "up": ((self.width, self.inner), columns),
            "down": ((self.inner, self.width), rows),
        }

    def head_weights(self) -> dict[str, tuple[tuple[int, int], PartitionSpec]]:
        return {"head": ((self.width, self.vocabulary), P("data", "model"))}


MODELS = {
    "1B": Shape(16, 2048, 8192, 32, 8, 64),
    "8B": Shape(32, 4096, 14336, 32, 8, 128),
    "70B": Shape(80, 8192, 28672, 64, 8, 128),
    "405B": Shape(126, 16384, 53248, 128, 8, 128),
}


def block(weights: dict[str, Any], x: jax.Array, shape: Shape) -> jax.Array:
    """Attention and a gated network; in each, weights are sharded by columns and then by rows over "model"."""
    batch, length, _ = x.shape
    h = _normed(x)
    query = (h @ weights["query"]).reshape(batch, length, shape.key_heads, -1, shape.head)
    key, value = ((h @ weights[name]).reshape(batch, length, shape.key_heads, shape.head) for name in ("key", "value"))
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key)
    mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, axis=-1), value)
    x = x + mixed.reshape(batch, length, shape.heads * shape.head) @ weights["out"]
    h = _normed(x)
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"]


def head(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """The scores of the last token of each sequence."""
    return _normed(x[:, -1]) @ weights["head"]


def _normed(x: jax.Array) -> jax.Array:
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-5)).astype(x.dtype)


@dataclass(frozen=True)
class Cost:
    """Bytes of one device."""

    held: float  # weights
    working: float  # peak of XLA's temporaries
    moved: float  # received from other devices
    gathered: float  # weights among them

    def times(self, n: int) -> Cost:
        return Cost(self.held * n, self.working, self.moved * n, self.gathered * n)

    def __add__(self, other: Cost) -> Cost:
        working = max(self.working, other.working)
        return Cost(self.held + other.held, working, self.moved + other.moved, self.gathered + other.gathered)


def cost(shape: Shape, devices: int, form: str) -> Cost:
    """Bytes of one step, with a sequence of LENGTH tokens per row of devices."""
    mesh = make_mesh(devices)
    x = _struct((mesh.shape["data"], LENGTH, shape.width), mesh, P("data"))
    blocks = _compiled(partial(block, shape=shape), shape.weights(), x, mesh, P("data"), form).times(shape.layers)
    # The embedding has as many weights as the head, sharded in the same way.
    last = _compiled(head, shape.head_weights(), x, mesh, P("data", "model"), form)
    return blocks + last + Cost(last.held, 0, 0, 0)


def make_mesh(devices: int) -> Mesh:
    grid = np.array(jax.devices()[:devices]).reshape(-1, min(devices, MODEL))
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def held(weights: Any, mesh: Mesh, form: str) -> int:
    """Bytes of these weights that one device holds."""
    made = [_weight(each, spec, mesh, form) for each, spec in weights.values()]
    return sum(_bytes_of_part(leaf) for leaf in jax.tree.leaves(made))


def fewest(shape: Shape, form: str, gigabytes: int) -> str:
    """The fewest devices, a power of two, on which weights take at most nine tenths of the memory."""
    for devices in (2**i for i in range(11)):
        mesh = make_mesh(devices)
        whole = shape.layers * held(shape.weights(), mesh, form) + 2 * held(shape.head_weights(), mesh, form)
        if whole <= 0.9e9 * gigabytes:
            return f"{devices:,}"
    return "none"


def _compiled(function: Any, weights: Any, x: Any, mesh: Mesh, out: PartitionSpec, form: str) -> Cost:
    made = {name: _weight(each, spec, mesh, form) for name, (each, spec) in weights.items()}
    program: Any = jax.jit(implicit(function), out_shardings=NamedSharding(mesh, out)).lower(made, x).compile()
    moves = collectives(program.as_text(), all_half=form == "bf16")
    moved, gathered = sum(size for _, size in moves), sum(size for kind, size in moves if kind == "all-gather")
    return Cost(held(weights, mesh, form), program.memory_analysis().temp_size_in_bytes, moved, gathered)


def _struct(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def _weight(shape: tuple[int, int], spec: PartitionSpec, mesh: Mesh, form: str) -> Any:
    dense = _struct(shape, mesh, spec)
    made = jax.eval_shape(FORMATS[form], jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    if isinstance(made, jax.ShapeDtypeStruct):
        return dense
    places = made._leaf_shardings(dense.sharding)
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), made, places)


def _bytes_of_part(leaf: Any) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def collectives(program: str, *, all_half: bool) -> list[tuple[str, float]]:
    """The kind of each collective of a program, and the bytes that a device receives in a ring algorithm.

    The CPU backend sums bfloat16 in float32, and marks such sums as promoted. It also gathers bfloat16 as float32,
    without a mark: with `all_half`, float32 counts as bfloat16.
    """
    found = []
    for line in program.splitlines():
        match = re.search(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", line)
        if match is None:
            continue
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        size = sum(
            SIZES[dtype] * np.prod([int(n) for n in dims.split(",") if n], dtype=float) for dtype, dims in arrays
        )
        if all_half or "promoted" in line:
            size /= 2
        kind, others = match[2], 1 - 1 / _group(line)
        factors = {"all-reduce": 2 * others, "reduce-scatter": others * _group(line), "collective-permute": 1}
        found.append((kind, size * factors.get(kind, others)))
    return found


def _group(line: str) -> int:
    """The number of devices in each group of a collective, which XLA writes in three ways."""
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if mesh is not None:
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return int(np.prod([int(part or sizes[name]) for name, part in axes]))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if iota is not None:
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed is not None:
        return len(listed[1].split(","))
    if "collective-permute(" in line:
        return 2
    raise ValueError(f"no groups of devices in {line[:300]!r}")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), choices=list(DEVICES))
    given = parser.parse_args()
    costs = {
        (model, n, form): cost(MODELS[model], n, form)
        for model in given.models
        for n in given.devices
        for form in FORMATS
    }
    print("GB held by each device: weights, and in brackets XLA's temporaries beside them\n")
    _table(given, lambda c: f"{c.held / 1e9:.2f} ({c.working / 1e9:.1f})", costs)
    print("\nGB received by each device in a step, and in brackets how much of it is weights\n")
    _table(given, lambda c: f"{c.moved / 1e9:.2f} ({c.gathered / 1e9:.2f})", costs)
    print("\nThe fewest devices on which the weights take at most nine tenths of the memory\n")
    print("| model | format | " + " | ".join(f"{chip}, {size} GB" for chip, size in CHIPS.items()) + " |")
    print("|---|---|" + "---|" * len(CHIPS))
    for model in given.models:
        for form in FORMATS:
            fits = [fewest(MODELS[model], form, size) for size in CHIPS.values()]
            print(f"| {model} | {form} | " + " | ".join(fits) + " |")


def _table(given: Any, cell: Callable[[Cost], str], costs: dict[Any, Cost]) -> None:
    print("| model | devices | " + " | ".join(FORMATS) + " |")
    print("|---|---|" + "---|" * len(FORMATS))
    for model in given.models:
        for n in given.devices:
            cells = [cell(costs[model, n, form]) for form in FORMATS]
            print(f"| {model} | {n:,} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
