"""An implicit array is a tree of its leaves, as JAX's own functions of trees see it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import tree_util as jtu

from eformer.jaximus import (
    ImplicitArray,
    aux_field,
    implicit,
    is_implicit,
    materialize,
    tree_flatten_with_implicit,
    tree_flatten_with_path_with_implicit,
    tree_leaves_with_implicit,
    tree_map_with_implicit,
    tree_map_with_path_with_implicit,
    tree_structure_with_implicit,
)

from .arrays import ARRAYS, Filled, Scaled, Shifted, assert_same, densely, integers, low_rank, name, scaled, shifted
from .test_transforms import squares

arrays = pytest.mark.parametrize("make", ARRAYS, ids=name)


class Packed(ImplicitArray):
    """With static fields: `packed * 2**exponent`."""

    warn_on_materialize = False

    packed: jax.Array
    exponent: int = aux_field(default=0)
    names: tuple[str, ...] = aux_field(default=(), kw_only=True)

    def materialize(self) -> jax.Array:
        return (self.packed.astype(jnp.float32) * 2.0**self.exponent).astype(self.dtype)


def packed(dtype: Any = jnp.float32) -> Packed:
    return Packed(jnp.ones((4, 2), jnp.uint8), 3, names=("a", "b"), dtype=dtype)


# --- structure ---


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"mlp": packed()}, ["['mlp'].packed"]),
        ([scaled(jax.random.key(0), (2, 2))], ["[0].w", "[0].s"]),
        ({"a": shifted(jax.random.key(0), (2, 2))}, ["['a'].base.a", "['a'].base.b", "['a'].by"]),
    ],
    ids=["dict", "list", "nested"],
)
def test_key_paths_name_the_fields(tree, paths):
    assert [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)] == paths


def test_static_fields_are_no_leaves():
    assert len(jtu.tree_leaves(packed())) == 1
    assert jtu.tree_structure(packed()) == jtu.tree_structure(packed())
    assert jtu.tree_structure(packed()) != jtu.tree_structure(packed(jnp.bfloat16))
    assert hash(jtu.tree_structure(packed())) == hash(jtu.tree_structure(packed()))


@arrays
def test_tree_map(make, getkey):
    q = make(getkey(), (4, 6))
    same = jtu.tree_map(lambda leaf: leaf, q)
    assert type(same) is type(q)
    assert_same(same, q)
    assert_same(same.materialize(), q.materialize())


@arrays
@pytest.mark.parametrize(
    "leaf",
    [None, object(), jax.ShapeDtypeStruct((2, 2), jnp.float32), "text", 3],
    ids=["None", "object", "s", "str", "3"],
)
def test_leaves_can_be_anything(leaf, make, getkey):
    q = make(getkey(), (4, 6))
    replaced = jtu.tree_map(lambda _: leaf, q)
    assert type(replaced) is type(q)
    assert type(q).__name__ in repr(replaced)
    assert jtu.tree_leaves(replaced, is_leaf=lambda x: x is None) == [leaf] * len(jtu.tree_leaves(q))
    assert jtu.tree_structure(jtu.tree_map(lambda _: 0, q)) == jtu.tree_structure(q)


@arrays
def test_abstract_leaves_tell_shape_and_dtype(make, getkey):
    q = make(getkey(), (4, 6))
    abstract = jax.eval_shape(lambda q: q, q)
    assert (abstract.shape, abstract.dtype, abstract.nbytes) == (q.shape, q.dtype, q.nbytes)


@arrays
def test_stacking_leaves_stacks_the_array(make, getkey):
    layers = [make(getkey(), (4, 6)) for _ in range(3)]
    stack = jtu.tree_map(lambda *leaves: jnp.stack(leaves), *layers)
    assert stack.shape == (3, 4, 6)
    assert_same(stack.materialize(), jnp.stack([layer.materialize() for layer in layers]))
    last = jtu.tree_map(lambda leaf: leaf[2], stack)
    assert last.shape == (4, 6)
    assert_same(last.materialize(), layers[2].materialize())


def test_transposing_trees(getkey):
    trees = [{"q": scaled(getkey(), (2, 2))} for _ in range(2)]
    turned = jtu.tree_transpose(jtu.tree_structure([0, 0]), jtu.tree_structure(trees[0]), trees)
    assert type(turned["q"]) is Scaled
    assert isinstance(turned["q"].w, list)


def test_is_leaf(getkey):
    tree = {"q": scaled(getkey(), (2, 2)), "x": jnp.ones(())}
    leaves = jtu.tree_leaves(tree, is_leaf=is_implicit)
    assert [is_implicit(leaf) for leaf in leaves] == [True, False]


def test_tree_functions_with_implicit(getkey):
    q, x = scaled(getkey(), (4, 6)), jnp.ones(2)
    tree = {"q": q, "x": [x]}
    assert [leaf is expected for leaf, expected in zip(tree_leaves_with_implicit(tree), [q, x], strict=True)] == [
        True
    ] * 2
    leaves, structure = tree_flatten_with_implicit(tree)
    assert leaves[0] is q
    assert structure == tree_structure_with_implicit(tree) == jtu.tree_structure({"q": 0, "x": [0]})
    paths, _ = tree_flatten_with_path_with_implicit(tree)
    assert [jtu.keystr(path) for path, _ in paths] == ["['q']", "['x'][0]"]
    assert tree_map_with_implicit(lambda leaf: leaf.shape, tree) == {"q": (4, 6), "x": [(2,)]}
    named = tree_map_with_path_with_implicit(lambda path, leaf: (jtu.keystr(path), leaf.size), tree)
    assert named == {"q": ("['q']", 24), "x": [("['x'][0]", 2)]}


def test_tree_map_with_implicit_takes_several_trees(getkey):
    q, x = scaled(getkey(), (4, 6)), integers(getkey(), (4, 6))
    assert_same(tree_map_with_implicit(jnp.subtract, {"w": q.materialize()}, {"w": x})["w"], q.materialize() - x)
    assert_same(tree_map_with_implicit(lambda q, x: q - x, {"w": q}, {"w": x})["w"], q.materialize() - x)


def test_materialize_of_a_tree(getkey):
    q, x = scaled(getkey(), (4, 6)), jnp.ones(2)
    dense = materialize({"q": [q], "x": x, "n": None})
    assert_same(dense["q"][0], q.materialize())
    assert dense["x"] is x


# --- what JAX does with trees ---


@arrays
def test_device_put(make, getkey):
    q = make(getkey(), (4, 6))
    device = jax.devices()[3]
    moved = jax.device_put(q, device)
    assert {leaf.device for leaf in jtu.tree_leaves(moved)} == {device}
    assert_same(moved, q)


@arrays
def test_block_until_ready_and_device_get(make, getkey):
    q = make(getkey(), (4, 6))
    assert_same(jax.block_until_ready(q), q)
    on_host = jax.device_get(q)
    assert {type(leaf) for leaf in jtu.tree_leaves(on_host)} == {np.ndarray}
    assert on_host.shape == q.shape
    np.testing.assert_array_equal(on_host.materialize(), q.materialize())


@arrays
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda q: pickle.loads(pickle.dumps(q)),
        lambda q: dataclasses.replace(q, shape=q.shape),
    ],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_copies(duplicate, make, getkey):
    q = make(getkey(), (4, 6))
    same = duplicate(q)
    assert same is not q
    assert (type(same), same.shape, same.dtype) == (type(q), q.shape, q.dtype)
    assert_same(same, q)
    assert_same(same.materialize(), q.materialize())


def test_copies_keep_static_fields():
    for_pickle = pickle.loads(pickle.dumps(packed(jnp.bfloat16)))
    assert (for_pickle.exponent, for_pickle.names, for_pickle.dtype) == (3, ("a", "b"), jnp.bfloat16)
    replaced = dataclasses.replace(packed(), dtype=jnp.bfloat16)
    assert (replaced.dtype, replaced.materialize().dtype) == (jnp.bfloat16, jnp.bfloat16)


@arrays
def test_optimizer(make, getkey):
    """A step of `optax` on the leaves that have a derivative."""
    x, params = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    variable = lambda tree: jtu.tree_map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), tree)  # noqa: E731
    optimizer = optax.masked(optax.sgd(0.5, momentum=0.5), variable)
    state = optimizer.init(params)
    gradients = jax.grad(implicit(squares), argnums=1, allow_int=True)(x, params)
    zeros = lambda g, p: jnp.zeros_like(p) if g.dtype == jax.dtypes.float0 else g  # noqa: E731
    gradients = jtu.tree_map(zeros, gradients, params)
    updates, _ = optimizer.update(gradients, state, params)
    stepped = optax.apply_updates(params, updates)
    assert type(stepped) is type(params)
    assert stepped.shape == params.shape
    inexact = lambda p, g: p - g / 2 if jnp.issubdtype(p.dtype, jnp.inexact) else p  # noqa: E731
    assert_same(stepped, jtu.tree_map(inexact, params, gradients))


def test_adam_under_jit(getkey):
    x, params = integers(getkey(), (3, 4)), {"q": low_rank(getkey(), (4, 6))}
    optimizer = optax.adam(0.125)

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(lambda p: implicit(squares)(x, p["q"]))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):  # which `optax` relies on
        params, state, first = step(params, state)
        params, state, second = step(params, state)
    assert second < first
    assert params["q"].shape == (4, 6)


def test_tree_arithmetic(getkey):
    q = scaled(getkey(), (4, 6))
    doubled = jtu.tree_map(lambda leaf: 2 * leaf, q)
    assert_same(doubled.materialize(), 4 * q.materialize())
    assert_same(optax.tree.add(q, q), doubled)
    zeros = optax.tree.zeros_like(q)
    assert type(zeros) is Scaled
    assert not np.any(zeros)


# --- values ---


@arrays
def test_frozen(make, getkey):
    q = make(getkey(), (4, 6))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.dtype = jnp.bfloat16
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(q, type(q)._data_fields[0], None)
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        q.shape = (1,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del q.dtype
    with pytest.raises(TypeError):
        q[0, 0] = 1


@arrays
@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.astype(jnp.bfloat16),
        lambda q: q.at[0].set(7.0),
        lambda q: q.T,
        lambda q: q.reshape(-1),
        lambda q: dataclasses.replace(q, dtype=q.dtype, shape=q.shape),
        lambda q: jtu.tree_map(jnp.zeros_like, q),
    ],
    ids=["astype", "at", "T", "reshape", "replace", "tree_map"],
)
def test_nothing_is_changed_in_place(change, make, getkey):
    q = make(getkey(), (4, 6))
    before, structure = [np.array(leaf) for leaf in jtu.tree_leaves(q)], jtu.tree_structure(q)
    dense = q.materialize()
    change(q)
    assert jtu.tree_structure(q) == structure
    assert_same([np.asarray(leaf) for leaf in jtu.tree_leaves(q)], before)
    assert_same(q.materialize(), dense)


@pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "@=", "**="])
def test_augmented_assignment_rebinds(operator, getkey):
    q = scaled(getkey(), (4, 4))
    space, dense = {"y": q, "other": jnp.ones((4, 4))}, {"y": q.materialize(), "other": jnp.ones((4, 4))}
    exec(f"y {operator} other", space)
    exec(f"y {operator} other", dense)
    assert_same(space["y"], dense["y"])
    assert space["y"] is not q


# --- construction ---


def test_subclass_is_a_dataclass():
    assert [field.name for field in dataclasses.fields(Packed)] == ["dtype", "packed", "exponent", "names"]
    assert dataclasses.is_dataclass(Packed)
    assert Packed(packed=jnp.ones(3, jnp.uint8)).exponent == 0


def test_shape_and_dtype_can_be_given():
    q = Packed(jnp.ones((4, 2), jnp.uint8), shape=(4, 2), dtype="bfloat16")
    assert (q.shape, q.dtype) == ((4, 2), jnp.bfloat16)
    assert q.materialize().dtype == jnp.bfloat16


def test_dtype_is_derived():
    assert scaled(jax.random.key(0), (2, 2)).dtype == jnp.float32
    assert type(scaled(jax.random.key(0), (2, 2)).dtype) is np.dtype(jnp.float32).__class__


@pytest.mark.parametrize("shape", [(4, 2), [4, 2], np.array([4, 2])], ids=["tuple", "list", "array"])
def test_given_shape_is_a_tuple_of_integers(shape):
    q = Filled(jnp.float32(2), shape=shape)
    assert q.shape == (4, 2)
    assert [type(size) for size in q.shape] == [int, int]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)], ids=str)
def test_scalars_and_empty_arrays(shape):
    q = Filled(jnp.float32(2), shape=shape)
    assert (q.shape, q.size, q.ndim) == (shape, np.prod(shape, dtype=int), len(shape))
    assert_same(q * 3, jnp.full(shape, 6.0, jnp.float32))


def test_materialize_is_strongly_typed():
    """An implicit array has a dtype; a Python number among its leaves doesn't change that."""
    assert_same(Filled(2.0, shape=(2,)).materialize(), jnp.full((2,), 2.0, jnp.float32))
    assert_same(implicit(lambda q: q + 1)(Filled(2.0, shape=(2,))), jnp.full((2,), 3.0, jnp.float32))


