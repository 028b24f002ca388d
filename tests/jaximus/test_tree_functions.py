"""Everyday jobs on trees that hold implicit arrays, and what happens to those who do them leaf by leaf."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quantization.cases import CLASSES

from eformer.jaximus import implicit, tree_average, tree_cast, tree_map_with_implicit, tree_norm, tree_size
from eformer.ops.quantization import quantize

pytestmark = pytest.mark.filterwarnings("ignore:no rule serves")
each_class = pytest.mark.parametrize("form", CLASSES)


@pytest.fixture
def w(getkey):
    return jax.random.normal(getkey(), (16, 8))


@each_class
def test_cast(form, w):
    tree = {"w": quantize(w, dtype=form), "b": w[0], "step": jnp.int32(3), "name": "layer"}
    cast = tree_cast(tree, jnp.bfloat16)
    assert (cast["w"].dtype, cast["b"].dtype, cast["step"].dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    assert type(cast["w"]) is type(tree["w"])
    assert jnp.array_equal(cast["w"].materialize(), tree["w"].materialize().astype(jnp.bfloat16))
    assert cast["name"] == "layer"


def test_cast_wants_floating_point(w):
    with pytest.raises(TypeError, match="floating point dtype, got int8"):
        tree_cast({"w": w}, jnp.int8)


@each_class
def test_norm(form, w):
    tree = {"w": quantize(w, dtype=form), "b": w[0], "step": jnp.int32(100)}
    expected = np.sqrt(np.sum(np.square(tree["w"].materialize())) + np.sum(np.square(w[0])))
    np.testing.assert_allclose(tree_norm(tree), expected, rtol=1e-5)


def test_norm_of_half_precision_does_not_overflow():
    np.testing.assert_allclose(tree_norm([jnp.full(4, 300, jnp.float16)]), 600)


@each_class
def test_average(form, w):
    first, second = ({"w": quantize(a, dtype=form), "b": a[0], "step": jnp.int32(n)} for a, n in ((w, 1), (-2 * w, 2)))
    mean = tree_average([first, second], weights=[3, 1])
    expected = 0.75 * first["w"].materialize() + 0.25 * second["w"].materialize()
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean["b"], 0.25 * w[0], rtol=1e-5)
    assert mean["step"] == 1


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, 2.0, 3.0]])
def test_average_says_which_weights_it_wants(weights, w):
    with pytest.raises(ValueError, match="must be 2 numbers"):
        tree_average([{"w": w}, {"w": w}], weights)


def test_average_of_nothing():
    with pytest.raises(ValueError, match="at least one tree"):
        tree_average([])


@each_class
def test_size(form, w):
    assert tree_size({"w": quantize(w, dtype=form), "b": w[0], "f": abs, "n": 3}) == 16 * 8 + 8


@each_class
def test_map_over_whole_arrays(form, w):
    q = quantize(w, dtype=form)
    halved = tree_map_with_implicit(lambda p: p * 0.5, {"w": q})
    np.testing.assert_allclose(jnp.asarray(halved["w"]), 0.5 * q.materialize(), rtol=1e-6)


LEAF_BY_LEAF = {
    "half": lambda tree: jax.tree.map(lambda leaf: leaf * 0.5, tree),
    "average": lambda tree: jax.tree.map(lambda a, b: (a + b) / 2, tree, tree),
    "cast": lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree),
}
USES = {
    "matmul": lambda q: jnp.ones((2, 16)) @ q,
    "implicit": lambda q: implicit(jnp.sum)(q),
    "materialize": lambda q: q.materialize(),
    "jit": lambda q: jax.jit(implicit(jnp.exp))(q),
    "index": lambda q: q[0],
}


# Half a code of FP8 is a code of FP8: nothing tells that it was changed.
@pytest.mark.parametrize("form", [form for form in CLASSES if not form.startswith("fp8")])
@pytest.mark.parametrize("change", LEAF_BY_LEAF.values(), ids=LEAF_BY_LEAF)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_arithmetic_on_leaves_is_found_out_when_the_array_is_used(use, change, form, w):
    with jax.numpy_dtype_promotion("standard"):  # as most people have it
        changed = change(quantize(w, dtype=form))
    with pytest.raises(TypeError, match=r"leaf `(weight|packed|scale|absmax)` .*tree_map_with_implicit"):
        use(changed)


DIFFERENTIATE = {
    "grad": lambda f, p: jax.grad(f)(p),
    "value_and_grad": lambda f, p: jax.value_and_grad(f)(p),
    "jacrev": lambda f, p: jax.jacrev(f)(p),
    "jacfwd": lambda f, p: jax.jacfwd(f)(p),
    "hessian": lambda f, p: jax.hessian(f)(p),
}


@each_class
@pytest.mark.parametrize("differentiate", DIFFERENTIATE.values(), ids=DIFFERENTIATE)
def test_differentiating_codes_says_what_works(differentiate, form, w):
    params = {"w": quantize(w, dtype=form), "b": w}
    with pytest.raises(TypeError, match=r"cannot be differentiated.*partition.*straight_through"):
        differentiate(lambda p: jnp.sum(jnp.ones((1, 16)) @ p["w"]), params)


def test_differentiating_with_allow_int_is_as_always(w):
    gradient = jax.grad(lambda q: jnp.sum(jnp.ones((1, 16)) @ q), allow_int=True)(quantize(w, dtype="int8"))
    assert gradient.scale.shape == (16, 1)


OPTIMIZE = {
    "init": lambda p: optax.adam(1e-3).init(p),
    "momentum": lambda p: optax.sgd(1e-3, momentum=0.9).init(p),
    "apply_updates": lambda p: optax.apply_updates(p, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), p)),
    "updates that are codes": lambda p: optax.apply_updates(p, p),
    "norm": lambda p: optax.tree.norm(p),
}


@each_class
@pytest.mark.parametrize("optimize", OPTIMIZE.values(), ids=OPTIMIZE)
def test_optimizing_codes_says_what_works(optimize, form, w):
    with pytest.raises(TypeError, match=r"given to Optax's.*partition.*straight_through"):
        optimize({"w": quantize(w, dtype=form)})


WITHOUT_IMPLICIT = {
    "jnp.dot": lambda q: jnp.dot(jnp.ones((2, 16)), q),
    "jnp.sum": jnp.sum,
    "softmax": jax.nn.softmax,
    "lax.exp": jax.lax.exp,
    "einsum": lambda q: jnp.einsum("ij->j", q),
    "in jit": lambda q: jax.jit(jnp.exp)(q),
    "x.dot": lambda q: jnp.ones((2, 16)).dot(q),
}


@each_class
@pytest.mark.parametrize("function", WITHOUT_IMPLICIT.values(), ids=WITHOUT_IMPLICIT)
def test_functions_outside_implicit_name_it(function, form, w):
    with pytest.raises(TypeError, match=r"`eformer.jaximus.implicit\(f\)` takes it"):
        function(quantize(w, dtype=form))


def test_nnx_jit_names_implicit(w):
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(TypeError, match=r"`eformer.jaximus.implicit\(f\)` takes it"):
        nnx.jit(lambda q, x: jnp.dot(x, q))(quantize(w, dtype="int8"), jnp.ones((2, 16)))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("form", ["ternary", "binary"])
@pytest.mark.parametrize("wrap", [implicit, lambda f: jax.jit(implicit(f))], ids=["eager", "jit"])
def test_vmap_over_an_axis_behind_the_packed_one(wrap, form, axis, getkey):
    q = quantize(jax.random.normal(getkey(), (3, 8, 4)), dtype=form)
    with pytest.raises(ValueError, match=r"codes are packed along axis -2.*implicit\(jax.vmap"):
        jax.vmap(wrap(jnp.exp), in_axes=axis)(q)
    inside = implicit(jax.vmap(jnp.exp, in_axes=axis))(q)
    np.testing.assert_allclose(inside, jax.vmap(jnp.exp, in_axes=axis)(q.materialize()), rtol=1e-6)


def test_vmap_over_axes_in_front_of_the_packed_one(getkey):
    q = quantize(jax.random.normal(getkey(), (2, 3, 8, 4)), dtype="ternary")
    out = jax.vmap(implicit(jnp.exp), in_axes=1)(q)
    np.testing.assert_allclose(out, jnp.moveaxis(jnp.exp(q.materialize()), 1, 0), rtol=1e-6)
    nested = jax.vmap(jax.vmap(implicit(jnp.exp), in_axes=1), in_axes=1)(q[:, :, None])
    assert nested.shape == (3, 1, 2, 8, 4)
