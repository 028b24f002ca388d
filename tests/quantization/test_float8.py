"""FP8: what its codes and scales stand for, and blocks in two dimensions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer._src.kernels import cpu
from eformer.jaximus import explain, implicit
from eformer.model import default_rules, quantize_model
from eformer.ops.quantization import ArrayFloat8, format_names, quantize

from .cases import assert_product, assert_same_array, assert_same_leaves, assert_within, f64, normal

DTYPES = {"fp8": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


def repeated(scale: Any, block_shape: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """The scale of every element."""
    for axis, block in enumerate(block_shape):
        scale = np.repeat(scale, block if scale.shape[axis] > 1 else shape[axis], axis=axis)
    return scale[: shape[0], : shape[1]]


SCALES = [
    ("fp8", (1, 1), (), jnp.float32),
    ("fp8_e5m2", (16, 1), (), jnp.bfloat16),
    ("fp8", (1, 48), (), jnp.float16),
    ("fp8", (4, 5), (4, 10), jnp.float32),
    ("fp8", (4, 5), (4, 10), jnp.float8_e8m0fnu),
    ("fp8_e5m2", (1, 5), (4, 10), jnp.float32),
    ("fp8_e5m2", (16, 5), (10,), jnp.float8_e8m0fnu),
]


@pytest.mark.parametrize(("name", "scale_shape", "block_shape", "scale_dtype"), SCALES, ids=str)
def test_all_codes_times_any_scale(name, scale_shape, block_shape, scale_dtype):
    codes = np.resize(np.arange(256, dtype=np.uint8), (16, 48)).view(DTYPES[name])
    scale = (2.0 ** (np.arange(np.prod(scale_shape)).reshape(scale_shape) % 20 - 9)).astype(scale_dtype)
    q = ArrayFloat8(jnp.asarray(codes), jnp.asarray(scale), block_shape=block_shape)
    blocks: Any = (1, 1, *block_shape)[-2:]
    assert_same_array(q.decode(), codes.astype(np.float32) * repeated(scale.astype(np.float32), blocks, (16, 48)))
    assert format_names(q) == (name,)


@pytest.mark.parametrize("name", DTYPES)
def test_codes_are_the_nearest_and_the_largest_element_has_the_largest_code(name):
    w = np.asarray(normal((7, 33))) * 5
    q = quantize(jnp.asarray(w), format=name, axis=-1)
    largest = float(jnp.finfo(DTYPES[name]).max)
    scale = (np.abs(w).max(1, keepdims=True) / np.float32(largest)).astype(np.float32)
    assert_same_array(q.scale, scale)
    assert_same_array(q.weight, (w / scale).astype(DTYPES[name]))


BLOCKS = (8, 4)


def in_blocks(shape: tuple[int, ...] = (24, 20)) -> ArrayFloat8:
    return quantize(normal(shape), format="fp8", block_shape=BLOCKS)


MOVES: dict[str, Any] = {
    "transpose": (lambda w: w.T, (4, 8)),
    "between blocks": (lambda w: w[8:, 4:12], BLOCKS),
    "concatenate": (lambda w: jnp.concatenate([w, w], 1), BLOCKS),
    "new axis in front": (lambda w: jnp.stack([w, w]), BLOCKS),
    "new axis behind": (lambda w: jnp.stack([w, w], -1), (8, 4, 1)),
    "split": (lambda w: w.reshape(3, 8, 20), BLOCKS),
}


@pytest.mark.parametrize("move", MOVES)
def test_blocks_stay_with_their_elements(move):
    function, block_shape = MOVES[move]
    q = in_blocks()
    moved = jax.jit(implicit(function))(q)
    assert isinstance(moved, ArrayFloat8)
    assert moved.block_shape == block_shape
    assert_same_array(moved.materialize(), function(q.materialize()))


@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
@pytest.mark.parametrize("part", [np.s_[4:], np.s_[:, 2:6], np.s_[::2], np.s_[::-1]], ids=str)
def test_parts_that_cut_a_block_are_right(part):
    q = in_blocks()
    assert_same_array(jnp.asarray(q[part]), q.materialize()[part])


@pytest.mark.parametrize(
    ("spec", "transposed"), [(("x", None), False), ((None, "x"), True), (("x", "y"), False)], ids=str
)
def test_shards_that_cut_blocks(spec, transposed):
    """Shards of 6 or 12 rows cut blocks of 8, those of 5 or 10 columns cut blocks of 4."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q, x = in_blocks(), normal((3, 20 if transposed else 24), seed=1)
    placed = q.with_sharding(NamedSharding(mesh, PartitionSpec(*spec)))
    run = jax.jit(implicit(lambda x, q: x @ (q.T if transposed else q)))
    dense = q.materialize()
    assert_product(run(x, placed), x, dense.T if transposed else dense)


