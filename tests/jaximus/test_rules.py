"""Which rule serves which operands."""

# No `from __future__ import annotations`: the rules here name classes that the tests make.

import typing
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eformer.jaximus import ImplicitArray, implicit, materialize_rule, register

from .arrays import assert_same, integers


class Quiet(ImplicitArray):
    """`value` itself."""

    warn_on_materialize = False

    value: jax.Array

    def materialize(self) -> jax.Array:
        return self.value


def new_class(base: type = Quiet, **namespace: Any) -> type:
    return type("New", (base,), namespace)


X = jnp.arange(1.0, 4.0)


def marked(number: float) -> jax.Array:
    """What a rule returns to be recognized by."""
    return jnp.full(3, number, jnp.float32)


# --- by name, by object ---


@pytest.mark.parametrize("primitive", ["sin", lax.sin_p], ids=["name", "object"])
def test_register(primitive):
    New = new_class()

    @register(primitive)
    def rule(primitive, _q: New, **params):
        assert primitive is lax.sin_p
        assert "accuracy" in params
        return marked(7)

    assert_same(implicit(jnp.sin)(New(X)), marked(7))
    assert_same(jax.jit(implicit(jnp.sin))(New(X)), marked(7))
    assert_same(implicit(jnp.cos)(New(X)), jnp.cos(X))


def test_register_gives_the_handler_back():
    New = new_class()

    @register("sin")
    @register("cos")
    def rule(_primitive, _q: New, **_params):
        return marked(7)

    assert_same(rule(lax.sin_p, New(X)), marked(7))
    assert_same(implicit(lambda q: jnp.sin(q) + jnp.cos(q))(New(X)), marked(14))


