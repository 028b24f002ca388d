"""Code written for the original package: `@dataclass` above a class, `precedence`, handlers without the primitive."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import tree_util as jtu

from eformer.jaximus import ImplicitArray, aux_field, explain, implicit, register

DECORATORS = {
    "plain": dataclasses.dataclass,
    "called": dataclasses.dataclass(),
    "frozen": dataclasses.dataclass(frozen=True),
    "frozen without eq": dataclasses.dataclass(frozen=True, eq=False),
    "unsafe_hash": dataclasses.dataclass(unsafe_hash=True),
    "none": lambda cls: cls,
}
decorators = pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)


def make_class(decorate):
    class Times(ImplicitArray):
        warn_on_materialize = False
        w: Any
        factor: int = aux_field(default=2)

        def materialize(self):
            return self.w * jnp.float32(self.factor)

    return decorate(Times)


@decorators
def test_a_decorated_class_is_an_implicit_array(decorate):
    cls = make_class(decorate)
    q = cls(jnp.arange(4.0), 3)
    assert (q.shape, q.dtype, q.factor) == ((4,), jnp.float32, 3)
    leaves, structure = jtu.tree_flatten(q)
    assert len(leaves) == 1
    assert jtu.tree_unflatten(structure, leaves).factor == 3
    assert repr(q) == "Times(float32[4], 16 bytes)"
    assert jnp.array_equal(implicit(jnp.negative)(q), -3 * jnp.arange(4.0))
    assert (q == q).shape == (4,)  # elements, as of every array
    assert dataclasses.replace(q, factor=5).factor == 5
    with pytest.raises(TypeError, match="unhashable"):
        hash(q)


@decorators
@pytest.mark.parametrize("outer", DECORATORS.values(), ids=DECORATORS)
def test_subclasses_of_decorated_classes(outer, decorate):
    class Shifted(make_class(decorate)):
        shift: Any = None
        name: str = aux_field(default="", kw_only=True)

        def materialize(self):
            return self.w * jnp.float32(self.factor) + self.shift

    q = outer(Shifted)(jnp.arange(4.0), 3, jnp.float32(1), name="n")
    assert len(jtu.tree_leaves(q)) == 2
    assert jnp.array_equal(q.materialize(), 3 * jnp.arange(4.0) + 1)
    assert (q.factor, q.name) == (3, "n")


@pytest.mark.parametrize("frozen", [True, False])
def test_only_a_class_that_says_so_can_have_its_attributes_set(frozen):
    q = make_class(dataclasses.dataclass(frozen=frozen))(jnp.arange(4.0))
    if frozen:
        with pytest.raises(dataclasses.FrozenInstanceError):
            q.factor = 5
    else:
        q.factor = 5
        assert jnp.array_equal(q.materialize(), 5 * jnp.arange(4.0))


def test_arrays_are_values_unless_they_say_otherwise():
    q = make_class(lambda cls: cls)(jnp.arange(4.0))
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses.replace\(array, factor=...\)"):
        q.factor = 5
    with pytest.raises(dataclasses.FrozenInstanceError, match="can't be deleted"):
        del q.factor


def test_a_mutable_class_may_set_attributes_when_it_is_made():
    @dataclasses.dataclass
    class Made(ImplicitArray):
        w: Any

        def __post_init__(self):
            self.w = jnp.asarray(self.w, jnp.float32)

        def materialize(self):
            return self.w

    assert Made([1, 2]).shape == (2,)


@pytest.fixture
def cls():
    """A class of its own for each test: rules stay."""

    class Own(ImplicitArray):
        warn_on_materialize = False
        w: Any

        def materialize(self):
            return self.w

    return Own


def test_a_handler_without_the_primitive(cls):
    def mm(lhs: jax.Array, rhs: cls, **params):
        assert "dimension_numbers" in params
        return jax.lax.dot_general(lhs, rhs.w * 2, params["dimension_numbers"])

    mm.__annotations__ = {"lhs": jax.Array, "rhs": cls}
    assert register("dot_general")(mm) is mm
    q, x = cls(jnp.eye(3)), jnp.ones((2, 3))
    assert jnp.array_equal(x @ q, 2 * x)
    assert explain(jnp.matmul)(x, q)[0][0].rule.endswith("mm")


def test_a_handler_of_one_operand_without_the_primitive(cls):
    def negate(operand, **params):
        del params
        return operand.w * 5

    negate.__annotations__ = {"operand": cls}
    register("neg")(negate)
    assert jnp.array_equal(-cls(jnp.ones(3)), jnp.full(3, 5.0))


def test_an_operand_is_known_by_its_name_where_it_has_no_annotation(cls):
    def mm(lhs, rhs, **params):
        del params
        return jnp.matmul(lhs, rhs.w) * 3

    mm.__annotations__ = {"rhs": cls}
    register("dot_general")(mm)
    assert jnp.array_equal(jnp.ones((2, 3)) @ cls(jnp.eye(3)), jnp.full((2, 3), 3.0))


def test_the_primitive_may_have_any_name_and_annotation(cls):
    def first(prim: Any, x, **params):
        return prim.bind(x.w * 7, **params)

    first.__annotations__ = {"prim": Any, "x": cls}
    register("neg")(first)
    assert jnp.array_equal(-cls(jnp.ones(3)), jnp.full(3, -7.0))


@pytest.mark.parametrize("order", [1, -1])
def test_higher_precedence_is_asked_first(order, cls):
    def rule(value):
        def handler(primitive, x, **params):
            del primitive, params
            return x.w * value

        handler.__annotations__ = {"x": cls}
        return handler

    for precedence, value in [(1, 10), (0, 20)][::order]:
        register("neg", precedence=precedence)(rule(value))
    assert jnp.array_equal(-cls(jnp.ones(3)), jnp.full(3, 10.0))
