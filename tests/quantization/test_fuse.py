"""`fuse`: fewer calls of the core, and the same results."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eformer import explain, fuse, implicit, materialization_error, quantize, use_kernels
from eformer._src.kernels import cpu
from eformer.jaximus import MaterializationError
from eformer.ops.quantization import QuantizedArray

from .cases import CASES, DEFAULTS, Case, every_case, in_turn, normal

needs_core = pytest.mark.skipif(not cpu.is_available(), reason="installed without the native core")
INT8 = Case.of("int8")
K, WIDTHS, LAYERS = 40, (24, 8, 17), 3
SINGLE, SEVERAL = "quantized_matmul", "quantized_matmuls"


def primitives(jaxpr: Any) -> Counter[str]:
    """How often each primitive stands in a jaxpr and those inside it."""
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += 1
        for inner in jaxprs_in_params(eqn.params):
            found += primitives(inner)
    return found


def matmuls(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How many operations there are of one matmul, and of several."""
    found = primitives(jax.make_jaxpr(function)(*args).jaxpr)
    return {name: found[name] for name in (SINGLE, SEVERAL) if found[name]}


def agree(function: Callable[..., Any], *args: Any, fused: dict[str, int] | None = None) -> None:
    """The fused function gives the same bits, and has the matmuls `fused`."""
    plain, faster = implicit(function), fuse(implicit(function))
    if fused is not None and cpu.is_available():
        assert matmuls(faster, *args) == fused
    for right, found in zip(
        jax.tree.leaves(jax.jit(plain)(*args)), jax.tree.leaves(jax.jit(faster)(*args)), strict=True
    ):
        assert found.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(right))


def weights(case: Any, transposed: bool = False, widths: tuple[int, ...] = WIDTHS) -> list[Any]:
    shapes = [(n, K) if transposed else (K, n) for n in widths]
    return [case(normal(shape, seed=i)) for i, shape in enumerate(shapes)]


def x_of(rows: int = 1, dtype: Any = jnp.float32) -> jax.Array:
    return normal((rows, K), seed=9).astype(dtype)


