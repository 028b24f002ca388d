"""An implicit array behaves as the array it stands for, outside `implicit` too, and by the same rules."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import ImplicitArray, implicit, materialization_error, register

from .arrays import ARRAYS, Filled, Scaled, assert_same, count_materialized, drawn, integers, name, scaled

arrays = pytest.mark.parametrize("make", ARRAYS, ids=name)


def whole(key: jax.Array, shape: tuple[int, ...]) -> Scaled:
    """Of integers, for the operators on bits."""
    w, s = jax.random.split(key)
    return Scaled(*(jnp.asarray(x, jnp.int32) for x in (drawn(w, -5, 6, shape), drawn(s, 1, 3, (1, shape[-1])))))


# --- facts ---


@arrays
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6)], ids=str)
def test_facts(shape, make, getkey):
    q = make(getkey(), shape)
    dense = q.materialize()
    assert (q.shape, q.ndim, q.size, q.dtype) == (dense.shape, dense.ndim, dense.size, dense.dtype)
    assert len(q) == len(dense)
    assert jnp.shape(q) == np.shape(q) == shape
    assert jnp.result_type(q.dtype) == dense.dtype


def test_nbytes_are_those_stored():
    assert Scaled(jnp.ones((4, 6), jnp.int8), jnp.ones((1, 6))).nbytes == 24 + 24
    assert Filled(jnp.float32(1), shape=(1000, 1000)).nbytes == 4


@pytest.mark.parametrize(
    ("q", "text"),
    [
        (Scaled(jnp.ones((4, 600), jnp.int8), jnp.ones((1, 600))), "Scaled(float32[4, 600], 4,800 bytes)"),
        (Filled(jnp.float32(1), shape=()), "Filled(float32[], 4 bytes)"),
    ],
    ids=["scaled", "filled"],
)
def test_repr_shows_what_it_is_and_no_data(q, text):
    assert repr(q) == str(q) == text


@arrays
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=name)
def test_repr_of_tracers(transform, make, getkey):
    q = make(getkey(), (3, 4, 6))
    seen = []

    def outside(x, q):
        seen.append(repr(q))
        return jnp.sum(x)

    def inside(x, q):
        implicit(lambda q: seen.append(repr(q)))(q)
        return jnp.sum(x)

    transform(outside)(jnp.ones(3), q)
    transform(inside)(jnp.ones(3), q)
    shape = "[4, 6]" if transform is jax.vmap else "[3, 4, 6]"
    expected = f"{type(q).__name__}(float32{shape}, "
    assert seen[0].startswith(expected)
    assert expected in seen[1]


@arrays
def test_numpy(make, getkey):
    q = make(getkey(), (4, 6))
    dense = np.asarray(q.materialize())
    np.testing.assert_array_equal(np.asarray(q), dense)
    assert np.asarray(q).dtype == np.float32
    assert np.asarray(q, dtype=np.float64).dtype == np.float64
    assert np.array(q, copy=True).shape == (4, 6)
    assert_same(jnp.asarray(q.materialize()), q.materialize())
    assert implicit(lambda q: np.asarray(q).sum())(q) == dense.sum()


def test_numpy_always_copies(getkey):
    with pytest.raises(ValueError, match=r"Scaled.*`copy=False` cannot be met"):
        np.asarray(scaled(getkey(), (4, 6)), copy=False)


def test_scalars():
    q = Filled(jnp.float32(2), shape=())
    assert (float(q), int(q), complex(q), bool(q)) == (2.0, 2, 2 + 0j, True)
    assert operator.index(Filled(jnp.int32(3), shape=())) == 3
    assert [10, 20, 30][Filled(jnp.int32(1), shape=())] == 20
    assert q.item() == 2.0
    assert implicit(float)(q) == 2.0
    assert implicit(lambda q: 1 if q > 1 else 0)(q) == 1


def test_python_may_branch_on_values(getkey):
    q = scaled(getkey(), (4, 6))
    assert implicit(lambda q: "some" if jnp.any(q != 0) else "none")(q) == "some"
    assert implicit(lambda q: float(q[0, 0]))(q) == float(q.materialize()[0, 0])


# --- methods ---

METHODS = {
    "T": lambda q: q.T,
    "mT": lambda q: q.mT,
    "real": lambda q: q.real,
    "imag": lambda q: q.imag,
    "reshape": lambda q: q.reshape(2, -1),
    "reshape tuple": lambda q: q.reshape((6, 4)),
    "reshape order": lambda q: q.reshape(6, 4, order="F"),
    "transpose": lambda q: q.transpose(),
    "transpose axes": lambda q: q.transpose(1, 0),
    "transpose tuple": lambda q: q.transpose((0, 1)),
    "swapaxes": lambda q: q.swapaxes(0, -1),
    "astype": lambda q: q.astype(jnp.bfloat16),
    "astype int": lambda q: q.astype(int),
    "astype same": lambda q: q.astype(jnp.float32),
    "ravel": lambda q: q.ravel(),
    "flatten": lambda q: q.flatten(),
    "squeeze": lambda q: q[None].squeeze(0),
    "sum": lambda q: q.sum(axis=0, keepdims=True),
    "prod": lambda q: q.prod(),
    "mean": lambda q: q.mean(-1),
    "std": lambda q: q.std(),
    "var": lambda q: q.var(axis=0),
    "max": lambda q: q.max(axis=1),
    "min": lambda q: q.min(),
    "argmax": lambda q: q.argmax(),
    "argmin": lambda q: q.argmin(axis=0),
    "all": lambda q: q.all(),
    "any": lambda q: q.any(axis=0),
    "ptp": lambda q: q.ptp(),
    "clip": lambda q: q.clip(0, 1),
    "round": lambda q: q.round(),
    "cumsum": lambda q: q.cumsum(axis=1),
    "cumprod": lambda q: q.cumprod(axis=0),
    "sort": lambda q: q.sort(),
    "argsort": lambda q: q.argsort(axis=0),
    "repeat": lambda q: q.repeat(2, axis=0),
    "take": lambda q: q.take(jnp.array([0, 2]), axis=0),
    "dot": lambda q: q.dot(jnp.ones((6, 2))),
    "diagonal": lambda q: q.diagonal(),
    "trace": lambda q: q.trace(),
    "conj": lambda q: q.conj(),
    "nonzero": lambda q: q.nonzero(),
    "at set": lambda q: q.at[0].set(7.0),
    "at add": lambda q: q.at[:, 1].add(jnp.ones(4)),
    "at get": lambda q: q.at[9].get(mode="fill", fill_value=0.0),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_method(method, getkey):
    q = scaled(getkey(), (4, 6))
    assert_same(method(q), method(q.materialize()))
    assert_same(implicit(method)(q), method(q.materialize()))


def test_tolist(getkey):
    q = scaled(getkey(), (2, 2))
    assert q.tolist() == implicit(lambda q: q.tolist())(q) == q.materialize().tolist()
    assert q.item(1) == implicit(lambda q: q.item(1))(q) == q.materialize().item(1)


INDICES = {
    "row": lambda q: q[1],
    "negative": lambda q: q[-1],
    "element": lambda q: q[0, 5],
    "slice": lambda q: q[1:3],
    "step": lambda q: q[::2, ::-1],
    "ellipsis": lambda q: q[..., 0],
    "new axis": lambda q: q[:, None],
    "list": lambda q: q[jnp.array([2, 0, 0])],
    "array": lambda q: q[np.array([[0, 1], [2, 3]])],
    "columns": lambda q: q[:, jnp.array([1, 5])],
    "mask": lambda q: q[np.array([True, False, True, False])],
    "pairs": lambda q: q[jnp.array([0, 1]), jnp.array([2, 3])],
    "empty": lambda q: q[4:],
}


@arrays
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_index(index, make, getkey):
    q = make(getkey(), (4, 6))
    assert_same(index(q), index(q.materialize()))


@arrays
def test_iteration(make, getkey):
    q = make(getkey(), (4, 6))
    assert_same(list(q), list(q.materialize()))
    first, *_, last = q
    assert_same([first, last], [q.materialize()[0], q.materialize()[3]])
    assert_same(implicit(list)(q), list(q.materialize()))


def test_scalars_have_no_length():
    q = Filled(jnp.float32(2), shape=())
    with pytest.raises(TypeError, match="unsized"):
        len(q)
    with pytest.raises(TypeError, match=r"unsized|0-d"):
        iter(q)


# --- operators ---

BINARY = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    divmod,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
)
BITS = (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift)
UNARY = (operator.neg, operator.pos, operator.abs)


@pytest.fixture(params=["python", "array", "numpy", "implicit"])
def other(request, getkey):
    """The other operand: positive, so that every operator has a value."""
    dense = jnp.abs(integers(getkey(), (4, 6))) + 1
    kinds = {"python": 2, "array": dense, "numpy": np.asarray(dense), "implicit": Filled(jnp.float32(2), shape=(4, 6))}
    return kinds[request.param]


def dense_of(x):
    return x.materialize() if isinstance(x, ImplicitArray) else jnp.asarray(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("function", BINARY, ids=name)
def test_binary_operator(function, other, getkey):
    q = scaled(getkey(), (4, 6))
    assert_same(function(q, other), function(q.materialize(), dense_of(other)))


@pytest.mark.parametrize("function", BINARY, ids=name)
def test_reflected_operator(function, other, getkey):
    q = Scaled(jnp.abs(integers(getkey(), (4, 6))) + 1, jnp.ones((1, 6)))
    assert_same(function(other, q), function(dense_of(other), q.materialize()))


@pytest.mark.parametrize("function", BITS, ids=name)
@pytest.mark.parametrize("other", [3, np.int32(2), "array", "implicit"], ids=str)
def test_operator_on_bits(function, other, getkey):
    q = whole(getkey(), (4, 6))
    others = {"array": jnp.ones((4, 6), jnp.int32), "implicit": Filled(jnp.int32(2), shape=(4, 6))}
    other = others[other] if isinstance(other, str) else other
    assert_same(function(q, other), function(q.materialize(), dense_of(other)))
    assert_same(function(other, q), function(dense_of(other), q.materialize()))


@arrays
@pytest.mark.parametrize("function", UNARY, ids=name)
def test_unary_operator(function, make, getkey):
    q = make(getkey(), (4, 6))
    assert_same(function(q), function(q.materialize()))


def test_invert(getkey):
    q = whole(getkey(), (4, 6))
    assert_same(~q, ~q.materialize())


@arrays
def test_operators_of_each_array(make, getkey):
    q, x = make(getkey(), (4, 6)), integers(getkey(), (4, 6))
    function = lambda q: (2 * q - x) / 4 + q**2 + (q == q)  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):
        assert_same(function(q), function(q.materialize()))


@arrays
def test_weak_types(make, getkey):
    """A Python number has no say in the dtype."""
    q = make(getkey(), (4, 6))
    half = lambda q: q.astype(jnp.bfloat16) * 2.0 + 1  # noqa: E731
    assert_same(half(q), half(q.materialize()))
    assert_same(implicit(half)(q), half(q.materialize()))
    fresh = lambda q: (q.sum() * 0 + 1, jnp.full_like(q, 3), jnp.full(q.shape, 3.0), jnp.where(q > 0, 1.0, 0.0))  # noqa: E731
    assert_same(implicit(fresh)(q), fresh(q.materialize()))


def test_equality_is_elementwise_and_hash_raises(getkey):
    q = scaled(getkey(), (4, 6))
    assert (q == q).all()
    assert (q == q).shape == (4, 6)
    assert not (q != q.materialize()).any()
    with pytest.raises(TypeError, match="unhashable type: 'Scaled'"):
        hash(q)


# --- matmul ---


def by_operator(x, q):
    return x @ q


def by_method(x, q):
    return q.__rmatmul__(x)


def by_function(x, q):
    return implicit(jnp.matmul)(x, q)


MATMULS = (by_operator, by_method, by_function)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("function", MATMULS, ids=name)
def test_matmul_takes_the_same_rules_outside(function, shape, getkey):
    x, q = integers(getkey(), shape), scaled(getkey(), (4, 6))
    assert_same(function(x, q), x @ q.materialize())
    assert count_materialized(function, x, q) == 0
    with materialization_error():
        function(x, q)


@arrays
def test_matmul_on_either_side(make, getkey):
    x, q = integers(getkey(), (3, 4)), make(getkey(), (4, 6))
    assert_same(x @ q, x @ q.materialize())
    assert_same(q @ x.T[:4, :3].T[:, :1].repeat(6, 1).T, q.materialize() @ x.T[:4, :3].T[:, :1].repeat(6, 1).T)
    assert_same(q.T @ x.T, q.materialize().T @ x.T)
    assert_same(q.T @ q, q.materialize().T @ q.materialize())
    assert_same(np.asarray(x) @ q, x @ q.materialize())


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=name)
def test_matmul_under_a_transformation(transform, getkey):
    x, q = integers(getkey(), (2, 3, 4)), scaled(getkey(), (4, 6))
    assert_same(transform(lambda x: x @ q)(x), x @ q.materialize())
    assert count_materialized(transform(lambda x: x @ q), x) == 0


def test_matmul_of_the_array_under_grad(getkey):
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 6))
    loss = lambda x, q: jnp.sum((x @ q) ** 2)  # noqa: E731
    expected = jax.grad(lambda x, q: loss(x, q.materialize()), argnums=(0, 1))(x, q)
    assert_same(jax.grad(loss, argnums=(0, 1))(x, q), expected)


class Late(Scaled):
    """Gets a rule of its own when it has been multiplied before."""


def test_matmul_sees_new_rules(getkey):
    """The product is compiled once per shape; a rule registered later still counts."""
    x, q = integers(getkey(), (3, 4)), scaled(getkey(), (4, 6))
    late = Late(q.w, q.s)
    assert_same(x @ late, x @ q.materialize())

    @register("dot_general")
    def zeros(_primitive, _x: jax.Array, _q: Late, **_params):
        return jnp.zeros((3, 6))

    assert_same(x @ late, jnp.zeros((3, 6)))


def test_other_types_are_left_to_answer(getkey):
    """`q + other` must not swallow a type that has its own reflected operator."""

    class Symbol:
        def __radd__(self, left):
            return "radd"

        def __rmatmul__(self, left):
            return "rmatmul"

        def __eq__(self, right):
            return "eq"

        __hash__ = None

    q, dense = scaled(getkey(), (4, 6)), scaled(getkey(), (4, 6)).materialize()
    assert (dense + Symbol(), dense @ Symbol(), dense == Symbol()) == ("radd", "rmatmul", "eq")
    assert (q + Symbol(), q @ Symbol(), q == Symbol()) == ("radd", "rmatmul", "eq")


@pytest.mark.parametrize("other", [None, "text", object(), {"a": 1}], ids=["None", "str", "object", "dict"])
def test_operands_that_are_no_arrays_raise(other, getkey):
    q = scaled(getkey(), (4, 6))
    with pytest.raises(TypeError):
        q + other
    with pytest.raises(TypeError):
        other @ q


def test_compared_with_none(getkey):
    """As with `jax.Array`, where Python's default answers."""
    q = scaled(getkey(), (4, 6))
    dense = q.materialize()
    assert (dense == None, dense != None) == (False, True)  # noqa: E711
    assert (q == None, q != None) == (False, True)  # noqa: E711


