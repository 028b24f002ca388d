"""Quantized caches: writes, moves and matmuls, beside the dense cache that they hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import explain, implicit, materialize
from eformer.cache import QuantizedCache, empty, quantize

EPS = 2.0**-23
POSITIONS, CHANNELS = 12, 16


class Case(NamedTuple):
    format: str
    rotated: bool = False
    axis: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        return (2, 2, POSITIONS, CHANNELS) if self.axis == -1 else (2, 2, CHANNELS, POSITIONS)

    def __call__(self, array: Any) -> QuantizedCache:
        return quantize(array, self.format, axis=self.axis, rotated=self.rotated)

    def part(self, array: jax.Array, positions: Any) -> jax.Array:
        """The entries of some positions."""
        return array[:, :, positions] if self.axis == -1 else array[..., positions]

    def __str__(self) -> str:
        return f"{self.format}{'-rotated' * self.rotated}{self.axis}"


CASES = [
    *(Case("int8"), Case("int8", axis=-2), Case("fp8"), Case("fp8", axis=-2)),
    *(Case("int4"), Case("int4", rotated=True), Case("int4", rotated=True, axis=-2)),
    *(Case("int8", rotated=True), Case("fp8", rotated=True)),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
one_of_each = pytest.mark.parametrize("case", [Case("int8"), Case("fp8"), Case("int4", rotated=True)], ids=str)


def normal(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_near(found: Any, expected: Any, bound: Any) -> None:
    distance = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
    assert np.all(distance <= np.asarray(bound)), np.max(distance - bound)


def lengths(x: Any, axis: int | tuple[int, int]) -> np.ndarray:
    """The norms along an axis, as if they were elements: no element, or partial sum of squares, is larger."""
    return np.linalg.norm(np.asarray(x, np.float64), axis=axis, keepdims=True)


@every_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_cache_holds_what_it_was_made_of(case: Case, dtype: Any):
    x = normal(case.shape).astype(dtype)
    cache = case(x)
    assert (cache.shape, cache.dtype) == (x.shape, x.dtype)
    turning = (CHANNELS + 2) * EPS * lengths(x, case.axis) if case.rotated else 0
    assert_near(cache.materialize(), x, np.asarray(cache.error_bound(x), np.float64) + turning)
    new = empty(case.shape, dtype, case.format, axis=case.axis, rotated=case.rotated)
    assert jax.tree.structure(new) == jax.tree.structure(cache)
    assert [leaf.shape for leaf in jax.tree.leaves(new)] == [leaf.shape for leaf in jax.tree.leaves(cache)]
    assert not jnp.any(new.materialize())


@pytest.mark.parametrize(("format", "share"), [("int8", 0.27), ("fp8", 0.27), ("int4", 0.15)])
def test_a_cache_is_small_and_never_dense_on_the_way(format: str, share: float):
    made = jax.make_jaxpr(functools.partial(empty, (2, 3, 1000, 64), jnp.float32, format))()
    assert max(each.aval.size * each.aval.dtype.itemsize for eqn in made.eqns for each in eqn.outvars) < 400_000
    assert empty((2, 3, 100, 64), format=format).nbytes < share * 4 * 2 * 3 * 100 * 64


# --- writes ---


def one_slice(cache: Any, new: Any, case: Case) -> Any:
    start = (0, 1, 5, 0) if case.axis == -1 else (0, 1, 0, 5)
    return lax.dynamic_update_slice(cache, case.part(new, slice(0, 3))[:, 1:], start)


def position_of_each(cache: Any, new: Any, case: Case) -> Any:
    """As sequences of several lengths are decoded together."""

    def write(cache: Any, new: Any, at: Any) -> Any:
        return lax.dynamic_update_slice(cache, new, (0, at, 0) if case.axis == -1 else (0, 0, at))

    return jax.vmap(write)(cache, case.part(new, slice(0, 1)), jnp.array([3, 9]))


def a_layer(cache: Any, new: Any, case: Case) -> Any:
    del case
    return cache.at[1, :].set(new[1])


def a_ring(cache: Any, new: Any, case: Case) -> Any:
    at = jnp.arange(10, 15) % POSITIONS
    new = case.part(new, slice(0, 5))
    return cache.at[:, :, at].set(new) if case.axis == -1 else cache.at[..., at].set(new)


def grown(cache: Any, new: Any, case: Case) -> Any:
    return jnp.concatenate([cache, case.part(new, slice(0, 2))], axis=-3 - case.axis)


def beyond_the_end(cache: Any, new: Any, case: Case) -> Any:
    """What is out of bounds is dropped."""
    del case
    return cache.at[jnp.array([0, 2])].set(new)


WRITES = [one_slice, position_of_each, a_layer, a_ring, grown, beyond_the_end]


@every_case
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_is_quantized_and_nothing_else(case: Case, write: Callable[..., Any]):
    cache, new = case(normal(case.shape)), normal(case.shape, 1)
    run = functools.partial(write, case=case)
    found = jax.jit(implicit(run))(cache, new)
    assert isinstance(found, QuantizedCache)
    assert explain(run)(cache, new).dense_bytes == 0
    expected = run(materialize(cache), materialize(case(new)))
    assert found.dtype == expected.dtype
    assert_near(found.materialize(), expected, CHANNELS * EPS * lengths(expected, case.axis) if case.rotated else 0)


def part_of_a_head(cache: Any, new: Any, case: Case) -> Any:
    del case
    return lax.dynamic_update_slice(cache, new[:, :, :4, :4], (0, 0, 2, 2))


def part_of_heads_at(cache: Any, new: Any, case: Case) -> Any:
    del case
    return cache.at[:, :, 2:4, 3:7].set(new[:, :, 2:4, 3:7])


@every_case
@pytest.mark.parametrize("write", [part_of_a_head, part_of_heads_at], ids=lambda write: write.__name__)
@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_a_part_of_a_head_makes_the_cache_dense(case: Case, write: Callable[..., Any]):
    cache, new = case(normal(case.shape)), normal(case.shape, 1)
    found = implicit(functools.partial(write, case=case))(cache, new)
    assert_near(found, write(materialize(cache), new, case), CHANNELS * EPS)


# --- moves ---

MOVES: dict[str, Callable[[Any], Any]] = {
    "a window": lambda q: (  # from a position that is known when the program runs, where those are the third axis
        lax.dynamic_slice(q, (0, 0, 4, 0), (2, 2, 5, q.shape[-1])) if q.shape[-1] == 16 else q[..., 4:9]
    ),
    "one head": lambda q: q[:, 1],
    "heads joined": lambda q: q.reshape(-1, *q.shape[2:]),
    "transposed": lambda q: q.swapaxes(-1, -2),
    "positions first": lambda q: jnp.transpose(q, (2, 0, 1, 3)),
    "halves": lambda q: jnp.concatenate([q[1:], q[:1]]),
    "rolled": lambda q: jnp.roll(q, 3, axis=1),
    "stacked": lambda q: jnp.stack([q, q]),
    "chosen": lambda q: jnp.where(jnp.array(True), q, q[::-1]),
    "taken": lambda q: q[jnp.array([1, 0])],
    "as bfloat16": lambda q: q.astype(jnp.bfloat16),
}


@functools.cache
def of_case(case: Case, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each of the functions gives for a cache, and for the dense one: two programs in all."""

    def run(q: Any) -> dict[str, Any]:
        return {name: {**MOVES, **OTHERS}[name](q) for name in names}

    cache = case(normal(case.shape))
    return jax.jit(implicit(run))(cache), jax.jit(run)(cache.materialize())


