"""Matmuls over eight devices move what dense matmuls move: read from the programs that XLA compiled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eformer import cache, quantize
from eformer._src.kernels import cpu
from eformer.jaximus import explain, implicit, is_implicit, materialize
from eformer.ops.quantization import RSROperatorTernary

from .cases import Case, assert_product, normal

P = PartitionSpec
CODES = ("u8", "s8", "u16")
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "int8": Case.of("int8"),
    "nf4": Case.of("nf4", block_size=16, axis=0),
    "nested": Case.of("nf4", block_size=4, double_quantization=True),
    "ternary": Case.of("ternary", scale="channel"),
    "rsr": RSROperatorTernary.quantize,
}


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def collectives(program: str) -> list[tuple[str, str]]:
    """The kind of each collective of a compiled program, and the dtype of what it moves."""
    found = r"= \(?(\w+)\[.* (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return [(kind, dtype) for dtype, kind in re.findall(found, program)]


def kinds(program: str) -> Counter[str]:
    return Counter(kind for kind, _ in collectives(program))


def place(tree: Any, mesh: Any, spec: PartitionSpec) -> Any:
    sharding = NamedSharding(mesh, spec)
    return tree.with_sharding(sharding) if is_implicit(tree) else jax.device_put(tree, sharding)


def compiled(function: Any, *args: Any, out: Any = None) -> tuple[Any, str]:
    program = jax.jit(implicit(function), out_shardings=out).lower(*args).compile()
    return program(*args), program.as_text()


class Layout(NamedTuple):
    """Of x (8, 64), of a weight (64, 128) and of their matmul, and the collectives it takes."""

    x: PartitionSpec
    w: PartitionSpec
    out: PartitionSpec | None
    moves: tuple[str, ...]


LAYOUTS = {
    "columns": Layout(P(), P(None, "model"), None, ()),
    "rows": Layout(P(None, "model"), P("model"), None, ("all-reduce",)),
    "data and columns": Layout(P("data"), P(None, "model"), None, ()),
    "both axes of the weight": Layout(P(None, "model"), P("model", "data"), None, ("all-reduce",)),
    "rows over all devices": Layout(P(None, ("data", "model")), P(("data", "model")), None, ("all-reduce",)),
    "rows, the sum in parts": Layout(P(None, "model"), P("model"), P(None, "model"), ("reduce-scatter",)),
    "x is whole": Layout(P(), P("model"), None, ("all-reduce",)),
}
STORED = {
    "rows": Layout(P("data"), P("data"), P("data"), ("all-gather",)),
    "columns": Layout(P("data"), P(None, "data"), P("data"), ("all-gather",)),
}
# What concerns one axis differs from format to format; how axes go together does not.
CHOSEN = [(form, "columns") for form in ("int8", "nested", "ternary", "rsr")] + [("nf4", name) for name in LAYOUTS]
CHOSEN += [(form, "rows over all devices") for form in ("int8", "nested", "ternary", "rsr")]


@pytest.mark.parametrize(("form", "name"), CHOSEN)
def test_matmuls_move_what_dense_ones_do(form, name):
    mesh, layout = make_mesh(), LAYOUTS[name]
    x, q = place(normal((8, 64), seed=1), mesh, layout.x), place(WEIGHTS[form](normal((64, 128))), mesh, layout.w)
    out = None if layout.out is None else NamedSharding(mesh, layout.out)
    made, program = compiled(jnp.matmul, x, q, out=out)
    assert tuple(kinds(program).elements()) == layout.moves
    assert ("eformer_matmul" in program) == (cpu.is_available() and form != "rsr")
    assert_product(made, x, q)
    if form == "nf4" and name not in ("rows, the sum in parts", "x is whole"):  # dense JAX does worse on these
        assert kinds(compiled(jnp.matmul, x, q.materialize(), out=out)[1]) == kinds(program)


@pytest.mark.parametrize(("form", "name"), [("int8", "rows"), ("nf4", "columns"), ("ternary", "rows")])
def test_weights_stored_in_parts_are_gathered_as_codes(form, name):
    """As fully sharded training has them: dense JAX gathers the dense weight."""
    mesh, layout = make_mesh(), STORED[name]
    x, q = place(normal((8, 64), seed=1), mesh, layout.x), place(WEIGHTS[form](normal((64, 128))), mesh, layout.w)
    made, program = compiled(jnp.matmul, x, q, out=NamedSharding(mesh, P("data")))
    moved = collectives(program)
    assert {kind for kind, _ in moved} <= {"all-gather", "collective-permute"}
    assert any(dtype in CODES for _, dtype in moved)
    assert_product(made, x, q)


@pytest.mark.parametrize("form", ["int8", "rsr"])
def test_matmuls_with_explicit_axes(form):
    mesh = make_mesh(AxisType.Explicit)
    x, w = place(normal((8, 64), seed=1), mesh, P("data", "model")), normal((64, 128))
    q, w = place(WEIGHTS[form](w), mesh, P("model")), place(w, mesh, P("model"))
    function = lambda x, w: jnp.dot(x, w, out_sharding=P("data"))  # noqa: E731
    gradient = jax.grad(implicit(lambda x, w: jnp.sum(function(x, w) ** 2)))
    with jax.set_mesh(mesh):
        (made, program), (dense_made, dense) = compiled(function, x, q), compiled(function, x, w)
        (cotangent, backward), (like, dense_backward) = compiled(gradient, x, q), compiled(gradient, x, w)
        with pytest.raises(Exception, match="ambiguous how the output should be sharded"):  # as dense JAX says
            jax.jit(implicit(jnp.dot))(x, q)
    assert kinds(program) == kinds(dense) == {"all-reduce": 1}
    assert kinds(backward) == kinds(dense_backward)
    assert (jax.typeof(made), jax.typeof(cotangent)) == (jax.typeof(dense_made), jax.typeof(like))
    assert_product(made, x, q)
    assert_product(cotangent, 2 * np.asarray(made), np.asarray(q.materialize()).T)


# --- a block of a transformer, as Megatron divides it ---

HEADS, WIDTH, INNER = 4, 32, 64
BLOCK = {
    "query": ("int8", (WIDTH, WIDTH), P(None, "model")),
    "value": ("nf4", (WIDTH, WIDTH), P(None, "model")),
    "out": ("ternary", (WIDTH, WIDTH), P("model")),
    "up": ("rsr", (WIDTH, INNER), P(None, "model")),
    "down": ("nf4", (INNER, WIDTH), P("model")),
}


def block(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    query, value = ((x @ weights[name]).reshape(heads) for name in ("query", "value"))
    attention = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, query), axis=-1)
    x = x + jnp.einsum("bhts,bshd->bthd", attention, value).reshape(x.shape) @ weights["out"]
    return x + jax.nn.silu(x @ weights["up"]) @ weights["down"]


def loss(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    return jnp.mean(block(weights, x) ** 2)


def test_a_block_takes_one_all_reduce_for_each_pair():
    """Two forward, and backward what the dense block takes, which XLA partly joins."""
    mesh = make_mesh()
    quantized = {n: place(WEIGHTS[form](normal(shape) / 8), mesh, spec) for n, (form, shape, spec) in BLOCK.items()}
    dense = {name: q.materialize() for name, q in quantized.items()}
    x = place(normal((2, 4, WIDTH), seed=1), mesh, P("data"))
    (out, forward), (expected, dense_forward) = compiled(block, quantized, x), compiled(block, dense, x)
    assert kinds(forward) == kinds(dense_forward) == {"all-reduce": 2}
    gradient = jax.grad(implicit(loss), argnums=1)
    (cotangent, backward), (like, dense_backward) = compiled(gradient, quantized, x), compiled(gradient, dense, x)
    assert kinds(backward) == kinds(dense_backward)
    assert not [dtype for _, dtype in collectives(forward + backward) if dtype in CODES]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)  # sums of at most 64 terms, a few after another
    np.testing.assert_allclose(cotangent, like, rtol=1e-4, atol=1e-6)


def test_stacks_are_divided_along_the_stack():
    mesh = make_mesh()
    q = place(Case.of("nf4", block_size=16, axis=1)(normal((4, 32, 64))), mesh, P("model", None, "data"))
    x = place(normal((4, 6, 32), seed=1), mesh, P("model"))
    made, program = compiled(lambda x, q: jnp.einsum("etk,ekn->etn", x, q), x, q)
    assert collectives(program) == []
    assert made.sharding.is_equivalent_to(NamedSharding(mesh, P("model", None, "data")), 3)
    assert_product(made, x, q, (((2,), (1,)), ((0,), (0,))))


@pytest.mark.parametrize("form", ["int8", "nf4", "rsr"])
def test_matmuls_in_shard_map(form):
    mesh = make_mesh()
    x = place(normal((8, 64), seed=1), mesh, P("data", "model"))
    q = place(WEIGHTS[form](normal((64, 128))), mesh, P("model"))
    specs = {"in_specs": (P("data", "model"), P("model")), "out_specs": P("data")}
    function = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "model"), mesh=mesh, **specs)
    made, program = compiled(function, x, q)
    assert kinds(program) == {"all-reduce": 1}
    assert ("eformer_matmul" in program) == (cpu.is_available() and form != "rsr")
    assert_product(made, x, q)
    cotangent, _ = compiled(jax.grad(lambda x, q: jnp.sum(function(x, q) ** 2)), x, q)
    assert_product(cotangent, 2 * np.asarray(made), np.asarray(q.materialize()).T)


# --- quantizing ---


@pytest.mark.parametrize("form", ["int8", "nf4", "ternary", "rsr"])
def test_quantizing_in_parts_never_holds_the_whole(form):
    """Devices exchange sums and largest magnitudes, and none has more than its quarter of anything."""
    sharding = NamedSharding(make_mesh(), P("model"))
    w = jax.device_put(normal((128, 64)), sharding)
    program = jax.jit(lambda w: WEIGHTS[form](w).with_sharding(sharding)).lower(w).compile().as_text()
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"= \w+\[([\d,]+)\]", program)]
    assert max(sizes) <= w.size // 4
    assert set(kinds(program)) <= {"all-reduce"}
    codes, *_ = WEIGHTS[form](w)._named_leaves().values()  # made without `jit`
    assert codes.addressable_shards[0].data.size == codes.size // 4


# --- parts that cut what is stored together ---

CUT = {
    "a block in four": (Case.of("nf4", block_size=64, axis=0), (64, 32), P("model"), True),
    "blocks in the middle": (Case.of("nf4", block_size=32, axis=0), (192, 32), P("model"), True),
    "a short last block": (Case.of("nf4", block_size=64, axis=0), (96, 32), P("data"), True),
    "blocks of columns": (Case.of("nf4", block_size=32), (16, 64), P(None, ("data", "model")), True),
    "a byte of two": (Case.of("nf4", block_size=4, axis=0), (20, 32), P("model"), False),
    "a byte of four": (Case.of("ternary"), (24, 32), P("model"), False),
    "a code of eight columns": (RSROperatorTernary.quantize, (16, 48), P(None, "model"), False),
}


@pytest.mark.parametrize("name", CUT)
def test_parts_that_cut_blocks_are_exact(name):
    """The scales of a block that several devices have parts of are there for all; codes in one byte stay together."""
    make, shape, spec, divided = CUT[name]
    mesh = make_mesh()
    x, q = normal((3, shape[0]), seed=1), place(make(normal(shape)), mesh, spec)
    assert q.is_sharded
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(q)) != divided
    made, program = compiled(jnp.matmul, place(x, mesh, P()), q)
    assert not [kind for kind, dtype in collectives(program) if dtype in CODES]
    assert_product(made, x, q)


# --- meshes of other shapes ---


def odd_mesh(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)], ids=str)
def test_devices_in_any_number(sizes):
    mesh = odd_mesh(*sizes)
    x, q = place(normal((6, 96), seed=1), mesh, P("b", "a")), place(WEIGHTS["int8"](normal((96, 24))), mesh, P("a"))
    made, program = compiled(jnp.matmul, x, q)
    assert kinds(program) == {"all-reduce": 1}
    assert_product(made, x, q)


def test_two_meshes_in_one_program():
    mesh, flat = make_mesh(), jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
    x, q = place(normal((8, 64), seed=1), mesh, P("data")), place(WEIGHTS["int8"](normal((64, 128))), mesh, P("model"))
    function = lambda x, q: jax.lax.with_sharding_constraint(x, NamedSharding(flat, P(None, "all"))) @ q  # noqa: E731
    made, program = compiled(function, x, q)
    assert not [kind for kind, dtype in collectives(program) if dtype in CODES]
    assert_product(made, x, q)


def test_half_an_axis_of_the_mesh():
    """Two heads over four devices: XLA gives each half of the axis, which no spec can name."""
    mesh = make_mesh()
    q = place(WEIGHTS["int8"](normal((64, 32))), mesh, P("model"))
    x = place(normal((8, 64), seed=1), mesh, P(None, "model"))
    function = lambda x, q: jnp.cumsum(x.reshape(8, 2, 32), axis=-1).reshape(8, 64) @ q  # noqa: E731
    made, _ = compiled(function, x, q)
    assert_product(made, np.cumsum(np.asarray(x).reshape(8, 2, 32), axis=-1).reshape(8, 64), q)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("gathered", [0, 1])
@pytest.mark.parametrize(
    "case",
    [
        *(Case.of("int8", axis=axis) for axis in (0, 1, (0, 1))),
        *(Case.of("fp8", axis=axis) for axis in (0, 1, (0, 1))),
        Case.of("fp8", block_shape=(8, 8)),
        Case.of("nf4", block_size=8, axis=0),
        Case.of("int4", block_size=8, axis=0),
    ],
    ids=str,
)
def test_gathering_shards_of_a_weight_moves_codes(case, gathered, check):
    """Also where each device may have a scale of its own, because `shard_map` is told not to check."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, x = case(normal((64, 128))), normal((8, 64), seed=1)

    def body(q, x):
        return x @ jax.lax.all_gather(q, "x", axis=gathered, tiled=True)

    specs = (P(*[None] * gathered, "x"), P("x"))
    out, program = compiled(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check), q, x)
    assert_product(out, x, q)
    moved = [dtype for kind, dtype in collectives(program) if kind == "all-gather"]
    assert any(dtype in (*CODES, "f8e4m3fn") for dtype in moved), moved


