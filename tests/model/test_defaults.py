"""What the default rules do with leaves of the names and shapes that models have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer._src.model.axes import contracted_axis
from eformer._src.model.rules import find_rule
from eformer.model import default_rules
from eformer.ops.quantization import formats

# path, shape, axis of the blocks; None: kept.
LEAVES = [
    ("params.Dense_0.kernel", (64, 128), -2),
    ("layers.0.mlp.weight", (128, 64), -1),
    ("cell.weight_hh", (192, 64), -1),
    ("transformer/linear_1.w", (64, 128), -2),
    ("wq", (64, 64), -2),
    ("layers.up.kernel", (3, 64, 128), -2),  # a stack
    ("layers.up.weight", (3, 64, 128), -1),
    ("attention.query.kernel", (64, 4, 16), -3),  # features, heads, features of a head
    ("layers.attention.key.kernel", (12, 64, 4, 16), -3),
    ("layers.attention.query.kernel", (12, 64, 64), -2),  # a stack of matrices
    ("layers.attention.query.kernel", (64, 64, 64), -2),  # as many matrices as inputs: still a stack
    ("attention.query.kernel", (64, 64), -2),
    ("attention.out.kernel", (4, 32, 64), -2),
    ("conv.kernel", (3, 3, 64, 64), -2),
    ("conv.weight", (64, 64, 3, 3), None),  # blocks of 3 are none
    ("head.weight", (512, 16), None),
    ("small.kernel", (63, 65), None),
    ("vector", (8192,), None),
    ("scalar", (), None),
    ("empty.kernel", (64, 0), None),
    ("embed.embedding", (512, 64), None),
    ("wte.weight", (512, 64), None),
    ("token_embd.weight", (512, 64), None),  # GGUF
    ("tok_emb.weight", (512, 64), None),
    ("member.kernel", (64, 128), -2),  # no embedding
    ("Embed_0.embedding", (512, 64), None),
    ("word_embeddings.weight", (512, 64), None),
    ("layers.norm.scale", (128, 64), None),
    ("layers.LayerNorm_0.scale", (128, 64), None),
    ("layers.ln_1.weight", (128, 64), None),
    ("layers.ln.weight", (128, 64), None),
    ("layers.Dense_0.bias", (128, 64), None),
    ("transformer/linear_1.b", (128, 64), None),
    ("cell.bias_n", (128, 64), None),
    ("lnet.kernel", (64, 128), -2),  # no norm
]


@pytest.mark.parametrize(("path", "shape", "axis"), LEAVES, ids=[f"{path}-{shape}" for path, shape, _ in LEAVES])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_which_leaves_are_quantized_and_how(path, shape, axis, dtype):
    rule = find_rule(default_rules("nf4"), path, jax.ShapeDtypeStruct(shape, dtype))
    found = None if rule is None or rule.format is None else (rule.format, dict(rule.options))
    assert found == (None if axis is None else ("nf4", {"axis": axis}))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64, jax.random.key(0).dtype], ids=str)
def test_other_dtypes_are_kept(dtype):
    assert find_rule(default_rules(), "kernel", jax.ShapeDtypeStruct((64, 64), dtype)) is None


@pytest.mark.parametrize("path", ["embed.embedding", "wte.weight", "token_embd.weight"])
@pytest.mark.parametrize(("shape", "quantized"), [((512, 64), True), ((512, 16), False), ((8, 64), False)])
def test_embeddings_when_asked(path, shape, quantized):
    rule = find_rule(default_rules(embeddings="int8"), path, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert rule is not None
    assert (rule.format, dict(rule.options)) == (("int8", {"axis": -1}) if quantized else (None, {}))


@pytest.mark.parametrize("form", formats(), ids=str)
@pytest.mark.parametrize(("path", "axis"), [("mlp.kernel", -2), ("mlp.weight", -1)])
def test_every_format(form, path, axis):
    """A format gets the axis if it has one; those without magnitudes get a scale."""
    rule = find_rule(default_rules(form.name), path, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    assert rule is not None
    assert rule.format == form.name
    assert rule.options.get("axis") == (axis if "axis" in form.options else None)
    assert rule.options.get("scale") == ("channel" if form.name in ("ternary", "binary") else None)


def test_options_and_sizes_are_the_users():
    rules = default_rules("nf4", min_size=16, axes=[("^odd", -1), ("^three", -3)], block_size=32)

    def decide(path, *shape):
        return find_rule(rules, path, jax.ShapeDtypeStruct(shape, jnp.float32))

    assert decide("odd.kernel", 2, 32).options == {"axis": -1, "block_size": 32}
    assert decide("three.kernel", 32, 64, 2).options == {"axis": -3, "block_size": 32}
    assert decide("even.kernel", 32, 2).options == {"axis": -2, "block_size": 32}
    assert decide("even.kernel", 31, 2) is None


def test_an_axis_must_count_from_the_end():
    with pytest.raises(ValueError, match=r"the axis of 'w' must count from the end \(-2, say\).*got 0"):
        default_rules(axes=[("w", 0)])


def test_a_shape_that_no_layout_fits():
    assert contracted_axis("vector", (7,)) == -1