@every_case
@pytest.mark.parametrize("move", MOVES)
def test_moves_move_codes(case: Case, move: str):
    found, expected = (each[move] for each in of_case(case, tuple(MOVES)))
    assert isinstance(found, QuantizedCache)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    rounding = (CHANNELS * EPS if expected.dtype == jnp.float32 else 2.0**-8) * np.max(lengths(expected, -1))
    assert_near(found.materialize(), expected, rounding if case.rotated else 0)


def reversed_order(q: Any, axis: int) -> jax.Array:
    return jnp.arange(q.shape[axis])[::-1]


# What can be done along an axis: of a rotated cache, nothing of it moves the codes of rotated channels.
ALONG: dict[str, Callable[[Any, int], Any]] = {
    "reversed": lambda q, axis: jnp.flip(q, axis),
    "permuted": lambda q, axis: jnp.take(q, reversed_order(q, axis), axis=axis),
    "one taken": lambda q, axis: jnp.take(q, 3, axis=axis),
    "one taken at run time": lambda q, axis: jnp.take(q, jnp.argmax(q[0, 0, 0, :3]), axis=axis),
    "taken beyond the end": lambda q, axis: jnp.take(q, jnp.array([1, 99]), axis=axis, mode="fill"),
    "indexed": lambda q, axis: jnp.moveaxis(q, axis, 0)[jnp.array([2, 1, 2])],
    "taken along": lambda q, axis: jnp.take_along_axis(q, jnp.argsort(jnp.ones(q.shape), axis), axis),
    "sliced": lambda q, axis: lax.slice_in_dim(q, 1, min(7, q.shape[axis]), axis=axis),
    "strided": lambda q, axis: lax.slice_in_dim(q, 0, None, 2, axis=axis),
    "sliced at run time": lambda q, axis: lax.dynamic_slice_in_dim(
        q, jnp.argmax(q[0, 0, 0, :3]), min(4, q.shape[axis]), axis
    ),
    "split": lambda q, axis: jnp.split(q, 2, axis)[1],
    "unstacked": lambda q, axis: jnp.unstack(q, axis=axis)[1],
    "rolled": lambda q, axis: jnp.roll(q, 3, axis),
    "rolled by all": lambda q, axis: jnp.roll(q, q.shape[axis], axis),
    "joined": lambda q, axis: jnp.concatenate([q, q], axis),
    "joined with numbers": lambda q, axis: jnp.concatenate([q, jnp.ones(q.shape)], axis),
    "repeated": lambda q, axis: jnp.repeat(q, 2, axis),
    "tiled": lambda q, axis: jnp.concatenate([jnp.tile(q, [1 + (a == axis % q.ndim) for a in range(q.ndim)])], 0),
    "padded": lambda q, axis: jnp.pad(q, [(int(a == axis % q.ndim),) * 2 for a in range(q.ndim)]),
    "stacked": lambda q, axis: jnp.stack([q, q], axis),
    "swapped with the first": lambda q, axis: jnp.swapaxes(q, 0, axis),
    "joined to the axis before": lambda q, axis: jnp.moveaxis(q, axis, -1).reshape(2, 2, -1),
    "split into two axes": lambda q, axis: jnp.moveaxis(q, axis, -1).reshape(2, 2, -1, q.shape[axis] // 2, 2),
    "joined to the next axis": lambda q, axis: jnp.moveaxis(q, axis, 1).reshape(2, -1, *q.shape[3:]),
    "with another axis of its size": lambda q, axis: jnp.broadcast_to(
        jnp.moveaxis(q, axis, -1)[..., None], (*jnp.moveaxis(q, axis, -1).shape, q.shape[axis])
    ),
    "scaled": lambda q, axis: q * jnp.moveaxis(jnp.arange(1.0, 1 + q.shape[axis])[:, None, None, None], 0, axis),
    "divided": lambda q, axis: q / jnp.moveaxis(jnp.arange(1.0, 1 + q.shape[axis])[:, None, None, None], 0, axis),
    "masked": lambda q, axis: jnp.where(jnp.arange(q.shape[axis]).reshape(-1, *[1] * (-1 - axis)) > 2, q, 0.0),
    "chosen by element": lambda q, axis: jnp.where(
        jnp.arange(q.shape[axis]).reshape(-1, *[1] * (-1 - axis)) > 2, q, jnp.flip(q, 0)
    ),
    "sorted": lambda q, axis: jnp.sort(q, axis),
    "summed up": lambda q, axis: jnp.cumsum(q, axis),
    "summed": lambda q, axis: jnp.sum(jnp.abs(q), axis),
    "largest": lambda q, axis: jnp.max(q, axis),
    "norm": lambda q, axis: jnp.linalg.norm(q, axis=axis),
    "softmax": lambda q, axis: jax.nn.softmax(q, axis),
    "turned by halves": lambda q, axis: jnp.concatenate(
        [-jnp.split(q, 2, axis)[1], jnp.split(q, 2, axis)[0]], axis
    ),
    "set": lambda q, axis: jnp.moveaxis(q, axis, 0).at[1].set(2.0),
    "added to": lambda q, axis: jnp.moveaxis(q, axis, 0).at[1].add(2.0),
    "written over": lambda q, axis: lax.dynamic_update_slice_in_dim(
        q, lax.slice_in_dim(q, 0, 2, axis=axis), 3, axis
    ),
    "mapped over": lambda q, axis: jax.vmap(lambda part: jnp.flip(part, 0) * 2, axis, axis)(q),
    "scanned over": lambda q, axis: lax.scan(lambda x, part: (x + part, x), 0.0 * q[0, 0, 0, 0] + jnp.zeros(
        jnp.moveaxis(q, axis, 0).shape[1:]), jnp.moveaxis(q, axis, 0))[1],
    "by a matrix": lambda q, axis: jnp.moveaxis(q, axis, -1) @ jnp.ones((q.shape[axis], 3)),
    "by itself": lambda q, axis: jnp.moveaxis(q, axis, -1) @ jnp.moveaxis(q, axis, -2),
}  # fmt: skip
OTHERS: dict[str, Callable[[Any], Any]] = {
    "flipped": lambda q: jnp.flip(q, (-1, -2)),
    "some channels": lambda q: q[..., 2:7, 2:7],
    "padded": lambda q: jnp.pad(q, ((0, 0), (0, 1), (1, 0), (0, 2)), constant_values=2.0),
    "all joined": lambda q: q.reshape(2, -1),
    "summed": lambda q: jnp.sum(jnp.exp(q), axis=-1),
    "of two layouts": lambda q: jnp.concatenate([q[..., :12, :12], q[..., :12, :12].swapaxes(-1, -2)]),
}
for _name, _function in ALONG.items():
    OTHERS |= {f"{_name} along {axis}": lambda q, f=_function, a=axis: f(q, a) for axis in (-4, -2, -1)}


@every_case
@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_everything_else_is_right(case: Case):
    wrong: dict[str, Any] = {}
    founds, expecteds = of_case(case, tuple(OTHERS))
    for name, found in materialize(founds).items():
        expected = expecteds[name]
        bound = 4 * CHANNELS**2 * EPS * np.max(np.abs(np.nan_to_num(expected)))
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            wrong[name] = found.aval
        elif not np.allclose(found, expected, rtol=0, atol=bound, equal_nan=True):
            wrong[name] = np.max(np.abs(np.nan_to_num(found - expected)))
    assert not wrong


# --- matmuls ---


EQUATIONS = ["bhgd,{}->bhgl", "{},bhgd->bhlg", "bhgl,{}->bhgd", "{},bhgl->bhdg", "hbgd,{}->bhgl"]


@functools.cache
def products(case: Case, rows: int, dtype: Any) -> tuple[jax.Array, dict[str, jax.Array], list[jax.Array], int]:
    """The cache's values, what it is multiplied by, all products, and the bytes made dense for them."""
    sizes = {"b": 2, "h": 2, "g": rows, "l": POSITIONS, "d": CHANNELS}
    xs = {
        axes: normal(tuple(sizes[a] for a in axes), i).astype(dtype) for i, axes in enumerate(["bhgd", "bhgl", "hbgd"])
    }
    cache = case(normal(case.shape, 7).astype(dtype))

    def run(xs: dict[str, Any], cache: Any) -> list[Any]:
        found = []
        for equation in EQUATIONS:
            pair = [xs.get(name, cache) for name in equation.split("->")[0].split(",")]
            found.append(jnp.einsum(equation.format("bhld" if case.axis == -1 else "bhdl"), *pair))
        return found

    # What is multiplied of a rotated cache was never rounded to its dtype.
    held = (cache.with_dtype(jnp.float32) if case.rotated else cache).materialize()
    return held, xs, jax.jit(implicit(run))(xs, cache), explain(run)(xs, cache).dense_bytes


@every_case
@pytest.mark.parametrize(("rows", "dtype"), [(1, jnp.float32), (3, jnp.float32), (3, jnp.bfloat16)])
@pytest.mark.parametrize("number", range(len(EQUATIONS)))
def test_both_matmuls_of_attention_are_those_of_the_dense_cache(case: Case, rows: int, dtype: Any, number: int):
    held, xs, found, dense_bytes = products(case, rows, dtype)
    equation = EQUATIONS[number]
    (axes,) = (each for each in equation.split("->")[0].split(",") if each in xs)
    pair = [np.asarray(xs.get(each, held), np.float64) for each in equation.split("->")[0].split(",")]
    expected = np.einsum(equation.format("bhld" if case.axis == -1 else "bhdl"), *pair)
    # By Cauchy and Schwarz no sum of magnitudes is larger, of rotated terms or others.
    terms = np.max(lengths(xs[axes], -1)) * np.max(lengths(held, (-1, -2)))
    rounding = 4 * (POSITIONS + CHANNELS) * EPS + (2.0**-8 if dtype == jnp.bfloat16 else 0)
    assert found[number].dtype == dtype
    assert dense_bytes == 0
    assert_near(found[number], expected, rounding * terms)


# --- transformations ---


def attend(cache: Any, new: Any, query: Any, at: Any) -> tuple[Any, Any]:
    cache = lax.dynamic_update_slice(cache, new, (0, 0, at, 0))
    weights = jax.nn.softmax(query @ cache.mT)
    return weights @ cache, cache


def operands(case: Case, *leading: int) -> tuple[Any, ...]:
    cache = case(normal((*leading, *case.shape)))
    return cache, normal((*leading, 2, 2, 1, CHANNELS), 1), normal((*leading, 2, 2, 3, CHANNELS), 2)


def assert_attends(found: Any, cache: Any, new: Any, query: Any, step: Callable[..., Any]) -> None:
    """As the step does on the dense cache, if the new entries are rounded first."""
    out, after = found
    assert isinstance(after, QuantizedCache)
    expected, held = step(materialize(cache), materialize(cache.like(new)), query)
    assert_near(after.materialize(), held, 1e-5)
    assert_near(out, expected, 1e-5)


@one_of_each
@pytest.mark.usefixtures("optimized")
def test_a_donated_cache_is_written_in_place(case: Case):
    cache, new, query = operands(case)
    step = functools.partial(attend, at=3)
    run = jax.jit(implicit(step), donate_argnums=0)
    kept = jax.tree.map(jnp.copy, cache)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    found = run(cache, new, query)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(found[1])] == before
    assert_attends(found, kept, new, query, step)