@pytest.mark.parametrize("case", [Case.of("int8", axis=1), Case.of("fp8", axis=1)], ids=str)
def test_gathered_shards_that_are_merged_stay_codes(case):
    """`tiled=False` puts the devices on an axis of its own; each part of a row then has a scale of its own."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, x = case(normal((64, 128))), normal((8, 64), seed=1)

    def body(q, x):
        return x @ jax.lax.all_gather(q, "x", axis=1).reshape(64, 128)

    f = jax.shard_map(body, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P("x"), check_vma=False)
    out, program = compiled(f, q, x)
    assert_product(out, x, q)
    assert not any(dtype == "f16" for kind, dtype in collectives(program) if kind == "all-gather")
    assert explain(f)(q, x).dense_bytes == 0


def own() -> Any:
    return jax.lax.axis_index("x")


def factor() -> Any:
    return own().astype(jnp.float32) + 1


# What each device does with a number of its own.
OWN: dict[str, Any] = {
    "scaled": lambda q: q * factor(),
    "divided": lambda q: q / factor(),
    "chosen": lambda q: jnp.where(own() > 0, q, jnp.flip(q, 0)),
    "chosen or zero": lambda q: jnp.where(own() > 0, q, 0.0),
    "sliced": lambda q: jax.lax.dynamic_slice_in_dim(q, own(), 2, 0),
    "sliced along the last axis": lambda q: jax.lax.dynamic_slice_in_dim(q, own() * 4, 4, 2),
    "one": lambda q: q[own()][None],
    "some": lambda q: jnp.take(q, jnp.array([0, 1]) + own(), axis=0),
    "updated": lambda q: jax.lax.dynamic_update_slice_in_dim(q, q[:1], own(), 0),
    "padded": lambda q: jnp.pad(q, ((0, 1), (0, 0), (0, 0))),
    "joined": lambda q: jnp.concatenate([q, q * factor()]),
    "stacked": lambda q: jnp.stack([q, q * factor()]),
    "rolled": lambda q: jnp.roll(q, own(), 0),
    "multiplied": lambda q: (jnp.ones((1, 3, q.shape[1])) * factor()) @ q,
    "in a branch": lambda q: jax.lax.cond(own() > 0, lambda q: q * factor(), lambda q: q, q),
    "in a loop": lambda q: jax.lax.fori_loop(0, 2, lambda i, q: q * factor(), q),
}


@pytest.mark.parametrize("kind", ["int8", "fp8", "cache"])
@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_leaves_that_all_devices_share(kind: str):
    """Along the divided axis there is one scale: it does not vary from device to device, and codes do."""
    w, mesh = normal((8, 16, 32)), Mesh(np.array(jax.devices()[:2]), ("x",))
    form: Any = kind
    q = cache.quantize(w, "int8") if kind == "cache" else quantize(w, format=form, axis=0)
    spec = P(None, None, "x") if kind == "cache" else P("x")

    def each(q: Any) -> dict[str, Any]:
        return {name: function(q) for name, function in OWN.items()}

    run = jax.jit(implicit(jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=P("x"))))
    found, expected = materialize(run(q)), run(q.materialize())
    for name in OWN:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
