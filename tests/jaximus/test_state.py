"""State that a function writes into its arguments is kept, as dense code keeps it."""

from __future__ import annotations

import collections
import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import tree_util as jtu

from eformer.jaximus import ImplicitArray, implicit

from .arrays import Scaled, integers, scaled


@pytest.fixture
def q(getkey):
    return scaled(getkey(), (4, 4))


@pytest.fixture
def x(getkey):
    return integers(getkey(), (2, 4))


class Box:
    """A mutable pytree node with one attribute."""

    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("extra", "value")

    def __init__(self, value):
        self.value, self.extra = value, {}


class PrivatelySlotted:
    __slots__ = ("__extra", "value")

    def __init__(self, value):
        self.value, self.__extra = value, {}

    @property
    def extra(self):
        return self.__extra

    @extra.setter
    def extra(self, extra):
        self.__extra = extra


jtu.register_pytree_node(
    PrivatelySlotted, lambda box: ((box.value,), None), lambda _, children: PrivatelySlotted(*children)
)
jtu.register_pytree_node(Box, lambda box: ((box.value,), None), lambda _, children: Box(*children))
jtu.register_pytree_node(Slotted, lambda box: ((box.value,), None), lambda _, children: Slotted(*children))


def test_a_new_entry_of_a_dict_of_parameters(q, x):
    params = {"w": q, "count": 0}

    def f(p, x):
        p["count"] = p["count"] + 1
        p["last"] = x @ p["w"]

    implicit(f)(params, x)
    assert params["w"] is q
    assert params["count"] == 1
    assert jnp.array_equal(params["last"], x @ q.materialize())


def test_removed_replaced_and_nested_entries(q, x):
    inner = {"w": q, "old": 1}
    params = {"layers": [inner, 2], "keep": x}

    def f(p):
        del p["layers"][0]["old"]
        p["layers"][0]["w"] = p["layers"][0]["w"] * 0
        p["layers"].append("new")

    implicit(f)(params)
    assert params["layers"][0] is inner
    assert list(inner) == ["w"]
    assert not jnp.any(jnp.asarray(inner["w"]))
    assert params["layers"][1:] == [2, "new"]
    assert params["keep"] is x


@pytest.mark.parametrize("change", [lambda p: p.insert(0, 3), lambda p: p.pop(), lambda p: p.reverse(), list.clear])
def test_a_list_changes_as_the_dense_one_does(change, q):
    params, dense = [q, 1], [q.materialize(), 1]
    implicit(change)(params)
    change(dense)
    assert [getattr(a, "shape", a) for a in params] == [getattr(a, "shape", a) for a in dense]
    assert all(p is q for p in params if isinstance(p, ImplicitArray))


@pytest.mark.parametrize("box", [Box, Slotted, PrivatelySlotted])
def test_attributes_of_an_object(box, q, x):
    holder = box({"w": q})

    def f(holder, x):
        holder.extra = x @ holder.value["w"]
        holder.value = [holder.value]

    implicit(f)(holder, x)
    assert jnp.array_equal(holder.extra, x @ q.materialize())
    assert holder.value[0]["w"] is q


@pytest.mark.parametrize("box", [Slotted, PrivatelySlotted])
def test_a_dict_that_is_an_attribute(box, q):
    holder = box(q)
    implicit(lambda holder: holder.extra.update(seen=True))(holder)
    assert holder.extra == {"seen": True}


def test_an_implicit_array_that_the_function_stores_is_one_afterwards(q):
    params, cache, closed_over = {"w": q}, {}, []

    def f(p, cache):
        p["t"] = p["w"].T
        p["pair"] = (p["w"], {"again": p["w"].T})
        cache["t"] = p["w"].T
        closed_over.append(1)

    implicit(f)(params, cache)
    assert isinstance(params["t"], Scaled)
    assert isinstance(cache["t"], Scaled)
    assert params["pair"][0] is q
    assert isinstance(params["pair"][1]["again"], Scaled)
    assert jnp.array_equal(cache["t"].materialize(), q.materialize().T)


def test_state_written_before_an_error_is_kept(q):
    params = {"w": q, "count": 0}

    def f(p):
        p["count"] += 1
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        implicit(f)(params)
    assert params["count"] == 1
    assert params["w"] is q


def test_what_occurs_twice_stays_one_object(q):
    shared = {"w": q, "n": 0}
    holder = Box(q)
    args = {"a": shared, "b": shared, "c": holder, "d": (holder,)}

    def f(args):
        assert args["a"] is args["b"]
        assert args["c"] is args["d"][0]
        assert args["c"].value is args["a"]["w"]
        args["a"]["n"] = 5

    implicit(f)(args)
    assert args["b"] is shared
    assert shared["n"] == 5


def test_arguments_that_are_returned_are_the_callers(q):
    params = {"w": q, "rest": [1]}
    out = implicit(lambda p: (p, p["w"], p["rest"]))(params)
    assert out[0] is params
    assert out[1] is q
    assert out[2] is params["rest"]


def test_entries_keep_their_order(q):
    params = {"z": q, "a": q, "m": q}
    assert implicit(lambda p: list(p))(params) == ["z", "a", "m"]
    assert implicit(lambda p: list(p))(collections.OrderedDict(params)) == ["z", "a", "m"]


def test_keyword_arguments_are_kept_too(q):
    params = {"w": q}
    implicit(lambda *, p: p.update(n=1))(p=params)
    assert params["n"] == 1


def test_a_bound_method_keeps_the_state_of_its_object(q, x):
    class Counter(Box):
        calls = 0

        def __call__(self, x):
            self.calls += 1
            return jnp.dot(x, self.value)

    jtu.register_pytree_node(Counter, lambda c: ((c.value,), None), lambda _, children: Counter(*children))
    counter = Counter(q)
    assert jnp.array_equal(implicit(counter.__call__)(x), x @ q.materialize())
    assert jnp.array_equal(implicit(counter)(x), x @ q.materialize())
    assert counter.calls == 2  # though JAX does not know of it


def test_a_frozen_object_that_is_made_inside_is_returned(q):
    @jtu.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Pair:
        a: object
        b: object

    out = implicit(lambda p: Pair(p["w"].T, p))(params := {"w": q})
    assert isinstance(out.a, Scaled)
    assert out.b is params


def test_inside_jit_the_callers_dict_stays_as_dense_code_leaves_it(q, x):
    params = {"w": q}

    @jax.jit
    def f(p, x):
        def g(p, x):
            p["y"] = x @ p["w"]

        implicit(g)(p, x)
        return p["y"]

    assert jnp.array_equal(f(params, x), x @ q.materialize())
    assert list(params) == ["w"]


def test_nested_calls(q, x):
    def outer(p, x):
        implicit(lambda p: p.update(n=p["n"] + 1))(p)
        p["y"] = jnp.dot(x, p["w"])
        return implicit(jnp.dot)(x, p["w"])

    params = {"w": q, "n": 0}
    assert jnp.array_equal(implicit(outer)(params, x), x @ q.materialize())
    assert params["n"] == 1
    assert jnp.array_equal(params["y"], x @ q.materialize())


def test_threads_that_share_parameters_see_no_tracers(q, x):
    params, seen = {"w": q}, []
    inside, checked = threading.Barrier(2), threading.Barrier(2)

    def f(p, x):
        inside.wait(10)
        checked.wait(10)
        return jnp.dot(x, p["w"])

    def other():
        inside.wait(10)
        seen.append(params["w"])
        checked.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    implicit(f)(params, x)
    thread.join()
    assert seen[0] is q
