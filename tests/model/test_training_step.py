"""A step of QLoRA, read from the compiled program: its memory, and what devices exchange."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eformer._src.kernels import cpu
from eformer.jaximus import implicit
from eformer.model import LoraArray, add_lora, combine, partition, quantize_model, stored_bytes

P = PartitionSpec
WIDTH, INNER, ROWS, RANK = 256, 512, 16, 4


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def weights(layers: int) -> dict[str, Any]:
    return {"up": {"kernel": struct(layers, WIDTH, INNER)}, "down": {"kernel": struct(layers, INNER, WIDTH)}}


def loss(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]["kernel"]) @ w["down"]["kernel"], None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def step(trained: Any, frozen: Any, x: jax.Array) -> Any:
    gradients = jax.grad(lambda t: implicit(loss)(combine(t, frozen), x))(trained)
    return jax.tree.map(lambda p, g: p - 0.1 * g, trained, gradients)


def adapted(base: Any) -> Any:
    return jax.eval_shape(lambda base: add_lora(base, rank=RANK, key=jax.random.key(0), rules=["kernel"]), base)


def temporaries(base: Any) -> int:
    trained, frozen = partition(adapted(base))
    compiled: Any = jax.jit(step, donate_argnums=0).lower(trained, frozen, struct(ROWS, WIDTH)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(not cpu.is_available(), reason="without the core, tiles of weights are decoded")
@pytest.mark.parametrize("format", ["nf4", "int8", "int4"])
def test_no_layer_keeps_a_dense_weight(format: str):
    """What a further layer takes: its saved input, the gradients of its update, and copies of scales in bfloat16.

    XLA:CPU has no arithmetic in bfloat16, and converts what a loop reads before it.
    """
    few, many = 2, 6
    used = {layers: temporaries(quantize_model(weights(layers), format=format)) for layers in (few, many)}
    per_layer = (used[many] - used[few]) / (many - few)
    saved = ROWS * WIDTH * 4 + 2 * RANK * (WIDTH + INNER) * 4
    halves = [leaf for leaf in jax.tree.leaves(quantize_model(weights(1), format=format)) if leaf.dtype == jnp.bfloat16]
    assert per_layer <= saved + 4 * sum(leaf.size for leaf in halves) + 1024
    # Activations of one layer and their gradients; all of it is less than one dense weight.
    assert used[few] < WIDTH * INNER * 4


MESH_SPECS = {"columns": P(None, None, "model"), "rows": P(None, "model", None)}


def on_mesh(mesh: Any, base: Any, adapters: str) -> Any:
    """The base sharded over "model"; updates replicated, or sharded as the weight that they adapt."""

    def placed(name: str, q: LoraArray) -> LoraArray:
        spec = MESH_SPECS["columns" if name == "up" else "rows"]
        specs = {"a": P(None, spec[1], None), "b": P(None, None, spec[2])} if adapters == "sharded" else {}
        parts = {n: _placed(getattr(q, n), NamedSharding(mesh, specs.get(n, P()))) for n in ("a", "b", "scaling")}
        return LoraArray(_placed(q.base, NamedSharding(mesh, spec)), **parts)

    return {name: {"kernel": placed(name, base[name]["kernel"])} for name in ("up", "down")}


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    return leaf.with_sharding(sharding) if hasattr(leaf, "with_sharding") else jax.device_put(leaf, sharding)


def collectives(program: str) -> Counter[str]:
    found = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return Counter(re.findall(found, program))


@pytest.mark.parametrize("adapters", ["replicated", "sharded"])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_devices_exchange_what_those_of_a_dense_step_do(format: str, adapters: str):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    draw = np.random.default_rng(0).standard_normal
    dense = jax.tree.map(lambda s: jnp.asarray(draw(s.shape) / 16, jnp.float32), weights(2))
    x = jax.device_put(jnp.asarray(draw((ROWS, WIDTH)), jnp.float32), NamedSharding(mesh, P("data")))
    programs, results = {}, {}
    quantized = quantize_model(dense, format=format)
    whole: Any = add_lora(quantized, rank=RANK, key=jax.random.key(0))
    for name, base in {"dense": dense, format: quantized}.items():
        tree = add_lora(base, rank=RANK, key=jax.random.key(0), rules=["kernel"])
        trained, frozen = partition(on_mesh(mesh, tree, adapters))
        compiled: Any = jax.jit(step).lower(trained, frozen, x).compile()
        programs[name] = collectives(compiled.as_text())
        results[name] = compiled(trained, frozen, x)
    assert programs[format] == programs["dense"]
    trained, frozen = partition(whole)
    alone = jax.jit(step)(trained, frozen, np.asarray(x))
    for found, expected in zip(jax.tree.leaves(results[format]), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert stored_bytes(frozen) < stored_bytes(dense)
