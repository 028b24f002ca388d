"""Errors name the thing, say what was given and what would work."""

# No `from __future__ import annotations`: the rules here name classes that the tests make.

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eformer.jaximus import ImplicitArray, aux_field, implicit, register

from .arrays import Filled, LowRank, Scaled, integers, scaled
from .test_rules import Quiet, X, new_class

# --- rules that return something else than the primitive does ---

WRONG = {
    "shape": (lambda q: q.value[:2], r"returned float32\[2\], but dense operands give float32\[3\]"),
    "rank": (lambda q: q.value[None], r"returned float32\[1, 3\], but dense operands give float32\[3\]"),
    "dtype": (lambda q: q.value.astype(jnp.bfloat16), r"returned bfloat16\[3\], but dense operands give float32\[3\]"),
    "implicit": (lambda q: Filled(1.0, shape=(2,)), r"returned float32\[2\], but dense operands give float32\[3\]"),
    "none": (lambda q: None, r"must return an array or NotImplemented, got NoneType"),
    "tuple": (lambda q: (q.value,), r"must return an array or NotImplemented, got tuple"),
    "number": (lambda q: 1.0, r"must return an array or NotImplemented, got float"),
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("returned", "message"), WRONG.values(), ids=WRONG)
def test_rule_returning_the_wrong_thing(returned, message, jit):
    New = new_class()

    @register("sin")
    def my_rule(_primitive, q: New, **_params):
        return returned(q)

    with pytest.raises(TypeError, match=rf"rule .*my_rule for `sin` {message}"):
        jit(implicit(lax.sin))(New(X))


@pytest.mark.parametrize("returned", [None, [X], (X, X, X), X], ids=["none", "too few", "too many", "an array"])
def test_rule_returning_the_wrong_number_of_arrays(returned):
    New = new_class()

    @register("split")
    def my_rule(_primitive, _q: New, **_params):
        return returned

    with pytest.raises(TypeError, match=r"my_rule for `split` must return a list of 2 arrays, got"):
        implicit(lambda q: lax.split(q, [1, 2]))(New(X))


def test_rule_returning_one_wrong_array_of_several():
    New = new_class()

    @register("split")
    def my_rule(_primitive, q: New, **_params):
        return [q.value[:1], q.value]

    with pytest.raises(
        TypeError, match=r"my_rule for `split` returned float32\[3\], but dense operands give float32\[2\]"
    ):
        implicit(lambda q: lax.split(q, [1, 2]))(New(X))


def test_rule_that_raises():
    """Its error is the user's to see, as it is."""
    New = new_class()

    @register("sin")
    def my_rule(_primitive, _q: New, **_params):
        raise ZeroDivisionError("from the rule")

    with pytest.raises(ZeroDivisionError, match="from the rule"):
        implicit(lax.sin)(New(X))


# --- registering ---


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dot_generall", r"JAX has no primitive named 'dot_generall'; did you mean 'dot_general'"),
        ("transpos", r"JAX has no primitive named 'transpos'; did you mean 'transpose'"),
        ("qqqqqqqqqq", r"JAX has no primitive named 'qqqqqqqqqq'; see jax\.extend\.core\.primitives"),
    ],
)
def test_unknown_primitive_name(name, message):
    with pytest.raises(ValueError, match=message):
        register(name)


@pytest.mark.parametrize("primitive", [jnp.dot, 3, None], ids=["function", "number", "None"])
def test_neither_a_primitive_nor_a_name(primitive):
    with pytest.raises(TypeError, match=r'register takes a primitive or its name, got .*@register\("dot_general"\)'):
        register(primitive)


def unannotated(primitive, x, y, **params): ...


def dense_only(primitive, x: jax.Array, y: jax.Array, **params): ...


def any_only(primitive, x: Any, *rest: Any, **params): ...


def no_operands(primitive, **params): ...


def keyword_only(primitive, *, q: Quiet, **params): ...