@one_of_each
@pytest.mark.parametrize("inside", [True, False], ids=["implicit outside", "implicit inside"])
def test_under_vmap(case: Case, inside: bool):
    cache, new, query = operands(case, 3)
    at = jnp.array([1, 5, 11])
    step: Any = jax.vmap(attend)
    found = (implicit(step) if inside else jax.vmap(implicit(attend)))(cache, new, query, at)
    assert_attends(found, cache, new, query, lambda *operands: step(*operands, at))


def decode_some(cache: Any, new: Any, query: Any) -> Any:
    """Tokens one after the other: the cache is carried."""

    def body(cache: Any, each: Any) -> Any:
        i, query = each
        out, cache = attend(cache, new, query, i)
        return cache, out

    cache, out = lax.scan(body, cache, (jnp.arange(2), jnp.stack([query, query])))
    return out, cache


def layer_by_layer(cache: Any, new: Any, query: Any) -> Any:
    """Layers one after the other: the stack of their caches is scanned over, and stacked again."""

    def body(x: Any, layer: Any) -> Any:
        cache, new = layer
        return attend(cache, new, x, 4)

    out, cache = lax.scan(body, query[0], (cache, new))
    return out, cache


@one_of_each
@pytest.mark.parametrize(("step", "leading"), [(decode_some, ()), (layer_by_layer, (3,))], ids=["carried", "stacked"])
def test_under_scan(case: Case, step: Callable[..., Any], leading: tuple[int, ...]):
    cache, new, query = operands(case, *leading)
    assert explain(step)(cache, new, query).dense_bytes == 0
    assert_attends(jax.jit(implicit(step))(cache, new, query), cache, new, query, step)


