"""The kernels for TPU and GPU against the oracle, in interpret mode, and lowered for their platforms."""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from eformer._src.kernels import cpu, grouped, pallas
from eformer._src.kernels.matrix import Matrix
from eformer._src.kernels.pallas import choice, gpu, tpu
from eformer._src.kernels.pallas import formats as pallas_formats
from eformer._src.kernels.pallas import integers as integers_module
from eformer.ops.quantization import ArrayGrouped, nf4_use_kernel, quantize

from .matrices import from_codebook, int8, integers, made, nested_nf4, nf4, ternary

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
# Several tiles along both axes, the last of them not full; and less than a tile.
RAGGED, SMALL = (1, 330, 140), (2, 70, 33)
FORMATS = {
    "int8 per row": lambda w: int8(w, (2,)),
    "int8 per column": lambda w: int8(w, (1,)),
    "int8 per matrix": lambda w: int8(w, (1, 2)),
    "nf4 along 1": lambda w: nf4(w, 1, 32),
    "nf4 along 2": lambda w: nf4(w, 2, 16),
    "nf4 nested": lambda w: nested_nf4(w, 1, 32),
    "ternary": lambda w: ternary(w, 1, None),
    "ternary per column": lambda w: ternary(w, 1, (1,)),
    "ternary along 2": lambda w: ternary(w, 2, (1, 2)),
    **{f"uint{b} along {a}": lambda w, a=a, b=b: integers(w, a, 32, b) for b in grouped.PLANES for a in (1, 2)},
    "uint4 centred along 1": lambda w: integers(w, 1, 64, 4, symmetric=True),
    "uint4 centred along 2": lambda w: integers(w, 2, 16, 4, symmetric=True),
    "uint8 centred": lambda w: integers(w, 1, 128, 8, symmetric=True),
    "uint4 in blocks of 48": lambda w: integers(w, 1, 48, 4),
    "uint4 in one block": lambda w: integers(w, 2, w.shape[2], 4),
    **{
        f"{name} along {a}": lambda w, a=a, n=name: from_codebook(w, a, 32, n)
        for name in grouped.CODEBOOKS
        for a in (1, 2)
    },
}
# Every way through the kernels; `tests/accelerators` has them all, and interprets them strictly.
CASES = [("int8 per row", 0), ("int8 per matrix", 1), ("nf4 along 1", 0), ("nf4 along 1", 1), ("nf4 along 2", 0)]
CASES += [("nf4 nested", 0), ("ternary", 0), ("ternary per column", 1), ("e2m1 along 1", 0), ("iq4_nl along 2", 1)]
CASES += [("uint4 along 1", 0), ("uint3 along 1", 1), ("uint5 along 2", 0), ("uint4 along 2", 1), ("uint8 centred", 0)]
CASES += [("uint5 along 1", 0), ("uint4 in blocks of 48", 1)]
every_case = pytest.mark.parametrize(("name", "contracted_axis"), CASES, ids=str)
# One of each way through the kernel also as strictly as a TPU would be, or more.
STRICT_CASES = [("nf4 along 1", 0), ("ternary per column", 1)]


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.cache
def example(name: str, shape: tuple[int, ...]) -> tuple[Matrix, np.ndarray]:
    return made(FORMATS[name], normal(shape))


def assert_product(out: Any, x: Any, values: np.ndarray, contracted_axis: int, roundings: int = 3) -> None:
    """x, a code and a scaled code may be rounded to bfloat16 each; sums are exact beside that."""
    x, values = np.asarray(x, np.float64), values.astype(np.float64)
    values = values if contracted_axis == 0 else values.swapaxes(1, 2)
    bound = np.abs(x) @ np.abs(values) * roundings * 2.0**-8 * 1.01
    assert out.dtype == jnp.float32
    off = np.abs(np.asarray(out) - x @ values)
    assert np.all(off <= bound), np.max(off - bound)


