"""LoRA as an array: a frozen weight plus a trainable update of low rank; the sum is never stored.

Run it with `python examples/lora.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eformer import ImplicitArray, aux_field, explain, implicit, register


class LoRA(ImplicitArray):
    """`w + alpha * (a @ b)`."""

    w: jax.Array
    a: jax.Array
    b: jax.Array
    alpha: float = aux_field(default=1.0)

    def materialize(self) -> jax.Array:
        return self.w + self.alpha * (self.a @ self.b)


@register("dot_general")
def multiply(primitive: Any, x: jax.Array, q: LoRA, *, dimension_numbers: Any, **params: Any) -> Any:
    """`x @ q` as `x @ w + alpha * (x @ a) @ b`: two thin matmuls, and no matrix as large as `w`."""
    (_, contracted), (_, batch) = dimension_numbers
    if q.ndim != 2 or contracted != (0,) or batch:
        return NotImplemented  # any other matmul runs on the dense array

    def dot(weight: jax.Array) -> jax.Array:
        return primitive.bind(x, weight, dimension_numbers=dimension_numbers, **params)

    return dot(q.w) + q.alpha * (dot(q.a) @ q.b)


# That is all. The rest is plain JAX, which knows nothing of LoRA.


def loss(weight: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ weight) - y) ** 2)


@jax.jit
def train(q: LoRA, x: jax.Array, y: jax.Array, rate: float) -> LoRA:
    gradient = jax.grad(implicit(loss))(q, x, y)  # a LoRA too: the gradients of w, a and b
    return dataclasses.replace(q, a=q.a - rate * gradient.a, b=q.b - rate * gradient.b)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def main() -> None:
    w, x = normal(0, 64, 64) / 8, normal(1, 256, 64)
    target = w + normal(2, 64, 4) @ normal(3, 4, 64) / 64  # the pretrained weight, moved by a matrix of rank 4
    y = jnp.tanh(x @ target)

    q = LoRA(w, a=normal(4, 64, 4) / 8, b=jnp.zeros((4, 64)), alpha=2.0)
    print(q)

    loss_of = jax.jit(implicit(loss))
    print(f"loss before: {loss_of(q, x, y):.1e}")
    for _ in range(300):
        q = train(q, x, y, rate=8.0)
    print(f"loss after:  {loss_of(q, x, y):.1e}")

    print(explain(loss)(q, x, y))


if __name__ == "__main__":
    main()
