"""What `calibrate` finds is what weights are multiplied by, whatever the function does with them before."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eformer._src.model.calibration.pull import PULLS
from eformer._src.model.uses.movements import INDEXING, MOVEMENTS, SCALING
from eformer.model import Statistics, calibrate, named_leaves, quantize_model

RNG = np.random.default_rng(0)
# Sums of a hundred products in float32, added in another order.
TOLERANCE = {"rtol": 100 * 2.0**-23, "atol": 100 * 2.0**-23}


@pytest.fixture(autouse=True)
def _as_models_expect():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), with_jvp(*tangents)))


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

X = normal(5, 6)
INDEX = jnp.array([2, 0, 2])
conv = lax.conv_general_dilated

# Linear in the weight, and each output of a matmul is an output of the function.
LINEAR: dict[str, tuple[Any, tuple[int, ...]]] = {
    "matmul": (lambda w: X @ w, (6, 4)),
    "transposed": (lambda w: X @ w.T, (4, 6)),
    "left": (lambda w: w @ X.T, (4, 6)),
    "vector": (lambda w: X @ w, (6,)),
    "cast": (lambda w: X @ w.astype(jnp.float16).astype(jnp.float32), (6, 4)),
    "heads": (lambda w: jnp.einsum("bd,dhk->bhk", X, w), (6, 2, 3)),
    "heads first": (lambda w: jnp.einsum("bd,hdk->bhk", X, w), (2, 6, 3)),
    "reshaped": (lambda w: X @ w.reshape(6, 4), (6, 2, 2)),
    "merged": (lambda w: X @ w.reshape(6, 4), (2, 3, 4)),
    "merged after a transpose": (lambda w: X @ w.transpose(1, 0, 2).reshape(6, 4), (2, 3, 4)),
    "split and merged": (lambda w: X @ w.reshape(2, 3, 4).transpose(1, 0, 2).reshape(6, 4), (6, 4)),
    "several": (lambda w: jnp.einsum("bhk,hkd->bd", X.reshape(5, 2, 3), w), (2, 3, 4)),
    "several, turned": (lambda w: jnp.einsum("bkh,hkd->bd", X.reshape(5, 3, 2), w), (2, 3, 4)),
    "batch": (lambda w: jnp.einsum("hbd,hdk->hbk", X.reshape(5, 2, 3).swapaxes(0, 1), w), (2, 3, 4)),
    "batch last": (lambda w: jnp.einsum("bhd,dkh->bhk", X.reshape(5, 2, 3), w), (3, 4, 2)),
    "squeezed": (lambda w: X @ w[0], (1, 6, 4)),
    "columns": (lambda w: X @ w[:, 1:3], (6, 4)),
    "rows": (lambda w: X @ w[2:8], (9, 4)),
    "every other row": (lambda w: X @ w[::2], (12, 4)),
    "reversed": (lambda w: X @ w[::-1], (6, 4)),
    "padded": (lambda w: X @ jnp.pad(w, ((1, 2), (0, 0))), (3, 4)),
    "halves": (lambda w: [X @ each for each in jnp.split(w, 2, axis=1)], (6, 4)),
    "joined with itself": (lambda w: X @ jnp.concatenate([w, w[::-1]], axis=1), (6, 4)),
    "tiled": (lambda w: X @ jnp.tile(w, (1, 2)), (6, 4)),
    "tiled, each layer": (lambda w: X @ jnp.tile(w, (2, 1, 1)), (3, 6, 4)),
    "chosen": (lambda w: X @ lax.select_n(INDEX[1] == 0, w[0], w[1]), (2, 6, 4)),
    "shared by a batch": (lambda w: jnp.broadcast_to(w, (2, 3, 4)) @ jnp.ones((4, 2)), (3, 4)),
    "scaled": (lambda w: X @ (2 * w), (6, 4)),
    "scaled by channel": (lambda w: X @ (w * jnp.arange(1.0, 5)), (6, 4)),
    "divided by input": (lambda w: X @ (w / jnp.arange(1.0, 7)[:, None]), (6, 4)),
    "negative": (lambda w: X @ -w, (6, 4)),
    "layers": (lambda w: [X @ w[i] for i in (0, 2)], (3, 6, 4)),
    "a layer by index": (lambda w: lax.map(lambda i: X @ w[i], INDEX), (3, 6, 4)),
    "gathered": (lambda w: jnp.einsum("td,tdk->tk", X[:3], w[INDEX]), (3, 6, 4)),
    "scan": (lambda w: lax.scan(lambda x, w: (x + 1, x @ w), X, w)[1], (3, 6, 4)),
    "scan backwards": (lambda w: lax.scan(lambda x, w: (x + 1, x @ w), X, w, reverse=True)[1], (3, 6, 4)),
    "scan, constant": (lambda w: lax.scan(lambda x, _: (x + 1, x @ w), X, length=3)[1], (6, 4)),
    "scan, carried": (lambda w: lax.scan(lambda c, _: ((c[0] + 1, c[1]), c[0] @ c[1]), (X, w), length=3)[1], (6, 4)),
    "scan of a transpose": (lambda w: lax.scan(lambda x, w: (x + 1, x @ w.T), X, w.swapaxes(1, 2))[1], (3, 6, 4)),
    "scan in scan": (
        lambda w: lax.scan(lambda x, w: lax.scan(lambda x, w: (x + 1, x @ w), x, w), X, w)[1],
        (2, 2, 6, 4),
    ),
    "loop": (lambda w: lax.fori_loop(0, 3, lambda i, y: y.at[i].set((X + i) @ w[i]), jnp.zeros((3, 5, 4))), (3, 6, 4)),
    "while": (
        lambda w: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].at[c[0]].set((X + c[0]) @ w)), (0, jnp.zeros((3, 5, 4)))
        )[1],
        (6, 4),
    ),
    "cond": (lambda w: lax.cond(X[0, 0] < 9, lambda w: X @ w, lambda w: 2 * X @ w, w), (6, 4)),
    "cond without": (lambda w: lax.cond(X[0, 0] < 9, lambda w: X @ w, lambda w: jnp.zeros((5, 4)), w), (6, 4)),
    "switch": (
        lambda w: lax.map(lambda i: lax.switch(i, [lambda i=i: X @ w[i] for i in range(3)]), INDEX[:2]),
        (3, 6, 4),
    ),
    "jit": (lambda w: jax.jit(lambda x, w: x @ w)(X, w), (6, 4)),
    "returned by jit": (lambda w: X @ jax.jit(lambda w: w.T)(w), (4, 6)),
    "remat": (lambda w: jax.checkpoint(lambda x, w: x @ w)(X, w), (6, 4)),
    "custom_jvp": (lambda w: with_jvp(X, w), (6, 4)),
    "custom_vjp": (lambda w: with_vjp(X, w), (6, 4)),
    "vmap over x": (lambda w: jax.vmap(lambda x: x @ w)(X), (6, 4)),
    "vmap over w": (lambda w: jax.vmap(lambda w: X @ w)(w), (2, 6, 4)),
    "vmap over both": (lambda w: jax.vmap(jnp.matmul)(X.reshape(2, 1, 15)[:, :, :6], w), (2, 6, 4)),
    "vmap over the last": (lambda w: jax.vmap(lambda w: X @ w, in_axes=2)(w), (6, 4, 2)),
    "barrier": (lambda w: jnp.matmul(*lax.optimization_barrier((X, w))), (6, 4)),
    "twice": (lambda w: [X @ w, (X + 1) @ w], (6, 4)),
    "ragged": (lambda w: lax.ragged_dot(X, w, jnp.array([2, 0, 3])), (3, 6, 4)),
    "ragged, not all rows": (lambda w: lax.ragged_dot(X, w, jnp.array([1, 2])), (2, 6, 4)),
    "convolution": (lambda w: conv(X[None, None], w, (1, 1), "SAME"), (4, 1, 3, 3)),
    "convolution, strided": (lambda w: conv(X.reshape(1, 2, 3, 5), w, (2, 2), "VALID"), (4, 2, 2, 2)),
    "convolution, channels last": (
        lambda w: conv(X.reshape(1, 3, 5, 2), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (2, 3, 2, 4),
    ),
    "convolution, by group": (
        lambda w: conv(X.reshape(1, 2, 3, 5), w, (1, 1), "SAME", feature_group_count=2),
        (4, 1, 2, 2),
    ),
    "convolution in one dimension": (lambda w: conv(X[None], w, (1,), [(1, 0)]), (4, 5, 2)),
}
# A second moment has another form than one matrix for all outputs, or none.
WITHOUT_MOMENT = {"scaled by channel", "divided by input", "padded", "every other row", "convolution, by group"}
WITHOUT_MOMENT |= {"joined with itself", "chosen"}


def slopes_of(function: Any, shape: tuple[int, ...]) -> jax.Array:
    """(elements, outputs): a linear function of each element alone."""
    outs = jax.jit(lambda units: lax.map(function, units))(jnp.eye(np.prod(shape)).reshape(-1, *shape))
    return jnp.concatenate([out.reshape(len(out), -1) for out in jax.tree.leaves(outs)], axis=1)


@pytest.mark.parametrize("name", LINEAR)
def test_sums_are_those_of_the_derivative(name):
    """An output of a matmul is a sum of inputs times elements: the inputs are its derivatives."""
    function, shape = LINEAR[name]
    w = normal(*shape)
    found = calibrate(function, second_moments=True)(w)
    assert not found.missing
    slopes = slopes_of(function, shape)
    (statistic,) = found.values()
    squares = sum(jnp.broadcast_to(use.squares, shape) for use in statistic.uses.values())
    np.testing.assert_allclose(squares, jnp.sum(slopes**2, axis=1).reshape(shape), **TOLERANCE)
    (use,) = statistic.uses.values()
    assert (use.moment is None) == (name in WITHOUT_MOMENT)
    if use.moment is not None:
        whole = np.asarray(slopes @ slopes.T).reshape(*shape, *shape)
        second = use.moment.shape[len(shape) :]
        # Elements that lie on the same place along every axis that is not contracted.
        same = np.ones((1,) * len(shape) * 2, bool)
        for axis, size in enumerate(second):
            equal = np.eye(shape[axis], dtype=bool) if size == 1 else np.ones((shape[axis],) * 2, bool)
            places = [1] * len(shape) * 2
            places[axis], places[len(shape) + axis] = equal.shape
            same = same & equal.reshape(places)
        given = np.where(same, np.broadcast_to(use.moment, whole.shape), 0)
        np.testing.assert_allclose(given, np.where(same, whole, 0), **TOLERANCE)


def test_a_leaf_contracted_along_two_axes_has_the_sums_of_both():
    w, x = normal(6, 4), normal(5, 4)
    found = calibrate(lambda w: (X @ w, x @ w.T))(w)[""]
    expected = jnp.mean(X**2, 0)[:, None] + jnp.mean(x**2, 0)
    np.testing.assert_allclose(found.mean_square, expected, **TOLERANCE)
    assert set(found.uses) == {(-2,), (-1,)}


def test_an_array_that_occurs_twice_has_one_statistic_of_both_uses():
    w, x = normal(6, 4), normal(5, 4)
    found = calibrate(lambda p, x: (X @ p["in"], x @ p["out"].T))({"in": w, "out": w}, x)
    assert found["in"] is found["out"]
    expected = jnp.mean(X**2, 0)[:, None] + jnp.mean(x**2, 0)
    np.testing.assert_allclose(found["in"].mean_square, expected, **TOLERANCE)


def test_of_leaves_that_a_number_chooses_from_the_others_count_nothing():
    w = [normal(6, 4), normal(6, 4)]
    found = calibrate(lambda w, i: X @ lax.select_n(i, *w), second_moments=True)(w, jnp.array(1))
    np.testing.assert_allclose(found["1"].second_moment(0)[0], X.T @ X / 5, **TOLERANCE)
    assert "0" in found.missing


def test_a_leaf_that_devices_send_each_other_is_missing():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    local = lambda w, x: x @ lax.all_gather(w, "a", axis=0, tiled=True)  # noqa: E731
    a = PartitionSpec("a")
    function = jax.shard_map(local, mesh=mesh, in_specs=(a, a), out_specs=a)
    assert "not known" in calibrate(function)(normal(8, 4), normal(6, 8)).missing[""]


def test_means_are_those_of_all_inputs():
    w = normal(6, 4)
    batches = [normal(5, 6), normal(3, 6), normal(5, 6)]
    found = calibrate(lambda w, x: x @ w, second_moments=True)(w, iter(batches))[""]
    x = np.concatenate(batches)
    np.testing.assert_allclose(found.mean_square[:, 0], np.mean(x**2, 0), **TOLERANCE)
    np.testing.assert_allclose(found.second_moment(-2)[0], x.T @ x / 13, **TOLERANCE)
    assert found.inputs == 13


def test_merging_is_calibrating_with_both(tmp_path):
    run = calibrate(lambda p, x: x @ p["w"] + p["b"], second_moments="w")
    p, x, y = {"w": normal(6, 4), "b": normal(4)}, normal(5, 6), normal(3, 6)
    both, merged = run(p, iter([x, y])), run(p, x) + run(p, y)
    merged.save(tmp_path / "statistics")
    loaded = Statistics.load(tmp_path / "statistics")
    for each in (merged, loaded):
        assert dict(each.missing) == dict(both.missing) == {"b": "used by add, and in no matmul or convolution"}
        np.testing.assert_allclose(each["w"].mean_square, both["w"].mean_square, **TOLERANCE)
        np.testing.assert_allclose(each["w"].second_moment(0), both["w"].second_moment(0), **TOLERANCE)
    assert repr(loaded) == repr(merged) == repr(both)


def test_only_inputs_that_reached_an_expert_count():
    w, gate = normal(3, 6, 4), jnp.array([0, 0, 1, 1, 1])

    def mixture(w, x):
        dispatch = jax.nn.one_hot(gate, 3)  # (tokens, experts)
        return jnp.einsum("te,ted->td", dispatch, jnp.einsum("ted,edk->tek", dispatch[..., None] * x[:, None], w))

    found = calibrate(mixture)(w, X)[""]
    np.testing.assert_allclose(found.mean_square[0, :, 0], np.mean(X[:2] ** 2, 0), **TOLERANCE)
    np.testing.assert_allclose(found.mean_square[1, :, 0], np.mean(X[2:] ** 2, 0), **TOLERANCE)
    np.testing.assert_array_equal(found.inputs.ravel(), [2, 3, 0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [PartitionSpec("a", None), PartitionSpec(None, "a"), PartitionSpec()])
def test_on_a_mesh(kind, spec):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    w, x = normal(8, 4), normal(6, 8)
    expected = calibrate(lambda w, x: x @ w.astype(x.dtype), second_moments=True)(w, x)[""]
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("b", spec[0] if spec else None)))
    with jax.set_mesh(mesh):
        sharding = PartitionSpec("b", spec[1] if len(spec) > 1 else None)

        def function(w, x):
            return jnp.einsum("bd,dk->bk", x, w, out_sharding=sharding if kind is AxisType.Explicit else None)

        found = calibrate(function, second_moments=True)(jax.device_put(w, NamedSharding(mesh, spec)), x)[""]
    np.testing.assert_allclose(found.mean_square, expected.mean_square, **TOLERANCE)
    np.testing.assert_allclose(found.second_moment(0), expected.second_moment(0), **TOLERANCE)
    assert found.inputs == 6


@pytest.mark.parametrize("axis", [0, 1])
def test_in_shard_map(axis):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec, x_spec = ((PartitionSpec("a"), PartitionSpec("b", "a")), (PartitionSpec(None, "a"), PartitionSpec("b")))[axis]
    out = PartitionSpec("b", None if axis == 0 else "a")
    local = (lambda w, x: lax.psum(x @ w, "a")) if axis == 0 else jnp.matmul
    local = local if axis == 0 else (lambda w, x: x @ w)
    function = jax.shard_map(local, mesh=mesh, in_specs=(spec, x_spec), out_specs=out)
    w, x = normal(8, 4), normal(6, 8)
    found = calibrate(function, second_moments=True)(w, x)[""]
    np.testing.assert_allclose(found.mean_square[:, 0], np.mean(x**2, 0), **TOLERANCE)
    moment = found.second_moment(0)  # none where the contracted axis is cut over devices
    assert (moment is None) == (axis == 0)
    if moment is not None:
        np.testing.assert_allclose(moment[0], x.T @ x / 6, **TOLERANCE)


def test_some_leaves_may_be_quantized():
    p = {"a": normal(64, 64), "b": normal(64, 64)}
    x = normal(5, 64)
    small = {**p, "a": quantize_model(p, format="int8")["a"]}
    found = calibrate(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"])(small, x)
    assert found.missing == {"a": "quantized already"}
    y = np.tanh(x @ small["a"].materialize())
    np.testing.assert_allclose(found["b"].mean_square[:, 0], np.mean(y**2, 0), rtol=1e-4)


def test_weights_without_statistics_are_named_with_the_reason():
    p = {
        "w": normal(6, 4),
        "b": normal(4),
        "e": normal(9, 6),
        "u": normal(6, 4),
        "c": normal(6, 4),
        "n": jnp.array(2.0),
    }

    def function(p, tokens):
        x = p["e"][tokens]
        x = lax.cond(x[0, 0] > 1e9, lambda w: x @ w, lambda w: jnp.zeros((3, 4)), p["c"])
        return x + p["b"] * p["n"] + p["e"][tokens] @ p["w"]

    assert calibrate(function)(p, jnp.arange(3)).missing == {
        "b": "used by add, and in no matmul or convolution",
        "c": "no input reached it",
        "e": "an embedding: the function only gathers from it",
        "n": "a single number, or empty",
        "u": "the function does not use it",
    }


def test_a_loop_that_changes_a_weight_is_named():
    function = lambda w: lax.fori_loop(0, 3, lambda i, c: (c[0] @ c[1], c[1] * 0.5), (X, w))[0]  # noqa: E731
    assert "changes it" in calibrate(function)(normal(6, 6)).missing[""]


def test_moments_of_a_few_leaves_at_a_time(capsys):
    p = [normal(6, 6) for _ in range(3)]
    function = lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2]  # noqa: E731
    at_once = calibrate(function, second_moments=True)(p, X)
    assert not capsys.readouterr().out
    in_turn = calibrate(function, second_moments=True, memory=2 * 4 * 36)(p, X)
    assert "2 passes over the inputs" in capsys.readouterr().out
    assert [each.has_moment for each in in_turn.values()] == [True] * 3
    for path, each in in_turn.items():
        np.testing.assert_allclose(each.second_moment(0), at_once[path].second_moment(0), **TOLERANCE)


def test_nan_names_the_leaf_and_the_batch():
    w = normal(6, 4)
    with pytest.raises(ValueError, match=r"inputs of '0' have NaN.* in batch 2"):
        calibrate(lambda p, x: x @ p[0] @ p[1])([w, normal(4, 4)], iter([X, X, X.at[0, 0].set(jnp.nan) * jnp.inf]))


def test_errors_are_words():
    w = normal(6, 4)
    with pytest.raises(ValueError, match="empty"):
        calibrate(lambda w, x: x @ w)(w, iter([]))
    with pytest.raises(TypeError, match="must have values"):
        calibrate(lambda w, x: x @ w)(jax.ShapeDtypeStruct((6, 4), jnp.float32), X)
    found = calibrate(lambda p, x: x @ p["a"])({"a": w}, X)
    with pytest.raises(ValueError, match="different models"):
        found + calibrate(lambda p, x: x @ p["b"])({"b": w}, X)
    with pytest.raises(ValueError, match="same model"):
        found + calibrate(lambda p, x: x @ p["a"])({"a": normal(6, 5)}, X)
    with pytest.raises(KeyError, match="no such leaf"):
        found["c"]


def test_every_movement_is_brought_back():
    assert {*MOVEMENTS, *INDEXING, *SCALING} == PULLS.keys()


def test_progress_is_told():
    told = []
    calibrate(lambda w, x: x @ w, progress=lambda *each: told.append(each))(normal(6, 4), iter([X, X]))
    assert told == [("batch 1", X.nbytes, 2 * X.nbytes), ("batch 2", 2 * X.nbytes, 2 * X.nbytes)]


def plain():
    p = {"w": normal(6, 4)}
    return p, lambda p, x: x @ p["w"], p["w"]


def linen():
    nn = pytest.importorskip("flax.linen")
    dense = nn.Dense(4)
    p = dense.init(jax.random.key(0), X)
    return p, dense.apply, p["params"]["kernel"]


def nnx():
    flax = pytest.importorskip("flax.nnx")
    dense = flax.Linear(6, 4, rngs=flax.Rngs(0))
    return dense, lambda model, x: model(x), dense.kernel.get_value()


def equinox():
    eqx = pytest.importorskip("equinox")
    dense = eqx.nn.Linear(6, 4, key=jax.random.key(0))
    return dense, lambda model, x: jax.vmap(model)(x), dense.weight.T


def haiku():
    hk = pytest.importorskip("haiku")
    dense = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))
    p = dense.init(jax.random.key(0), X)
    return p, dense.apply, p["linear"]["w"]


@pytest.mark.parametrize("make", [plain, linen, nnx, equinox, haiku])
def test_frameworks(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params, function, kernel = make()
    found = calibrate(function, second_moments=True)(params, X)
    (statistic,) = found.values()
    assert {*found, *found.missing} == {path for path, _ in named_leaves(params)[0]}
    np.testing.assert_allclose(jnp.ravel(statistic.mean_square), jnp.mean(X**2, 0), **TOLERANCE)
    (axis,) = next(iter(statistic.uses))
    assert statistic.shape[axis] == kernel.shape[0] == 6
    np.testing.assert_allclose(statistic.second_moment(axis)[0], X.T @ X / 5, **TOLERANCE)