@pytest.mark.parametrize(
    ("old_name", "transform"),
    [("pjit", jax.jit), ("jit", jax.jit), ("remat", jax.checkpoint), ("checkpoint", jax.checkpoint)],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_names_that_people_know(old_name, transform):
    New = new_class()
    asked = []

    @register(old_name)
    def rule(primitive, _q: New, **_params):
        asked.append(primitive)
        return NotImplemented

    assert_same(implicit(transform(lambda q: q + 1))(New(X)), X + 1)
    assert asked


def test_primitive_of_ones_own():
    New = new_class()
    own_p = jax.extend.core.Primitive("tests_own")
    own_p.def_impl(lambda x: x + 1)
    own_p.def_abstract_eval(lambda x: x)
    assert_same(implicit(own_p.bind)(New(X)), X + 1)

    @register(own_p)
    def rule(_primitive, _q: New):
        return marked(7)

    assert_same(implicit(own_p.bind)(New(X)), marked(7))


def test_several_results():
    New = new_class()

    @register("split")
    def rule(_primitive, _q: New, *, sizes, **_params):
        return [jnp.zeros(size) for size in sizes]

    assert_same(implicit(lambda q: lax.split(q, [1, 2]))(New(X)), [jnp.zeros(1), jnp.zeros(2)])


def test_params_are_passed_on():
    New = new_class()

    @register("reduce_sum")
    def rule(primitive, q: New, **params):
        return 2 * primitive.bind(q.value, **params)

    assert_same(implicit(lambda q: jnp.sum(q, axis=1))(New(jnp.ones((3, 4)))), jnp.full(3, 8.0, jnp.float32))


# --- annotations ---


def union(New, Other):
    return New | Other


def typing_union(New, Other):
    return typing.Union[New, Other]  # noqa: UP007


def with_dense(New, _):
    return New | jax.Array


def optional(New, _):
    return New | None


def annotated(New, _):
    return typing.Annotated[New, "the weights"]


def nested(New, Other):
    return typing.Annotated[typing.Union[New, None], ""] | Other  # noqa: UP007


@pytest.mark.parametrize(
    "annotation", [union, typing_union, with_dense, optional, annotated, nested], ids=lambda f: f.__name__
)
def test_annotation_admits_each_member(annotation):
    New, Other = new_class(), new_class()

    def rule(_primitive, _q, **_params):
        return marked(7)

    rule.__annotations__["_q"] = annotation(New, Other)
    register("sin")(rule)
    assert_same(implicit(jnp.sin)(New(X)), marked(7))
    served = annotation in (union, typing_union, nested)
    assert_same(implicit(jnp.sin)(Other(X)), marked(7) if served else jnp.sin(X))


class Quoted(Quiet):
    pass


def test_annotation_as_text():
    @register("sin")
    def rule(_primitive: "Any", _q: "Quoted | jax.Array", **_params: "Any") -> "jax.Array":
        return marked(7)

    assert_same(implicit(jnp.sin)(Quoted(X)), marked(7))


@pytest.mark.parametrize("annotation", [jax.Array, Any, "none", object], ids=str)
def test_dense_operands(annotation):
    """However the dense operand is annotated, arrays and numbers are admitted."""
    New = new_class()

    def rule(_primitive, _x, _q: New, **_params):
        return marked(7)

    if annotation != "none":
        rule.__annotations__["_x"] = annotation
    register("sub")(rule)
    assert_same(implicit(jnp.subtract)(X, New(X)), marked(7))
    assert_same(implicit(lambda q: 1 - q)(New(X)), marked(7))


@pytest.mark.parametrize(("annotation", "served"), [(Any, True), (jax.Array, False)], ids=["Any", "Array"])
def test_any_admits_other_implicit_arrays(annotation, served):
    New, Other = new_class(), new_class()

    def rule(_primitive, _x: annotation, _q: New, **_params):
        return marked(7)

    register("sub")(rule)
    assert_same(implicit(jnp.subtract)(Other(X), New(X)), marked(7) if served else X - X)


def test_operand_position_matters():
    New = new_class()

    @register("sub")
    def rule(_primitive, _x: jax.Array, _q: New, **_params):
        return marked(7)

    assert_same(implicit(jnp.subtract)(X, New(X)), marked(7))
    assert_same(implicit(jnp.subtract)(New(X), X), X - X)


def test_star_operands():
    New = new_class()

    @register("concatenate")
    def rule(_primitive, *operands: New | Any, **_params):
        return jnp.zeros(3 * len(operands))

    join = implicit(lambda *arrays: jnp.concatenate(arrays))
    assert_same(join(New(X), X, X), jnp.zeros(9))
    assert_same(join(X, New(X)), jnp.zeros(6))


def test_star_operands_without_dense_ones():
    New = new_class()

    @register("concatenate")
    def rule(_primitive, *operands: New, **_params):
        return jnp.zeros(3 * len(operands))

    join = implicit(lambda *arrays: jnp.concatenate(arrays))
    assert_same(join(New(X), New(X)), jnp.zeros(6))
    assert_same(join(New(X), X), jnp.concatenate([X, X]))


def test_first_operand_and_the_rest():
    New = new_class()

    @register("concatenate")
    def rule(_primitive, _first: New, *rest: jax.Array, **_params):
        return jnp.zeros(3 + 3 * len(rest))

    join = implicit(lambda *arrays: jnp.concatenate(arrays))
    assert_same(join(New(X), X), jnp.zeros(6))
    assert_same(join(X, New(X)), jnp.concatenate([X, X]))


def test_number_of_operands_must_fit():
    New = new_class()

    @register("concatenate")
    def rule(_primitive, _x: New, _y: New, **_params):
        return jnp.zeros(6)

    join = implicit(lambda *arrays: jnp.concatenate(arrays))
    assert_same(join(New(X), New(X)), jnp.zeros(6))
    assert_same(join(*[New(X)] * 3), jnp.concatenate([X, X, X]))


# --- which comes first ---


def test_subclass_before_base_class():
    Base = new_class()
    Derived = new_class(Base)

    @register("sin")
    def of_derived(_primitive, _q: Derived, **_params):
        return marked(1)

    @register("sin")
    def of_base(_primitive, _q: Base, **_params):
        return marked(2)

    assert_same(implicit(jnp.sin)(Derived(X)), marked(1))
    assert_same(implicit(jnp.sin)(Base(X)), marked(2))
    assert_same(implicit(jnp.sin)(new_class(Derived)(X)), marked(1))


def test_base_class_serves_subclasses():
    Base = new_class()

    @register("sin")
    def rule(_primitive, _q: Base, **_params):
        return marked(1)

    assert_same(implicit(jnp.sin)(new_class(new_class(Base))(X)), marked(1))


def test_latest_of_equals():
    New = new_class()

    @register("sin")
    def first(_primitive, _q: New, **_params):
        return marked(1)

    @register("sin")
    def second(_primitive, _q: New, **_params):
        return marked(2)

    assert_same(implicit(jnp.sin)(New(X)), marked(2))


def test_class_before_union_before_any():
    New, Other = new_class(), new_class()

    @register("sub")
    def exact(_primitive, _x: New, _y: New, **_params):
        return marked(1)

    @register("sub")
    def either(_primitive, _x: New | Other, _y: New | Other, **_params):
        return marked(2)

    @register("sub")
    def anything(_primitive, _x: New, _y: Any, **_params):
        return marked(3)

    subtract = implicit(jnp.subtract)
    assert_same(subtract(New(X), New(X)), marked(1))
    assert_same(subtract(New(X), Other(X)), marked(2))
    assert_same(subtract(New(X), X), marked(3))


def test_not_implemented_means_next():
    Base = new_class()
    Derived = new_class(Base)
    asked = []

    @register("sin")
    def of_base(_primitive, q: Base, **_params):
        asked.append("base")
        return NotImplemented if q.shape == (2,) else marked(1)

    @register("sin")
    def earlier(_primitive, _q: Derived, **_params):
        asked.append("earlier")
        return NotImplemented

    @register("sin")
    def later(_primitive, _q: Derived, **_params):
        asked.append("later")
        return NotImplemented

    assert_same(implicit(jnp.sin)(Derived(X)), marked(1))
    assert asked == ["later", "earlier", "base"]
    assert_same(implicit(jnp.sin)(Derived(X[:2])), jnp.sin(X[:2]))


def test_not_implemented_asks_the_other_operands_class():
    New, Other = new_class(), new_class()

    @register("sub")
    def of_left(_primitive, _x: New, _y: Any, **_params):
        return NotImplemented

    @register("sub")
    def of_right(_primitive, _x: Any, _y: Other, **_params):
        return marked(2)

    assert_same(implicit(jnp.subtract)(New(X), Other(X)), marked(2))


def test_rule_registered_after_use():
    """The engine's own caches hold no rules that are out of date."""
    New = new_class()
    double = lambda q: lax.scan(lambda c, _: (c + jnp.sin(q), None), jnp.zeros(3), None, length=2)[0]  # noqa: E731
    function = lambda q: jax.jit(double)(q)  # noqa: E731
    assert_same(implicit(function)(New(0 * X)), jnp.zeros(3))

    @register("sin")
    def rule(_primitive, _q: New, **_params):
        return marked(7)

    assert_same(implicit(function)(New(0 * X)), marked(14))


# --- commuting ---


@pytest.mark.parametrize("commute", [True, False])
@pytest.mark.parametrize("function", [jnp.add, jnp.multiply, jnp.maximum, jnp.minimum], ids=lambda f: f.__name__)
def test_commute_ops(function, commute):
    New = new_class(commute_ops=commute)
    primitive = {"add": "add", "multiply": "mul", "maximum": "max", "minimum": "min"}[function.__name__]

    @register(primitive)
    def rule(_primitive, _q: New, _x: jax.Array, **_params):
        return marked(7)

    assert_same(implicit(function)(New(X), X), marked(7))
    assert_same(implicit(function)(X, New(X)), marked(7) if commute else function(X, X))


def test_commute_ops_of_two_classes():
    New, Other = new_class(), new_class()

    @register("mul")
    def rule(_primitive, x: New, y: Other, **_params):
        return x.value * 10 + y.value

    expected = X * 10 + 2 * X
    assert_same(implicit(jnp.multiply)(New(X), Other(2 * X)), expected)
    assert_same(implicit(jnp.multiply)(Other(2 * X), New(X)), expected)


def test_own_order_is_preferred_to_commuting():
    New = new_class()

    @register("mul")
    def left(_primitive, _q: New, _x: jax.Array, **_params):
        return marked(1)

    @register("mul")
    def right(_primitive, _x: jax.Array, _q: New, **_params):
        return marked(2)

    assert_same(implicit(jnp.multiply)(New(X), X), marked(1))
    assert_same(implicit(jnp.multiply)(X, New(X)), marked(2))


@pytest.mark.parametrize("function", [jnp.subtract, jnp.divide, jnp.power, jnp.matmul], ids=lambda f: f.__name__)
def test_only_commutative_primitives_commute(function):
    New = new_class()

    def rule(_primitive, _q: New, _x: jax.Array, **_params):
        raise AssertionError("called with the operands turned round")

    names = {"subtract": "sub", "divide": "div", "power": "pow", "matmul": "dot_general"}
    register(names[function.__name__])(rule)
    assert_same(implicit(function)(X, New(X)), function(X, X))


# --- what a rule may return ---


def test_implicit_result_of_another_class():
    New, Other = new_class(), new_class()

    @register("sin")
    def rule(_primitive, q: New, **_params):
        return Other(q.value + 1)

    assert type(implicit(jnp.sin)(New(X))) is Other
    assert_same(implicit(lambda q: jnp.sin(q) * 2)(New(X)), (X + 1) * 2)
    assert_same(implicit(jax.jit(lambda q: {"y": jnp.sin(q)}))(New(X))["y"], X + 1)


def test_operands_that_do_not_go_together_reach_no_rule():
    New = new_class()

    @register("dot_general")
    def rule(_primitive, _x: jax.Array, _q: New, **_params):
        raise AssertionError("asked")

    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        implicit(lambda x, q: lax.dot_general(x, q, (((0,), (0,)), ((), ()))))(jnp.ones(4), New(X))


def test_weak_result_is_made_strong():
    New = new_class()

    @register("sin")
    def rule(_primitive, _q: New, **_params):
        return jnp.full(3, 7.0) * 1.0

    assert not implicit(jnp.sin)(New(X)).weak_type


def test_numpy_result():
    New = new_class()

    @register("sin")
    def rule(_primitive, _q: New, **_params):
        return jax.device_get(marked(7))

    assert_same(implicit(lambda q: jnp.sin(q) + 1)(New(X)), marked(8))


def test_rule_that_uses_operators_and_other_rules():
    New = new_class()

    @register("neg")
    def negate(_primitive, q: New, **_params):
        return New(-q.value)

    @register("sub")
    def subtract(_primitive, x: jax.Array, q: New, **_params):
        return x + (-q)

    assert_same(implicit(jnp.subtract)(X, New(3 * X)), -2 * X)


def test_materialize_rule():
    New = new_class()
    assert_same(materialize_rule(lax.sub_p, New(X), X), X - X)

    @register("sin")
    def rule(primitive, q: New, **params):
        return materialize_rule(primitive, q, **params)

    assert_same(implicit(jnp.sin)(New(X)), jnp.sin(X))


def test_rule_under_differentiation(getkey):
    """The rule is what is differentiated."""
    New = new_class()

    @register("dot_general")
    def rule(primitive, x: jax.Array, q: New, **params):
        return 2 * primitive.bind(x, q.value, **params)

    x, w = integers(getkey(), (2, 3)), integers(getkey(), (3, 4))
    loss = lambda x, q: jnp.sum(jnp.matmul(x, q) ** 2)  # noqa: E731
    expected = jax.grad(lambda x, w: jnp.sum((2 * (x @ w)) ** 2), argnums=(0, 1))(x, w)
    actual = jax.grad(implicit(loss), argnums=(0, 1))(x, New(w))
    assert_same((actual[0], actual[1].value), expected)