OPTIONS: list[Any] = [
    ({"axis": 0}, jnp.bfloat16),
    ({"axis": (0, 1)}, jnp.float32),
    ({"block_shape": (16, 32)}, jnp.float32),
    ({"block_shape": (16, 32)}, jnp.float16),
    ({"block_shape": (8, 1)}, jnp.float32),
    ({"block_shape": (4, 5)}, jnp.float32),  # odd blocks, which kernels do not have
]


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize(("options", "dtype"), OPTIONS, ids=str)
def test_matmuls_make_nothing_dense(options, dtype, core):
    """Of several rows and of one, along either axis; the last blocks are short."""
    q, x = quantize(normal((83, 97), dtype), format="fp8", **options), normal((3, 97), dtype, seed=1)

    def matmuls(x: Any, q: Any) -> Any:
        return x[:, :83] @ q, x[:1, :83] @ q, x @ q.T, x[:1] @ q.T

    with cpu.use_core(core):
        assert explain(matmuls)(x, q).dense_bytes == 0
        several, one, transposed, one_transposed = jax.jit(implicit(matmuls))(x, q)
    assert_product(several, x[:, :83], q)
    assert_product(one, x[:1, :83], q)
    assert_product(transposed, x, q.materialize().T)
    assert_product(one_transposed, x[:1], q.materialize().T)


def test_blocks_win_over_the_axis_that_rules_for_models_choose():
    model = quantize_model({"kernel": normal((128, 96))}, default_rules("fp8", block_shape=(64, 32)))
    assert_same_leaves(model["kernel"], quantize(normal((128, 96)), format="fp8", block_shape=(64, 32)))


def test_codes_have_no_gradient():
    q, x = quantize(normal((6, 10)), format="fp8", axis=-1), normal((3, 6), seed=1)
    gradient = jax.grad(implicit(lambda q: jnp.sum(x @ q)), allow_int=True)(q)  # as for codes that are integers
    assert not np.any(f64(gradient.weight))
    expected = f64(x).sum(0)[:, None] * f64(q.weight).sum(1, keepdims=True)
    assert_within(gradient.scale, expected, 1e-4 * np.abs(f64(q.weight)).sum(1, keepdims=True))


W: Any = np.ones((6, 10), np.float32)
CODES = jnp.asarray(W, jnp.float8_e4m3fn)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "blocks of a vector": (lambda: quantize(W[0], format="fp8", block_shape=(2, 2)), ValueError, "needs 2 axes"),
    "length 0": (lambda: quantize(W, format="fp8", block_shape=(2, 0)), ValueError, "lengths from 1 to"),
    "no ints": (lambda: quantize(W, format="fp8", block_shape=(2, 2.0)), TypeError, "must be an int"),
    "codes": (lambda: ArrayFloat8.quantize(W, code_dtype=jnp.float16), ValueError, "float8_e4m3fn or float8_e5m2, not"),
    "entries": (
        lambda: ArrayFloat8(CODES, jnp.ones((2, 3)), block_shape=(4, 4)[:1]),
        ValueError,
        "along axis 0 it must have 6 entries or 1",
    ),
    "scale": (lambda: ArrayFloat8(CODES, CODES), TypeError, "scale must be floating point, or float8_e8m0fnu"),
    "leading 1": (
        lambda: ArrayFloat8(CODES, jnp.ones((6, 5)), block_shape=(1, 2)),
        ValueError,
        "must not begin with 1",
    ),
    "too many": (
        lambda: ArrayFloat8(CODES, jnp.ones((1, 1)), block_shape=(2, 2, 2)),
        ValueError,
        "more axes than weight",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    call, error, message = BAD[bad]
    with pytest.raises(error, match=message):
        call()