def shared(x: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
    x = jax.nn.silu(x)
    return [x @ w for w in ws]


def shared_transposed(x: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
    x = jax.nn.silu(x)
    return [x @ w.T for w in ws]


# --- matmuls that share x ---


@pytest.mark.parametrize(("case", "transposed"), in_turn(CASES, [False, True], each=1), ids=str)
def test_every_format(case, transposed):
    agree(shared_transposed if transposed else shared, x_of(), weights(case, transposed))


@pytest.mark.parametrize("case", DEFAULTS, ids=str)
def test_every_format_rounds_x_as_before(case):
    ws = [w.with_activation_dtype("int8") for w in weights(case, True)]
    agree(shared_transposed, x_of(), ws)


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_rows_and_dtypes_of_x(rows, dtype):
    ws = [quantize(normal((K, n)).astype(dtype), dtype="int4") for n in WIDTHS]
    agree(shared, x_of(rows, dtype), ws)


def mixed() -> list[Any]:
    cases = [case for case in CASES if case.name in ("int8", "nf4", "int4", "fp8", "ternary")]
    return [case(normal((K, 8 + i), seed=i)) for i, case in enumerate(cases)]


@needs_core
def test_mixed_formats_are_one_operation():
    agree(shared, x_of(), mixed(), fused={SEVERAL: 1})


@needs_core
def test_mixed_orientations_and_rounding():
    first, second, third = (quantize(normal((K, K), seed=i), dtype="int8") for i in range(3))

    def f(x, first, second, third):
        return x @ first, x @ second.T, x @ third.T

    agree(f, x_of(), first, second.with_activation_dtype("int8"), third, fused={SEVERAL: 1})


@needs_core
def test_nan_in_x_with_int8_activations():
    ws = [w.with_activation_dtype("int8") for w in mixed()]
    agree(shared, x_of().at[0, 3].set(jnp.nan), ws, fused={SEVERAL: 1})


@needs_core
def test_stacks_of_matrices():
    first, second = (quantize(normal((2, K, n)), dtype="int8") for n in (8, 9))
    agree(lambda x, a, b: (x @ a, x @ b), normal((2, 3, K)), first, second, fused={SEVERAL: 1})


@needs_core
def test_x_that_differs_is_not_shared():
    first, second = weights(INT8)[:2]
    agree(lambda x, a, b: (x @ a, (x + 1) @ b), x_of(), first, second, fused={SINGLE: 2})


@needs_core
def test_a_matrix_that_depends_on_the_first_result_is_not_moved_before_it():
    first, second = (quantize(normal((K, K), seed=i), dtype="int8") for i in range(2))

    def f(x, a, b):
        y = x @ a
        return y, x @ (b * jnp.where(y[0, 0] > 0, 2.0, 3.0))

    agree(f, x_of(), first, second, fused={SINGLE: 2})


@needs_core
def test_large_x_takes_the_way_that_it_takes_alone():
    ws = [quantize(normal((160, n), seed=i), dtype="int8") for i, n in enumerate((160, 160, 64))]
    agree(shared, normal((400, 160)), ws, fused={SEVERAL: 1})


@needs_core
def test_formats_with_kernels_of_their_own_stay_single():
    ternary = jnp.sign(normal((K, 24))).astype(jnp.float32)
    from eformer import RSROperatorTernary

    ws = [RSROperatorTernary.quantize(ternary), *weights(INT8)]
    agree(shared, x_of(), ws)


# --- programs in programs ---


def by_jit(f):
    return jax.jit(f)


def by_remat(f):
    return jax.checkpoint(f)


def by_cond(f):
    return lambda x, ws: lax.cond(x[0, 0] > 0, f, lambda x, ws: [y + 1 for y in f(x, ws)], x, ws)


def by_while(f):
    def run(x, ws):
        def step(carry):
            i, _ = carry
            return i + 1, f(x * i.astype(x.dtype), ws)

        zeros = [jnp.zeros((*x.shape[:-1], w.shape[-1])) for w in ws]
        return lax.while_loop(lambda carry: carry[0] < 3, step, (jnp.int32(0), zeros))[1]

    return run


def by_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


def by_jits_of_one_matmul(f):
    del f
    dense = jax.jit(lambda x, w: jax.nn.relu(x @ w) + 1)
    return lambda x, ws: [dense(x, w) for w in ws]


INSIDE = [by_jit, by_remat, by_cond, by_while, by_custom_jvp, by_jits_of_one_matmul]


@needs_core
@pytest.mark.parametrize("inside", INSIDE, ids=lambda f: f.__name__)
def test_inside_other_programs(inside):
    branches = 2 if inside is by_cond else 1
    agree(inside(shared), x_of(), weights(INT8), fused={SEVERAL: branches})


@needs_core
def test_layers_that_share_a_jit_share_the_fused_one():
    layer = jax.jit(lambda x, a, b: jax.nn.relu(x @ a) + x @ b)
    ws = [quantize(normal((K, K), seed=i), dtype="int8") for i in range(2)]

    def f(x, a, b):
        for _ in range(4):
            x = layer(x, a, b)
        return x

    jaxpr = jax.make_jaxpr(fuse(implicit(f)))(x_of(), *ws)
    inner = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    assert len(inner) == 4
    assert len(set(map(id, inner))) == 1
    assert primitives(inner[0].jaxpr)[SEVERAL] == 1
    agree(f, x_of(), *ws)


# --- layers of a scan ---


def layers(case: Any, shape: tuple[int, ...] = (LAYERS, K, K)) -> list[Any]:
    return [case(normal(shape, seed=i)) for i in range(2)]


def scan(x: jax.Array, xs: Any, step: Any = None, **options: Any) -> Any:
    def default(x: jax.Array, ws: Any) -> tuple[jax.Array, jax.Array]:
        first, second = ws
        y = jnp.tanh(x @ first) + 0.1 * (x @ second)
        return y, y.sum(-1)

    return lax.scan(step or default, x, xs, **options)


@every_case
def test_scan_of_every_format(case):
    agree(scan, x_of(), layers(case))


@needs_core
@pytest.mark.parametrize("case", [case for case in DEFAULTS if case.name in ("int8", "nf4", "int4")], ids=str)
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}], ids=str)
def test_scan_reads_the_stacks(case, options):
    agree(functools.partial(scan, **options), x_of(), layers(case), fused={SEVERAL: 1})


def stacked_operands(function: Callable[..., Any], *args: Any) -> list[Any]:
    """The operands of the scan in the program of the function, of those along which it goes."""
    (eqn,) = [eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == "scan"]
    body = eqn.params["jaxpr"].jaxpr.invars
    return [
        outer.aval for outer, inner in zip(eqn.invars, body, strict=True) if outer.aval.shape[1:] == inner.aval.shape
    ]


