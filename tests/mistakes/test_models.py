"""Mistakes with whole models, rules and training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer
from eformer import Rule, default_rules, implicit, quantize_model
from eformer.model import (
    NonfiniteWarning,
    UnusedRuleWarning,
    add_lora,
    compare_outputs,
    fake_quantize,
    init_scales,
    parse_rule,
)

from .common import PARAMS, Mistakes, W, X, check, model, q, small

RULES = [Rule("w", "int8")]


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(model(params, x))


def donated() -> None:
    params = {"w": jnp.asarray(W)}
    quantize_model(params, donate=True)
    jnp.sum(params["w"])


MODELS: Mistakes = {
    "a path": (
        lambda: quantize_model("model.safetensors"),
        TypeError,
        "a tree of arrays | 'model.safetensors' | `quantize_checkpoint`",
    ),
    "a function": (lambda: quantize_model(model), TypeError, "a tree of arrays | got a function | after the tree"),
    "misspelt format": (
        lambda: quantize_model(PARAMS, "nf5"),
        ValueError,
        "unknown format 'nf5' | did you mean 'nf4'?",
    ),
    "group_size": (
        lambda: quantize_model(PARAMS, "int4", group_size=32),
        TypeError,
        "no option 'group_size' | Did you mean 'block_size'?",
    ),
    "misspelt option": (
        lambda: quantize_model(PARAMS, "int4", blck_size=32),
        TypeError,
        "no option 'blck_size' | Did you mean 'block_size'?",
    ),
    "misspelt embeddings": (
        lambda: quantize_model(PARAMS, "int4", embeddings="int9"),
        ValueError,
        "unknown format 'int9'",
    ),
    "embedding": (
        lambda: quantize_model(PARAMS, "int4", embedding="int8"),
        TypeError,
        "no option 'embedding' | Did you mean 'embeddings'?",
    ),
    "one rule": (lambda: quantize_model(PARAMS, Rule("w", "int8")), TypeError, "got Rule | put it into a list"),
    "a rule as text": (lambda: quantize_model(PARAMS, "w=nf4"), TypeError, "'w=nf4' | parse_rule"),
    "rules as texts": (
        lambda: quantize_model(PARAMS, ["w=nf4"]),
        TypeError,
        "must hold `Rule`s | 'w=nf4' | `parse_rule` reads",
    ),
    "rules as a dict": (
        lambda: quantize_model(PARAMS, {"w": "nf4"}),
        TypeError,
        "got dict | [Rule(pattern, format), ...]",
    ),
    "rules as pairs": (
        lambda: quantize_model(PARAMS, [("w", "nf4")]),
        TypeError,
        "must hold `Rule`s | ('w', 'nf4') | `Rule(pattern, format)` makes one",
    ),
    "bits as rules": (lambda: quantize_model(PARAMS, 4), TypeError, "a format or a sequence of `Rule`s | got int 4"),
    "rules and a format": (
        lambda: quantize_model(PARAMS, RULES, format="int4"),
        TypeError,
        "'format' can't be given beside `rules`",
    ),
    "rules and options": (
        lambda: quantize_model(PARAMS, RULES, block_size=32),
        TypeError,
        "'block_size' can't be given beside `rules`",
    ),
    "format twice": (lambda: quantize_model(PARAMS, "int8", format="int4"), TypeError, "given twice | 'int8' | 'int4'"),
    "free": (lambda: quantize_model(PARAMS, free=True), TypeError, "`donate` | donate=True"),
    "an input without its tuple": (
        lambda: quantize_model(PARAMS, function=model, inputs=X),
        TypeError,
        "`inputs` must be a tuple | float32[2, 64] | `inputs=(x,)`",
    ),
    "inputs as a dict": (
        lambda: quantize_model(PARAMS, function=model, inputs={"x": X}),
        TypeError,
        "`inputs` must be a tuple | got dict | `inputs=(x,)`",
    ),
    "inputs without a function": (
        lambda: quantize_model(PARAMS, inputs=(X,)),
        TypeError,
        "`inputs` and `sequential` go with a `function`",
    ),
    "the result as function": (
        lambda: quantize_model(PARAMS, function=model(PARAMS, X), inputs=(X,)),
        TypeError,
        "`function` must be a function",
    ),
    "sequential without a function": (
        lambda: quantize_model(PARAMS, sequential=True),
        TypeError,
        "`inputs` and `sequential` go with a `function`",
    ),
    "a number as progress": (
        lambda: quantize_model(PARAMS, progress=3),
        TypeError,
        "`progress` must be None, True or a function | got 3",
    ),
    "another method": (lambda: quantize_model(PARAMS, "int4", method="awq"), ValueError, "`method='awq'` | 'gptq'"),
    "gptq without statistics": (
        lambda: quantize_model(PARAMS, "int4", method="gptq"),
        ValueError,
        "'w', float32[64, 96] | calibrate(function, second_moments=True)",
    ),
    "a dict of arrays as statistics": (
        lambda: quantize_model(PARAMS, "int4", statistics={"w": jnp.ones(64)}),
        TypeError,
        "what `calibrate` returned | got dict",
    ),
    "budget as text": (
        lambda: quantize_model(PARAMS, budget="4 bits"),
        TypeError,
        "a number of bits a weight | '4 bits'",
    ),
    "a budget too small": (
        lambda: quantize_model(PARAMS, budget=0.1),
        ValueError,
        "`budget=0.1` is too small | bits a weight in all",
    ),
    "a budget of 0": (lambda: quantize_model(PARAMS, budget=0), TypeError, "a number of bits a weight | got 0"),
    "nothing matches": (
        lambda: quantize_model(PARAMS, [Rule("kernle", "int8")]),
        UnusedRuleWarning,
        "kernle=int8 | 'b', 'w'",
    ),
    "nothing to quantize": (
        lambda: quantize_model({"b": np.zeros(9, np.float32)}),
        UnusedRuleWarning,
        "quantize nothing | 'b', float32[9]",
    ),
    "a NaN": (
        lambda: quantize_model({"w": np.full((64, 96), np.nan, np.float32)}),
        NonfiniteWarning,
        "'w' holds 6,144 NaN | becomes NaN",
    ),
    "donated and used": (donated, RuntimeError, "has been deleted"),
    "a pattern that is none": (lambda: Rule("w(", "int8"), ValueError, "'w(' | no regular expression"),
    "a number as pattern": (lambda: Rule(3, "int8"), TypeError, "a str or a function of path and leaf | got 3"),
    "a rule of a misspelt format": (lambda: Rule("w", "nf5"), ValueError, "unknown format 'nf5' | did you mean 'nf4'?"),
    "a rule with a misspelt option": (
        lambda: Rule("w", "int4", groupsize=32),
        TypeError,
        "no option 'groupsize' | Did you mean 'block_size'?",
    ),
    "a rule that keeps, with options": (lambda: Rule("w", None, axis=0), TypeError, "has no options | 'axis'"),
    "a rule the other way round": (
        lambda: Rule("int4", "kernel"),
        ValueError,
        "first which leaves, then which format | Rule('kernel', 'int4')",
    ),
    "an option that is an array": (
        lambda: Rule("w", "int4", axis=np.ones(1)),
        TypeError,
        "`axis` must be hashable | ndarray",
    ),
    "a text that is no rule": (lambda: parse_rule("mlp nf4"), ValueError, "'mlp nf4' is no rule | PATTERN=FORMAT"),
    "axes from the front": (lambda: default_rules(axes=[("w", 0)]), ValueError, "count from the end | got 0"),
    "a function of nothing": (
        lambda: eformer.rules_from_use(PARAMS, model),
        TypeError,
        "takes a function first | got dict",
    ),
    "a report of files": (
        lambda: eformer.report("a.safetensors", "b.safetensors"),
        TypeError,
        "a tree of arrays, got 'a.safetensors' | `load` reads",
    ),
    "the bytes of a file": (lambda: eformer.stored_bytes("a.gguf"), TypeError, "a tree of arrays | `load` reads"),
    "a file made dense": (lambda: eformer.dequantize("a.gguf"), TypeError, "a tree of arrays | `load` reads"),
    "a size as text": (lambda: default_rules(min_size="1M"), TypeError, "`min_size` must be an int | '1M'"),
    "tune the other way round": (
        lambda: eformer.tune(small(), model, [X], reference=PARAMS),
        TypeError,
        "`tune(function, small, inputs, reference=before)` | a function first | got dict",
    ),
    "outputs of no function": (
        lambda: compare_outputs(PARAMS, small(), model, [X]),
        TypeError,
        "`compare_outputs(function, before, after, inputs)` | a function first | got dict",
    ),
    "a report of other trees": (lambda: eformer.report(PARAMS, {"v": W}), ValueError, "the same leaves | 'v'"),
    "a report of other shapes": (
        lambda: eformer.report(PARAMS, {"w": W.T, "b": PARAMS["b"]}),
        ValueError,
        "'w' was [64, 96] and is [96, 64]",
    ),
    "a histogram of no leaf": (
        lambda: eformer.report(PARAMS, PARAMS, histogram="kernel"),
        ValueError,
        "no leaf 'kernel' | 'b', 'w'",
    ),
    "partition by a text": (
        lambda: eformer.partition(PARAMS, "norm"),
        TypeError,
        "a function of path and leaf | 'norm'",
    ),
    "the same half twice": (
        lambda: eformer.combine(*[eformer.partition(PARAMS)[0]] * 2),
        ValueError,
        "'b' | `partition` returned",
    ),
    "halves of two trees": (
        lambda: eformer.combine({"w": W}, {"b": None}),
        ValueError,
        "different trees | 'w' | `partition` returned",
    ),
    "calibrate of parameters": (
        lambda: eformer.calibrate(PARAMS),
        TypeError,
        "takes a function | got dict | `calibrate(f)(x)`",
    ),
    "calibrate without batches": (
        lambda: eformer.calibrate(model)(PARAMS, iter(())),
        ValueError,
        "iterator of batches is empty",
    ),
    "a model that is quantized already": (
        lambda: fake_quantize(small(), "int8"),
        TypeError,
        "'w' is quantized already | `dequantize` it first | add_lora",
    ),
    "freeze by a text": (
        lambda: fake_quantize(PARAMS, "int8", freeze="b"),
        TypeError,
        "a sequence of regular expressions | 'b' | put it in a list",
    ),
    "freeze of nothing": (
        lambda: fake_quantize(PARAMS, "int8", freeze=["norm"]),
        ValueError,
        "no leaf matches `freeze` 'norm' | 'b', 'w'",
    ),
    "scales of no leaf": (
        lambda: fake_quantize(PARAMS, "int8", scales={"v": jnp.ones(1)}),
        ValueError,
        "`scales` has 'v' | 'w'",
    ),
    "learned scales of nf4": (
        lambda: init_scales(PARAMS, "nf4"),
        ValueError,
        "'nf4' | can't be learned | 'int8', 'ternary'",
    ),
    "learned scales with offsets": (
        lambda: init_scales(PARAMS, "int4"),
        ValueError,
        "'int4' | can't be learned | `symmetric=True`",
    ),
    "gradients of codes": (
        lambda: jax.grad(implicit(loss))(small(), X),
        TypeError,
        "Array8B cannot be differentiated | `eformer.model.partition` | add_lora",
    ),
    "gradients without implicit": (
        lambda: jax.grad(lambda w: jnp.sum(jnp.dot(X, w)))(q()),
        TypeError,
        "Array8B cannot be differentiated | straight_through",
    ),
    "updates of codes": (
        lambda: (
            jax.tree.map(lambda p, g: p.astype(jnp.float32) - g.astype(jnp.float32), {"w": q()}, {"w": q()})["w"]
            @ jnp.ones(96)
        ),
        TypeError,
        "`weight` of this Array8B is float32 | was int8",
    ),
    "rank 0": (lambda: add_lora(small(), rank=0, key=jax.random.key(0)), ValueError, "`rank=0` | at least 1"),
    "a rank too large": (
        lambda: add_lora(small(), rank=100, key=jax.random.key(0)),
        ValueError,
        "`rank=100` | 'w' (64, 96) | 64 at most",
    ),
    "patterns of LoRA as a text": (
        lambda: add_lora(small(), rules="w", key=jax.random.key(0)),
        TypeError,
        "a sequence of patterns | put it into a list",
    ),
    "no weight for LoRA": (
        lambda: add_lora(small(), rules=["v"], key=jax.random.key(0)),
        ValueError,
        "no matrix matches 'v' | 'w'",
    ),
    "LoRA twice": (
        lambda: add_lora(add_lora(small(), key=jax.random.key(0)), key=jax.random.key(0)),
        ValueError,
        "'w' has an update | `merge_lora`",
    ),
}


@pytest.mark.parametrize("mistake", MODELS.values(), ids=MODELS)
def test_mistakes_with_models(mistake):
    check(*mistake)
