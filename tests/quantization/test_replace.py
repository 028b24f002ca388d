"""`dataclasses.replace` of every quantized array, field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import implicit, is_implicit
from eformer.ops.quantization import RSROperatorBinary, RSROperatorTernary, formats

from .cases import CASES, about, assert_same_leaves, example, normal

TYPES: dict[str, Any] = {str(case): form.array_type for case in CASES for form in formats() if form.name == case.name}
OPERATORS: dict[str, Any] = {
    "rsr-binary": lambda: RSROperatorBinary.quantize(normal(), k=4),
    "rsr-ternary": lambda: RSROperatorTernary.quantize(normal(), k=4),
    "rsr-stack": lambda: jax.vmap(lambda w: RSROperatorBinary.quantize(w, k=4))(normal((2, 6, 10))),
}
TYPES |= {"rsr-binary": RSROperatorBinary, "rsr-ternary": RSROperatorTernary, "rsr-stack": RSROperatorBinary}
CHANGES = {"dtype": jnp.dtype(jnp.bfloat16), "use_kernel": False, "activation_dtype": "int8"}


def array(name: str) -> Any:
    return OPERATORS[name]() if name in OPERATORS else next(example(case)[0] for case in CASES if str(case) == name)


@pytest.mark.parametrize("name", TYPES)
def test_a_field_replaced_by_itself_changes_nothing(name):
    q = array(name)
    for field in dataclasses.fields(TYPES[name]):
        with about(field.name):
            assert_same_leaves(dataclasses.replace(q, **{field.name: getattr(q, field.name)}), q)


@pytest.mark.parametrize("name", TYPES)
def test_a_field_replaced_is_the_only_one_that_changes(name):
    q = array(name)
    for field, value in CHANGES.items():
        with about(field):
            changed = jax.jit(lambda q, new={field: value}: dataclasses.replace(q, **new))(q)
            assert getattr(changed, field) == value
            assert_same_leaves(dataclasses.replace(changed, **{field: getattr(q, field)}), q)


MOVES: dict[str, Any] = {
    "transpose": jnp.transpose,
    "slice": lambda q: q[:4],
    "reshape": lambda q: jnp.reshape(q, (1, *q.shape)),
    "take": lambda q: jnp.take(jnp.stack([q, q]), jnp.array([1]), axis=0),
    "concatenate": lambda q: jnp.concatenate([q, q], axis=0),
    "pad": lambda q: jnp.pad(q, ((0, 0), (0, 0))),
    "negative": jnp.negative,
    "astype": lambda q: q.astype(jnp.float16),
}


@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_moved_array_keeps_what_it_was_told(case):
    q = dataclasses.replace(example(case)[0], use_kernel=False, activation_dtype="int8", dtype=jnp.bfloat16)
    moved = {move: implicit(function)(q) for move, function in MOVES.items()}
    kept = {move: each for move, each in moved.items() if is_implicit(each)}  # a slice through a block is dense
    wanted = {move: (False, "int8", jnp.float16 if move == "astype" else jnp.bfloat16) for move in kept}
    assert {move: (each.use_kernel, each.activation_dtype, each.dtype) for move, each in kept.items()} == wanted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_array_quantized_as_another_is_told_the_same(case):
    q = dataclasses.replace(example(case)[0], use_kernel=False, activation_dtype="int8", dtype=jnp.bfloat16)
    again = q._requantized(q.materialize())
    assert (again.use_kernel, again.activation_dtype, again.dtype) == (False, "int8", jnp.bfloat16)


def test_codes_of_an_operator_can_be_replaced():
    q = RSROperatorBinary.from_matrix(jnp.eye(4, dtype=jnp.int32), k=4)
    flipped = dataclasses.replace(q, codes=15 - q.codes)
    assert np.array_equal(flipped.materialize(), 1 - np.eye(4))
    assert_same_leaves(RSROperatorBinary(codes=q.codes, k=4), q)


BAD = {
    "neither": (lambda: RSROperatorBinary(k=4), TypeError, "give `one_hot_maps` or `codes`"),
    "both": (
        lambda: RSROperatorBinary(np.array([[1]]), 4, codes=np.array([[1]])),
        TypeError,
        "give `one_hot_maps` or `codes`",
    ),
    "a vector": (lambda: RSROperatorBinary(codes=np.array([1]), k=4), ValueError, r"shape \(num_blocks, n\), got int"),
    "floats": (lambda: RSROperatorBinary(codes=np.ones((1, 1)), k=4), ValueError, "codes are integers"),
    "too large": (lambda: RSROperatorBinary(codes=np.array([[16]]), k=4), ValueError, "from 0 to 15, got 16 to 16"),
    "activations": (
        lambda: dataclasses.replace(array("rsr-binary"), activation_dtype="int4"),
        ValueError,
        "`activation_dtype` must be None or 'int8'",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_codes_are_named(bad):
    make, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        make()
