"""What our metadata says of an array is checked by its class, when the file is opened, and by the constructor alike."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantization.cases import normal

from eformer.checkpoint import CheckpointError, load, open_checkpoint
from eformer.ops.quantization import Array1B, Array8B, ArrayNF4, RSROperatorBinary, RSROperatorTernary, quantize

from .files import file_of, ours, parts_of, safetensors_file

BITS = np.arange(30).reshape(3, 10) % 2
ARRAYS: dict[str, Any] = {
    "nf4": quantize(normal((4, 66)), dtype="nf4", block_size=32),
    "nested": quantize(normal((4, 66)), dtype="nf4", block_size=32, double_quantization=True),
    "int8": quantize(normal((4, 6)), dtype="int8"),
    "ternary": quantize(normal((5, 6)), dtype="ternary", scale="channel"),
    "binary rsr": RSROperatorBinary.from_matrix(jnp.asarray(BITS), k=4),
    "wide rsr": RSROperatorBinary.from_matrix(jnp.asarray(BITS), k=9),
    "ternary rsr": RSROperatorTernary.from_matrix(jnp.asarray(BITS - 1), k=4),
}


@pytest.mark.parametrize("q", ARRAYS.values(), ids=ARRAYS)
def test_the_files_that_are_changed_below_are_right(q: Any):
    again = load(file_of(q, {}, {}))["w"]
    assert jax.tree.structure(again) == jax.tree.structure(q)
    assert np.array_equal(again.materialize(), q.materialize())


def half(name: str) -> dict[str, Any]:
    return parts_of(ARRAYS[name], "w.other")[0]


U8 = np.zeros((4, 33), np.uint8)
# Of which array, what the description says instead, which tensors are others, and what is said of it.
LIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "an activation dtype": ("int8", {"static/activation_dtype": "bogus"}, {}, "must be None or 'int8', got 'bogus'"),
    "a list as one": ("int8", {"static/activation_dtype": ["int8"]}, {}, "must be None or 'int8'"),
    "a kernel of text": ("nf4", {"static/use_kernel": "yes"}, {}, "`use_kernel` must be True or False, got 'yes'"),
    "a kernel of 1": ("ternary rsr", {"static/use_kernel": 1}, {}, "`use_kernel` must be True or False"),
    "an unknown field": ("nf4", {"static/zero_point": 1}, {}, "has no static field 'zero_point'"),
    "a block of text": ("nf4", {"static/block_size": "64"}, {}, "`block_size` must be an int, got str"),
    "a fraction of an axis": ("nf4", {"static/axis": 2.5}, {}, "`axis` must be an int"),
    "an axis that is true": ("ternary", {"static/axis": True}, {}, "`axis` must be an int"),
    "too much padding": ("nf4", {"static/padding": 7}, {}, "`padding` is 1 for an odd length"),
    "less than none": ("ternary", {"static/padding": -1}, {}, "that is no array"),
    "padding of text": ("ternary", {"static/padding": "1"}, {}, "`padding` must be an int"),
    "no dtype": ("nf4", {"static/dtype": ...}, {}, "ArrayNF4 needs `dtype`"),
    "null as dtype": ("nf4", {"static/dtype": None}, {}, "ArrayNF4 needs `dtype`"),
    "a dtype of three bits": ("nf4", {"static/dtype": {"dtype": "int3"}}, {}, "which is no dtype"),
    "a dtype of text": ("nf4", {"static/dtype": "float32x"}, {}, "`dtype` must be a dtype, got 'float32x'"),
    "a complex dtype": ("int8", {"static/dtype": {"dtype": "complex64"}}, {}, "floating point or integer dtype"),
    "bool": ("binary rsr", {"static/dtype": {"dtype": "bool"}}, {}, "floating point or integer dtype"),
    "an original dtype": ("binary rsr", {"static/org_dtype": {"dtype": "bool"}}, {}, "floating point or integer"),
    "codes that are no bytes": ("nf4", {}, {"packed": U8.view(np.int8)}, "packed must be uint8.* got int8"),
    "codes of another rank": ("nf4", {}, {"packed": U8[0]}, "that is no array"),
    "scales of integers": ("nf4", {}, {"absmax": np.ones((4, 3), np.int32)}, "absmax must be floating point.* int32"),
    "too few scales": ("nf4", {}, {"absmax": np.ones((4, 2), np.float32)}, "it must have 3 entries or 1"),
    "too few rows of scales": ("nf4", {}, {"absmax": np.ones((3, 3), np.float32)}, "it must have 4 entries or 1"),
    "codes as scales": ("nf4", {}, {"absmax": np.ones((4, 3), np.uint8)}, "a quantized absmax is uint8, with `nested`"),
    "no scales": ("nf4", {"leaves/absmax": ...}, {}, "ArrayNF4 needs `absmax`"),
    "nested without offset": ("nested", {"leaves/offset": ...}, {}, "with `nested` and `offset`"),
    "offset without nested": ("nested", {"leaves/nested": ...}, {}, "with `nested` and `offset`"),
    "nested too long": ("nested", {}, {"nested": np.ones(2, np.float32)}, r"has `nested` \(1,\)"),
    "nested of halves": ("nested", {}, {"nested": np.ones(1, np.float16)}, "nested must be float32"),
    "an offset per row": ("nested", {}, {"offset": np.ones(4, np.float32)}, r"has `nested` \(4, 1\)"),
    "nested that is plain": ("nested", {}, {"absmax": np.ones((4, 3), np.float32)}, "a quantized absmax is uint8"),
    "nested that is broadcast": ("nested", {}, {"absmax": np.ones((1, 3), np.uint8)}, "has a code per block"),
    "weights of 16 bits": ("int8", {}, {"weight": np.ones((4, 6), np.int16)}, "weight must be int8, got int16"),
    "a scale of integers": ("int8", {}, {"scale": np.ones((4, 1), np.int8)}, "scale must be floating point"),
    "a scale that is too long": ("int8", {}, {"scale": np.ones((4, 2), np.float32)}, "does not broadcast"),
    "a scale of one axis": ("int8", {}, {"scale": np.ones(4, np.float32)}, "must have the 2 axes"),
    "an axis of text": ("int8", {"static/axis": ["-1"]}, {}, "int or a tuple of ints"),
    "no axis": ("int8", {"static/axis": None}, {}, "must be sorted and counted from the end"),
    "an axis twice": ("int8", {"static/axis": [-1, -1]}, {}, "names an axis twice"),
    "an axis with scales": ("int8", {"static/axis": [-2]}, {}, "must have length 1 along the axes"),
    "an axis too far": ("int8", {"static/axis": [-3]}, {}, "out of range"),
    "bytes with a sign": ("ternary", {}, {"weight": np.ones((2, 6), np.int8)}, "weight must be uint8"),
    "a scale per row": ("ternary", {}, {"scale": np.ones((2, 6), np.float32)}, "does not broadcast"),
    "a ternary axis": ("ternary", {"static/axis": -3}, {}, "packed along axis -3"),
    "no bits": ("binary rsr", {"static/k": 0}, {}, "`k=0` must be from 1 to 16"),
    "many bits": ("binary rsr", {"static/k": 2**60}, {}, "must be from 1 to 16"),
    "bits of text": ("binary rsr", {"static/k": "4"}, {}, "`k` must be an int"),
    "a byte for 9 bits": ("binary rsr", {"static/k": 9}, {}, "codes for `k=9` are uint16"),
    "two bytes for 4 bits": ("wide rsr", {"static/k": 4, "static/padding": 0}, {}, "codes for `k=4` are uint8"),
    "padding of a block": ("binary rsr", {"static/padding": 4}, {}, "`padding=4` must be from 0 to 3"),
    "codes with a sign": ("binary rsr", {}, {"codes": np.ones((3, 3), np.int8)}, "codes must be uint8"),
    "codes of a vector": ("binary rsr", {}, {"codes": np.ones(3, np.uint8)}, "are no matrix"),
    "codes too large": ("binary rsr", {}, {"codes": np.full((3, 3), 16, np.uint8)}, "from 0 to 15, and there is a 16"),
    "codes too large for 9": ("wide rsr", {}, {"codes": np.full((2, 3), 512, np.uint16)}, "there is a 512"),
    "codes of a half": ("ternary rsr", {}, {"rsr_b2.codes": np.full((3, 3), 255, np.uint8)}, "there is a 255"),
    "halves of two k": ("ternary rsr", {"leaves/rsr_b1/static/k": 3}, {}, "`k=3` and .*`k=4`"),
    "halves of two shapes": ("ternary rsr", {"leaves/rsr_b1/static/padding": 1}, {}, "must have the same shape"),
    "half an operator": ("ternary rsr", {"leaves/rsr_b2": ...}, {}, "needs `rsr_b2`"),
    "a tensor as half": ("ternary rsr", {"leaves/rsr_b2": "w.rsr_b2.codes"}, {}, "must be an RSROperatorBinary"),
    "unsigned": ("ternary rsr", {"static/dtype": {"dtype": "uint8"}}, {}, "can't hold -1"),
    "an array of arrays": ("int8", {"leaves/weight": {**half("int8"), "leaves": {}}}, {}, "Array8B needs"),
}


VALUES = {"codes too large", "codes too large for 9", "codes of a half"}  # which only reading them shows


@pytest.mark.parametrize("lie", LIES)
def test_a_file_is_refused_when_it_is_opened(lie: str):
    name, changes, leaves, match = LIES[lie]
    opened = load if lie in VALUES else open_checkpoint
    with pytest.raises(CheckpointError, match=f"(?s)tensor 'w': .*{match}"):
        opened(file_of(ARRAYS[name], changes, leaves))


def test_scales_of_64_bits_become_those_that_jax_holds():
    q = ARRAYS["int8"]
    again = load(file_of(q, {}, {"scale": np.asarray(q.scale, np.float64)}))["w"]
    assert again.scale.dtype == jnp.float32
    assert np.array_equal(again.materialize(), q.materialize())


def test_an_array_in_an_array_is_refused():
    inner, tensors = parts_of(ARRAYS["int8"].with_dtype(jnp.int8), "v")
    outer, more = parts_of(ARRAYS["int8"])
    outer["leaves"]["weight"] = inner
    with pytest.raises(CheckpointError, match="weight must be an array, int8, got Array8B"):
        open_checkpoint(safetensors_file(tensors | more, ours({"w": outer}, "w")))


W = np.ones((4, 6), np.float32)
CONSTRUCTORS = {
    "int8 of floats": (lambda: Array8B(W[:, :1], W), TypeError, "weight must be int8, got float32"),
    "int8 of a list": (lambda: Array8B([1.0], W.astype(np.int8)), TypeError, "scale must be an array"),
    "a scale of integers": (lambda: Array8B(U8[:, :1], U8.view(np.int8)), TypeError, "scale must be floating point"),
    "a wrong axis": (lambda: Array8B(W, W.astype(np.int8), (0,)), ValueError, "must have length 1 along the axes"),
    "nf4 of int8": (lambda: ArrayNF4(U8.view(np.int8), W[:, :1]), TypeError, "packed must be uint8"),
    "nested alone": (lambda: ArrayNF4(U8, U8[:, :2], nested=W[0, :1]), ValueError, "with `nested` and `offset`"),
    "padding": (lambda: ArrayNF4(U8, W[:, :2], padding=7), ValueError, "`padding` is 1 for an odd length"),
    "kernel": (lambda: ArrayNF4(U8, W[:, :2], use_kernel="yes"), TypeError, "`use_kernel` must be True or False"),
    "activations": (lambda: Array1B(U8, activation_dtype="bogus"), ValueError, "None or 'int8', got 'bogus'"),
    "a scale of a ternary": (lambda: Array1B(U8, scale=W), ValueError, "does not broadcast"),
    "a complex ternary": (lambda: Array1B(U8, dtype=jnp.complex64), TypeError, "floating point or integer"),
    "a kernel of rsr": (lambda: RSROperatorBinary(U8, 8, 0, W.dtype, use_kernel=1), TypeError, "True or False"),
}


@pytest.mark.parametrize(("make", "error", "match"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_a_constructor_says_the_same(make: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        make()
