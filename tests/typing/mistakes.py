"""What type checkers must refuse: each line that ends in `# error`, and no other."""

# pyright: strict
import jax

import eformer
from eformer import quantize, quantize_model


def wrong(w: jax.Array, params: dict[str, jax.Array]) -> None:
    quantize(w, format="nf5")  # error
    quantize(w, "int7")  # error
    quantize(w, dtype="q4_0")  # error
    quantize(w, "int4").absmax  # noqa: B018  # error
    quantize(w, "nf4").bits  # noqa: B018  # error
    quantize(w, "int8", activation_dtype="int4")  # error
    quantize(w, 4)  # error
    quantize({"w": w}, "int4")  # error
    quantize_model(params, "nf5")  # error
    quantize_model(params, format="int1")  # error
    quantize_model(params, "int4", donate="yes")  # error
    quantize_model(params, "int4", inputs=3)  # error
    eformer.Rule("w", "nf5")  # error
    eformer.default_rules("float4")  # error
    eformer.straight_through(w, "nf5")  # error
    eformer.no_such_name  # noqa: B018  # error
