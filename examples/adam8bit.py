"""Adam with an 8-bit state: both moments are quantized arrays, in blocks with a scale each.

An optax transformation in thirty lines. The first moment is INT8. The second is stored as its square root, which has
half as many decades, in FP8, which is as exact for small elements as for large ones. Run it with
`python examples/adam8bit.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from eformer import quantize
from eformer.jaximus import materialize, tree_map_with_implicit
from eformer.model import stored_bytes

BLOCK = 64


class State(NamedTuple):
    """As of optax's Adam; leaves of `mean` and `root` are quantized arrays of the parameters' shapes."""

    steps: jax.Array
    mean: Any
    root: Any  # the square root of the second moment


def signed(x: jax.Array) -> Any:
    return quantize(x, format="int8_grouped", block_size=BLOCK, symmetric=True, fit=False)


def positive(x: jax.Array) -> Any:
    return quantize(x, format="fp8", block_shape=(BLOCK,))


def scale_by_adam8bit(b1: float = 0.9, b2: float = 0.99, eps: float = 1e-8) -> optax.GradientTransformation:
    """As `optax.scale_by_adam`, with moments in 8 bits.

    A moment that one update changes by less than half a step of its format stays as it is. Half a step of FP8 is 3 to
    6% of an element: gradients of three times the root raise it, and small ones do not lower it as they should. That
    costs nothing here; where it does, more bits or stochastic rounding of the root are the remedy.
    """

    def init(params: Any) -> State:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return State(jnp.int32(0), jax.tree.map(signed, zeros), jax.tree.map(positive, zeros))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, State]:
        del params
        taken = state.steps + 1
        time = taken.astype(jnp.float32)

        def moments(g: jax.Array, mean: Any, root: Any) -> tuple[jax.Array, jax.Array]:
            g = g.astype(jnp.float32)
            square = b2 * materialize(root) ** 2 + (1 - b2) * g**2
            return b1 * materialize(mean) + (1 - b1) * g, jnp.sqrt(square)

        both = tree_map_with_implicit(moments, updates, state.mean, state.root)
        mean, root = (jax.tree.map(lambda pair, i=i: pair[i], both, is_leaf=_is_pair) for i in (0, 1))
        to_mean, to_root = 1 - b1**time, jnp.sqrt(1 - b2**time)
        steps = jax.tree.map(lambda m, r: m / to_mean / (r / to_root + eps), mean, root)
        updates = jax.tree.map(lambda step, g: step.astype(g.dtype), steps, updates)
        return updates, State(taken, jax.tree.map(signed, mean), jax.tree.map(positive, root))

    return optax.GradientTransformation(init, update)


def _is_pair(x: object) -> bool:
    return type(x) is tuple


def adam8bit(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    return optax.chain(scale_by_adam8bit(), optax.scale_by_learning_rate(rate))


# --- a model to train ---


def model(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"] + params["bias"][None]) @ params["down"]


def train(optimizer: optax.GradientTransformation, steps: int) -> tuple[float, int]:
    """The loss after some steps, and the bytes of the optimizer's state."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(keys[0], (128, 512)) / 11, "bias": jnp.zeros(512)}
    params |= {"down": jax.random.normal(keys[1], (512, 128)) / 23}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model(params, x) - jnp.sin(3 * x[:, ::-1])) ** 2)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        gradients = jax.grad(loss)(params, jax.random.normal(key, (64, 128)))
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for key in jax.random.split(keys[2], steps):
        params, state = step(params, state, key)
    return float(loss(params, jax.random.normal(jax.random.key(1), (1024, 128)))), stored_bytes(state)


def main(steps: int = 400) -> None:
    for name, optimizer in {"adam, float32": optax.adam(1e-3, b2=0.99), "adam, 8 bits": adam8bit(1e-3)}.items():
        loss, size = train(optimizer, steps)
        print(f"{name}: loss {loss:.4f} after {steps} steps, state of {size:,} bytes")


if __name__ == "__main__":
    main()
