"""One of several processes that share a model: they quantize it, train a step, and save; or load what was saved.

`worker.py ADDRESS PROCESSES INDEX STEP FOLDER`, with eight devices in all. The parent reads what the first prints.
After "make" they save once more, and the last one is killed before it has written all of its parts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eformer._src.checkpoint.saving import save as save_module
from eformer.checkpoint import load, save
from eformer.jaximus import implicit
from eformer.model import Rule, quantize_model

DEVICES = 8  # of all processes; the parent gives each its part
P = PartitionSpec
FORMATS = {"up": "nf4", "down": "int8", "gate": "ternary"}
SHAPES = {"up": (64, 128), "gate": (64, 128), "down": (128, 64)}
SPECS = {"up": P("data", "model"), "gate": P(None, "model"), "down": P("model", "data"), "adapter": P()}


def model() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights and inputs, the same in every process."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape).astype(np.float32) / 8 for name, shape in SHAPES.items()}
    return weights, random.standard_normal((8, 64)).astype(np.float32)


def forward(weights: dict[str, jax.Array], adapter: jax.Array, x: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(x @ weights["up"]) * (x @ weights["gate"])
    return hidden @ weights["down"] + x @ adapter


def loss(adapter: jax.Array, weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(implicit(forward)(weights, adapter, x) ** 2)


def sharded(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])


def largest_part(tree: Any) -> float:
    """Of an array of codes, how much a device has at most."""
    codes = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype.itemsize == 1]
    return max(shard.data.size / leaf.size for leaf in codes for shard in leaf.addressable_shards)


def killed_after_the_first_part() -> None:
    write, written = save_module._write_piece, []

    def write_piece(*args: Any) -> None:
        if written:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(write(*args))

    save_module._write_piece = write_piece


def main(address: str, processes: int, index: int, step: str, folder: str) -> None:
    jax.distributed.initialize(address, processes, index)
    devices = np.array(jax.devices()).reshape(processes, DEVICES // processes)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    dense, x = model()
    x = sharded(x, NamedSharding(mesh, P("data")))
    path = Path(folder, "model.safetensors")
    value_and_gradient = jax.jit(jax.value_and_grad(loss))
    if step == "make":
        weights = {name: sharded(value, places[name]) for name, value in dense.items()}
        weights = quantize_model(weights, [Rule(name, FORMATS[name]) for name in FORMATS])
        tree = {"weights": weights, "adapter": sharded(np.zeros((64, 64), np.float32), places["adapter"])}
    else:
        tree = load(path, sharding=lambda name, shape: places[name.rpartition(".")[2]])
    value, gradient = value_and_gradient(tree["adapter"], tree["weights"], x)
    if step == "make":
        tree["adapter"] = tree["adapter"] - 0.1 * gradient
        save(path, tree)
    answer = {"loss": float(value), "largest": largest_part(tree)}
    multihost_utils.sync_global_devices("done")
    if index == 0:
        print(json.dumps(answer), flush=True)
    if step == "make":
        if index == processes - 1:
            killed_after_the_first_part()
        save(path, {**tree, "adapter": tree["adapter"] + 1}, overwrite=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
