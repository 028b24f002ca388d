"""Seeing what becomes of implicit arrays: `explain`, the warning, and the error that replaces it."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eformer.jaximus import (
    Explanation,
    ImplicitArray,
    MaterializationError,
    MaterializationWarning,
    explain,
    implicit,
    materialization_error,
    note_materialized,
    register,
)

from .arrays import Filled, LowRank, Scaled, Shifted, assert_same, integers, low_rank, name, scaled

DOT = "jaximus.arrays.dot_scaled"  # the module's name, then the function's


def rows(explanation: Explanation) -> dict[tuple[str, str], tuple[int, int]]:
    """(primitive, rule) to (times, dense bytes), without the rules of control flow."""
    found = {(met.primitive, met.rule): (times, dense) for met, times, dense in explanation}
    return {key: value for key, value in found.items() if not key[1].startswith("eformer._src.jaximus.control_flow")}


@pytest.fixture
def x(getkey):
    return integers(getkey(), (3, 4))


@pytest.fixture
def q(getkey):
    return scaled(getkey(), (4, 4))


def test_rows(x, q):
    explanation = explain(lambda x, q: jnp.exp(x @ q) + x @ jnp.sin(q))(x, q)
    assert isinstance(explanation, Explanation)
    assert rows(explanation) == {("dot_general", DOT): (1, 0), ("sin", "materialize"): (1, 64)}
    assert explanation.dense_bytes == 64
    met, times, dense = explanation[0]  # what costs most comes first
    assert (met.primitive, met.classes, met.rule, times, dense) == ("sin", ("Scaled",), "materialize", 1, 64)


def test_several_classes(q):
    explanation = explain(lambda q, other: q + other)(q, Filled(jnp.float32(1), shape=(4, 4)))
    ((met, times, dense),) = [row for row in explanation if row[0].primitive == "add"]
    assert (met.classes, times, dense) == (("Scaled", "Filled"), 1, 128)


def test_transpose(q):
    assert rows(explain(lambda q: q.T.T)(q)) == {("transpose", "jaximus.arrays.transpose_scaled"): (2, 0)}


def dot_in_scan(x, q):
    return lax.scan(lambda c, _: (c @ q, None), x, None, length=5)[0]


def dot_in_scan_of_scan(x, q):
    return lax.scan(lambda c, _: (dot_in_scan(c, q), None), x, None, length=3)[0]


def dot_in_jits(x, q):
    f = jax.jit(lambda x, q: x @ q)
    return f(f(x, q), q)


def dot_in_checkpoint(x, q):
    return jax.checkpoint(lambda x, q: x @ q)(x, q)


def dot_in_each_branch(x, q):
    return lax.cond(True, lambda x, q: x @ q, lambda x, q: x @ q + 1, x, q)


def dot_in_while(x, q):
    return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] @ q), (0, x))[1]


def dot_in_while_carry(x, q):
    return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] @ c[2], -c[2]), (0, x, q))[1]


def dot_in_scan_carry(x, q):
    return lax.scan(lambda c, _: ((c[0] @ c[1], -c[1]), None), (x, q), None, length=5)[0][0]


def dot_in_scan_carry_made_dense(x, q):
    return lax.scan(lambda c, _: ((c[0] @ c[1], c[1] + 1), c[0] @ q), (x, q), None, length=5)[0][0]


def dot_in_map(x, q):
    return lax.map(lambda row: row @ q, x)


def dot_in_fori(x, q):
    return lax.fori_loop(0, 5, lambda _, c: c @ q, x)


def dot_in_vmap(x, q):
    return jax.vmap(lambda row: row @ q)(x)


def dot_in_grad(x, q):
    return jax.grad(lambda x: jnp.sum(x @ q))(x)


COUNTS = {
    dot_in_scan: 5,
    dot_in_scan_of_scan: 15,
    dot_in_jits: 2,
    dot_in_checkpoint: 1,
    dot_in_each_branch: 2,
    dot_in_while: 1,
    dot_in_while_carry: 1,
    dot_in_scan_carry: 5,
    dot_in_scan_carry_made_dense: 5,
    dot_in_map: 3,
    dot_in_fori: 5,
    dot_in_vmap: 1,
}


@pytest.mark.parametrize(("function", "times"), COUNTS.items(), ids=[f.__name__ for f in COUNTS])
def test_counts(function, times, x, q):
    """As often as it runs; of a `while_loop`, whose length is not known, once; of branches, each."""
    assert rows(explain(function)(x, q))["dot_general", DOT] == (times, 0)


def test_dense_bytes_are_multiplied_too(x, q):
    function = lambda x, q: lax.scan(lambda c, _: (c + jnp.sum(jnp.sin(q)), None), x, None, length=5)  # noqa: E731
    assert rows(explain(function)(x, q)) == {("sin", "materialize"): (5, 5 * 64)}


def test_layers(x, getkey):
    q = scaled(getkey(), (3, 4, 4))
    function = lambda x, q: lax.scan(lambda c, w: (c @ w, None), x, q)  # noqa: E731
    assert rows(explain(function)(x, q)) == {("dot_general", DOT): (3, 0)}


def test_layers_that_must_be_made_dense(x):
    """The whole stack, once, where its slices are no slices of its leaves."""
    q = Filled(jnp.float32(1), shape=(3, 4, 4))
    function = lambda x, q: lax.scan(lambda c, w: (c @ w, None), x, q)  # noqa: E731
    explanation = explain(function)(x, q)
    assert explanation.dense_bytes == 3 * 64


def test_materialization_inside_a_rule_is_put_down_to_it(x, q):
    """The transposed product, that the gradient takes, is not served by `dot_scaled`."""
    assert rows(explain(dot_in_grad)(x, q))["dot_general", "materialize"] == (1, 64)


def test_finding_out_a_sharded_type_costs_nothing(getkey):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    function = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    assert explain(function)(integers(getkey(), (8, 4)), scaled(getkey(), (4, 5))).dense_bytes == 0


def test_table(x, q):
    text = str(explain(lambda x, q: x @ jnp.sin(q) + dot_in_scan(x, q))(x, q))
    lines = text.splitlines()
    assert lines[0].split() == ["primitive", "arrays", "rule", "times", "dense", "bytes"]
    assert set(lines[1]) == {"-", " "}
    assert lines[2].split() == ["sin", "Scaled", "materialize", "1", "64"]
    assert ["dot_general", "Scaled", DOT, "5", "0"] in [line.split() for line in lines]
    assert repr(explain(dot_in_jits)(x, q)) == str(explain(dot_in_jits)(x, q))


def test_table_of_nothing(x):
    explanation = explain(jnp.sin)(x)
    assert not explanation
    assert explanation.dense_bytes == 0
    assert str(explanation) == "no primitive met an implicit array"


def test_large_numbers_are_readable():
    q = Filled(jnp.float32(1), shape=(1000, 1000))
    assert "4,000,000" in str(explain(jnp.sin)(q))


@pytest.mark.parametrize(
    "wrap", [lambda f: f, implicit, lambda f: jax.jit(implicit(f)), jax.jit], ids=["", "i", "ji", "j"]
)
def test_function_that_was_called_before(wrap, x, q):
    """A trace that JAX has cached hides nothing."""
    function = wrap(lambda x, q: x @ q + jnp.sum(jnp.sin(q)))
    implicit(function)(x, q)
    explanation = rows(explain(function)(x, q))
    assert explanation == {("dot_general", DOT): (1, 0), ("sin", "materialize"): (1, 64)}
    assert rows(explain(function)(x, q)) == explanation


def test_operator_outside_implicit(x, q):
    assert rows(explain(lambda x: x @ q)(x)) == {("dot_general", DOT): (1, 0)}


def test_keyword_arguments_and_containers(x, q):
    function = lambda *, tree, scale: tree["x"] @ tree["q"][0] * scale  # noqa: E731
    assert rows(explain(function)(tree={"x": x, "q": [q]}, scale=2)) == {("dot_general", DOT): (1, 0)}


def test_does_not_run_the_function(x, q):
    ran = []

    def function(x, q):
        jax.debug.callback(lambda: ran.append(None))
        return x @ q

    explain(function)(x, q)
    jax.effects_barrier()
    assert not ran


def test_function_that_branches_on_values(x, q):
    function = lambda x, q: x @ q if jnp.sum(x) > -100 else None  # noqa: E731
    assert rows(explain(function)(x, q)) == {("dot_general", DOT): (1, 0)}


def test_leaves_the_function_as_it_was(x, q):
    """Nothing that `explain` traced is used afterwards, and it says nothing more."""
    function = jax.jit(implicit(lambda x, q: x @ q))
    explain(function)(x, q)
    assert_same(function(x, q), x @ q.materialize())


# --- warnings ---


def new_class(base: type[ImplicitArray] = Scaled, warn: bool = True) -> type:
    """A class that has not warned yet."""
    return type("Loud", (base,), {"warn_on_materialize": warn})


def test_fallback_warns_once_for_each_class_and_primitive(q):
    loud, other = (new_class()(q.w, q.s) for _ in range(2))
    with pytest.warns(MaterializationWarning, match=r"no rule serves `sin` of Loud.*explain"):
        implicit(lax.sin)(loud)
    implicit(lax.sin)(loud)  # a second warning would be an error
    jax.jit(implicit(lambda q: lax.sin(q) * 2))(loud)
    with pytest.warns(MaterializationWarning, match="`cos` of Loud"):
        implicit(jnp.cos)(loud)
    with pytest.warns(MaterializationWarning, match="`sin` of Loud"):
        implicit(jnp.sin)(other)


def test_operator_warns_too(q):
    loud = new_class()(q.w, q.s)
    with pytest.warns(MaterializationWarning, match="`add` of Loud"):
        loud + 1


def test_no_warning_where_a_rule_serves(x, q):
    loud = new_class()(q.w, q.s)
    with warnings.catch_warnings(action="error"):
        assert_same(x @ loud, x @ q.materialize())
        assert_same(loud.materialize(), q.materialize())


def test_class_that_does_not_want_warnings(q):
    with warnings.catch_warnings(action="error"):
        implicit(jnp.sin)(new_class(warn=False)(q.w, q.s))


def test_explain_does_not_warn(q):
    """Whoever asks is told by the answer; the warning is kept for the call itself."""
    loud = new_class()(q.w, q.s)
    with warnings.catch_warnings(action="error"):
        explain(jnp.sin)(loud)
    with pytest.warns(MaterializationWarning):
        implicit(jnp.sin)(loud)


def test_finding_out_a_shape_does_not_warn(getkey):
    q = low_rank(getkey(), (4, 6))
    with warnings.catch_warnings(action="error"):
        assert Shifted(new_class(LowRank)(q.a, q.b), jnp.ones((4, 6))).shape == (4, 6)


def test_warning_as_an_error_is_repeated(q):
    """A warning that was turned into an error has not been seen yet."""
    loud = new_class()(q.w, q.s)
    with warnings.catch_warnings(action="error"):
        with pytest.raises(MaterializationWarning):
            implicit(jnp.sin)(loud)
        with pytest.raises(MaterializationWarning):
            implicit(jnp.sin)(loud)


# --- strict mode ---


def eager(f):
    return implicit(f)


def jit_outside(f):
    return jax.jit(implicit(f))


def jit_inside(f):
    return implicit(jax.jit(f))


def in_scan(f):
    return jax.jit(implicit(lambda x, q: lax.scan(lambda c, _: (c, f(x, q)), 0, None, length=2)[1]))


def in_cond(f):
    return jax.jit(implicit(lambda x, q: lax.cond(True, f, f, x, q)))


STRICT = pytest.mark.parametrize("place", [eager, jit_outside, jit_inside, in_scan, in_cond], ids=name)


@STRICT
def test_materialization_is_an_error(place, x, q):
    function = place(lambda x, q: x @ jnp.sin(q))
    with (
        materialization_error(),
        pytest.raises(MaterializationError, match=r"no rule serves `sin` of Scaled.*@register"),
    ):
        function(x, q)


@STRICT
def test_materialization_is_an_error_after_the_function_was_traced(place, x, q):
    function = place(lambda x, q: x @ jnp.sin(q))
    expected = function(x, q)
    with materialization_error(), pytest.raises(MaterializationError, match="`sin` of Scaled"):
        function(x, q)
    assert_same(function(x, q), expected)


@STRICT
def test_no_error_where_rules_serve(place, x, q):
    function = place(lambda x, q: x @ q)
    with materialization_error():
        actual = function(x, q)
    assert_same(actual, function(x, q))


def test_operator_outside_implicit_in_strict_mode(x, getkey):
    q = low_rank(getkey(), (4, 4))
    x @ q
    with materialization_error(), pytest.raises(MaterializationError, match="`dot_general` of LowRank"):
        x @ q
    assert_same(x @ q, x @ q.materialize())


def test_strict_mode_ends_after_an_error(q):
    with materialization_error(), pytest.raises(MaterializationError):
        implicit(jnp.sin)(q)
    implicit(jnp.sin)(q)


def test_strict_mode_nests(q):
    with materialization_error():
        with materialization_error(), pytest.raises(MaterializationError):
            implicit(jnp.sin)(q)
        with pytest.raises(MaterializationError):
            implicit(jnp.sin)(q)


def test_asking_for_the_dense_array_outside_implicit_is_no_error(q):
    """Whoever has the array may make it dense."""
    with materialization_error():
        assert_same(q.materialize(), q.w * q.s)
        assert LowRank(jnp.ones((2, 1)), jnp.ones((1, 3))).shape == (2, 3)


@STRICT
def test_rule_that_materializes_is_an_error(place, x, q):
    """The product with the transpose has a rule, which makes the array dense."""
    quiet = Quiet(q.w, q.s)
    function = place(lambda x, q: x @ q)
    reason = r"`dot_general` of Quiet .*Quiet\[4, 4\] \(64 bytes\) in the rule .*dot_quiet: as a test; .*@register"
    with materialization_error(), pytest.raises(MaterializationError, match=reason):
        function(x, quiet)
    assert explain(function)(x, quiet).dense_bytes > 0
    assert_same(place(lambda x, q: x @ q)(x, quiet), place(lambda x, q: x @ q)(x, q.materialize()))


class Quiet(Scaled):
    """Has a rule that materializes."""


@register("dot_general")
def dot_quiet(primitive, x: jax.Array, q: Quiet, **params):
    note_materialized(q, "as a test")
    return primitive.bind(x, q.w * q.s, **params)


@pytest.mark.parametrize(
    "function", [lambda q: q.materialize(), lambda q: np.asarray(q), lambda q: q.tolist()], ids=["", "numpy", "list"]
)
def test_function_that_asks_for_the_dense_array(function, q):
    counted = []
    explained = explain(lambda q: counted.append(function(q)) if jnp.sum(q) == jnp.sum(q) else None)(q)
    asked = [(met.classes, times, dense) for met, times, dense in explained if met.rule == "asked for by the function"]
    assert asked == [(("Scaled",), 1, 64)]
    with materialization_error(), pytest.raises(MaterializationError, match=r"asks for a dense copy of Scaled\[4, 4\]"):
        implicit(function)(q)


def test_an_element_is_no_dense_copy(getkey):
    q = scaled(getkey(), (1, 1))
    with materialization_error():
        assert float(implicit(lambda q: q.materialize()[0, 0])(q)) == float(q.materialize()[0, 0])


def jit_output(x, q):
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return x @ jax.jit(lambda q: q.T, out_shardings=on_device)(q)


def cond_output(x, q):
    return x @ lax.cond(True, lambda q: q, lambda q: jnp.zeros(q.shape), q)


def scan_carry(x, q):
    return lax.scan(lambda c, _: ((c[0] @ c[1], jnp.zeros(q.shape)), None), (x, q), None, length=5)[0][0]


def custom_output(x, q):
    f = jax.custom_jvp(lambda q: q)
    f.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return x @ f(q)


REASONS = {
    scan_carry: r"`scan` of Scaled .*another form",
    jit_output: r"`jit` of Scaled .*layout",
    cond_output: r"`cond` of Scaled .*different forms",
    custom_output: r"`custom_jvp_call` of Scaled .*",
}


@pytest.mark.parametrize(("function", "reason"), REASONS.items(), ids=[f.__name__ for f in REASONS])
def test_reasons(function, reason, x, q):
    assert explain(function)(x, q).dense_bytes > 0
    with materialization_error(), pytest.raises(MaterializationError, match=reason):
        implicit(function)(x, q)


def test_names_every_class(q):
    other = Filled(jnp.float32(1), shape=(4, 4))
    with materialization_error(), pytest.raises(MaterializationError, match="`add` of Scaled and Filled"):
        q + other


FALLBACKS = {
    "eager": lambda q: implicit(jnp.sinh)(q),
    "jit": lambda q: jax.jit(implicit(jnp.sinh))(q),
    "method": lambda q: q.std(),
}


@pytest.mark.parametrize("fall_back", FALLBACKS.values(), ids=FALLBACKS)
def test_a_warning_points_at_the_line_of_the_user(fall_back):
    class Loud(ImplicitArray):
        w: jax.Array

        def materialize(self):
            return self.w

    with pytest.warns(MaterializationWarning) as caught:
        fall_back(Loud(jnp.ones((2, 2))))
    assert {warning.filename for warning in caught} == {__file__}
