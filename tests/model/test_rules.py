"""Rules: how they are written, read, found and applied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer._src.model.rules import apply_rule, find_rule
from eformer.model import Rule, parse_rule
from eformer.ops.quantization import Array8B, ArrayNF4

LEAF = jax.ShapeDtypeStruct((64, 64), jnp.float32)

WRITTEN = [
    ("attn=nf4", Rule("attn", "nf4")),
    ("lm_head=keep", Rule("lm_head", None)),
    ("w=int8,axis=-2", Rule("w", "int8", {"axis": -2})),
    ("w=int8,axis=(-2,-1)", Rule("w", "int8", {"axis": (-2, -1)})),
    ("w=ternary,scale=channel", Rule("w", "ternary", {"scale": "channel"})),
    ("w=ternary,scale=None", Rule("w", "ternary", {"scale": None})),
    (
        "a|b=nf4,block_size=32,double_quantization=True",
        Rule("a|b", "nf4", {"block_size": 32, "double_quantization": True}),
    ),
    ("(?=x)w{1,2}=nf4,axis=0", Rule("(?=x)w{1,2}", "nf4", {"axis": 0})),
    ("a=b=nf4", Rule("a=b", "nf4")),
    ("w=int4,activation_dtype=int8", Rule("w", "int4", {"activation_dtype": "int8"})),
]
written = pytest.mark.parametrize(("text", "rule"), WRITTEN, ids=[text for text, _ in WRITTEN])


@written
def test_a_written_rule_is_read(text, rule):
    assert parse_rule(text) == rule


@written
def test_a_rule_is_written_as_it_is_read(text, rule):
    assert str(rule) == text


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (" w=nf4 ", {}),
        ("w=nf4,double_quantization=true", {"double_quantization": True}),
        ("w=nf4,double_quantization=FALSE", {"double_quantization": False}),
        ("w=ternary,scale=none", {"scale": None}),
    ],
)
def test_words_of_the_shell(text, options):
    assert parse_rule(text).options == options


@pytest.mark.parametrize(
    "text", ["", "nf4", "w = nf4", "=nf4", "w=", "w=nf4,", "w=nf4,axis", "w=nf4,axis=", "w=4bit", "w=nf4,a=(1"]
)
def test_what_is_no_rule_says_how_to_write_one(text):
    with pytest.raises(ValueError, match=r"is no rule: write PATTERN=FORMAT,option=value"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("w", "nf5"), ValueError, r"unknown format 'nf5'; there are .*'nf4'"),
        (("w", "nf4", {"group": 3}), TypeError, r"'nf4' has no option 'group'; it has 'block_size', 'axis'"),
        (("w", None, {"axis": 3}), TypeError, r"keeps leaves as they are has no options, got 'axis'"),
        (("w(", "nf4"), ValueError, r"pattern 'w\(' is no regular expression: .*position 1"),
        ((3, "nf4"), TypeError, r"must be a str or a function of path and leaf, got 3"),
        (("w", "nf4", {"axis": {}}), TypeError, r"option `axis` must be hashable.*dict"),
    ],
    ids=str,
)
def test_a_bad_rule_says_why(arguments, error, message):
    with pytest.raises(error, match=message):
        Rule(*arguments)


def test_rules_are_values():
    one, same = Rule("w", "int8", {"axis": [-2, -1]}), Rule("w", "int8", {"axis": (-2, -1)})
    assert one == same
    assert len({one, same, Rule("w", "int8", {"axis": -2})}) == 2
    assert dict(one.options) == {"axis": (-2, -1)}


@pytest.mark.parametrize(
    ("path", "index"),
    [("layers.0.mlp.kernel", 0), ("layers.10.kernel", 1), ("head.kernel", 2), ("bias", 3), ("mlp", None)],
)
def test_the_first_match_wins(path, index):
    rules = [
        Rule(r"mlp\.kernel$", "nf4"),
        Rule(r"layers\.1", "int8"),
        Rule("kernel", None),
        Rule(lambda path, leaf: path == "bias" and leaf.shape == (64, 64), "binary"),
    ]
    assert find_rule(rules, path, LEAF) is (None if index is None else rules[index])


def test_apply(getkey):
    x = jax.random.normal(getkey(), (6, 10))
    assert apply_rule(Rule("", None), "w", x) is x
    nf4 = apply_rule(Rule("", "nf4", {"axis": 0, "block_size": 4}), "w", x)
    assert isinstance(nf4, ArrayNF4)
    assert (nf4.axis, nf4.block_size, nf4.shape) == (-2, 4, (6, 10))
    int8 = apply_rule(Rule("", "int8", {"axis": -2}), "w", x)
    assert isinstance(int8, Array8B)
    assert int8.scale.shape == (1, 10)


@pytest.mark.parametrize(
    ("rule", "error", "why"),
    [
        (Rule("w", "nf4", {"axis": -3}), ValueError, "axis -3 is out of range for an array of 2 axes"),
        (Rule("w", "nf4", {"block_size": 3}), ValueError, "`block_size=3` must be even"),
        (Rule("w", "int8", {"axis": "a"}), TypeError, "`axis` must be an int"),
    ],
    ids=str,
)
def test_an_error_names_leaf_and_rule(rule, error, why):
    with pytest.raises(error) as caught:
        apply_rule(rule, "layers.0.w", jnp.ones((6, 10)))
    assert f"'layers.0.w', float32[6, 10], can't be quantized by the rule '{rule}'" in str(caught.value)
    assert why in str(caught.value)
