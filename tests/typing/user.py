"""What a user may write with each public name: `test_typing.py` has type checkers find nothing wrong in it."""

# pyright: strict
import jax
import jax.numpy as jnp

import eformer
from eformer.ops.quantization import FormatSpec

Params = dict[str, jax.Array]


def model(params: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


class Half(eformer.ImplicitArray):
    weight: jax.Array
    by: float = eformer.aux_field(default=0.5)

    def materialize(self) -> jax.Array:
        return self.weight * self.by


@eformer.register("neg")
def negate(primitive: object, q: Half, **params: object) -> Half:
    del primitive, params
    return Half(-q.weight, q.by)


def use(params: Params, x: jax.Array, name: str) -> float:
    w = params["up"]
    nf4: eformer.ArrayNF4 = eformer.quantize(w)
    int4: eformer.ArrayGrouped = eformer.quantize(w, "int4", block_size=32, activation_dtype="int8")
    int8: eformer.Array8B = eformer.quantize(w, format="int8", axis=-1)
    others: list[eformer.QuantizedArray] = [
        eformer.quantize(w, FormatSpec(name)),
        eformer.quantize(w, eformer.formats()[0]),
        eformer.quantize(w, eformer.QuantizationConfig("nf4")),
        eformer.quantize(w, eformer.QuantizationType.FP8),
    ]
    bits: eformer.Array1B | eformer.ArrayFloat8 = eformer.quantize(w, "ternary", scale="channel")
    dense: jax.Array = x @ int4 + nf4.materialize() + eformer.dequantize(w) + eformer.quantize(w, simulate=True)
    rounded: jax.Array = eformer.straight_through(w, "mxfp4") + eformer.ste(jnp.round)(w)
    rules = [eformer.Rule("up", "int8", axis=-2), *eformer.default_rules("int4", embeddings="int8")]
    rules += eformer.rules_from_use(model, params, x, format="int3", block_size=64)
    statistics: eformer.Statistics = eformer.calibrate(model, second_moments=True)(params, x)
    small = eformer.quantize_model(params, rules, statistics=statistics, method="gptq")
    small = eformer.quantize_model(params, "int4", function=model, inputs=(x,), donate=True, embeddings=None)
    small = eformer.tune(model, small, [x], reference=params)
    trained, frozen = eformer.partition(small)
    y = eformer.fuse(eformer.implicit(model))(eformer.combine(trained, frozen), x)
    with eformer.materialization_error(), eformer.use_kernels(True):
        print(eformer.explain(model)(small, x).dense_bytes, eformer.report(params, small), eformer.stored_bytes(small))
    path = eformer.save("small.safetensors", small)
    with eformer.open_checkpoint(path) as checkpoint:
        print(checkpoint.metadata, [eformer.load(path), eformer.materialize(small)["up"]])
    eformer.quantize_checkpoint(path, "smaller", "int4", embeddings="int8")
    eformer.convert(path, "small.gguf", type="Q8_0")
    return float(jnp.vdot(y + dense, rounded + int8.scale + x @ bits)) + sum(q.nbytes for q in others)