@needs_core
def test_codes_are_no_slices_any_more():
    ws = layers(INT8)
    sliced = stacked_operands(fuse(implicit(scan)), x_of(), ws)
    assert [aval.shape for aval in sliced if aval.ndim < 3 and aval.shape == (LAYERS,)] == [(LAYERS,)]  # the counter
    assert not [aval for aval in sliced if aval.shape[:1] == (LAYERS,) and aval.ndim == 3]


@needs_core
@pytest.mark.filterwarnings("ignore:no rule serves")
def test_scan_with_other_uses_of_a_stack():
    def step(x, w):
        return jnp.tanh(x @ w) + w.sum(0)[None], None

    agree(functools.partial(scan, step=step), x_of(), layers(INT8)[0], fused={SEVERAL: 1})


@needs_core
def test_scan_with_a_matrix_of_all_layers():
    own, of_all = (quantize(normal(shape), dtype="int8") for shape in ((LAYERS, K, K), (K, K)))

    def f(x, own, of_all):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w + x @ of_all), None), x, own)[0]

    agree(f, x_of(), own, of_all, fused={SINGLE: 1, SEVERAL: 1})


@needs_core
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_scan_over_a_wrapped_layer(wrap):
    layer = wrap(lambda x, w: jnp.tanh(x @ w[0] + x @ w[1]))
    agree(lambda x, ws: lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], x_of(), layers(INT8))


@needs_core
def test_scan_over_stacks_of_experts():
    experts = quantize(normal((LAYERS, 2, K, K)), dtype="int8")
    step = functools.partial(scan, step=lambda x, w: (jnp.tanh(x @ w), None))
    agree(step, normal((2, 3, K)), experts, fused={SEVERAL: 1})


@needs_core
def test_scan_in_a_scan():
    deep = quantize(normal((2, LAYERS, K, K)), dtype="int8")

    def f(x, ws):
        return lax.scan(lambda x, w: (scan(x, w, lambda x, w: (jnp.tanh(x @ w), None))[0], None), x, ws)[0]

    agree(f, x_of(), deep)


def test_scan_of_no_layers():
    agree(scan, x_of(), [quantize(normal((1, K, K)), dtype="int8")[:0] for _ in range(2)])


@needs_core
def test_an_index_beyond_the_stack_is_the_last():
    """As in a dynamic slice of XLA's. No program of `fuse` has such an index."""
    matrix = implicit(lambda q: q[None])(quantize(normal((K, 8)), dtype="int8"))._stored_matrix()
    whole = [jnp.concatenate([b, b + b, b - b]) for b in (*matrix.codes, *matrix.scales)]
    call = cpu.Matmul(matrix, 0, False, False, tuple(whole))
    run = jax.jit(lambda x, index: cpu.matmuls(x, [call], index)[0])
    found = [run(x_of()[None], jnp.int32(i)) for i in (-5, 0, 2, 2**31 - 1)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])
    np.testing.assert_array_equal(found[1], cpu.matmul(x_of()[None], matrix, 0))


# --- other transformations ---


@needs_core
@pytest.mark.parametrize("f", [shared, scan], ids=["shared", "scan"])
def test_derivatives(f):
    ws = weights(INT8) if f is shared else layers(INT8)

    def loss(run):
        return lambda x: sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(run(x, ws)))

    plain, faster = implicit(f), fuse(implicit(f))
    right, found = (jax.jit(jax.value_and_grad(loss(run)))(x_of(2)) for run in (plain, faster))
    np.testing.assert_allclose(found[1], right[1], rtol=1e-5)
    outside = jax.jit(fuse(jax.grad(loss(plain))))(x_of(2))
    np.testing.assert_allclose(outside, right[1], rtol=1e-5)
    tangents = [jax.jvp(loss(run), (x_of(2),), (x_of(2),))[1] for run in (plain, faster)]
    np.testing.assert_allclose(*tangents, rtol=1e-5)


@needs_core
def test_derivatives_of_scales():
    ws = weights(INT8)

    def loss(run):
        def of_scales(scales):
            scaled = [dataclasses.replace(w, scale=s) for w, s in zip(ws, scales, strict=True)]
            return sum(jnp.sum(y) for y in run(x_of(), scaled))

        return jax.grad(of_scales)([w.scale for w in ws])

    for right, found in zip(loss(implicit(shared)), loss(fuse(implicit(shared))), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)


