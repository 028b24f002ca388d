"""Patterns of plain JAX: a Llama with a cache, experts, parts on several devices, a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from eformer.model import combine, partition

from .case import Case, Program


def _weights(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {n: jax.random.normal(k, s) / s[-2] ** 0.5 for (n, s), k in zip(shapes.items(), keys, strict=True)}


def _x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def _norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def llama() -> Program:
    """Two layers in one array each, a cache that each step writes to, and a loop that generates greedily."""
    heads, size, length = 2, 32, 8
    layer = {"q": (2, 64, 2, 32), "k": (2, 64, 2, 32), "v": (2, 64, 2, 32), "o": (2, 2, 32, 64)}
    mlp = {"gate": (2, 64, 128), "up": (2, 64, 128), "down": (2, 128, 64)}
    params = {"embed": _weights(e=(128, 64))["e"], "layers": _weights(**layer, **mlp)}

    def attention(w: Any, x: jax.Array, cache: Any, at: Any) -> tuple[jax.Array, Any]:
        q, k, v = (jnp.einsum("bd,dhk->bhk", x, w[name]) for name in "qkv")
        cache = [lax.dynamic_update_index_in_dim(c, new, at, 1) for c, new in zip(cache, (k, v), strict=True)]
        scores = jnp.einsum("bhk,bthk->bht", q, cache[0]) / size**0.5
        scores = jax.nn.softmax(jnp.where(jnp.arange(length) <= at, scores, -1e30))
        return jnp.einsum("bhk,hkd->bd", jnp.einsum("bht,bthk->bhk", scores, cache[1]), w["o"]), cache

    def step(params: Any, token: jax.Array, caches: Any, at: Any) -> tuple[jax.Array, Any]:
        def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, Any]:
            w, cache = of_layer
            attended, cache = attention(w, _norm(x), cache, at)
            x = x + attended
            hidden = jax.nn.silu(_norm(x) @ w["gate"]) * (_norm(x) @ w["up"])
            return x + hidden @ w["down"], cache

        x, caches = lax.scan(layer, params["embed"][token], (params["layers"], caches))
        return _norm(x) @ params["embed"].T, caches

    def generate(params: Any, token: jax.Array) -> jax.Array:
        def body(at: Any, carry: Any) -> Any:
            token, caches, out = carry
            logits, caches = step(params, token, caches, at)
            return jnp.argmax(logits, -1).astype(token.dtype), caches, out.at[at].set(logits)

        empty = [jnp.zeros((2, len(token), length, heads, size))] * 2
        out = jnp.zeros((length, len(token), 128))
        return lax.fori_loop(0, length, body, (token, empty, out))[2]

    return Program(generate, params, (jnp.array([3, 5]),))


def experts_by_group() -> Program:
    """Tokens sorted by expert, then one `ragged_dot` for all experts."""

    def function(params: Any, x: jax.Array) -> jax.Array:
        chosen = jnp.argmax(x @ params["router"], axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=64)
        hidden = jax.nn.gelu(lax.ragged_dot(x[order], params["up"], sizes))
        return jnp.zeros_like(x).at[order].set(lax.ragged_dot(hidden, params["down"], sizes))

    return Program(function, _weights(router=(64, 64), up=(64, 64, 32), down=(64, 32, 64)), (_x(12, 64),))


def experts_in_a_batch() -> Program:
    """Every expert on every token, weighted."""

    def function(params: Any, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(x @ params["router"])
        hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", x, params["up"]))
        return jnp.einsum("te,etd->td", weights, jnp.einsum("etf,efd->etd", hidden, params["down"]))

    return Program(function, _weights(router=(64, 64), up=(64, 64, 32), down=(64, 32, 64)), (_x(12, 64),))


def fused() -> Program:
    """One matmul for queries, keys and values, which are joined when the function runs, in bfloat16."""

    def function(params: Any, x: jax.Array) -> jax.Array:
        fused = jnp.concatenate([params[name].astype(jnp.bfloat16) for name in "qkv"], axis=1)
        q, k, v = jnp.split(x.astype(jnp.bfloat16) @ fused, 3, axis=-1)
        return jax.nn.dot_product_attention(*(each[None, :, None] for each in (q, k, v)))

    return Program(function, _weights(q=(64, 64), k=(64, 64), v=(64, 64)), (_x(6, 64),))


def tensor_parallel() -> Program:
    """An MLP over two devices in `shard_map`: columns of one weight, rows of the other, one sum."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    specs = PartitionSpec(None, "model"), PartitionSpec("model", None), PartitionSpec()

    def function(params: Any, x: jax.Array) -> jax.Array:
        def part(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
            return lax.psum(jax.nn.gelu(x @ up) @ down, "model")

        parts = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        return parts(params["up"], params["down"], x)

    return Program(function, _weights(up=(64, 256), down=(256, 64)), (_x(4, 64),))


def training() -> Program:
    """Adapters and norms of a frozen model, with Adam: four lines more split the tree and put it together."""
    import optax

    def loss(params: Any, x: jax.Array) -> jax.Array:
        low = x @ params["a"] @ params["b"]
        return jnp.mean((jnp.tanh(_norm(x) * params["norm"] @ params["w"] + low) - 1) ** 2)

    def run(function: Callable[..., Any], params: Any, inputs: tuple[Any, ...]) -> Any:
        names = {"a", "b", "norm"}
        trained, frozen = partition(params, lambda path, leaf: path in names)
        optimizer = optax.adam(0.01)

        @jax.jit
        def step(trained: Any, state: Any) -> Any:
            value, gradients = jax.value_and_grad(lambda t: function(combine(t, frozen), *inputs))(trained)
            updates, state = optimizer.update(gradients, state, trained)
            return optax.apply_updates(trained, updates), state, value

        state, losses = optimizer.init(trained), []
        for _ in range(3):
            trained, state, value = step(trained, state)
            losses.append(value)
        return trained, losses

    params = {**_weights(w=(64, 128), a=(64, 4), b=(4, 128)), "norm": jnp.ones(64)}
    return Program(loss, params, (_x(8, 64),), run)


CASES = (
    Case("Plain JAX: a Llama with a cache, layers scanned, greedy loop", ("jax",), llama),
    Case("Plain JAX: mixture of experts, `ragged_dot`", ("jax",), experts_by_group),
    Case("Plain JAX: mixture of experts, one batch", ("jax",), experts_in_a_batch),
    Case("Plain JAX: weights joined by `concatenate`, bfloat16", ("jax",), fused),
    Case("Plain JAX: tensor parallel in `shard_map`", ("jax",), tensor_parallel),
    Case("optax: adapters trained with Adam", ("optax",), training, lines=4),
)