def test_subclass_of_a_subclass_adds_fields(getkey):
    class Biased(Scaled):
        bias: jax.Array

        def materialize(self) -> jax.Array:
            return super().materialize() + self.bias

    q = scaled(getkey(), (4, 6))
    biased = Biased(q.w, q.s, integers(getkey(), (4, 6)))
    assert [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(biased)] == [".w", ".s", ".bias"]
    assert_same(biased.materialize(), q.materialize() + biased.bias)


def test_own_constructor(getkey):
    """As the quantized formats do: the constructor takes another array than it stores."""

    class Halved(ImplicitArray):
        warn_on_materialize = False

        half: jax.Array

        def __init__(self, array: jax.Array, *, dtype: Any = None):
            object.__setattr__(self, "half", array / 2)
            object.__setattr__(self, "dtype", dtype or array.dtype)

        def materialize(self) -> jax.Array:
            return self.half * 2

    x = integers(getkey(), (4, 6))
    q = Halved(x)
    assert (q.shape, q.dtype) == ((4, 6), jnp.float32)
    assert_same(q.materialize(), x)
    assert_same(jtu.tree_map(lambda leaf: leaf, q), q)
    assert_same(implicit(jnp.sum)(q), jnp.sum(x))


def test_implicit_arrays_inside_implicit_arrays(getkey):
    q = shifted(getkey(), (4, 6))
    assert type(q) is Shifted
    assert len(jtu.tree_leaves(q)) == 3
    assert len(tree_leaves_with_implicit(q)) == 1
    assert_same(q.materialize(), densely(lambda base, by: base + by)(q.base, q.by))
