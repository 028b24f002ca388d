"""Leaves are not numbers: what a function that maps over leaves may do with codes, and what an array refuses then."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.flatten_util import ravel_pytree

from eformer._src.quantization.registry import array_types
from eformer.jaximus import implicit, materialize
from eformer.model import add_lora, combine, partition
from eformer.ops.quantization import Array1B, ArrayPermuted, RSROperatorBinary, RSROperatorTernary, formats, quantize

from .cases import about, assert_same_leaves, normal

SHAPE = (64, 48)
CODES = np.random.default_rng(3).integers(-1, 2, SHAPE)


# An array of each format, and of each class that is no format's.
ARRAYS = {
    form.name: functools.partial(lambda form: quantize(normal(SHAPE), dtype=form), form.name) for form in formats()
}
ARRAYS |= {
    "nf4 double": lambda: quantize(normal(SHAPE), dtype="nf4", double_quantization=True),
    "int4 double": lambda: quantize(normal(SHAPE), dtype="int4", double_quantization=True),
    "ternary of integers": lambda: Array1B.quantize(jnp.asarray(CODES, jnp.int8)),
    "RSR binary": lambda: RSROperatorBinary.from_matrix(jnp.asarray(abs(CODES)), k=4),
    "RSR ternary": lambda: RSROperatorTernary.from_matrix(jnp.asarray(CODES), k=8),
    "permuted": lambda: ArrayPermuted(quantize(normal(SHAPE), dtype="int4"), order=jnp.arange(SHAPE[1])[::-1]),
    "LoRA": lambda: add_lora({"w": quantize(normal(SHAPE), dtype="nf4")}, rank=2, key=jax.random.key(0))["w"],
}
every_array = pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)


def test_there_is_an_array_of_each_class():
    classes = {type(part).__name__ for make in ARRAYS.values() for part in (make(), getattr(make(), "rsr_b1", None))}
    assert array_types().keys() <= classes


def twice(a):
    return a * 2


def half(a):
    return (a * 0.5).astype(a.dtype)


def doubled(a):
    return a + a


def negated(a):
    return -a


def next_one(a):
    return a + jnp.ones((), a.dtype)


def clipped(a):
    return jnp.clip(a.astype(jnp.float32), 0, 3).astype(a.dtype)


def squared(a):
    return jnp.square(a)


def moved_and_twice(a):
    return jnp.ravel(jnp.where(True, a, a))[::-1].reshape(a.shape) * 2


def capped(a):
    return jnp.where(a > 1, jnp.ones((), a.dtype), a)


def in_order(a):
    return jnp.sort(a, axis=None).reshape(a.shape)


def looked_up(a):
    """Which element is chosen is calculated."""
    return jnp.ravel(a)[(a.astype(jnp.int32) * 3) % a.size]


def in_a_loop(a):
    return jax.lax.fori_loop(0, 2, lambda i, a: (a * 3).astype(a.dtype), a)


def in_a_scan(a):
    return jax.lax.scan(lambda carry, a: (carry, (a * 3).astype(a.dtype)), 0, a.reshape(-1))[1].reshape(a.shape)


def carried(a):
    """Two carries of a scan change places: what is calculated of one is the other in the next step."""

    def step(carry, _):
        return ((carry[1] * 3).astype(a.dtype), carry[0]), None

    return jax.lax.scan(step, (jnp.zeros_like(a), a), length=2)[0][1]


def in_a_branch(a):
    return jax.lax.cond(jnp.all(a == a), lambda a: (a * 3).astype(a.dtype), lambda a: a, a)


def chosen_by_a_branch(a):
    first = jnp.ravel(a)[0] > 0
    return jax.lax.cond(first, lambda a: a, jnp.zeros_like, a)


@jax.custom_jvp
def tripled(a):
    return a * 3


tripled.defjvps(lambda t, out, a: t * 3)


def in_a_custom_derivative(a):
    return tripled(a)


CALCULATE = (twice, half, doubled, negated, next_one, clipped, squared)
BY_EQUATIONS = (capped, in_order, looked_up, in_a_loop, in_a_scan, carried, in_a_branch, in_a_custom_derivative)


@pytest.fixture(autouse=True)
def as_most_people_have_it():
    """Numbers of Python take the dtype of the array."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def used(q: Any) -> Any:
    return jnp.ones((2, q.shape[-2]), jnp.float32) @ q


refused = functools.partial(pytest.raises, (TypeError, ValueError), match="leaf.*tree_map_with_implicit")


