"""`jax.export`: programs with quantized weights for any batch, written to bytes and read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from eformer.jaximus import ImplicitArray, aux_field, implicit, materialize
from eformer.ops.quantization import RSROperatorTernary

from .cases import Case, in_turn, name, normal


def embed_and_unembed(q: Any, ids: Any) -> Any:
    return jnp.tanh(q[ids]) @ q.T


def scan(q: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, q)[0]


def attend(q: Any, x: Any) -> Any:
    heads = (x @ q).reshape(*x.shape[:2], 4, 8)
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", heads, heads), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, heads).reshape(x.shape)


# The function, the shape of the weight, and that of the input in symbols and in numbers.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], str, tuple[int, ...], Any]] = {
    "matmul": (lambda q, x: jnp.tanh(x @ q), (64, 32), "b, 64", (5, 64), jnp.float32),
    "scaled": (lambda q, x: x @ (q * 0.5), (64, 32), "b, t, 64", (2, 3, 64), jnp.float32),
    "embedding": (embed_and_unembed, (64, 32), "b", (5,), jnp.int32),
    "attention": (attend, (32, 32), "b, t, 32", (3, 7, 32), jnp.float32),
    "scan": (scan, (3, 64, 64), "b, 64", (5, 64), jnp.float32),
}
INT8, NF4, NESTED = Case.of("int8"), Case.of("nf4", axis=-2), Case.of("nf4", double_quantization=True)
CHANNEL, TERNARY = Case.of("ternary", scale="channel"), Case.of("ternary")
RSR = RSROperatorTernary.quantize
CHOSEN = [(INT8, program) for program in PROGRAMS] + [(make, "matmul") for make in (NF4, NESTED, CHANNEL, TERNARY, RSR)]
CHOSEN += [(NESTED, "scan"), (NF4, "attention")]
GIVEN = [(*chosen, given) for chosen, given in in_turn(CHOSEN, ["arguments", "leaves", "closed over"], each=1)]


def structs(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize(("make", "program", "given"), GIVEN, ids=name)
def test_round_trip_with_a_symbolic_batch(make, program, given):
    function, shape, symbols, sizes, dtype = PROGRAMS[program]
    q = make(normal(shape) / 8)
    leaves, treedef = jax.tree.flatten(q)
    run = implicit(function)
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "arguments": (run, (q,)),
        "leaves": (lambda leaves, x: run(jax.tree.unflatten(treedef, leaves), x), (leaves,)),
        "closed over": (lambda x: run(q, x), ()),
    }
    call, weights = programs[given]
    exported = export.export(jax.jit(lambda *args: materialize(call(*args))))(
        *structs(weights), jax.ShapeDtypeStruct(export.symbolic_shape(symbols), dtype)
    )
    restored = export.deserialize(exported.serialize())
    x = jnp.arange(sizes[0], dtype=dtype) if dtype == jnp.int32 else normal(sizes, dtype, seed=1)
    expected = function(q.materialize(), x)
    out = restored.call(*weights, x)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)  # sums of 64 terms, a few after another


def test_programs_that_return_quantized_arrays():
    q = CHANNEL(normal((8, 4)))
    restored = export.deserialize(export.export(jax.jit(implicit(lambda q: q.T)))(structs(q)).serialize())
    out = restored.call(q)
    assert jax.tree.structure(out) == jax.tree.structure(q.T)
    np.testing.assert_array_equal(out.materialize(), q.materialize().T)


class Named(ImplicitArray):
    warn_on_materialize = False

    weight: jax.Array
    tags: frozenset[str] = aux_field(default=frozenset({"a"}))

    def materialize(self) -> jax.Array:
        return self.weight


def test_what_cannot_be_written_is_refused_in_words():
    exported = export.export(jax.jit(implicit(lambda x: x + 1)))(structs(Named(jnp.ones(3))))
    with pytest.raises(TypeError, match=r"frozenset.*jax\.tree\.leaves"):
        exported.serialize()
