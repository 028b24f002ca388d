"""Plain JAX: a dict of arrays and a function of it. Run it with `python examples/frameworks/plain.py`."""

from typing import Any

import jax
import jax.numpy as jnp

from eformer import dequantize, implicit, quantize_model, stored_bytes


def init(key: jax.Array, width: int = 128, layers: int = 3) -> dict[str, Any]:
    up, down = jax.random.split(key)
    stacked = {  # all layers in one array, for `scan`
        "up": jax.random.normal(up, (layers, width, 4 * width)) / width**0.5,
        "down": jax.random.normal(down, (layers, 4 * width, width)) / (4 * width) ** 0.5,
    }
    return {"layers": stacked, "scale": jnp.ones(width)}


def model(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Knows nothing of quantization."""

    def layer(x: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return x * params["scale"][None]


def main() -> None:
    params, x = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (4, 128))
    quantized = quantize_model(params, function=model, inputs=(x,))
    y = jax.jit(implicit(model))(quantized, x)
    dense = jax.jit(model)(dequantize(quantized), x)
    sizes = f"{stored_bytes(params):,} -> {stored_bytes(quantized):,} bytes"
    print(f"plain: {sizes}, max error {jnp.max(jnp.abs(y - dense)):.1e}")


if __name__ == "__main__":
    main()
