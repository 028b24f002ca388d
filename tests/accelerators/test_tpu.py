"""The TPU kernels compile for every chip that libtpu knows, over a table of problems."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from eformer._src.kernels.pallas import tpu
from eformer._src.kernels.pallas.choice import CHIPS, TOPOLOGIES, permutes_sublanes
from eformer.ops.quantization import quantize

from .problems import PROBLEMS, Problem

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: `make test-accelerators` does it", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("optimized")
every_chip = pytest.mark.parametrize("chip", TOPOLOGIES)


@functools.cache
def devices(chip: str) -> Any:
    return topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices


@every_chip
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "-".join(map(str, p[:4])))
def test_kernels_compile(problem: Problem, chip):
    def run(x: Any, codes: Any, scales: Any) -> Any:
        matrix = problem.matrix(codes, scales)
        return tpu.matmul(x, matrix, problem.contracted_axis, sublanes=permutes_sublanes(chip))

    program = jax.jit(run).lower(*problem.arguments(SingleDeviceSharding(devices(chip)[0]))).compile()
    assert "tpu_custom_call" in program.as_text()
    # x and the result may be moved about; a decoded weight may not be held.
    moved = 4 * problem.m * problem.shape[0] * (problem.shape[1] + problem.shape[2]) * 4
    assert program.memory_analysis().temp_size_in_bytes < max(problem.dense_bytes / 4, 2**20) + moved


@pytest.mark.parametrize("chip", [chip for chip in TOPOLOGIES if chip != "v4"])
def test_products_with_rounded_x_compile(chip):
    problem = Problem("int8 per column", (1, 1024, 1024), 0, 8)

    def run(x: Any, codes: Any, scales: Any) -> Any:
        return tpu.matmul(x, problem.matrix(codes, scales), 0, round_x=True)

    program = jax.jit(run).lower(*problem.arguments(SingleDeviceSharding(devices(chip)[0]))).compile()
    assert "tpu_custom_call" in program.as_text()


@every_chip
def test_devices_are_known_by_name(chip):
    assert CHIPS[devices(chip)[0].device_kind] == chip


def abstract(options: dict[str, Any], shape: tuple[int, ...], sharding: Any) -> Any:
    """A quantized array without values, only shapes, laid out in one way."""
    q = jax.eval_shape(lambda w: quantize(w, **options), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), q)


@every_chip
@pytest.mark.parametrize(
    "options", [{"dtype": "nf4"}, {"dtype": "nf4", "axis": 0}, {"dtype": "ternary"}, {"dtype": "int4"}], ids=str
)
def test_products_and_gradients_use_the_kernel(options, chip):
    sharding = SingleDeviceSharding(devices(chip)[0])
    x = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16, sharding=sharding)
    q = abstract(options, (512, 1024), sharding)
    program = jax.jit(lambda x, q: jax.value_and_grad(lambda x: (x @ q).astype(jnp.float32).sum())(x)).lower(x, q)
    assert len(re.findall(r"%(?:nf4|ternary|uint4)_matmul[.\d]* = ", program.compile().as_text())) == 2


@pytest.mark.parametrize("dtype", ["nf4", "int3"])
def test_each_device_of_a_mesh_uses_the_kernel_in_shard_map(dtype):
    mesh = Mesh(np.array(devices("v5e")), "d")
    replicated, columns = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "d"))
    q = abstract({"dtype": dtype, "axis": 0}, (512, 2048), columns)
    x = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16, sharding=replicated)
    local = jax.shard_map(lambda x, q: x @ q, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P(None, "d"))
    text = jax.jit(local).lower(x, q).compile().as_text()
    assert "tpu_custom_call" in text
    assert "all-gather" not in text
