"""Implicit arrays for the tests, and how their results are compared with those of dense arrays.

All values are small integers and powers of two, and all functions tested polynomials: float32 arithmetic on them is
exact, so results agree bit for bit whatever the order of the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random as jr
from jax import tree_util as jtu
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from eformer.jaximus import ImplicitArray, is_implicit, materialize, register, tree_flatten_with_implicit

MATERIALIZED = "materialized"  # the name that `materialize` leaves in the program


class Scaled(ImplicitArray):
    """`w * s`, with `s` of w's rank and 1 along the axes it does not vary over."""

    warn_on_materialize = False

    w: Any
    s: Any

    def materialize(self) -> jax.Array:
        return checkpoint_name(self.w.astype(self.s.dtype) * self.s, MATERIALIZED)

    def leaf_specs(self, spec: PartitionSpec) -> Any:
        spec = (*spec, *[None] * (self.ndim - len(spec)))
        scale = [None if size == 1 else axis for size, axis in zip(self.s.shape, spec, strict=True)]
        return jtu.tree_unflatten(jtu.tree_structure(self), [PartitionSpec(*spec), PartitionSpec(*scale)])


@register("dot_general")
def dot_scaled(primitive: Any, x: jax.Array, q: Scaled, *, dimension_numbers: Any, **params: Any) -> Any:
    """`x @ q` with leading axes of `q` batched: `(x @ w) * s`, where the scale is per column."""
    (_, contracted), (_, batch) = dimension_numbers
    leading = q.ndim - 2
    if contracted != (leading,) or batch != tuple(range(leading)) or q.s.shape[-2] != 1 or x.dtype != q.dtype:
        return NotImplemented
    y = primitive.bind(x, q.w.astype(x.dtype), dimension_numbers=dimension_numbers, **params)
    scale = q.s.reshape((*q.s.shape[:leading], *[1] * (y.ndim - leading - 1), q.s.shape[-1]))
    return y * scale.astype(y.dtype)


@register("transpose")
def transpose_scaled(primitive: Any, q: Scaled, **params: Any) -> Scaled:
    return Scaled(primitive.bind(q.w, **params), primitive.bind(q.s, **params))


@register("neg")
def neg_scaled(primitive: Any, q: Scaled, **params: Any) -> Scaled:
    return Scaled(primitive.bind(q.w, **params), q.s)


class LowRank(ImplicitArray):
    """`a @ b`, without any rule."""

    warn_on_materialize = False

    a: jax.Array
    b: jax.Array

    def materialize(self) -> jax.Array:
        return self.a @ self.b


class Filled(ImplicitArray):
    """`value` everywhere, of a shape that the leaf does not tell; leading axes of `value` are the array's own."""

    warn_on_materialize = False

    value: jax.Array

    def materialize(self) -> jax.Array:
        value = jnp.asarray(self.value)
        return jnp.broadcast_to(value.reshape((*value.shape, *[1] * (self.ndim - value.ndim))), self.shape)


class Shifted(ImplicitArray):
    """`base + by`, where `base` is an implicit array itself."""

    warn_on_materialize = False

    base: ImplicitArray
    by: jax.Array

    def materialize(self) -> jax.Array:
        return self.base + self.by


def drawn(key: jax.Array, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
    """Integers from `low` to below `high`, by NumPy, which has nothing to compile."""
    return np.random.default_rng(np.asarray(jr.key_data(key))).integers(low, high, shape)


def integers(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(drawn(key, -1, 2, shape), dtype)


def scaled(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Scaled:
    w, s = jr.split(key)
    columns = (*shape[:-2], 1, *shape[-1:]) if len(shape) > 1 else shape
    return Scaled(integers(w, shape, dtype), jnp.asarray(2 ** drawn(s, 0, 2, columns), jnp.float32))


def scaled_int8(key: jax.Array, shape: tuple[int, ...]) -> Scaled:
    """As a quantized array: a leaf without a derivative."""
    return scaled(key, shape, jnp.int8)


def low_rank(key: jax.Array, shape: tuple[int, ...]) -> LowRank:
    a, b = jr.split(key)
    *batch, rows, columns = shape
    return LowRank(integers(a, (*batch, rows, 2)), integers(b, (*batch, 2, columns)))


def filled(key: jax.Array, shape: tuple[int, ...]) -> Filled:
    return Filled(jnp.asarray(drawn(key, 1, 3, shape[:-2]), jnp.float32), shape=shape)


def shifted(key: jax.Array, shape: tuple[int, ...]) -> Shifted:
    base, by = jr.split(key)
    return Shifted(low_rank(base, shape), integers(by, shape))


Make = Callable[[jax.Array, tuple[int, ...]], Any]
ARRAYS: tuple[Make, ...] = (scaled, scaled_int8, low_rank, filled, shifted)


def name(x: Any) -> str:
    """For the `ids` of parametrized tests: functions go by their names."""
    return x.__name__


def densely(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `implicit(function)` must agree with: the function of dense arrays."""
    return lambda *args, **kwargs: function(*materialize(args), **materialize(kwargs))


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structure, values, shapes, dtypes and weak types; `actual` may be implicit where `expected` is dense."""
    actual, actual_structure = tree_flatten_with_implicit(actual)
    expected, structure = tree_flatten_with_implicit(expected)
    assert actual_structure == structure
    for a, e in zip(actual, expected, strict=True):
        if is_implicit(e):  # a tree of arrays as any other: the gradients of the leaves, say
            assert jtu.tree_structure(a) == jtu.tree_structure(e)
            for pair in zip(jtu.tree_leaves(a), jtu.tree_leaves(e), strict=True):
                assert_same_array(*pair)
        else:
            assert_same_array(materialize(a), e)


def assert_same_array(actual: Any, expected: Any) -> None:
    assert type_of(actual) == type_of(expected)
    if isinstance(expected, (jax.Array, np.ndarray)) and expected.dtype != jax.dtypes.float0:
        np.testing.assert_array_equal(actual, expected)


def type_of(x: Any) -> tuple[Any, ...]:
    return jnp.shape(x), x.dtype, getattr(x, "weak_type", False)


def count_materialized(function: Callable[..., Any], *args: Any) -> int:
    """How often the program of `function` makes a `Scaled` array dense."""
    return count_names(jax.make_jaxpr(function)(*args).jaxpr)


def count_names(jaxpr: Any) -> int:
    own = sum(eqn.primitive.name == "name" and eqn.params["name"] == MATERIALIZED for eqn in jaxpr.eqns)
    return own + sum(count_names(inner) for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params))
