"""Every registered format with its options, and how results are compared with those of dense arrays."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from eformer.jaximus import is_implicit, materialize, tree_flatten_with_implicit
from eformer.ops.quantization import Format, QuantizedArray, formats, quantize, straight_through

# What is worth trying besides the defaults. A format that is not named here is tested along both axes, in small blocks.
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "int8": ({"axis": 0}, {"axis": (-2, -1)}),
    "nf4": ({"block_size": 4}, {"block_size": 4, "axis": 0}, {"block_size": 4, "double_quantization": True}),
    "ternary": ({"scale": "tensor"}, {"scale": "channel"}, {"scale": "channel", "axis": -1}, {"scale": "absmean"}),
    "binary": ({"scale": "channel"},),
    "int4": (
        {"block_size": 4, "axis": 0},
        {"block_size": 3, "symmetric": True},
        {"block_size": 4, "double_quantization": True},
    ),
    "int3": ({"block_size": 8, "axis": 0},),
    "fp8": ({"block_shape": (4, 4)},),
}
# Most of a test's time is compiling, so formats that share their code do not all run through all tests.
#
# Of the same class as "int4", "int3" or "fp8", and different in a width, a codebook or the dtype of a leaf alone. Rules
# and transformations ask the class; what the format changes (packing, decoding, rounding, scales of scales, joins) is
# tested for each in `test_grouped.py`, `test_mx.py` and `test_float8.py`, and its matmuls in `kernels`. A test of
# `test_conformance.py` has a little of everything for each.
ALIKE = {"int2", "int5", "int6", "int8_grouped", "fp8_e5m2", "mxfp4", "nvfp4"}


def _options(form: Format) -> tuple[dict[str, Any], ...]:
    blocks = {"block_size": form.options["block_size"] // 8} if "block_size" in form.options else {}
    return OPTIONS.get(form.name) or tuple({"axis": axis, **blocks} for axis in (0, -1) if "axis" in form.options)


class Case(NamedTuple):
    """A format and options for it, hashable; called with an array, it quantizes that."""

    name: str
    items: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, **options: Any) -> Case:
        return cls(name, tuple(options.items()))

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.items)

    def __call__(self, array: Any, **more: Any) -> Any:
        return quantize(array, dtype=self.name, **self.options, **more)

    def straight_through(self, array: Any) -> jax.Array:
        return straight_through(array, dtype=self.name, **self.options)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.items)])


_FORMATS = [form for form in formats() if form.name not in ALIKE]
# A format of each class, for tests of what classes share: trees, errors, `disable_jit`, pages.
CLASSES = list({form.array_type: form.name for form in reversed(_FORMATS)}.values())
CASES = [Case.of(form.name, **options) for form in _FORMATS for options in ({}, *_options(form))]
DEFAULTS = [case for case in CASES if not case.items]
# One of each way to store an array: with and without scales, blocks, and scales of scales.
LAYOUTS = [*DEFAULTS, *(case for case in CASES if {"double_quantization", "scale"} & case.options.keys())]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_format = pytest.mark.parametrize("case", DEFAULTS, ids=str)

SHAPE = (6, 10)  # of the arrays that most tests share: ragged for every format, so that little is compiled
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def in_turn(slow: Sequence[Any], fast: Sequence[Any], each: int) -> list[tuple[Any, Any]]:
    """Pairs of each of `slow` with `each` of `fast`, which take turns: where neither changes what the other does."""
    return [(a, fast[(i * each + k) % len(fast)]) for i, a in enumerate(slow) for k in range(each)]


def name(x: Any) -> str:
    """For the `ids` of parametrized tests."""
    return getattr(x, "__name__", None) or str(x)


def normal(shape: Sequence[int] = SHAPE, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """Normal numbers from NumPy, which has nothing to compile."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(tuple(shape)), dtype)


@jax.jit
def dense(q: QuantizedArray) -> jax.Array:
    """`q.materialize()` as one program: `test_materialize_under_jit` says that it is the same, bit for bit."""
    return q.materialize()


@functools.cache
def example(case: Case, shape: tuple[int, ...] = SHAPE, dtype: Any = jnp.float32, seed: int = 0) -> Any:
    """A quantized array and its dense form, the same objects at each call."""
    q = case(normal(shape, dtype, seed))
    return q, dense(q)


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def assert_within(actual: Any, expected: Any, bound: Any) -> None:
    """At most `bound` apart, elementwise; a NaN is never within."""
    distance = np.abs(f64(actual) - f64(expected))
    assert np.all(distance <= f64(bound)), f"{np.max(distance - f64(bound))} more than allowed"


