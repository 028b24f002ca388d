"""Keras 3 on JAX: a function of the variables of a model. Run it with `python examples/frameworks/with_keras.py`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras  # pyright: ignore[reportMissingImports]

from eformer import dequantize, implicit, quantize_model, stored_bytes


def main() -> None:
    layers = keras.layers
    model = keras.Sequential([layers.Dense(512, "gelu"), layers.LayerNormalization(), layers.Dense(128)])
    model.build((None, 128))
    variables = [jnp.asarray(each.value) for each in model.trainable_variables]
    rest = [each.value for each in model.non_trainable_variables]

    def run(variables: list[jax.Array], x: jax.Array) -> jax.Array:
        return model.stateless_call(variables, rest, x)[0]

    x = jax.random.normal(jax.random.key(1), (4, 128))
    quantized = quantize_model(variables, function=run, inputs=(x,))
    y = jax.jit(implicit(run))(quantized, x)
    dense = jax.jit(run)(dequantize(quantized), x)
    sizes = f"{stored_bytes(variables):,} -> {stored_bytes(quantized):,} bytes"
    print(f"keras: {sizes}, max error {jnp.max(jnp.abs(y - dense)):.1e}")


if __name__ == "__main__":
    main()
