"""`explain`, the strict mode and what XLA allocates, held against each other over a table of programs.

Where `explain` counts nothing, the strict mode must not raise, and the compiled program must not have room for the
dense weight. Where it counts something, the strict mode must raise.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._src.kernels import cpu
from eformer.jaximus import MaterializationError, MaterializationWarning, explain, implicit, materialization_error
from eformer.ops.quantization import Array8B, QuantizedArray, nf4_use_kernel, quantize

pytestmark = pytest.mark.usefixtures("optimized")  # what a program allocates is asked
K, N = 512, 1024
Program = Callable[..., Any]


@functools.cache
def weight(shape: tuple[int, ...] = (K, N), form: str = "int8", dtype: Any = jnp.float32, **options: Any) -> Any:
    """Zeros, as only sizes matter."""
    return quantize(jnp.zeros(shape, dtype), dtype=form, **options)


def rows(count: int = 8, width: int = K, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros((count, width), dtype)


class Row(NamedTuple):
    name: str
    program: Program
    operands: Callable[[], tuple[Any, ...]]  # the first quantized one is the weight
    dense: bool = False


def mesh(axes: AxisType = AxisType.Auto, **sizes: int) -> jax.sharding.Mesh:
    sizes = sizes or {"i": 2}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axes,) * len(sizes))


def matmul(x: Any, q: Any) -> Any:
    return x @ q


def transposed(x: Any, q: Any) -> Any:
    return x @ q.T


def gradient(x: Any, q: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(x @ q))(x)


def tied(ids: Any, table: Any) -> Any:
    return jnp.tanh(table[ids]) @ table.T


def over_layers(x: Any, q: Any) -> Any:
    return lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, q)[0]


def in_scan(x: Any, q: Any) -> Any:
    return lax.scan(lambda x, _: (jnp.tanh(x @ q @ q.T), None), x, None, length=3)[0]


def in_while(x: Any, q: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ q @ q.T), (0, x))[1]


def in_cond(x: Any, q: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x, q: x @ q, lambda x, q: -(x @ q), x, q)


def in_remat(x: Any, q: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.tanh(x @ q))(x)))(x)


def precision(asked: Any) -> Program:
    return functools.partial(jnp.matmul, precision=asked)


def under_precision(x: Any, q: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return x @ q


def einsum(letters: str) -> Program:
    return functools.partial(jnp.einsum, letters)


def typed(x: Any, q: Any) -> Any:
    return lax.dot_general(x, q, (((1,), (0,)), ((), ())))


def experts(x: Any, q: Any, ids: Any) -> Any:
    return jnp.einsum("tk,tkn->tn", x, q[ids])


def ragged(x: Any, q: Any, sizes: Any) -> Any:
    return lax.ragged_dot(x, q, sizes)


def convolved(**params: Any) -> Program:
    given = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **params}
    return functools.partial(lax.conv_general_dilated, **given)


@jax.custom_jvp
def custom(x: Any, q: Any) -> Any:
    return x @ q


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0] @ primals[1]))


@jax.custom_vjp
def custom_vjp(x: Any, q: Any) -> Any:
    return x @ q


custom_vjp.defvjp(lambda x, q: (x @ q, q), lambda q, ct: (ct @ q.T, None))


def custom_that_returns_it(x: Any, q: Any) -> Any:
    passed = jax.custom_jvp(lambda q: q)
    passed.defjvp(lambda p, t: (p[0], t[0]))
    return x @ passed(q)


over_columns = jax.shard_map(matmul, mesh=mesh(), in_specs=(P(), P(None, "i")), out_specs=P(None, "i"))
over_rows_of_weight = jax.shard_map(
    lambda x, q: lax.psum(x @ q, "i"), mesh=mesh(), in_specs=(P(None, "i"), P("i")), out_specs=P()
)
depthwise = convolved(feature_group_count=64)


def over_partly_manual_mesh(x: Any, q: Any) -> Any:
    return jax.shard_map(matmul, mesh=mesh(i=2, j=2), in_specs=(P("i"), P()), out_specs=P("i"), axis_names={"i"})(x, q)


def dense_in_scan(x: Any, q: Any) -> Any:
    return lax.scan(lambda x, _: (x + jnp.sum(jnp.sin(q)), None), x, None, length=3)[0]


def carry_that_changes(x: Any, q: Any) -> Any:
    return lax.scan(lambda c, _: ((c[0] @ c[1] @ c[1].T, jnp.sin(c[1])), None), (x, q), None, length=3)[0][0]


def branches_that_differ(x: Any, q: Any) -> Any:
    return x @ lax.cond(x[0, 0] > 0, lambda q: q, jnp.zeros_like, q)


def output_that_is_laid_out(x: Any, q: Any) -> Any:
    on_device = NamedSharding(mesh(i=1), P())
    return x @ jax.jit(lambda q: q.T, out_shardings=on_device)(q).T


def without_kernels(x: Any, q: Any) -> Any:
    with nf4_use_kernel(False):
        return x @ q


def nf4(axis: int = 0, shape: tuple[int, ...] = (K, N), **options: Any) -> Any:
    return weight(shape, "nf4", axis=axis, **options)


ROWS = [
    Row("matmul", matmul, lambda: (rows(), weight())),
    Row("nf4", matmul, lambda: (rows(), nf4())),
    Row("nf4 across", matmul, lambda: (rows(), nf4(1))),
    Row("nf4 doubly", matmul, lambda: (rows(), nf4(double_quantization=True))),
    Row("ternary", matmul, lambda: (rows(), weight(form="ternary"))),
    Row("vector", matmul, lambda: (rows()[0], weight())),
    Row("many rows", matmul, lambda: (rows(200), nf4())),
    Row("weight first", lambda x, q: q.T @ x.T, lambda: (rows(), weight())),
    Row("transposed", transposed, lambda: (rows(width=N), nf4(1))),
    Row("gradient", gradient, lambda: (rows(), weight())),
    Row("precision default", precision("default"), lambda: (rows(), weight())),
    Row("precision highest", precision("highest"), lambda: (rows(), nf4())),
    Row("precision pair", precision(("default", "highest")), lambda: (rows(), weight())),
    Row("precision by context", under_precision, lambda: (rows(), weight())),
    Row("algorithm", precision(lax.DotAlgorithmPreset.BF16_BF16_F32), lambda: (rows(), weight())),
    Row("integer rows", typed, lambda: (rows(dtype=jnp.int32), weight())),
    Row("bfloat16 rows", typed, lambda: (rows(dtype=jnp.bfloat16), weight())),
    Row("bfloat16 weight", typed, lambda: (rows(), weight(dtype=jnp.bfloat16))),
    Row("integers", typed, lambda: (rows(dtype=jnp.int32), weight(form="ternary", dtype=jnp.int8))),
    Row("cast", lambda x, q: x @ q.astype(jnp.bfloat16), lambda: (rows(dtype=jnp.bfloat16), weight())),
    Row("two quantized", lambda q, r: q @ r, lambda: (weight((256, K)), nf4())),
    Row("blocks off the sum", einsum("mk,khd->mhd"), lambda: (rows(), nf4(-2, (K, 64, 16)))),
    Row("blocks off, many rows", einsum("mk,khd->mhd"), lambda: (rows(200), nf4(-2, (K, 64, 16)))),
    Row("blocks along heads", einsum("mhd,khd->mk"), lambda: (jnp.zeros((8, 64, 16)), nf4(-2, (K, 64, 16)))),
    Row("batch in the middle", einsum("bmk,kbn->bmn"), lambda: (jnp.zeros((4, 8, K)), weight((K, 4, 256)))),
    Row("fused, then split", lambda x, q: jnp.split(x @ q, 4, axis=-1), lambda: (rows(), weight())),
    Row("halves", lambda x, q: x @ q[:, : N // 2], lambda: (rows(), weight())),
    Row("embedding", lambda i, q: q[i], lambda: (jnp.arange(8), weight())),
    Row("tied embedding", tied, lambda: (jnp.arange(8), weight())),
    Row("tied embedding nf4", tied, lambda: (jnp.arange(8), nf4(1))),
    Row("experts", experts, lambda: (rows(2), weight((8, K, 256)), jnp.array([3, 5]))),
    Row("ragged experts", ragged, lambda: (rows(32), nf4(-2, (8, K, 256)), jnp.full((8,), 4))),
    Row("pointwise convolution", convolved(), lambda: (jnp.zeros((1, 4, 4, K)), weight((1, 1, K, N)))),
    Row("convolution", convolved(), lambda: (jnp.zeros((1, 4, 4, 64)), weight((3, 3, 64, 256)))),
    Row("layers in scan", over_layers, lambda: (rows(), weight((4, K, K)))),
    Row("scan", in_scan, lambda: (rows(), nf4())),
    Row("while", in_while, lambda: (rows(), weight())),
    Row("cond", in_cond, lambda: (rows(), weight())),
    Row("checkpoint", in_remat, lambda: (rows(), weight())),
    Row("vmap", jax.vmap(matmul, in_axes=(0, None)), lambda: (rows(), weight())),
    Row("vmap of a stack", jax.vmap(matmul), lambda: (jnp.zeros((4, 8, K)), weight((4, K, 256)))),
    Row("inner jit", jax.jit(matmul), lambda: (rows(), weight())),
    Row("custom_jvp", custom, lambda: (rows(), weight())),
    Row("custom_vjp", jax.grad(lambda x, q: jnp.sum(custom_vjp(x, q))), lambda: (rows(), weight())),
    Row("shard_map", over_columns, lambda: (rows(), weight())),
    # What goes dense.
    Row("elementwise", lambda q: jnp.sum(jnp.sin(q)), lambda: (weight(),), True),
    Row("softmax", lambda q: jnp.sum(jax.nn.softmax(q)), lambda: (weight(),), True),
    Row("asked for", lambda x, q: x @ q.materialize(), lambda: (rows(), weight()), True),
    Row("use_kernel=False", matmul, lambda: (rows(), Array8B.quantize(jnp.zeros((K, N)), use_kernel=False)), True),
    Row("nf4_use_kernel(False)", without_kernels, lambda: (rows(), nf4()), True),
    Row("dense in scan", dense_in_scan, lambda: (rows(), weight()), True),
    Row("carry that changes", carry_that_changes, lambda: (rows(), weight()), True),
    Row("branches that differ", branches_that_differ, lambda: (rows(), weight()), True),
    Row("laid out output", output_that_is_laid_out, lambda: (rows(), weight()), True),
    Row("stack of blocks", over_layers, lambda: (rows(), nf4(0, (4, K, K), block_size=2)), True),
    Row("depthwise 1 x 1", depthwise, lambda: (jnp.zeros((1, 4, 4, 64)), weight((1, 1, 1, 64))), True),
    Row("custom output", custom_that_returns_it, lambda: (rows(), weight()), True),
    Row("blocks cut by shard_map", over_rows_of_weight, lambda: (rows(), nf4(block_size=512)), False),
    Row("partly manual mesh", over_partly_manual_mesh, lambda: (rows(), weight()), True),
]
# Those that read the array differently without the core.
WITHOUT_CORE = {"nf4 across", "many rows", "gradient", "two quantized", "tied embedding", "ragged experts", "scan"}


def of(row: Row) -> str:
    return row.name


def dense_size(operands: tuple[Any, ...]) -> int:
    """Of the largest weight, in the 32 bits that it is multiplied in."""
    return 4 * max(o.size for o in operands if isinstance(o, QuantizedArray))


def check(program: Program, operands: tuple[Any, ...], dense: bool) -> None:
    with warnings.catch_warnings(action="ignore", category=MaterializationWarning):
        counted = explain(program)(*operands).dense_bytes
        assert (counted > 0) == dense
        strict = jax.jit(implicit(program))
        if dense:
            with materialization_error(), pytest.raises(MaterializationError, match=r"Array|materialize"):
                strict.lower(*operands)
        else:
            with materialization_error():
                compiled = strict.lower(*operands).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < dense_size(operands)


@pytest.mark.parametrize("row", ROWS, ids=of)
def test_tools_agree(row):
    check(row.program, row.operands(), row.dense)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in WITHOUT_CORE], ids=of)
def test_tools_agree_without_the_core(row):
    with cpu.use_core(False):
        check(row.program, row.operands(), row.dense)


@pytest.mark.parametrize(
    ("program", "spec"),
    [(matmul, P(None, "i")), (matmul, P()), (in_scan, P()), (precision("highest"), P(None, "i"))],
    ids=["sharded", "replicated", "scan", "precision"],
)
def test_tools_agree_on_explicit_meshes(program, spec):
    with jax.set_mesh(mesh(AxisType.Explicit, i=2)):
        q = quantize(jax.device_put(jnp.zeros((K, N)), spec), dtype="int8")
        check(program, (jax.device_put(rows(), P()), q), dense=False)


def test_table_is_large():
    assert len(ROWS) >= 30