# --- outside `implicit` ---


def test_jax_functions_refuse_it_outside_implicit(getkey):
    """Rather than making it dense without a word."""
    q = scaled(getkey(), (4, 6))
    with pytest.raises(TypeError, match="Scaled"):
        jnp.sin(q)
    assert not hasattr(q, "__jax_array__")


# --- the rest of what jax.Array has ---

SAME = {
    "itemsize": lambda a: a.itemsize,
    "weak_type": lambda a: a.weak_type,
    "aval": lambda a: (a.aval.shape, a.aval.dtype),
    "devices": lambda a: a.devices(),
    "device": lambda a: a.device,
    "platform": lambda a: a.platform(),
    "is_fully_addressable": lambda a: a.is_fully_addressable,
    "is_fully_replicated": lambda a: a.is_fully_replicated,
    "committed": lambda a: a.committed,
    "is_deleted": lambda a: a.is_deleted(),
    "is_ready": lambda a: a.block_until_ready().is_ready(),
    "tobytes": lambda a: a.tobytes(),
    "shards": lambda a: [(s.index, s.data.tolist()) for s in a.addressable_shards],
    "global_shards": lambda a: len(a.global_shards),
    "addressable_data": lambda a: a.addressable_data(0).tolist(),
    "view": lambda a: a.view(jnp.uint32).tolist(),
    "conjugate": lambda a: jnp.asarray(a.conjugate()).tolist(),
    "argpartition": lambda a: a.argpartition(1).shape,
    "searchsorted": lambda a: a.ravel().searchsorted(a.ravel()[0]).dtype,
    "compress": lambda a: jnp.asarray(a.compress(jnp.array([True, False]), 0)).tolist(),
    "round": lambda a: jnp.asarray(round(a)).tolist(),
    "contains": lambda a: (2.5 in a[0], float(a[0, 0]) in a[0]),
    "namespace": lambda a: a.__array_namespace__().sum is jnp.sum,
    "dlpack": lambda a: np.from_dlpack(a).tolist(),
    "copy_to_host_async": lambda a: a.copy_to_host_async(),
    "to_device": lambda a: a.to_device(jax.devices()[1]).devices(),
    "len of format": lambda a: format(a[0, 0], ".3f"),
}


