"""`PackedArray`, by a format of 3 bits in two planes of codes that this file adds: shapes, moves, options, checks."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.kernels import reference
from eformer._src.quantization import registry
from eformer._src.quantization.packed import PackedArray
from eformer.jaximus import aux_field, explain, implicit
from eformer.model import Rule, quantize_model
from eformer.ops.quantization import QuantizationConfig, find_format, quantize, register_format, straight_through

from .cases import assert_product, assert_same_array, assert_same_leaves, assert_within, normal

pytestmark = pytest.mark.usefixtures("planes")


class Planes(PackedArray):
    """`decode() == (code - 4) * scale of its block`."""

    _values_per_byte: ClassVar = {"low": 4, "high": 8}
    _scale_fields = ("scale",)
    _unit_codes: ClassVar = {"low": 0x55, "high": 0xFF}

    low: jax.Array
    high: jax.Array
    scale: jax.Array
    block_size: int = aux_field(default=16)

    @classmethod
    def quantize(cls, array: Any, block_size: int = 16, *, axis: int = -1, use_kernel: bool = True) -> Planes:
        encode = functools.partial(_encode, block_size=block_size)
        return cls._quantized("planes", array, axis, encode, block_size=block_size, use_kernel=use_kernel)

    def _values(self, codes: dict[str, jax.Array], axis: int, length: int) -> jax.Array:
        low, high = reference.unpack(codes["low"], 4, axis, length), reference.unpack(codes["high"], 8, axis, length)
        return (low | high << 2).astype(jnp.float32) - 4

    def _step_bound(self, original: jax.Array) -> jax.Array:
        return self._scaled(jnp.full(original.shape, 0.5), jnp.abs(self.scale))


def _encode(x: jax.Array, axis: int, block_size: int) -> dict[str, jax.Array]:
    values, scale = reference.encode_blocks(x, block_size, axis, largest=3)
    codes = (values + 4).astype(jnp.uint8)
    return {"low": reference.pack(codes & 3, 4, axis), "high": reference.pack(codes >> 2, 8, axis), "scale": scale}


@pytest.fixture(scope="module")
def planes() -> Iterator[Any]:
    yield register_format("planes", Planes, Planes.quantize)
    del registry._formats["planes"]


SHAPES = [((), -1), ((1,), 0), ((5,), -1), ((6, 10), 0), ((6, 34), -1), ((3, 35, 9), 1), ((0, 4), 0), ((4, 0), 1)]


@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_round_trip(shape, axis):
    w = normal(shape)
    q = Planes.quantize(w, axis=axis)
    assert (q.shape, q.dtype) == (w.shape, w.dtype)
    assert_within(q.materialize(), w, q.error_bound(w))
    length = shape[axis] if shape else 1
    assert q.nbytes == sum(-(-length // n) * size for n, size in ((4, 1), (8, 1), (16, 4))) * (w.size // max(length, 1))


MOVES: dict[str, Any] = {
    "transpose": lambda q: q.T,
    "rows": lambda q: q[1:5],
    "blocks": lambda q: q[:, 16:],
    "reshape": lambda q: jnp.reshape(q, (2, 3, 3, 16)),
    "stack": lambda q: jnp.stack([q, q]),
    "concatenate": lambda q: jnp.concatenate([q, q], 1),
    "pad rows": lambda q: jnp.pad(q, ((1, 2), (0, 0)), constant_values=2.5),
    "broadcast": lambda q: jnp.broadcast_to(q, (2, 6, 48)),
    "negative": jnp.negative,
    "experts": lambda q: jnp.take(jnp.stack([q, q]), jnp.array([1, 1]), axis=0),
}


@pytest.mark.parametrize("move", MOVES)
def test_moving_moves_both_planes_and_makes_nothing_dense(move):
    q = Planes.quantize(normal((6, 48)))
    found, dense = implicit(MOVES[move])(q), MOVES[move](q.materialize())
    assert isinstance(found, Planes)
    assert_same_array(found.materialize(), dense)
    assert explain(MOVES[move])(q).dense_bytes == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_matmul(axis):
    q, x = Planes.quantize(normal((40, 24)), axis=axis), normal((3, 40), seed=1)
    assert_product(x @ q, x, q)


def test_every_way_to_quantize_has_the_defaults_of_the_format():
    w = normal((6, 48))
    q, along_the_last = Planes.quantize(w, axis=-2), Planes.quantize(w)
    assert q.block_size == QuantizationConfig(format="planes").block_size == 16
    assert_same_leaves(quantize(w, format="planes"), q)
    assert_same_leaves(quantize(w, "planes"), q)
    assert_same_leaves(quantize_model({"w": w}, [Rule("w", "planes")])["w"], q)
    assert_same_leaves(quantize(w, dtype="planes"), along_the_last)  # as documented
    assert_same_leaves(find_format("planes").encode(w), along_the_last)
    assert_same_array(straight_through(w, format="planes"), q.materialize())


Q = {"low": np.zeros((2, 4), np.uint8), "high": np.zeros((2, 2), np.uint8), "scale": np.ones((2, 1), np.float32)}
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "block": (lambda: quantize(normal(), format="planes", block_size=12), ValueError, "12` must be a multiple of 8"),
    "block of config": (lambda: QuantizationConfig("planes", 4), ValueError, "multiple of 8.*eight codes share a byte"),
    "two axes": (lambda: quantize(normal(), format="planes", axis=(0, 1)), ValueError, "packed along one axis"),
    "a plane too short": (lambda: Planes(**Q | {"high": Q["high"][:, :1]}), ValueError, "high .* must have 2 entries"),
    "a plane broadcast": (lambda: Planes(**Q | {"low": Q["low"][:1]}), ValueError, "that is no array of shape"),
    "a plane of int8": (lambda: Planes(**Q | {"low": Q["low"].astype(np.int8)}), TypeError, "uint8, four codes a byte"),
    "too many scales": (lambda: Planes(**Q | {"scale": np.ones((2, 3), np.float32)}), ValueError, "of blocks of 16"),
    "padding": (lambda: Planes(**Q, padding=4), ValueError, "`padding` is from 0 to 3"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    call, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("block", [2**16, 2**30], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_longer_blocks_than_the_axis_take_no_memory(block, axis):
    """A file may say any length: what `materialize` computes is no larger than the array."""
    q = dataclasses.replace(Planes.quantize(normal((40, 48)), axis=axis, block_size=64), block_size=block)
    shapes = re.findall(r"\w+\[([\d,]+)\]", str(jax.make_jaxpr(lambda q: q.materialize())(q)))
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) <= 48 * 48


def test_a_constructor_takes_what_is_documented_of_all():
    q = Planes(**Q, shape=(2, 13), dtype=jnp.bfloat16)
    assert (q.shape, q.padding, q.dtype) == ((2, 13), 3, jnp.bfloat16)
    assert_same_array(q.materialize(), jnp.full((2, 13), -4, jnp.bfloat16))