@needs_core
@pytest.mark.parametrize("f", [shared, scan], ids=["shared", "scan"])
def test_vmap(f):
    ws = weights(INT8) if f is shared else layers(INT8)
    xs = normal((4, 2, K))
    right, found = (jax.vmap(lambda x, run=run: run(x, ws))(xs) for run in (implicit(f), fuse(implicit(f))))
    for a, b in zip(jax.tree.leaves(right), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_on_several_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    ws = [w.with_sharding(NamedSharding(mesh, PartitionSpec(None, "model"))) for w in weights(INT8, widths=(24, 8))]
    x = jax.device_put(x_of(4), NamedSharding(mesh, PartitionSpec()))
    right, found = (jax.jit(run)(x, ws) for run in (implicit(shared), fuse(implicit(shared))))
    for a, b in zip(right, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
        assert b.sharding == a.sharding


def test_scan_on_several_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    ws = [w.with_sharding(NamedSharding(mesh, PartitionSpec(None, None, "model"))) for w in layers(INT8)]
    x = jax.device_put(x_of(4), NamedSharding(mesh, PartitionSpec()))
    right, found = (jax.jit(run)(x, ws) for run in (implicit(scan), fuse(implicit(scan))))
    for a, b in zip(jax.tree.leaves(right), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("context", [cpu.use_core, use_kernels], ids=["no core", "no kernels"])
@pytest.mark.parametrize("f", [shared, scan], ids=["shared", "scan"])
def test_without_the_core(f, context):
    ws = weights(INT8) if f is shared else layers(INT8)
    with context(False):
        agree(f, x_of(), ws, fused={})


@needs_core
def test_traced_with_the_core_and_lowered_without_it():
    ws = weights(INT8)
    traced = jax.jit(fuse(implicit(shared))).trace(x_of(), ws)
    with cpu.use_core(False):
        found = traced.lower().compile()(x_of(), ws)
    for a, b in zip(found, shared(x_of(), [w.materialize() for w in ws]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@needs_core
def test_exported_programs_have_no_call_of_the_core():
    ws = weights(INT8)
    exported = jax.export.export(jax.jit(lambda x: fuse(implicit(shared))(x, ws)))(x_of())
    assert "eformer" not in exported.mlir_module().replace("eformer/", "")
    for a, b in zip(exported.call(x_of()), shared(x_of(), [w.materialize() for w in ws]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@needs_core
def test_without_jit():
    ws = weights(INT8)
    right, found = implicit(shared)(x_of(), ws), fuse(implicit(shared))(x_of(), ws)
    for a, b in zip(right, found, strict=True):
        np.testing.assert_array_equal(a, b)
    with jax.disable_jit():
        for a, b in zip(right, fuse(implicit(shared))(x_of(), ws), strict=True):
            np.testing.assert_array_equal(a, b)


def test_arguments_and_results_of_every_kind():
    def f(tree, scale, *, name, count):
        assert name == "static"
        assert isinstance(count, int)
        return {"y": tree["x"] @ tree["w"] * scale, "w": tree["w"].T, "none": None, "count": jnp.arange(count)}

    (w,) = weights(INT8)[:1]
    run = jax.jit(fuse(implicit(f)), static_argnames=("name", "count"))
    found = run({"x": x_of(), "w": w, "n": None}, 2.0, name="static", count=3)
    assert isinstance(found["w"], QuantizedArray)
    assert found["none"] is None
    np.testing.assert_array_equal(found["count"], np.arange(3))
    np.testing.assert_allclose(found["y"], 2 * (x_of() @ w.materialize()), rtol=1e-4, atol=1e-4)
    assert fuse(implicit(f)).__name__ == "f"


def test_donated_arguments_and_prints(capfd):
    ws = weights(INT8)

    def f(x, ws):
        jax.debug.print("x is {}", x[0, 0])
        return [x @ ws[0], x @ ws[1], x + 1]

    run = jax.jit(fuse(implicit(f)), donate_argnums=0)
    jax.block_until_ready(run(x_of(), ws))
    jax.effects_barrier()
    assert "x is" in capfd.readouterr().out


def test_dense_copies_are_seen_as_before():
    ws = weights(INT8)

    def f(x, ws):
        return [x @ jnp.exp(w) for w in ws]

    with materialization_error(), pytest.raises(MaterializationError):
        fuse(implicit(f))(x_of(), ws)
    with materialization_error():
        fuse(implicit(shared))(x_of(), ws)
    right, found = (explain(jax.jit(run))(x_of(), ws) for run in (implicit(shared), fuse(implicit(shared))))
    assert str(right) == str(found)