@arrays
@pytest.mark.parametrize("ask", SAME.values(), ids=SAME)
@pytest.mark.filterwarnings("ignore:Requested copy:UserWarning")
def test_says_what_the_dense_array_says(ask, make, getkey):
    q = make(getkey(), (4, 6))
    assert ask(q) == ask(q.materialize())


@arrays
def test_copy_has_memory_of_its_own(make, getkey):
    q = make(getkey(), (4, 6))
    copied = q.copy()
    assert type(copied) is type(q)
    expected = q.materialize()
    q.delete()
    assert q.is_deleted()
    assert not copied.is_deleted()
    assert_same(copied.materialize(), expected)


def test_bytes_on_devices_are_those_stored():
    assert Scaled(jnp.ones((4, 6), jnp.int8), jnp.ones((1, 6))).on_device_size_in_bytes() == 24 + 24


def test_setting_an_item_says_what_works(getkey):
    with pytest.raises(TypeError, match=r"`q.at\[index\].set\(value\)` makes another"):
        scaled(getkey(), (4, 6))[0, 0] = 1


OWN = {"materialize", "commute_ops", "warn_on_materialize", "is_stacked", "leaf_specs"}


def test_completion_shows_the_manners_of_an_array():
    public = {name for name in dir(ImplicitArray) if not name.startswith("_")}
    assert public - {*dir(jnp.ones(1))} == OWN