def run_on_tpu(matrix: Matrix, x: jax.Array, contracted_axis: int, **options: Any) -> jax.Array:
    """With tiles so small that there are several."""
    if pallas_formats.FORMATS[matrix.format].integer_blocks:
        tiles = integers_module.default_tiles(matrix, 8, most=(128, 128))
    else:
        tiles = tpu.Tiles(8, max(128, 4 * matrix.block_size), 128)
    options = {"tiles": tiles, "interpret": True, **options}

    @jax.jit
    def run(x: jax.Array, codes: Any, scales: Any) -> jax.Array:
        return tpu.matmul(x, replace(matrix, codes=codes, scales=scales), contracted_axis, **options)

    return run(x, matrix.codes, matrix.scales)


def run_on_gpu(matrix: Matrix, x: jax.Array, contracted_axis: int) -> jax.Array:
    @jax.jit
    def run(x: jax.Array, codes: Any, scales: Any) -> jax.Array:
        return gpu.matmul(x, replace(matrix, codes=codes, scales=scales), contracted_axis, interpret=True)

    return run(x, matrix.codes, matrix.scales)


def x_for(shape: tuple[int, ...], contracted_axis: int, m: int = 5) -> jax.Array:
    return jnp.asarray(normal((shape[0], m, shape[1 + contracted_axis]), seed=1))


@every_case
def test_tpu_kernels(name, contracted_axis):
    (matrix, values), x = example(name, RAGGED), x_for(RAGGED, contracted_axis)
    assert_product(run_on_tpu(matrix, x, contracted_axis), x, values, contracted_axis)


@pytest.mark.parametrize(("name", "contracted_axis"), STRICT_CASES, ids=str)
def test_tpu_kernels_read_nothing_that_is_not_there(name, contracted_axis):
    """Races are looked for, and memory that nothing was written to holds NaN."""
    (matrix, values), x = example(name, SMALL), x_for(SMALL, contracted_axis)
    assert_product(run_on_tpu(matrix, x, contracted_axis, interpret=STRICT), x, values, contracted_axis)


@pytest.mark.parametrize(
    ("name", "contracted_axis", "options"),
    [
        ("nf4 along 1", 0, {"sublanes": False}),
        ("nf4 along 1", 0, {"scale_after": False}),
        ("uint3 along 1", 0, {"scale_after": False}),
        ("uint3 along 2", 1, {"scale_after": False}),
    ],
    ids=str,
)
def test_other_ways_to_decode(name, contracted_axis, options):
    (matrix, values), x = example(name, RAGGED), x_for(RAGGED, contracted_axis)
    assert_product(run_on_tpu(matrix, x, contracted_axis, **options), x, values, contracted_axis)


def test_products_with_rounded_x():
    """A row of x, times the scales that go with it, is off by at most half of a 127th of its largest."""
    (matrix, values), x = example("int8 per row", RAGGED), x_for(RAGGED, 0)
    scale = np.asarray(matrix.scales[0], np.float64)
    step = np.abs(np.asarray(x) * scale.swapaxes(1, 2)).max(2, keepdims=True) / 127
    bound = step / 2 * np.abs(values / scale).sum(1, keepdims=True)
    error = np.abs(np.asarray(run_on_tpu(matrix, x, 0, round_x=True)) - np.asarray(x, np.float64) @ values)
    np.testing.assert_array_less(error, bound * (1 + 1e-5))
    assert error.max() > bound.max() * 1e-3  # it was rounded


@pytest.mark.parametrize(("name", "contracted_axis"), CASES[1::3], ids=str)
def test_gpu_kernels(name, contracted_axis):
    (matrix, values), x = example(name, RAGGED), x_for(RAGGED, contracted_axis)
    assert_product(run_on_gpu(matrix, x, contracted_axis), x, values, contracted_axis)