@contextlib.contextmanager
def about(*what: object) -> Iterator[None]:
    """A block whose error says what it was about, for one test of many alike."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"about {', '.join(map(str, what))}")
        raise


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structure, values, shapes, dtypes and weak types; `actual` may be implicit where `expected` is dense."""
    actual, actual_structure = tree_flatten_with_implicit(actual)
    expected, structure = tree_flatten_with_implicit(expected)
    assert actual_structure == structure
    for pair in zip(actual, expected, strict=True):
        assert_same_array(*(dense(x) if is_implicit(x) else x for x in pair))


def assert_same_array(actual: Any, expected: Any) -> None:
    assert type_of(actual) == type_of(expected)
    np.testing.assert_array_equal(*(f64(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in (actual, expected)))


def assert_same_leaves(actual: Any, expected: Any) -> None:
    """The same implicit array, bit for bit: class, static fields and leaves."""
    assert is_implicit(actual)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for pair in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_array(*pair)


def type_of(x: Any) -> tuple[Any, ...]:
    return jnp.shape(x), x.dtype, getattr(x, "weak_type", False)


# --- products ---

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_f64(lhs: Any, rhs: Any, numbers: Numbers) -> np.ndarray:
    """`lax.dot_general` by its definition, in float64."""
    (l_summed, r_summed), (l_batch, r_batch) = numbers
    lhs, rhs = f64(lhs), f64(rhs)
    letters = iter("abcdefghijklmnop")
    left = [next(letters) for _ in range(lhs.ndim)]
    right = [next(letters) for _ in range(rhs.ndim)]
    for mine, its in (*zip(l_summed, r_summed, strict=True), *zip(l_batch, r_batch, strict=True)):
        right[its] = left[mine]
    batch = [left[a] for a in l_batch]
    free_left = [c for a, c in enumerate(left) if a not in (*l_summed, *l_batch)]
    free_right = [c for a, c in enumerate(right) if a not in (*r_summed, *r_batch)]
    out = "".join([*batch, *free_left, *free_right])
    return np.einsum(f"{''.join(left)},{''.join(right)}->{out}", lhs, rhs)


def assert_product(out: Any, lhs: Any, rhs: Any, numbers: Numbers | None = None) -> None:
    """`out` is `lhs @ rhs`, or the `dot_general` of dense operands, as exactly as its dtype and theirs can tell.

    Rounding moves each of the `K` terms of a sum by half an epsilon of float32 at each of its additions, and by two
    halves of one of the operands' dtypes (a scale may be rounded into `x` where the dense array rounds it into the
    weight); the result is rounded once more.
    """
    lhs, rhs = materialize((lhs, rhs))
    numbers = numbers or (((lhs.ndim - 1,), (max(rhs.ndim - 2, 0),)), ((), ()))
    terms = int(np.prod([lhs.shape[a] for a in numbers[0][0]]))
    exact, magnitude = dot_f64(lhs, rhs, numbers), dot_f64(np.abs(lhs), np.abs(rhs), numbers)
    operands = max(float(jnp.finfo(a.dtype).eps) for a in (lhs, rhs))
    info = jnp.finfo(out.dtype)
    bound = magnitude * (terms * float(jnp.finfo(jnp.float32).eps) + operands)
    assert out.shape == exact.shape
    assert_within(out, exact, bound + (np.abs(exact) + bound) * float(info.eps) / 2 + float(info.tiny))


# --- what a program holds ---


def eqns(jaxpr: Any) -> list[Any]:
    """All equations of a jaxpr and of those inside it."""
    inner = [e for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params) for e in eqns(j)]
    return [*jaxpr.eqns, *inner]


def eqns_of(function: Callable[..., Any], *args: Any) -> list[Any]:
    return eqns(jax.make_jaxpr(function)(*args).jaxpr)


def primitives(function: Callable[..., Any], *args: Any) -> set[str]:
    return {eqn.primitive.name for eqn in eqns_of(function, *args)}


def largest_float(function: Callable[..., Any], *args: Any) -> int:
    """Elements of the largest floating point array that the program of `function` makes."""
    avals = [v.aval for eqn in eqns_of(function, *args) for v in eqn.outvars]
    sizes = [aval.size for aval in avals if hasattr(aval, "size") and jnp.issubdtype(aval.dtype, jnp.floating)]
    return max(sizes, default=0)