@one_of_each
def test_over_heads_of_a_mesh(case: Case):
    cache, new, query = operands(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    place = NamedSharding(mesh, P(None, "heads"))
    cache = cache.with_sharding(place)
    new, query = (jax.device_put(each, place) for each in (new, query))
    step = functools.partial(attend, at=3)
    found = jax.jit(implicit(step))(cache, new, query)
    assert_attends(found, cache, new, query, step)
    assert all(leaf.sharding.spec[1] == "heads" for leaf in jax.tree.leaves(found[1]))
    each: Any = jax.shard_map(implicit(step), mesh=mesh, in_specs=P(None, "heads"), out_specs=P(None, "heads"))
    assert_attends(jax.jit(implicit(each))(cache, new, query), cache, new, query, step)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "case", [Case(form, rotated=rotated) for form in ("int8", "fp8") for rotated in (False, True)], ids=str
)
@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_over_channels_of_a_mesh(case: Case, axis: int):
    """Each device has some channels, or some positions, and does with them what it does with dense ones."""
    cache, mesh = case(normal(case.shape)), Mesh(np.array(jax.devices()[:2]), ("parts",))
    spec = P(*[None] * (4 + axis), "parts")

    def step(cache: Any) -> Any:
        whole = lax.all_gather(cache, "parts", axis=axis % 4, tiled=True)
        stacked = lax.all_gather(cache, "parts", axis=axis % 4)
        swapped = lax.all_to_all(cache, "parts", split_axis=0, concat_axis=axis % 4, tiled=True)
        return [jnp.flip(each, axis) * 2 for each in (cache, whole, stacked, swapped)]

    shard: Any = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=P("parts"), check_vma=False)
    found, expected = jax.jit(implicit(shard(step)))(cache), jax.jit(shard(step))(cache.materialize())
    for one, other in zip(materialize(found), expected, strict=True):
        assert_near(one, other, 4 * CHANNELS * EPS * np.max(np.abs(other)))


# --- words ---


def mistaken(x: Any) -> Any:
    """For type checkers."""
    return x


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: empty((2, 8), format="int5"), ValueError, "must be one of 'int8', 'fp8', 'int4'"),
        (lambda: empty((2, 8), jnp.int32), TypeError, "floating point"),
        (lambda: empty((2, 8), axis=2), ValueError, r"`axis=2` is out of range for a cache of 2 axes \(2, 8\)"),
        (lambda: quantize(jnp.ones((2, 8)), rotated=mistaken(1)), TypeError, "`rotated` must be True or False"),
        (
            lambda: QuantizedCache(mistaken(jnp.ones((2, 8)))),
            TypeError,
            "must be an Array8B, an ArrayFloat8 or an",
        ),
    ],
)
def test_mistakes_are_told_in_words(call: Callable[[], Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        call()
