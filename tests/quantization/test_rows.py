"""Parts of an array along the axis of its blocks: only the elements that are asked for are decoded, or their blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer import explain, implicit, materialization_error
from eformer.jaximus import materialize
from eformer.ops.quantization import formats

from .cases import ALIKE, Case, about, assert_same_array, largest_float, name, normal

SHAPE = (64, 48)
UNLIKE = [form for form in formats() if form.name not in ALIKE]
BLOCKS = [
    *(Case.of(form.name, axis=0) for form in UNLIKE if "axis" in form.options),
    *(Case.of(form.name, axis=0, block_size=8) for form in UNLIKE if "block_size" in form.options),
    Case.of("nf4", axis=0, block_size=8, double_quantization=True),
    Case.of("int4", axis=0, block_size=3),
    Case.of("int4", axis=0, block_size=3, double_quantization=True),
    Case.of("int3", axis=0, block_size=8, double_quantization=True),
    Case.of("ternary", axis=0, scale="channel"),
    Case.of("fp8", block_shape=(8, 16)),
    Case.of("fp8", block_shape=(64, 48)),
]
every_block = pytest.mark.parametrize("case", BLOCKS, ids=str)
IDS = jnp.array([3, 63, 0, 17, 17])
PARTS: dict[str, Any] = {
    "number": lambda q: q[3],
    "last": lambda q: q[-1],
    "slice": lambda q: q[3:6],
    "slice of both": lambda q: q[3:6, 5:40],
    "steps": lambda q: q[1:20:7],
    "element": lambda q: q[3, 4],
    "column": lambda q: q[:, 4],
    "ids": lambda q: q[IDS],
    "ids, taken": lambda q: jnp.take(q, IDS, axis=0),
    "ids out of bounds": lambda q: jnp.take(q, IDS + 50, axis=0),
    "ids out of bounds, filled": lambda q: q.at[IDS + 50].get(mode="fill", fill_value=7),
    "ids out of bounds, clipped": lambda q: jnp.take(q, IDS + 50, axis=0, mode="clip"),
    "table of ids": lambda q: q[jnp.stack([IDS, IDS])],
    "small ids": lambda q: q[IDS.astype(jnp.uint8)],
    "ids of both": lambda q: q[IDS, IDS],
    "ids and a slice": lambda q: q[IDS, 4:9],
    "traced": lambda q: lax.dynamic_index_in_dim(q, IDS[0], 0, keepdims=False),
    "traced rows": lambda q: lax.dynamic_slice_in_dim(q, IDS[3], 3, 0),
    "traced at the end": lambda q: lax.dynamic_slice_in_dim(q, IDS[1], 3, 0),
    "many": lambda q: jax.vmap(lambda i: q[i])(IDS),
    "windows": lambda q: jax.vmap(lambda i: lax.dynamic_slice(q, (i, jnp.zeros_like(i)), (2, 48)))(IDS),
}


def all_parts(q):
    return {part: function(q) for part, function in PARTS.items()}


@every_block
def test_parts_are_those_of_the_dense_array(case):
    """As one program: that is compiled faster than its parts."""
    q = case(normal(SHAPE))
    assert explain(all_parts)(q).dense_bytes == 0
    assert largest_float(implicit(all_parts), q) < q.size
    found, expected = jax.jit(lambda q: (materialize(implicit(all_parts)(q)), all_parts(q.materialize())))(q)
    for part in PARTS:
        with about(part):
            assert_same_array(found[part], expected[part])


@every_block
def test_more_rows_than_there_are_take_no_more_memory_than_the_result(case):
    q, ids = case(normal(SHAPE)), jnp.arange(100) % 64
    assert explain(lambda q: q[ids])(q).dense_bytes == 0
    assert_same_array(q[ids], q.materialize()[ids])


def test_a_stack_of_matrices():
    q = Case.of("nf4", axis=1, block_size=8)(normal((3, 64, 48)))
    assert_same_array(implicit(lambda q: q[:, IDS])(q), q.materialize()[:, IDS])
    assert_same_array(implicit(lambda q: q[1, IDS])(q), q.materialize()[1, IDS])


# --- a token ---


def embed(table, token):
    return table[token] * 2 + 1


TOKENS = {"traced": jnp.int32(3), "int": 3, "NumPy": np.int64(3), "tokens": IDS}


@pytest.mark.parametrize("case", [*BLOCKS, *(Case.of(form.name) for form in formats())], ids=str)
def test_the_embedding_of_a_token_is_no_dense_copy(case):
    table = case(normal(SHAPE))
    dense = table.materialize()
    with materialization_error():
        compiled = jax.jit(lambda table: {kind: implicit(embed)(table, token) for kind, token in TOKENS.items()})(table)
    for kind, token in TOKENS.items():
        with about(kind), materialization_error():
            found = implicit(embed)(table, token)
        with about(kind):
            assert_same_array(found, embed(dense, token))
            assert_same_array(compiled[kind], embed(dense, token))


def grown(q):
    return jnp.concatenate([q[:1]] * 64) + 1


def whole_vector(q):
    return q.reshape(-1) + 1


@pytest.mark.parametrize("function", [grown, whole_vector], ids=name)
def test_what_is_made_of_rows_is_a_dense_copy_again(function):
    q = Case.of("int8", axis=1)(normal(SHAPE))
    assert explain(function)(q).dense_bytes >= q.size * 4


# --- NumPy ---

FUNCTIONS = {
    "tanh": np.tanh,
    "abs": np.abs,
    "add": lambda q: np.add(q, np.float32(1)),
    "add, right": lambda q: np.add(np.ones(SHAPE, np.float32), q),
    "matmul": lambda q: np.matmul(np.ones((2, SHAPE[0]), np.float32), q),
    "reduce": np.add.reduce,
    "outer": lambda q: np.multiply.outer(np.ones(2, np.float32), q),
    "out": lambda q: np.add(q, np.float32(1), out=np.zeros(SHAPE, np.float32)),
    "in place": lambda q: np.zeros(SHAPE, np.float32).__iadd__(q),
    "frexp": np.frexp,
    "where": lambda q: np.exp(q, where=np.ones(SHAPE, bool), out=np.zeros(SHAPE, np.float32)),
    "a function that JAX has not": np.spacing,
}


@pytest.mark.filterwarnings("ignore:no rule serves")
@pytest.mark.parametrize("form", ["nf4", "int8", "ternary"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_numpy_take_the_dense_values(function, form):
    q = Case.of(form)(normal(SHAPE))
    for found, expected in zip(*map(jax.tree.leaves, (function(q), function(np.asarray(q)))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