@pytest.mark.parametrize(
    ("handler", "given"),
    [
        (unannotated, "x, y"),
        (dense_only, r"x: jax\..*Array, y: jax\..*Array"),
        (any_only, r"x: Any, \*rest: Any"),
        (no_operands, "none"),
        (keyword_only, "q: .*Quiet"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_handler_without_a_usable_annotation(handler, given):
    message = rf"handler {handler.__name__} for `mul` annotates no operand .*\(operands: {given}\).*`x: MyArray`"
    with pytest.raises(TypeError, match=message):
        register("mul")(handler)


def test_annotation_that_cannot_be_resolved():
    def my_rule(_primitive, _q: "Missing", **_params):  # noqa: F821
        return NotImplemented

    with pytest.raises(TypeError, match=r"handler .*my_rule for `mul` has an annotation .*'Missing' is not defined"):
        register("mul")(my_rule)


def test_failed_registration_registers_nothing():
    New = new_class()
    with pytest.raises(TypeError):
        register("sin")(lambda primitive, q: X)
    assert (implicit(jnp.sin)(New(X)) == jnp.sin(X)).all()


# --- x @ q ---


@pytest.mark.parametrize("make", [lambda q: q, lambda q: q.materialize()], ids=["implicit", "dense"])
def test_mismatched_matmul_raises_as_for_dense_arrays(make, getkey):
    x, q = integers(getkey(), (3, 5)), scaled(getkey(), (4, 6))
    with pytest.raises(TypeError):
        x @ make(q)


def test_mismatched_matmul_names_both_operands(getkey):
    x, q = integers(getkey(), (3, 5)), scaled(getkey(), (4, 6))
    message = r"array\[3, 5\] @ Scaled\[4, 6\]: the last axis of the left operand \(5\) .* second-to-last axis .* \(4\)"
    with pytest.raises(TypeError, match=message):
        x @ q
    with pytest.raises(TypeError, match=r"Scaled\[4, 6\] @ array\[3, 5\]: .* \(6\) .* \(3\)"):
        q @ x
    with pytest.raises(TypeError, match=r"Scaled\[4, 6\] @ array\[5\]: .* \(6\) .* only axis .* \(5\)"):
        q @ x[0]
    with pytest.raises(TypeError, match=r"Scaled\[4, 6\] @ Scaled\[4, 6\]"):
        q @ q


@pytest.mark.parametrize("scalar", [2.0, jnp.ones(())], ids=["number", "array"])
def test_matmul_with_a_scalar(scalar, getkey):
    with pytest.raises(TypeError, match=r"array\[\] @ Scaled\[4, 6\]: `@` needs at least one axis .* use `\*`"):
        scalar @ scaled(getkey(), (4, 6))


def test_mismatched_batches(getkey):
    x, q = integers(getkey(), (3, 2, 4)), scaled(getkey(), (2, 4, 6))
    with pytest.raises((TypeError, ValueError)):
        x @ q


# --- construction ---


def test_shape_that_contradicts_the_leaves():
    message = r"LowRank was given `shape=\(3, 3\)`, but its leaves make an array of shape \(4, 6\)"
    with pytest.raises(ValueError, match=message):
        LowRank(jnp.ones((4, 2)), jnp.ones((2, 6)), shape=(3, 3))


def test_dtype_that_contradicts_the_leaves():
    message = r"LowRank was given `dtype=bfloat16`, but `materialize` returns float32: .*\.astype\(self\.dtype\)"
    with pytest.raises(ValueError, match=message):
        LowRank(jnp.ones((4, 2)), jnp.ones((2, 6)), dtype=jnp.bfloat16)


def test_shape_that_is_missing():
    with pytest.raises(ValueError, match=r"Filled needs `shape=\.\.\.`: its `materialize` reads `self\.shape`"):
        Filled(jnp.float32(1))


@pytest.mark.parametrize("shape", [(2.5,), ("a",), 3.0], ids=str)
def test_shape_that_is_no_shape(shape):
    with pytest.raises(TypeError):
        Filled(jnp.float32(1), shape=shape)


def test_leaves_that_do_not_fit_each_other():
    with pytest.raises((TypeError, ValueError)):
        LowRank(jnp.ones((4, 2)), jnp.ones((3, 6)))


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, jnp.ones(3)], ids=["list", "dict", "array"])
def test_static_field_that_cannot_be_hashed(value):
    class Static(ImplicitArray):
        w: jax.Array
        setting: Any = aux_field()

        def materialize(self) -> jax.Array:
            return self.w

    message = rf"`Static\.setting` is static and must be hashable, got {type(value).__name__} .*a tuple would work"
    with pytest.raises(TypeError, match=message):
        Static(X, value)
    assert Static(X, (1, 2)).setting == (1, 2)


def test_class_without_materialize():
    class Unfinished(ImplicitArray):
        w: jax.Array

    with pytest.raises(TypeError, match=r"abstract.*materialize"):
        Unfinished(X)


def test_materialize_that_contradicts_the_shape_property():
    class Liar(ImplicitArray):
        warn_on_materialize = False

        w: jax.Array

        @property
        def shape(self) -> tuple[int, ...]:
            return (7,)

        def materialize(self) -> jax.Array:
            return self.w

    message = r"`Liar\.materialize` returned float32\[3\] for an array that says it is float32\[7\]"
    with pytest.raises(TypeError, match=message):
        Liar(X, dtype=jnp.float32).materialize()


def test_jax_function_outside_implicit(getkey):
    q = scaled(getkey(), (4, 6))
    with pytest.raises(TypeError, match="Scaled"):
        jnp.dot(q, q)
    with pytest.raises(AttributeError, match=r"Scaled is no JAX array outside `implicit`; .*`implicit\(f\)\(\.\.\.\)`"):
        Scaled.__jax_array__.fget(q)