@every_array
def test_calculating_with_leaves_is_refused(make):
    for function in CALCULATE:
        changed = jax.tree.map(function, make())
        with about(function), refused():
            used(changed)


@pytest.mark.parametrize("form", ["int8", "nf4", "fp8", "ternary", "int4"])
@pytest.mark.parametrize("function", BY_EQUATIONS, ids=lambda function: function.__name__)
def test_calculating_is_seen_in_programs_and_in_values(function, form):
    q = quantize(normal(SHAPE), dtype=form)
    with refused():
        used(jax.tree.map(function, q))
    with refused():
        jax.eval_shape(lambda q: used(jax.tree.map(function, q)), q)


def test_calculating_is_seen_in_the_choice_of_a_branch():
    with refused():
        jax.eval_shape(lambda q: used(jax.tree.map(chosen_by_a_branch, q)), quantize(normal(SHAPE), dtype="int8"))


FLAT = {"twice": lambda x: x * 2, "half": lambda x: x * 0.5, "step": lambda x: x - 0.1 * jnp.sin(jnp.arange(x.size))}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("form", ["int8", "nf4", "ternary"])
@pytest.mark.parametrize("function", FLAT.values(), ids=FLAT)
def test_calculating_with_a_flat_vector_is_refused(function, form, jit):
    def changed(q):
        flat, unravel = ravel_pytree({"w": q, "b": jnp.ones(3)})
        return used(unravel(function(flat).astype(flat.dtype))["w"])

    with refused():
        jit(changed)(quantize(normal(SHAPE), dtype=form))


@every_array
def test_calculating_with_leaves_is_refused_in_jit(make):
    q = make()
    for function in (*CALCULATE, moved_and_twice):
        with about(function), refused():
            jax.eval_shape(lambda q: used(jax.tree.map(function, q)), q)  # noqa: B023


