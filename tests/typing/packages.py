"""What a user may write with the functions of the packages below `eformer`, beyond those of `user.py`."""

# pyright: strict
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from eformer import ArrayGrouped, ImplicitArray, QuantizedArray, Rule, cache, checkpoint, jaximus, model
from eformer.checkpoint import GgufCodec
from eformer.ops import quantization

Params = dict[str, jax.Array]


def forward(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["w"]


def doubled(x: jax.Array) -> jax.Array:
    return x + x


def names(path: str, leaf: object) -> str:
    return f"{path} {type(leaf).__name__}"


def trees(params: Params) -> float:
    paths: list[tuple[str, object]] = [(path, leaf) for path, leaf in model.named_leaves(params)[0]]
    half: Params = jaximus.tree_cast(params, jnp.bfloat16)
    leaves = [each for each in jaximus.tree_leaves_with_implicit(half) if jaximus.is_implicit(each)]
    mapped: Params = jaximus.tree_map_with_implicit(doubled, params)
    # JAX does not type the structure of a tree.
    structures: list[object] = [
        jaximus.tree_structure_with_implicit(params),
        jaximus.tree_flatten_with_implicit(params)[1],
        jaximus.tree_flatten_with_path_with_implicit(params)[1],
    ]
    average: Params = jaximus.tree_average([params, half])
    print(paths, leaves, jaximus.tree_map_with_path_with_implicit(names, mapped), structures, average)
    return float(jaximus.tree_norm(params)) + jaximus.tree_size(params)


def train(params: Params, x: jax.Array, key: jax.Array) -> Params:
    rough: Params = model.fake_quantize(params, "int8", scales=model.init_scales(params, "int8"))
    small: Params = model.finalize(rough)
    adapted: Params = model.lora_dropout(model.add_lora(small, rank=4, key=key), 0.1, key)
    model.check_finite(adapted)
    print(model.find_nonfinite(adapted), model.compare_outputs(forward, params, small, [(x,)]).divergence)
    plan: tuple[Rule, ...] = model.plan_budget(4.5, params, [model.parse_rule("w=int4")])
    checkpoint.save_adapter("adapter", adapted)
    again: Params = checkpoint.load_adapter("adapter", model.drop_lora(adapted))
    print(plan, model.quantize_model(params, plan))
    return model.merge_lora(again)


def arrays(w: jax.Array, filled: jax.Array) -> list[QuantizedArray]:
    form: quantization.Format = quantization.find_format("int4")
    made: QuantizedArray = form.encode(w)
    dense: list[jax.Array] = [model.dequantize(made), jaximus.materialize(made), model.dequantize({"w": w})["w"]]
    keys: cache.QuantizedCache = cache.empty((1, 2, 64, 32), jnp.bfloat16, "int8")
    held: cache.QuantizedCache = cache.quantize(filled, rotated=False)
    print(dense, quantization.format_names(made), quantization.is_kernel_available())
    return [made, made.with_dtype(jnp.bfloat16), made.with_activation_dtype("int8"), keys, held]


def extend(codec: GgufCodec[ArrayGrouped]) -> None:
    checkpoint.register_gguf_codec(codec)


def rule(primitive: Primitive, q: ImplicitArray) -> object:
    jaximus.note_materialized(q, "as an example")
    return jaximus.materialize_rule(primitive, q)
