"""The documented handlers: each is in its module under its name, and does on quantized arrays what `jax.lax` does."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eformer.jaximus import is_implicit
from eformer.ops.quantization import quantize

from .cases import about, assert_same, normal

# What is documented to be made dense is.
pytestmark = [
    pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning"),
]

FORMATS = {"8bit": "int8", "nf4": "nf4", "1bit": "ternary"}
X = normal((4, 8), seed=1)
ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
NUMBERS = (((1,), (0,)), ((), ()))

# Each as documented, what it is given for `q` of shape (4, 8), documented arguments first, and what it means.
CALLS: dict[str, tuple[str, Any, Any]] = {
    "add_{}_xy": ("x, y", lambda q: {"x": q, "y": X}, lambda d: d + X),
    "broadcast_in_dim_{}_operand": (
        "operand, *args, **params",
        lambda q: {"operand": q, "shape": (2, 4, 8), "broadcast_dimensions": (1, 2)},
        lambda d: jnp.broadcast_to(d, (2, 4, 8)),
    ),
    "concatenate_{}_operands": (
        "operands, *args, **kwargs",
        lambda q: {"operands": [q, X], "dimension": 0},
        lambda d: jnp.concatenate([d, X]),
    ),
    "conv_general_dilated_{}_lhs_rhs": (
        "lhs, rhs, *args, **kwargs",
        lambda q: {"lhs": X[None], "rhs": q.reshape(2, 4, 4), "window_strides": (1,), "padding": "SAME"},
        lambda d: lax.conv_general_dilated(X[None], d.reshape(2, 4, 4), (1,), "SAME"),
    ),
    "convert_element_type_{}_operand_kw": (
        "operand, **kwargs",
        lambda q: {"operand": q, "new_dtype": jnp.bfloat16},
        lambda d: d.astype(jnp.bfloat16),
    ),
    "convert_element_type_{}_operand_pos": (
        "operand, new_dtype",
        lambda q: {"operand": q, "new_dtype": jnp.bfloat16},
        lambda d: d.astype(jnp.bfloat16),
    ),
    "div_{}_xy": ("x, y", lambda q: {"x": q, "y": X}, lambda d: lax.div(d, X)),
    "dot_general_{}_lhs_rhs": (
        "lhs, rhs, *args, **kwargs",
        lambda q: {"lhs": jnp.eye(4), "rhs": q, "dimension_numbers": NUMBERS},
        lambda d: d,
    ),
    "exp_{}_x": ("x, *args, **kwargs", lambda q: {"x": q}, lax.exp),
    "gather_{}_operand": (
        "operand, *args, **kwargs",
        lambda q: {
            "operand": q,
            "start_indices": jnp.array([[2], [0]]),
            "dimension_numbers": ROWS,
            "slice_sizes": (1, 8),
        },
        lambda d: d[jnp.array([2, 0])],
    ),
    "integer_pow_{}_x": ("x, **kwargs", lambda q: {"x": q, "y": 3}, lambda d: d**3),
    "integer_pow_{}_xy": ("x, y", lambda q: {"x": q, "y": 3}, lambda d: d**3),
    "log_{}_x": ("x, *args, **kwargs", lambda q: {"x": q}, lax.log),
    "lt_{}_xy": ("x, y, **kwargs", lambda q: {"x": q, "y": X}, lambda d: d < X),
    "max_{}_xy": ("x, y, *args, **kwargs", lambda q: {"x": X, "y": q}, lambda d: jnp.maximum(X, d)),
    "mul_{}_xy": ("x, y", lambda q: {"x": q, "y": q}, lambda d: d * d),
    "reduce_{}_operand_init_value": (
        "operand, init_value, *args, **kwargs",
        lambda q: {"operand": q, "init_value": jnp.float32(0), "computation": lax.max, "dimensions": (0,)},
        lambda d: jnp.maximum(jnp.max(d, 0), 0),
    ),
    "reshape_{}_operand": (
        "operand, *args, **params",
        lambda q: {"operand": q, "new_sizes": (1, 4, 8)},
        lambda d: d.reshape(1, 4, 8),
    ),
    "sqrt_{}_x": ("x, **kwargs", lambda q: {"x": q}, lax.sqrt),  # `**kwargs` besides: JAX binds it with `accuracy`
    "transpose_{}_operand": (
        "operand, *args, **kwargs",
        lambda q: {"operand": q, "permutation": (1, 0)},
        lambda d: d.T,
    ),
}
KEPT = {"broadcast_in_dim_{}_operand", "reshape_{}_operand", "transpose_{}_operand"}
KEPT |= {"convert_element_type_{}_operand_kw", "convert_element_type_{}_operand_pos"}


def handler_and_primitive(call: str, tag: str) -> tuple[Any, Any]:
    module = importlib.import_module(f"eformer.ops.quantization.implicit_array_{tag}")
    return getattr(module, call.format(tag)), getattr(lax, call[: call.index("_{}")] + "_p")


@pytest.mark.parametrize("call", CALLS)
def test_handler_does_what_is_documented(call):
    for tag in FORMATS:
        with about(tag):
            check_name_and_arguments(call, tag)
            check_call(call, tag, by_position=False)
            check_call(call, tag, by_position=True)


def check_name_and_arguments(call: str, tag: str) -> None:
    handler, _ = handler_and_primitive(call, tag)
    assert handler.__name__ == call.format(tag)
    assert str(inspect.signature(handler)) == f"(primitive, {CALLS[call][0]})"
    assert handler.__doc__.startswith(f"`lax.{call[: call.index('_{}')]}`")


def check_call(call: str, tag: str, *, by_position: bool) -> None:
    handler, primitive = handler_and_primitive(call, tag)
    names, given, meaning = CALLS[call]
    q = quantize(normal((4, 8)), dtype=FORMATS[tag])
    arguments = given(q)
    if by_position:  # where `*args` are documented, all that `lax` takes may go there; else only what is named
        positional = [arguments.pop(n) for n in list(arguments) if n in names.split(", ") or "*args" in names]
        out = handler(primitive, *positional, **arguments)
    else:
        out = handler(primitive=primitive, **arguments)
    assert is_implicit(out) == (call in KEPT)
    assert_same(out, meaning(q.materialize()))


# As JAX itself binds the primitives: with all their parameters, by name.
BOUND: dict[str, tuple[Any, Any]] = {
    "concatenate_{}_operands": (
        lambda h, q: h(lax.concatenate_p, q, X, dimension=0),
        lambda d: jnp.concatenate([d, X]),
    ),
    "convert_element_type_{}_operand_kw": (
        lambda h, q: h(
            lax.convert_element_type_p, q, new_dtype=jnp.dtype(jnp.bfloat16), weak_type=False, sharding=None
        ),
        lambda d: d.astype(jnp.bfloat16),
    ),
    "exp_{}_x": (lambda h, q: h(lax.exp_p, q, accuracy=None), lax.exp),
    "reshape_{}_operand": (
        lambda h, q: h(lax.reshape_p, q, new_sizes=(1, 4, 8), dimensions=None, sharding=None),
        lambda d: d.reshape(1, 4, 8),
    ),
    "sqrt_{}_x": (lambda h, q: h(lax.sqrt_p, q, accuracy=None), lax.sqrt),
}


@pytest.mark.parametrize("call", BOUND)
def test_handler_takes_the_parameters_of_its_primitive(call):
    run, meaning = BOUND[call]
    for tag, form in FORMATS.items():
        with about(tag):
            q = quantize(normal((4, 8)), dtype=form)
            assert_same(run(handler_and_primitive(call, tag)[0], q), meaning(q.materialize()))


@pytest.mark.parametrize("tag", FORMATS)
def test_the_power_is_two_unless_said(tag):
    q = quantize(normal((4, 8)), dtype=FORMATS[tag])
    handler, primitive = handler_and_primitive("integer_pow_{}_x", tag)
    assert_same(handler(primitive, q), q.materialize() ** 2)


def test_handler_names_the_argument_that_is_missing():
    from eformer.ops.quantization.implicit_array_8bit import add_8bit_xy

    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        add_8bit_xy(lax.add_p, x=X)


@pytest.mark.parametrize("tag", FORMATS)
def test_reshaping_across_blocks_requantizes(tag):
    module: Any = importlib.import_module(f"eformer.ops.quantization.implicit_array_{tag}")
    q = quantize(normal((4, 8)), dtype=FORMATS[tag])
    out = getattr(module, f"reshape_{tag}_operand")(lax.reshape_p, q, (8, 4))
    assert type(out) is type(q)
    assert out.shape == (8, 4)


def test_documented_duplicate_of_division():
    from eformer.ops.quantization.implicit_array_1bit import div_1bit_xy_fallback

    q = quantize(normal((4, 8)), dtype="binary")
    assert_same(div_1bit_xy_fallback(lax.div_p, x=X, y=q), lax.div(X, q.materialize()))


def test_handlers_run_under_jit():
    from eformer.ops.quantization.implicit_array_8bit import add_8bit_xy, dot_general_8bit_lhs_rhs

    q = quantize(normal((4, 8)), dtype="int8")
    assert_same(jax.jit(lambda q: add_8bit_xy(lax.add_p, q, X))(q), jax.jit(lambda q: q.materialize() + X)(q))
    out = jax.jit(lambda q: dot_general_8bit_lhs_rhs(lax.dot_general_p, jnp.eye(4), q, NUMBERS))(q)
    assert_same(out, q.materialize())


# The documented parameters of the constructors, in order; after `*` keyword-only.
CONSTRUCTORS = {
    "1bit": ("Array1B", ["weight"]),
    "8bit": ("Array8B", ["scale", "weight", "axis", "sharding"]),
    "nf4": ("ArrayNF4", ["packed", "absmax", "block_size", "sharding"]),
}
METHODS = ["quantize", "materialize", "delete", "with_sharding", "reshard", "with_mesh_and_axis", "is_sharded"]


@pytest.mark.parametrize("tag", CONSTRUCTORS)
def test_classes_have_what_is_documented(tag):
    name, fields = CONSTRUCTORS[tag]
    cls = getattr(importlib.import_module(f"eformer.ops.quantization.implicit_array_{tag}"), name)
    parameters = inspect.signature(cls).parameters
    assert list(parameters)[: len(fields)] == fields
    assert all(parameters[field].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for field in fields)
    assert all(parameters[field].kind is inspect.Parameter.KEYWORD_ONLY for field in ("shape", "dtype"))
    assert all(hasattr(cls, method) for method in METHODS)
    assert cls.commute_ops is True
    assert cls.warn_on_materialize is True
