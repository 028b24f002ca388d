"""Where a rule serves, nothing is made dense: the program holds no trace of `materialize`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eformer.jaximus import explain, implicit, is_implicit, materialization_error

from . import test_transforms as t
from .arrays import Scaled, count_materialized, integers, name, scaled

PLACES = (t.inside, t.outside, t.jitted)
TRANSFORMS = (
    t.eager,
    t.jit,
    t.jit_in_jit,
    t.jit_keyword,
    t.jit_container,
    t.jit_unused,
    t.jit_returning_it,
    t.named_call,
    t.vmap_closed_over,
    t.scan_constant,
    t.scan_constant_reverse,
    t.scan_carry,
    t.scan_carry_of_both,
    t.scan_of_checkpoint,
    t.scan_of_scan,
    t.cond,
    t.cond_closing_over,
    t.switch,
    t.while_constant,
    t.while_carry,
    t.while_condition,
    t.fori_static,
    t.fori_traced,
    t.lax_map,
    t.checkpoint,
    t.checkpoint_returning_it,
    t.jvp_x,
)


@pytest.mark.parametrize("place", PLACES, ids=name)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=name)
def test_matrix(transform, place, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert count_materialized(place(implicit, transform, t.matmul), x, q) == 0


STACKED = (
    t.scan_layers,
    t.scan_layers_reverse,
    t.scan_layers_with_inputs,
    t.scan_layers_of_checkpoint,
    t.lax_map_layers,
    t.lax_map_both,
    t.vmap_both,
)


@pytest.mark.parametrize("place", PLACES, ids=name)
@pytest.mark.parametrize("transform", STACKED, ids=name)
def test_stack(transform, place, getkey):
    x, q = integers(getkey(), (3, 2, 4)), scaled(getkey(), (3, 4, 4))
    x = x[0] if transform in (t.scan_layers, t.scan_layers_reverse, t.scan_layers_with_inputs) else x
    x = x[0] if transform in (t.scan_layers_of_checkpoint, t.lax_map_layers) else x
    assert count_materialized(place(implicit, transform, t.matmul), x, q) == 0


@pytest.mark.parametrize("transform", [t.scan_carry_doubled, t.cond_returning_it, t.switch_returning_it], ids=name)
def test_carried_and_chosen_as_a_tree(transform, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert count_materialized(t.inside(implicit, transform, t.matmul), x, q) == 0


def negated_in_scan(q):
    return lax.scan(lambda c, _: (-c, None), q, None, length=3)[0]


def negated_in_while(q):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, -c[1]), (0, q))[1]


def negated_in_cond(q):
    return lax.cond(True, lambda q: -q, lambda q: q, q)


def negated_in_switch(q):
    return lax.switch(1, [lambda q: -q, lambda q: q, lambda q: -q], q)


def transposed_in_jit(q):
    return jax.jit(lambda q: q.T)(q)


def transposed_in_checkpoint(q):
    return jax.checkpoint(lambda q: q.T)(q)


def transposed_in_scan_of_jit(q):
    return lax.scan(lambda c, _: (jax.jit(lambda c: -c)(c), None), q.T, None, length=2)[0]


def transposed_twice(q):
    return q.T.T


def transposed_by_einsum(q):
    return jnp.einsum("ij->ji", q)


def transposed_by_moveaxis(q):
    return jnp.moveaxis(q, 0, 1)


RETURNING = (
    negated_in_scan,
    negated_in_while,
    negated_in_cond,
    negated_in_switch,
    transposed_in_jit,
    transposed_in_checkpoint,
    transposed_in_scan_of_jit,
    transposed_twice,
    transposed_by_einsum,
    transposed_by_moveaxis,
)


@pytest.mark.parametrize("function", RETURNING, ids=name)
def test_result_of_control_flow(function, getkey):
    q = scaled(getkey(), (4, 4))
    assert is_implicit(implicit(function)(q))
    assert count_materialized(implicit(function), q) == 0


@pytest.mark.parametrize("wrt", ["x", "both"])
def test_forward_pass_under_grad(wrt, getkey):
    """Only the gradient's own products, with the transpose, are dense."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    gradient = jax.grad(t.squares, argnums=(0, 1) if wrt == "both" else 0)
    assert count_materialized(implicit(gradient), x, q) == 1


def test_outside_grad_needs_no_dense_array(getkey):
    """The rule is differentiated, not the dense product."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    assert count_materialized(jax.grad(implicit(t.squares), argnums=(0, 1)), x, q) == 0


@pytest.mark.parametrize("transform", [t.scan_layers, t.scan_carry_of_both, t.cond, t.checkpoint, t.jit], ids=name)
def test_strict_mode_agrees(transform, getkey):
    x = integers(getkey(), (3, 4))
    q = scaled(getkey(), (3, 4, 4) if transform is t.scan_layers else (4, 4))
    with materialization_error():
        jax.jit(implicit(lambda x, q: transform(t.matmul, x, q)))(x, q)
    assert explain(lambda x, q: transform(t.matmul, x, q))(x, q).dense_bytes == 0


def as_operator(x, q):
    return x @ q


def as_function(x, q):
    return implicit(jnp.matmul)(x, q)


def as_closure(x, q):
    return implicit(lambda x: jnp.dot(x, q))(x)


def as_array(x, q):
    return implicit(lambda x, q: lax.dot_general(x, jnp.asarray(q), (((1,), (0,)), ((), ()))))(x, q)


def asking_for_its_shape(x, q):
    return implicit(lambda x, q: jnp.zeros_like(q) + jnp.ones(jnp.shape(q)) * q.ndim)(x, q)


@pytest.mark.parametrize("function", [as_operator, as_function, as_closure, as_array, asking_for_its_shape], ids=name)
def test_eager(function, getkey, monkeypatch):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 4))
    made_dense, materialize = [], Scaled.materialize

    def counting(self):
        if isinstance(self.w, jax.core.Tracer):
            return materialize(self)
        made_dense.append(self)
        return materialize(self)

    monkeypatch.setattr(Scaled, "materialize", counting)
    function(x, q)
    assert not made_dense