WAYS = {
    "with paths": lambda f, q: jax.tree_util.tree_map_with_path(lambda _, a: f(a), q),
    "in a dict": lambda f, q: jax.tree.map(f, {"w": q, "b": jnp.ones(3)})["w"],
    "by hand": lambda f, q: jax.tree.unflatten(jax.tree.structure(q), list(map(f, jax.tree.leaves(q)))),
    "two trees": lambda f, q: jax.tree.map(lambda a, b: a + f(b), q, q),
    "two different trees": lambda f, q: jax.tree.map(
        lambda a, b: a + f(b), q, quantize(normal(SHAPE, seed=9), dtype="int8")
    ),
    "vmap": lambda f, q: jax.vmap(functools.partial(jax.tree.map, f))(jax.tree.map(lambda a: a[None], q)),
    "a closure of jit": lambda f, q: jax.eval_shape(lambda: used(jax.tree.map(f, q))),
    "jit of jit": lambda f, q: jax.eval_shape(lambda q: used(jax.tree.map(jax.jit(f), q)), q),
    "vmap in jit": lambda f, q: jax.eval_shape(
        jax.vmap(lambda q: used(jax.tree.map(f, q))), jax.tree.map(lambda a: a[None], q)
    ),
    "implicit": lambda f, q: implicit(lambda tree: used(tree["w"]))({"w": jax.tree.map(f, q)}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_of_mapping_is_seen(way):
    with refused():
        used(way(twice, quantize(normal(SHAPE), dtype="int8")))


def there_and_back(tree: Any) -> Any:
    flat, unravel = ravel_pytree(tree)
    return unravel(flat)


MOVE = {
    "identity": lambda a: a,
    "copy": jnp.copy,
    "numpy": lambda a: np.asarray(a) if not isinstance(a, Tracer) else a,
    "flip": lambda a: jnp.flip(a, 0),
    "roll": lambda a: jnp.roll(a, 1, 0),
    "take": lambda a: jnp.take(a, jnp.arange(a.shape[0])[::-1] if a.ndim else 0, axis=0) if a.ndim else a,
    "select": lambda a: jnp.where(jnp.array(True), a, jnp.zeros_like(a)),
    "set": lambda a: a.at[0].set(a[-1]),
    "zeros": jnp.zeros_like,
    "put": jax.device_put,
    "shuffled": lambda a: jax.random.permutation(jax.random.key(0), a),
    "chosen by all": lambda a: jnp.where(jnp.all(jnp.isfinite(a.astype(jnp.float32))), a, jnp.zeros_like(a)),
    "carried": lambda a: jax.lax.scan(lambda carry, _: ((carry[1], carry[0]), None), (a, a), length=3)[0][0],
    "branch": lambda a: jax.lax.cond(jnp.max(a.astype(jnp.float32)) > 0, lambda a: a, jnp.zeros_like, a),
    "wider": lambda a: a.astype(jnp.float32).astype(a.dtype),
    "flat": there_and_back,
}


@pytest.mark.parametrize("form", ["int8", "nf4", "fp8", "ternary"])
def test_moving_leaves_is_allowed(form):
    """Layers of a stack change places, say."""
    q = quantize(normal((6, 16, 16)), dtype=form)
    for name, function in MOVE.items():
        for moved in (jax.tree.map(function, q), jax.tree.map(jax.jit(function), q)):
            with about(name):
                assert np.all(np.isfinite(materialize(moved)))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("form", ["int8", "nf4", "ternary"])
def test_a_flat_vector_may_be_read_back(form, jit):
    q = quantize(normal(SHAPE), dtype=form)
    np.testing.assert_array_equal(jit(there_and_back)(q).materialize(), q.materialize())


def test_leaves_of_another_array_may_be_put_in():
    q, other = (quantize(normal(SHAPE, seed=seed), dtype="nf4") for seed in (0, 1))
    leaves = iter(jax.tree.leaves(other))
    assert_same_leaves(jax.tree.map(lambda _: next(leaves), q), other)
    assert np.array_equal(jax.tree.map(lambda _, b: b, q, other).materialize(), other.materialize())
    chosen = jax.tree.map(lambda a, b: jnp.where(jnp.array(False), a, b), q, other)
    assert np.array_equal(chosen.materialize(), other.materialize())


def test_codes_may_be_made_in_the_program_that_maps():
    def function(w, x):
        return x @ jax.tree.map(jnp.copy, quantize(w * 2 + 1, dtype="int4"))

    jax.jit(function)(normal(SHAPE), jnp.ones((2, SHAPE[0])))


@every_array
def test_an_array_that_was_pickled_is_checked_again(make):
    q = pickle.loads(pickle.dumps(make()))
    with refused():
        used(jax.tree.map(twice, q))


def test_programs_do_not_depend_on_where_leaves_are_from():
    step: Any = jax.jit(used)
    for seed in range(3):
        step(quantize(normal(SHAPE, seed=seed), dtype="nf4"))
    assert step._cache_size() == 1


# --- trees that were split ---


def split(tree: Any) -> tuple[Any, Any]:
    import equinox as eqx

    return eqx.partition(tree, eqx.is_inexact_array)


def joined(*halves: Any) -> Any:
    import equinox as eqx

    return eqx.combine(*halves)


@every_array
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_tree_that_was_split_is_joined_inside_implicit(jit, make):
    pytest.importorskip("equinox")
    tree = {"w": make()}
    a, b = split(tree)
    out = jit(implicit(lambda a, b: used(joined(a, b)["w"])))(a, b)
    np.testing.assert_array_equal(out, jit(implicit(used))(tree["w"]))


def test_partition_of_lora_is_joined_inside_implicit():
    tree = {"w": ARRAYS["LoRA"](), "b": jnp.ones(3)}
    trained, frozen = partition(tree)
    out, gradient = jax.value_and_grad(implicit(lambda t, f: jnp.sum(used(combine(t, f)["w"]))))(trained, frozen)
    assert out == jnp.sum(used(tree["w"]))
    assert gradient["w"].a.shape == (SHAPE[0], 2)


def used_with_its_shape(q: Any) -> Any:
    return jnp.ones((2, SHAPE[0])) @ q


@every_array
def test_half_an_array_is_refused_when_it_is_used(make):
    pytest.importorskip("equinox")
    half = min(split(make()), key=lambda half: len(jax.tree.leaves(half)))
    with pytest.raises(ValueError, match=r"has of its leaves .*split.*combine"):
        used_with_its_shape(half)


# What has scales or factors that can be trained; RSR and ternary codes alone have none.
@pytest.mark.parametrize("make", [ARRAYS[form] for form in ("nf4", "int8", "int4", "fp8", "LoRA")])
@pytest.mark.parametrize("wrap", [implicit, lambda f: f], ids=["implicit", "plain"])
def test_equinox_refuses_to_train_scales_alone(wrap, make):
    eqx = pytest.importorskip("equinox")
    with pytest.raises(TypeError, match=r"cannot be differentiated.*partition.*add_lora"):
        eqx.filter_grad(wrap(lambda q: jnp.sum(used(q))))(make())
