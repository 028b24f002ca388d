"""What a matmul or convolution multiplies its weights by: sums of squares of inputs, and of their products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from eformer._src.model.uses.movements import type_of

from .pull import CannotPull


class Sums(NamedTuple):
    """Sums over the inputs of an array's elements; shapes are those of `pull`.

    `moment` has the array's axes twice: entry (i, j) is the sum of the product of the inputs of elements i and j, which
    lie along the contracted axes of the same matrix. `inputs` is how many inputs there are that are not all zero.
    """

    squares: jax.Array
    inputs: jax.Array
    moment: jax.Array | None = None


def sums_of(eqn: JaxprEqn, operands: Sequence[Any], at: int, wants_moment: bool) -> Sums:
    """The sums for operand number `at`; `CannotPull` if this way to multiply is not known."""
    return _SUMS[eqn.primitive.name](eqn, operands, at, wants_moment)


def _dot_general(eqn: JaxprEqn, operands: Sequence[Any], at: int, wants_moment: bool) -> Sums:
    contracted, batch = eqn.params["dimension_numbers"]
    # In the order of the weight's axes, so that those of the sums are too.
    summed = sorted(zip(contracted[at], contracted[1 - at], strict=True))
    shared = sorted(zip(batch[at], batch[1 - at], strict=True))
    x = operands[1 - at].astype(jnp.float32)
    ours = [axis for _, axis in (*shared, *summed)]
    x = x.transpose(*ours[: len(shared)], *[i for i in range(x.ndim) if i not in ours], *ours[len(shared) :])
    stack, channels = x.shape[: len(shared)], x.shape[x.ndim - len(summed) :]
    x = x.reshape(*stack, -1, math.prod(channels))
    found = _of_rows(x, wants_moment)
    places = [axis for axis, _ in (*shared, *summed)]
    return _in_place(found, places, len(shared), channels, len(_shape(eqn, at)))


def _of_rows(x: jax.Array, wants_moment: bool) -> Sums:
    """Of inputs (..., rows, channels)."""
    count = jnp.sum(jnp.any(x != 0, axis=-1), axis=-1, dtype=jnp.float32)
    moment = jnp.einsum("...ri,...rj->...ij", x, x, precision="highest") if wants_moment else None
    return Sums(jnp.sum(x * x, axis=-2), count, moment)


def _in_place(found: Sums, places: Sequence[int], stacked: int, channels: Sequence[int], ndim: int) -> Sums:
    """Sums (stack, channels), whose axes are the `places` of the array's `ndim` axes, with those axes."""
    order = sorted(range(len(places)), key=places.__getitem__)
    beside = [axis for axis in range(ndim) if axis not in places]
    stack = found.squares.shape[:stacked]

    def placed(total: jax.Array, channels: Sequence[int], behind: Sequence[int] = ()) -> jax.Array:
        rest = range(len(order), len(order) + len(behind))
        return jnp.expand_dims(total.reshape(*stack, *channels, *behind).transpose(*order, *rest), beside)

    ones = [1] * len(channels)
    moment = None
    if found.moment is not None:
        width = math.prod(channels)
        second = [channels[places.index(i) - stacked] if i in places[stacked:] else 1 for i in range(ndim)]
        moment = placed(found.moment, channels, [width])
        moment = moment.reshape(*moment.shape[:-1], *second)
    return Sums(placed(found.squares, channels), placed(found.inputs, ones), moment)


def _ragged_dot(eqn: JaxprEqn, operands: Sequence[Any], at: int, wants_moment: bool) -> Sums:
    """Of the matrices (groups, k, n) that multiply the rows of their group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs, rhs), batch = numbers.dot_dimension_numbers
    groups = list(numbers.rhs_group_dimensions)
    if at != 1 or len(groups) != 1 or any(map(len, batch)) or numbers.lhs_ragged_dimensions[0] in lhs:
        raise CannotPull
    summed = sorted(zip(rhs, lhs, strict=True))
    x, sizes = operands[0].astype(jnp.float32), operands[2]
    x = x.transpose(*[i for i in range(x.ndim) if i not in lhs], *[axis for _, axis in summed])
    channels = x.shape[x.ndim - len(summed) :]
    x = x.reshape(x.shape[0], -1, math.prod(channels))
    ends = jnp.cumsum(sizes)
    group = jnp.sum(jnp.arange(len(x))[:, None] >= ends, axis=1)  # of each row; the number of groups beyond them
    if not wants_moment:
        member = (group[:, None] == jnp.arange(len(sizes))).astype(jnp.float32)
        squares = jnp.einsum("rg,ric->gc", member, x * x, precision="highest")
        found = Sums(squares, jnp.einsum("rg,ri->g", member, jnp.any(x != 0, axis=-1).astype(jnp.float32)))
    else:
        own = lambda g: _of_rows(jnp.where((group == g)[:, None, None], x, 0).reshape(-1, x.shape[-1]), True)  # noqa: E731
        found = lax.map(own, jnp.arange(len(sizes)))
    return _in_place(found, [groups[0], *[axis for axis, _ in summed]], 1, channels, len(_shape(eqn, 1)))


def _convolution(eqn: JaxprEqn, operands: Sequence[Any], at: int, wants_moment: bool) -> Sums:
    """The transpose of the convolution, as a function of its kernel, adds up the squares that each element meets."""
    if at != 1:
        raise CannotPull
    numbers, shape = eqn.params["dimension_numbers"], list(_shape(eqn, 1))
    features, grouped = numbers.rhs_spec[0], max(eqn.params["feature_group_count"], eqn.params["batch_group_count"])
    if grouped == 1:
        shape[features] = 1  # the same for all output features
    x = operands[0].astype(jnp.float32)
    params = {**eqn.params, "preferred_element_type": None, "precision": lax.Precision.HIGHEST}
    run = lambda kernel: eqn.primitive.bind(x * x, kernel, **params)  # noqa: E731
    kernel = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    out = jax.eval_shape(run, kernel)
    (squares,) = jax.linear_transpose(run, kernel)(jnp.ones(out.shape, out.dtype))
    positions = out.size // out.shape[numbers.out_spec[1]]
    count = jnp.full([1] * len(shape), positions, jnp.float32)
    if not wants_moment:
        return Sums(squares, count)
    if grouped > 1:
        raise CannotPull
    patches = lax.conv_general_dilated_patches(
        x,
        [shape[axis] for axis in numbers.rhs_spec[2:]],
        eqn.params["window_strides"],
        eqn.params["padding"],
        eqn.params["lhs_dilation"],
        eqn.params["rhs_dilation"],
        dimension_numbers=numbers,
        precision=lax.Precision.HIGHEST,
    )
    rows = jnp.moveaxis(patches, numbers.out_spec[1], -1).reshape(-1, math.prod(shape))
    own = [shape[axis] for axis in numbers.rhs_spec[1:]]  # the features, then the window, as patches have them
    order = sorted(range(len(own)), key=lambda i: numbers.rhs_spec[1 + i])
    rows = rows.reshape(-1, *own).transpose(0, *[1 + i for i in order]).reshape(len(rows), -1)
    return Sums(squares, count, _of_rows(rows, True).moment.reshape(*shape, *shape))  # pyright: ignore[reportOptionalMemberAccess]


def _shape(eqn: JaxprEqn, at: int) -> tuple[int, ...]:
    return type_of(eqn.invars[at]).shape


_SUMS: Mapping[str, Callable[[JaxprEqn, Sequence[Any], int, bool], Sums]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