LEVELS: dict[str, dict[str, Any]] = {
    "two levels": {"scale": jnp.uint8, "scale_scale": jnp.float16, "offset": jnp.int8, "offset_scale": jnp.float16},
    "zeros": {"scale": jnp.bfloat16, "zero": jnp.uint8},
    "centred": {"scale": jnp.float16},
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtypes", LEVELS.values(), ids=LEVELS)
def test_scales_and_offsets_are_read_as_they_are_stored(dtypes, axis):
    """40 x 72 codes of 4 bits in blocks of 8, whose scales may share another in superblocks of 16."""
    codes = np.random.default_rng(0).integers(0, 256, (20, 72) if axis == 0 else (40, 36), np.uint8)

    def level(name: str, dtype: Any) -> jax.Array:
        entries = tuple(
            -(-n // (16 if name.endswith("_scale") else 8)) if i == axis else n for i, n in enumerate((40, 72))
        )
        return jnp.abs(jnp.asarray(normal(entries)) * 4).astype(dtype)

    levels = {name: level(name, dtype) for name, dtype in dtypes.items()}
    sizes: Any = {"block_size": 8, "superblock_size": 16 if len(dtypes) > 2 else 0, "axis": axis, "shape": (40, 72)}
    q = ArrayGrouped(jnp.asarray(codes), **levels, **sizes)
    matrix = jax.tree.map(lambda leaf: leaf[None], q)._stored_matrix()
    scale, offset = pallas_formats.scale_and_offset(matrix)
    values = grouped.unpack_codes(matrix.codes, 4, 1 + axis, (40, 72)[axis]).astype(jnp.float32)
    values = values if offset is not None else values - pallas_formats.FORMATS["uint4"].centre
    wide = [None if each is None else each.astype(jnp.float32) for each in (scale, offset)]
    assert wide[0] is not None
    decoded = grouped.decode_blocks(values, wide[0], None, wide[1], 8, 1 + axis)
    np.testing.assert_allclose(np.asarray(decoded[0]), np.asarray(q.materialize()), rtol=1e-6, atol=1e-5)


KERNELS = {"tpu": (tpu.supports, run_on_tpu), "gpu": (gpu.supports, run_on_gpu)}
on_each_device = pytest.mark.parametrize("device", KERNELS)


@on_each_device
@pytest.mark.parametrize("name", ["nf4 along 1", "int8 per row", "uint3 along 1"])
def test_a_format_that_the_kernels_do_not_know_is_declined(name, device):
    matrix, _ = example(name, SMALL)
    supports, _ = KERNELS[device]
    assert supports(matrix)
    assert not supports(replace(matrix, format="sym3"))


@on_each_device
def test_blocks_that_do_not_fill_bytes_are_declined(device):
    matrix, _ = example("uint4 along 1", SMALL)
    supports, _ = KERNELS[device]
    assert not supports(replace(matrix, block_size=7))
    assert not supports(replace(matrix, codes=matrix.codes * 2))


@pytest.mark.parametrize("platform", pallas.PLATFORMS)
def test_a_matmul_with_an_unknown_format_is_left_to_xla(platform):
    matrix = replace(example("ternary", SMALL)[0], format="sym3")
    assert pallas.matmul(x_for(SMALL, 0), matrix, 0, pallas.Device(platform), round_x=True) is None


@on_each_device
def test_padding_that_holds_nan_codes_is_not_multiplied(device):
    """70 rows are 17 bytes and half of another, whose other half is not part of the matrix."""
    matrix, values = example("ternary", SMALL)
    (codes,) = matrix.codes
    filled = replace(matrix, codes=(codes.at[:, -1].set(codes[:, -1] | 0b10100000),))
    x = x_for(SMALL, 0)
    assert_product(KERNELS[device][1](filled, x, 0), x, values, 0)


# --- lowered for the platforms, as a user's matmul is ---

KERNEL = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton", "rocm": "__gpu$xla.gpu.triton"}
WEIGHTS: list[dict[str, Any]] = [{"dtype": "nf4"}, {"dtype": "nf4", "axis": 0}, {"dtype": "ternary"}, {"dtype": "int8"}]
WEIGHTS += [{"dtype": "int4"}, {"dtype": "int3", "axis": 0}]


def lowered(function: Any, platform: str, *arguments: Any) -> str:
    with device_of(platform):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def device_of(platform: str) -> contextlib.AbstractContextManager[Any]:
    """The newest JAX asks which GPU a program is for; older ones did not."""
    if platform == "tpu" or jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # newest JAX
@pytest.mark.skipif(not cpu.is_available(), reason="products are lowered by platform only with the native core")
@pytest.mark.parametrize("options", WEIGHTS, ids=str)
@pytest.mark.parametrize("platform", KERNEL)
def test_products_are_lowered_to_the_kernels(platform, options):
    q = quantize(jnp.asarray(normal((256, 128))), **options)
    x = jnp.ones((512, 256))  # so many that no chip in the table prefers XLA
    products = jax.vmap(lambda x, q: x @ q, (0, None))
    assert lowered(jax.grad(lambda x, q: products(x, q).sum()), platform, x[None], q).count(KERNEL[platform]) >= 1
    assert KERNEL[platform] in lowered(products, platform, x[None], q)


@pytest.mark.parametrize("platform", KERNEL)
def test_use_kernel_means_the_same_on_every_platform(platform):
    q, x = quantize(jnp.asarray(normal((256, 128)))), jnp.ones((512, 256))
    assert KERNEL[platform] not in lowered(lambda x, q: x @ q, platform, x, replace(q, use_kernel=False))
    with nf4_use_kernel(False):
        assert KERNEL[platform] not in lowered(lambda x, q: x @ q, platform, x, q)


# --- which is faster ---


def entry(chip: str, m: int, kernel: int, xla: int | None) -> dict[str, Any]:
    return {"chip": chip, "weight": "nf4 packed 0", "contracted_axis": 0, "m": m, "kernel": kernel, "xla": xla}


def test_the_table_decides(tmp_path, monkeypatch):
    table = [entry("v5e", 8, 3, 2), entry("v5e", 512, 4, 5), entry("v6e", 8, 1, 2), entry("v6e", 512, 2, None)]
    monkeypatch.setattr(choice, "CYCLES", tmp_path / "cycles.json")
    choice.CYCLES.write_text(json.dumps(table))
    choice._table.cache_clear()
    matrix, _ = example("nf4 along 1", RAGGED)
    chosen = {
        (chip, m): choice.kernel_is_faster(matrix, 0, m, chip) for chip in ("v5e", "v6e", None) for m in (1, 8, 600)
    }
    choice._table.cache_clear()
    assert chosen == {key: key[0] != "v5e" or key[1] == 600 for key in chosen}


def test_the_table_has_every_chip_and_problem():
    table = json.loads(choice.CYCLES.read_text())
    found = {(row["chip"], row["weight"], row["contracted_axis"]) for row in table}
    weights = {"int8 packed 0", "nf4 packed 0", "nf4 packed 1", "ternary packed 0", "uint4 packed 0", "uint4 packed 1"}
    every = {(chip, weight, axis) for chip in choice.TOPOLOGIES for weight in weights for axis in (0, 1)}
    assert found == every - {("tpu7x", "uint4 packed 1", axis) for axis in (0, 1)}  # not counted yet


def test_the_documents_have_the_table():
    lines = (Path(__file__).parents[2] / "docs" / "accelerators.md").read_text().splitlines()
    for row in json.loads(choice.CYCLES.read_text()):
        xla = "" if row["xla"] is None else f" ({row['xla'] / 1e3:,.1f})"
        start, cell = (
            f"| {row['weight']} | {row['contracted_axis']} | {row['m']} |",
            f"| {row['kernel'] / 1e3:,.1f}{xla} |",
        )
        assert any(line.startswith(start) and cell in line for line in lines)


def test_what_was_promised_of_the_table():
    """At M=8, 4096 x 4096 on v5e: NF4 in 85 kcycles, INT4 in 34.6, and INT8 in 1.1 times what XLA takes."""
    table = json.loads(choice.CYCLES.read_text())
    of_v5e = [row for row in table if row["chip"] == "v5e" and row["m"] == 8]
    assert all(row["kernel"] < 85_000 for row in of_v5e if "nf4" in row["weight"])
    assert all(row["kernel"] < 34_600 for row in of_v5e if "uint4" in row["weight"])
    assert all(row["kernel"] < 1.1 * row["xla"] for row in of_v5e if row["weight"].startswith("int8"))
