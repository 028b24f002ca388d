"""Modules of Flax NNX keep state in variables: it moves inside `implicit` as it does without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random as jr

from eformer.jaximus import explain, implicit

from .arrays import Scaled

nnx = pytest.importorskip("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow")
TOLERANCE = 1e-5  # a few float32 roundings of values of about 1


class Stateful(nnx.Module):
    """Everything that a forward pass writes: a counter, statistics, a generator, a sown value, an attribute."""

    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))
        self.calls = 0

    def __call__(self, x):
        self.count[...] += 1
        self.calls += 1
        x = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return self.dropout(self.norm(x))


def quantized(module):
    """`module` with an implicit array in each kernel, and the same module with that array made dense."""

    def is_kernel(path):
        return any(getattr(key, "key", getattr(key, "name", "")) == "kernel" for key in path)

    def rounded(path, leaf):
        if not is_kernel(path):
            return leaf
        scale = jnp.full((1,) * leaf.ndim, 1 / 32)
        return Scaled(jnp.round(leaf * 32).astype(jnp.int8), scale)

    implicit_one = jax.tree_util.tree_map_with_path(rounded, module)
    dense = jax.tree.map(
        lambda x: x.materialize() if isinstance(x, Scaled) else jnp.copy(x),
        implicit_one,
        is_leaf=lambda x: isinstance(x, Scaled),
    )
    return implicit_one, dense


def run(module, x):
    return module(x)


def split_and_merge(module, x):
    graph, state = nnx.split(module)

    @jax.jit
    def step(state, x):
        def body(state, x):
            merged = nnx.merge(graph, state)
            return merged(x), nnx.state(merged)

        return implicit(body)(state, x)

    for leaf in jax.tree.leaves(nnx.state(module)):
        assert not isinstance(leaf, jax.core.Tracer)
    out, state = step(state, x)
    nnx.update(module, state)
    return out


WAYS = {
    "eager": lambda m, x: implicit(run)(m, x),
    "module": lambda m, x: implicit(m)(x),
    "bound method": lambda m, x: implicit(m.__call__)(x),
    "closed over": lambda m, x: implicit(lambda x: m(x))(x),
    "nnx.jit of implicit": lambda m, x: nnx.jit(implicit(run))(m, x),
    "implicit of nnx.jit": lambda m, x: implicit(nnx.jit(run))(m, x),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def state_of(module):
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in jax.tree.leaves(nnx.state(module, nnx.Not(nnx.Param)), is_leaf=lambda x: isinstance(x, Scaled))
    ]


@ways
@pytest.mark.parametrize("has_quantized", [True, False])
def test_state_moves_as_in_dense_code(way, has_quantized, getkey):
    module, dense = quantized(Stateful()) if has_quantized else (Stateful(), Stateful())
    for _ in range(3):
        x = jr.normal(getkey(), (4, 8))
        np.testing.assert_allclose(way(module, x), dense(x), atol=TOLERANCE)
    assert module.count[...] == 3
    assert len(module.hidden.get_value()) == 3
    for ours, theirs in zip(state_of(module), state_of(dense), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    assert isinstance(module.linear.kernel.get_value(), Scaled) == has_quantized


def test_jit_with_split_and_merge(getkey):
    module, dense = quantized(Stateful())
    for _ in range(2):
        x = jr.normal(getkey(), (4, 8))
        np.testing.assert_allclose(split_and_merge(module, x), dense(x), atol=TOLERANCE)
    assert module.count[...] == 2


def test_attributes_that_are_no_variables(getkey):
    module, _ = quantized(Stateful())
    implicit(run)(module, jr.normal(getkey(), (4, 8)))
    assert module.calls == 1


@ways
def test_attention_advances_its_cache(way, getkey):
    attention = nnx.MultiHeadAttention(2, 8, 8, decode=True, rngs=nnx.Rngs(0))
    module, dense = quantized(attention)
    for each in (module, dense):
        each.init_cache((1, 4, 8))
    for step in range(4):
        x = jr.normal(getkey(), (1, 1, 8))
        np.testing.assert_allclose(way(module, x), dense(x), atol=TOLERANCE)
        assert module.cache_index[...] == step + 1


def test_state_written_before_an_error_is_kept(getkey):
    module, _ = quantized(Stateful())

    def fails(module, x):
        module(x)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        implicit(fails)(module, jr.normal(getkey(), (4, 8)))
    assert module.count[...] == 1


def test_a_variable_that_holds_an_implicit_array_can_be_written():
    module, _ = quantized(Stateful())
    before = module.linear.kernel.get_value()

    def transpose(module):
        module.linear.kernel.set_value(module.linear.kernel.get_value().T)

    implicit(transpose)(module)
    after = module.linear.kernel.get_value()
    assert isinstance(after, Scaled)
    assert jnp.array_equal(after.materialize(), before.materialize().T)


def test_variables_that_are_shared_stay_shared():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.b = nnx.List([self.a])
            self.kernel = self.a.kernel

    module, _ = quantized(Tied())
    module.b[0] = module.a
    module.kernel = module.a.kernel

    def check(module):
        assert module.kernel is module.a.kernel
        assert module.b[0] is module.a

    implicit(check)(module)
    check(module)


def test_a_variable_of_another_level_is_refused_as_flax_does(getkey):
    module, _ = quantized(Stateful())

    @jax.jit
    def step(x):
        return implicit(lambda x: module(x))(x)

    with pytest.raises(Exception, match="different trace level"):
        step(jr.normal(getkey(), (4, 8)))


def test_metadata_of_a_variable():
    module, _ = quantized(Stateful())
    implicit(lambda m: m.linear.kernel.set_metadata(seen=True))(module)
    assert module.linear.kernel.seen


def test_scan_over_layers_with_state(getkey):
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(seed):
        return nnx.Linear(8, 8, rngs=nnx.Rngs(jr.key(seed)))

    module, dense = quantized(make(jnp.arange(3)))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return jnp.tanh(layer(x))

    x = jr.normal(getkey(), (4, 8))
    np.testing.assert_allclose(implicit(forward)(module, x), forward(dense, x), atol=TOLERANCE)


def test_training_step_inside(getkey):
    """The gradient and the optimizer of Flax, with an implicit array that is not trained beside what is."""

    class Model(nnx.Module):
        def __init__(self):
            self.base = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.head = nnx.Param(jnp.ones((8, 1)))

        def __call__(self, x):
            return self.base(x) @ self.head[...]

    module, dense = quantized(Model())
    x = jr.normal(getkey(), (4, 8))

    def gradient(module, x):
        return nnx.grad(lambda m, x: jnp.sum(m(x) ** 2), argnums=nnx.DiffState(0, nnx.PathContains("head")))(module, x)

    ours, theirs = implicit(gradient)(module, x), gradient(dense, x)
    np.testing.assert_allclose(jax.tree.leaves(ours)[0], jax.tree.leaves(theirs)[0], rtol=1e-4)


def test_reading_state_makes_nothing_dense(getkey):
    module, _ = quantized(Stateful())
    table = explain(run)(module, jr.normal(getkey(), (4, 8)))
    assert module.count[...] == 0  # `explain` runs nothing
    assert table
