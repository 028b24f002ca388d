"""The GPU kernels compile for A100 and H100 without spilling registers, over a table of problems."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import triton as plgpu
from jax.sharding import SingleDeviceSharding

from eformer._src.kernels.pallas import gpu
from eformer.ops.quantization import quantize

from .problems import PROBLEMS, Problem
from .targets import TARGETS

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip("JAX's CUDA plugin is not installed: `make test-accelerators` does it", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    pytest.mark.usefixtures("optimized"),
]
every_gpu = pytest.mark.parametrize("name", TARGETS)
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


@functools.cache
def sharding(name: str) -> Any:
    found = topologies.get_topology_desc("", platform="cuda", topology="1x1x4", target_config=TARGETS[name])
    return SingleDeviceSharding(found.devices[0])


@every_gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "-".join(map(str, p[:4])))
def test_kernels_compile_without_spills(problem: Problem, name):
    def run(x: Any, codes: Any, scales: Any) -> Any:
        return gpu.matmul(x, problem.matrix(codes, scales), problem.contracted_axis)

    program = jax.jit(run).lower(*problem.arguments(sharding(name))).compile(NO_SPILLS)
    assert "__gpu$xla.gpu.triton" in program.as_text()
    # Partial sums, and x in another dtype; a decoded weight may not be held.
    moved = 4 * problem.m * problem.shape[0] * (problem.shape[1] + 32 * problem.shape[2])
    assert program.memory_analysis().temp_size_in_bytes < problem.dense_bytes / 4 + moved


def test_spills_are_seen():
    """The test above can fail: a tile that no registers hold."""

    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
    )
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=sharding("A100"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="spill"):
        jax.jit(call).lower(x, x).compile(NO_SPILLS)


@every_gpu
@pytest.mark.parametrize(
    "options", [{"dtype": "nf4"}, {"dtype": "int8"}, {"dtype": "ternary"}, {"dtype": "int4"}], ids=str
)
def test_products_and_gradients_use_the_kernel(options, name):
    q = jax.eval_shape(lambda w: quantize(w, **options), jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16)
    x, q = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(name)), (x, q))
    program = jax.jit(lambda x, q: jax.value_and_grad(lambda x: (x @ q).astype(jnp.float32).sum())(x)).lower(x, q)
    assert program.compile().as_text().count("__gpu$xla.gpu.triton") == 2
