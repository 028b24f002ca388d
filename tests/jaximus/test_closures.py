"""Functions that close over implicit arrays, and all the ways an array can reach a function."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax import tree_util as jtu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eformer.jaximus import ImplicitArray, implicit, use_implicit

from .arrays import ARRAYS, assert_same, count_materialized, densely, filled, integers, name, scaled
from .test_transforms import matmul

arrays = pytest.mark.parametrize("make", ARRAYS, ids=name)


# --- each makes a function of `x` that closes over `q` ---


def operator_(q):
    return lambda x: x @ q


def reflected(q):
    return lambda x: q.T @ x.T + (1 - q).sum()


def method(q):
    return lambda x: x + q.sum(axis=1, keepdims=True) + q.reshape(-1)[None, :4] + q[:1].astype(x.dtype)


def function(q):
    return lambda x: jnp.dot(x, q)


def several_functions(q):
    return lambda x: jnp.concatenate([jnp.matmul(x, q), jnp.tanh(0 * q), jnp.where(q > 0, q, 0.0)])


def einsum(q):
    return lambda x: jnp.einsum("bi,ij,kj->bk", x, q, q)


def lax_function(q):
    """Functions of `lax` take arrays only; `jnp.asarray` makes it one, still implicit."""
    return lambda x: lax.dot_general(x, jnp.asarray(q), (((1,), (0,)), ((), ())))


def in_jit(q):
    return jax.jit(lambda x: jnp.dot(x, q))


def in_nested_jit(q):
    return jax.jit(lambda x: jax.jit(lambda x: jnp.dot(x, q))(x) + x @ q)


def jit_used_twice(q):
    inner = jax.jit(lambda x: jnp.dot(x, q))
    return lambda x: inner(inner(x))


def in_scan(q):
    return lambda x: lax.scan(lambda c, _: (jnp.dot(c, q), c @ q), x, None, length=2)


def in_scan_of_jit(q):
    inner = jax.jit(lambda x: jnp.dot(x, q))
    return lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]


def in_cond(q):
    return lambda x: lax.cond(x.sum() > 0, lambda x: jnp.dot(x, q), lambda x: x @ q + 1, x)


def in_while(q):
    return lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.dot(c[1], q)), (0, x))


def in_checkpoint(q):
    return jax.checkpoint(lambda x: jnp.dot(x, q))


def in_grad(q):
    return jax.grad(lambda x: jnp.sum(jnp.dot(x, q) ** 2))


def in_grad_of_jit(q):
    return jax.grad(jax.jit(lambda x: jnp.sum(jnp.dot(x, q) ** 2)))


def in_grad_of_scan(q):
    return jax.grad(lambda x: jnp.sum(lax.scan(lambda c, _: (jnp.dot(c, q), None), x, None, length=2)[0] ** 2))


def in_jvp(q):
    return lambda x: jax.jvp(lambda x: jnp.dot(x, q), (x,), (x,))


def in_vmap(q):
    return jax.vmap(lambda x: jnp.dot(x, q))


def in_vmap_of_grad(q):
    return jax.vmap(jax.grad(lambda x: jnp.sum(jnp.dot(x, q) ** 2)))


def in_vmap_of_jit(q):
    return jax.vmap(jax.jit(lambda x: jnp.dot(x, q)))


def in_map(q):
    return lambda x: lax.map(lambda row: jnp.dot(row, q), x)


def in_shard_map(q):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    return jax.shard_map(lambda x: jnp.dot(x, q), mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def as_default_argument(q):
    return lambda x, q=q: jnp.dot(x, q)


def as_partial(q):
    return functools.partial(lambda q, x: jnp.dot(x, q), q)


def as_tree_partial(q):
    return jtu.Partial(lambda q, x: jnp.dot(x, q), q)


CLOSURES = (
    operator_,
    reflected,
    method,
    function,
    several_functions,
    einsum,
    lax_function,
    in_jit,
    in_nested_jit,
    jit_used_twice,
    in_scan,
    in_scan_of_jit,
    in_cond,
    in_while,
    in_checkpoint,
    in_grad,
    in_grad_of_jit,
    in_grad_of_scan,
    in_jvp,
    in_vmap,
    in_vmap_of_grad,
    in_vmap_of_jit,
    in_map,
    in_shard_map,
    as_default_argument,
    as_partial,
    as_tree_partial,
)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("closure", CLOSURES, ids=name)
def test_closure(closure, jit, getkey):
    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    assert_same(jit(implicit(closure(q)))(x), jit(closure(q.materialize()))(x))


@arrays
@pytest.mark.parametrize("closure", [operator_, method, in_jit, in_scan, in_vmap_of_grad], ids=name)
def test_closure_over_each_array(closure, make, getkey):
    x, q = integers(getkey(), (4, 4)), make(getkey(), (4, 4))
    assert_same(implicit(closure(q))(x), closure(q.materialize())(x))


STAYING = (operator_, function, lax_function, in_jit, jit_used_twice, in_scan, in_cond, in_while, in_checkpoint)


@pytest.mark.parametrize("closure", [*STAYING, in_scan_of_jit, in_shard_map, as_tree_partial], ids=name)
def test_closure_stays_implicit(closure, getkey):
    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    assert count_materialized(implicit(closure(q)), x) == 0


def test_jit_closing_over_it_used_inside_and_then_outside(getkey):
    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    jitted = jax.jit(lambda x: x @ q)
    expected = x @ q.materialize()
    assert_same(implicit(jitted)(x), expected)
    assert_same(jitted(x), expected)
    assert_same(jitted(x + 1), (x + 1) @ q.materialize())


def test_jit_closing_over_it_used_outside_and_then_inside(getkey):
    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    jitted = jax.jit(lambda x: x @ q)
    expected = x @ q.materialize()
    assert_same(jitted(x), expected)
    assert_same(implicit(jitted)(x), expected)
    assert count_materialized(implicit(jitted), x) == 0


@pytest.mark.parametrize("outer", [jax.jit, jax.grad, jax.vmap], ids=name)
def test_transformation_of_a_jit_traced_inside_before(outer, getkey):
    """The trace that JAX cached inside `implicit` serves transformations outside it too."""
    x, q = integers(getkey(), (4,)), scaled(getkey(), (4, 4))
    jitted = jax.jit(lambda x: jnp.sum((x @ q) ** 2))
    dense = lambda x: jnp.sum((x @ q.materialize()) ** 2)  # noqa: E731
    implicit(jitted)(x)
    x = jnp.stack([x, x]) if outer is jax.vmap else x
    assert_same(outer(jitted)(x), outer(dense)(x))


def test_traced_leaves_closed_over(getkey):
    """The array is made of tracers, and the function that closes over it runs inside another trace."""
    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))

    def loss(q):
        inner = jax.jit(lambda x: jnp.dot(x, q))
        return jnp.sum(implicit(lambda x: inner(x) + jnp.dot(x, q))(x))

    assert_same(jax.jit(jax.grad(loss))(q), jax.grad(densely(lambda q: jnp.sum(2 * (x @ q))))(q))


def test_one_jit_for_arrays_of_different_values(getkey):
    """What JAX caches for one array must not serve another."""
    x, one, other = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    inner = jax.jit(matmul)
    assert_same(implicit(inner)(x, one), x @ one.materialize())
    assert_same(implicit(inner)(x, other), x @ other.materialize())
    assert_same(implicit(inner)(x, other.materialize()), x @ other.materialize())


# --- arguments ---


@arrays
def test_keyword_arguments(make, getkey):
    x, q = integers(getkey(), (4, 4)), make(getkey(), (4, 4))
    f = lambda x, *, q, scale=2: scale * (x @ q)  # noqa: E731
    assert_same(implicit(f)(x, q=q), f(x, q=q.materialize()))
    assert_same(implicit(f)(scale=3, q=q, x=x), f(x, q=q.materialize(), scale=3))
    assert_same(jax.jit(implicit(f), static_argnames="scale")(x, q=q, scale=3), f(x, q=q.materialize(), scale=3))


@arrays
def test_nested_containers(make, getkey):
    x = integers(getkey(), (4, 4))
    tree = {"mlp": [(make(getkey(), (4, 4)), None), {"up": make(getkey(), (4, 4)), "name": 3}], "x": x}

    def f(tree):
        first, _ = tree["mlp"][0]
        hidden = tree["x"] @ first
        return {"hidden": hidden, "out": (hidden @ tree["mlp"][1]["up"] * tree["mlp"][1]["name"], None)}

    assert_same(implicit(f)(tree), densely(f)(tree))
    assert_same(jax.jit(implicit(f))(tree), densely(f)(tree))


def test_container_without_implicit_arrays_keeps_its_identity(getkey):
    settings, x = {"a": [1, "text"]}, integers(getkey(), (2,))
    assert implicit(lambda x, given: given is settings)(x, settings)


def test_arguments_that_are_no_arrays(getkey):
    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    f = lambda x, q, combine, text: combine(x, q) if text == "yes" else None  # noqa: E731
    assert_same(implicit(f)(x, q, operator.matmul, "yes"), x @ q.materialize())
    assert implicit(f)(x, q, operator.matmul, "no") is None


def test_returns_the_array_it_was_given(getkey):
    q = scaled(getkey(), (4, 4))
    returned = implicit(lambda q: {"q": [q]})(q)["q"][0]
    assert isinstance(returned, ImplicitArray)
    assert_same(returned, q)


def test_module_with_a_method(getkey):
    """A bound method of a tree that holds implicit arrays."""

    @jtu.register_pytree_node_class
    class Linear:
        def __init__(self, w, b):
            self.w, self.b = w, b

        def __call__(self, x):
            return jnp.dot(x, self.w) + self.b[None]

        def tree_flatten(self):
            return (self.w, self.b), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    x, q, b = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4)), integers(getkey(), (4,))
    assert_same(implicit(Linear(q, b))(x), x @ q.materialize() + b[None])
    assert_same(implicit(Linear(q, b).__call__)(x), x @ q.materialize() + b[None])


def test_wraps_the_function():
    def documented(x):
        """Says something."""
        return x

    assert implicit(documented).__name__ == "documented"
    assert implicit(documented).__doc__ == "Says something."
    assert use_implicit is implicit


def test_method_of_a_class(getkey):
    class Model:
        @implicit
        def __call__(self, x, q):
            return x @ q

    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    assert_same(Model()(x, q), x @ q.materialize())


# --- implicit in implicit ---


def twice(f):
    return implicit(implicit(f))


def around_part(f):
    return implicit(lambda x, q: implicit(f)(x, q) * 1)


def with_jit_between(f):
    return implicit(jax.jit(implicit(f)))


def with_grad_between(f):
    return implicit(jax.grad(lambda x, q: jnp.sum(implicit(f)(x, q) ** 2)))


def with_vmap_between(f):
    return implicit(jax.vmap(implicit(f), (0, None)))


def in_loop(f):
    return implicit(lambda x, q: lax.scan(lambda c, _: (implicit(f)(c, q), None), x, None, length=2)[0])


NESTINGS = (twice, around_part, with_jit_between, with_grad_between, with_vmap_between, in_loop)


@pytest.mark.parametrize("nesting", NESTINGS, ids=name)
def test_implicit_in_implicit(nesting, getkey, monkeypatch):
    x, q = integers(getkey(), (4, 4)), scaled(getkey(), (4, 4))
    actual, count = nesting(matmul)(x, q), count_materialized(nesting(matmul), x, q)
    monkeypatch.setitem(globals(), "implicit", densely)
    assert_same(actual, nesting(matmul)(x, q))
    assert count == 0


# --- einsum ---

EINSUMS = {
    "left": ("ij,jk->ik", "qx"),
    "right": ("ij,jk->ik", "xq"),
    "left transposed": ("ji,jk->ik", "qx"),
    "right transposed": ("ij,kj->ik", "xq"),
    "two": ("ij,jk->ik", "qq"),
    "three": ("ij,jk,kl->il", "qxq"),
    "repeated": ("ij,ij->", "qq"),
    "repeated rows": ("ij,ij->i", "qx"),
    "outer": ("ij,kl->ijkl", "xq"),
    "diagonal": ("ii->i", "q"),
    "trace": ("ii->", "q"),
    "sum": ("ij->j", "q"),
    "transpose": ("ij->ji", "q"),
    "four": ("ab,bc,cd,da->", "qxqx"),
}


@pytest.mark.parametrize("make", [scaled, filled], ids=name)  # with rules for it, and without
@pytest.mark.parametrize(("spec", "operands"), EINSUMS.values(), ids=EINSUMS)
def test_einsum(spec, operands, make, getkey):
    values = {"x": integers(getkey(), (4, 4)), "q": make(getkey(), (4, 4))}
    given = [values[operand] for operand in operands]
    f = functools.partial(jnp.einsum, spec)
    assert_same(implicit(f)(*given), densely(f)(*given))


@pytest.mark.parametrize("spec", ["bij,bjk->bik", "bij,bjk->ik", "bij,kjl->bikl", "...ij,...jk->...ik"])
def test_einsum_with_batches(spec, getkey):
    x, q = integers(getkey(), (3, 2, 4)), scaled(getkey(), (3, 4, 5))
    f = functools.partial(jnp.einsum, spec)
    assert_same(implicit(f)(x, q), densely(f)(x, q))


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (0, 4), (1, 1, 1, 4)], ids=str)
def test_matmul_with_operands_of_any_rank(shape, getkey):
    x, q = integers(getkey(), shape), scaled(getkey(), (4, 5))
    assert_same(implicit(jnp.matmul)(x, q), x @ q.materialize())
    assert_same(x @ q, x @ q.materialize())
    assert count_materialized(implicit(jnp.matmul), x, q) == 0


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("precision", [None, "highest"])
def test_matmul_keeps_what_the_caller_asked_for(precision, preferred, getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 5))
    f = functools.partial(jnp.matmul, precision=precision, preferred_element_type=preferred)
    assert_same(implicit(f)(x, q), densely(f)(x, q))


def test_numpy_operand(getkey):
    x, q = np.asarray(integers(getkey(), (3, 4))), scaled(getkey(), (4, 5))
    assert_same(implicit(jnp.matmul)(x, q), jnp.matmul(x, q.materialize()))
