"""`quantize`, `straight_through`, their configuration, the registry, and what they say of bad input."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.quantization import registry
from eformer._src.quantization.elementwise_layout import LeafwiseArray
from eformer.jaximus import MaterializationWarning, explain, materialize
from eformer.ops.quantization import (
    Array1B,
    Array8B,
    ArrayNF4,
    FormatName,
    QuantizationConfig,
    QuantizationType,
    QuantizedArray,
    find_format,
    formats,
    quantize,
    register_format,
    straight_through,
    straight_through_1bit,
)

from .cases import assert_same_array, assert_same_leaves, assert_within, normal


def test_documented_types():
    documented = {"NF4": "nf4", "INT8": "int8", "TERNARY": "ternary", "BINARY": "binary"}
    assert documented.items() <= {t.name: t.value for t in QuantizationType}.items()


def test_every_type_is_a_format():
    assert {t.value for t in QuantizationType} <= {form.name for form in formats()}


def test_config_defaults_and_strings():
    config = QuantizationConfig()
    assert (config.dtype, config.block_size, config.simulate, config.use_kernel) == (
        QuantizationType.NF4,
        64,
        False,
        True,
    )
    assert QuantizationConfig(dtype="int8").dtype is QuantizationType.INT8
    assert QuantizationConfig(QuantizationType.BINARY, 64, True, False).simulate


def test_config_is_a_value():
    config = QuantizationConfig("int8")
    assert hash(config) == hash(QuantizationConfig(QuantizationType.INT8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "nf4"  # pyright: ignore[reportAttributeAccessIssue]

    @functools.partial(jax.jit, static_argnums=1)
    def decoded(w: jax.Array, config: QuantizationConfig) -> jax.Array:
        return quantize(w, config).materialize()

    assert_same_array(decoded(normal(), config), quantize(normal(), config).materialize())


@pytest.mark.parametrize(
    ("dtype", "cls"),
    [("nf4", ArrayNF4), ("int8", Array8B), ("ternary", Array1B), ("binary", Array1B), (None, ArrayNF4)],
)
def test_quantize_makes_the_format_asked_for(dtype, cls):
    q = quantize(normal(), dtype=dtype)
    assert type(q) is cls
    if dtype:
        assert_same_leaves(quantize(normal(), QuantizationConfig(dtype)), q)
        assert_same_leaves(quantize(normal(), dtype=QuantizationType(dtype)), q)


def test_config_is_taken_instead_of_arguments():
    config = QuantizationConfig("nf4", block_size=4)
    assert quantize(normal(), config, dtype="int8", block_size=8).block_size == 4
    assert quantize(normal(), dtype="nf4", block_size=8).block_size == 8


def test_use_kernel_reaches_the_array():
    assert quantize(normal()).use_kernel
    assert not quantize(normal(), QuantizationConfig("int8", use_kernel=False)).use_kernel


def test_simulate_is_dense_and_differentiable():
    w = normal()
    simulated = quantize(w, dtype="int8", simulate=True)
    assert isinstance(simulated, jax.Array)
    assert_same_array(simulated, quantize(w, dtype="int8").materialize())
    gradient = jax.grad(lambda w: jnp.sum(3 * quantize(w, dtype="int8", simulate=True)))(w)
    assert_same_array(gradient, jnp.full_like(w, 3))


def test_training_step_of_the_documentation():
    inputs, targets = normal((4, 6)), normal((4, 10), seed=1)

    @jax.jit
    def train_step(params, inputs, targets):
        def loss_fn(params):
            quant_w = straight_through(params["weight"], dtype=QuantizationType.NF4)
            return jnp.mean((inputs @ quant_w - targets) ** 2)

        return jax.value_and_grad(loss_fn)(params)

    loss, grads = train_step({"weight": normal()}, inputs, targets)
    assert np.isfinite(loss)
    assert np.any(grads["weight"])


# Documented calls have blocks along the last axis, as they always had; by `format` they run along the contracted one.
ALIASES: dict[str, Any] = {
    "quantize": (functools.partial(quantize, axis=-2), "int8"),
    "straight_through": (functools.partial(straight_through, axis=-2), "int8"),
    "straight_through_1bit": (straight_through_1bit, "binary"),
    "config": (lambda w, **name: quantize(w, QuantizationConfig(**name)), "int8"),
}


@pytest.mark.parametrize("call", ALIASES)
def test_format_is_another_name_of_dtype(call):
    function, name = ALIASES[call]
    found, expected = function(normal(), format=name), function(normal(), dtype=name)
    assert_same_array(materialize(found), materialize(expected))
    assert type(found) is type(expected)
    with pytest.raises(TypeError, match=f"`dtype` and `format` mean the same.*'{name}' and 'nf4'"):
        function(normal(), dtype=name, format="nf4")


FORMS: dict[str, Any] = {
    "text": lambda w: quantize(w, "int4,block_size=4,symmetric=true"),
    "capitals": lambda w: quantize(w, "INT4, block_size=4", symmetric=True),
    "format": lambda w: quantize(w, format="int4", block_size=4, symmetric=True),
    "registry": lambda w: quantize(w, find_format("int4"), block_size=4, symmetric=True),
    "dtype": lambda w: quantize(w, dtype="int4", block_size=4, symmetric=True, axis=-2),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_format_has_one_meaning_however_it_is_spelt(form):
    assert_same_leaves(FORMS[form](normal()), find_format("int4").encode(normal(), 4, symmetric=True, axis=-2))


@pytest.mark.parametrize("form", [form for form in formats() if "axis" in form.options], ids=str)
def test_blocks_run_along_the_contracted_axis(form):
    vector, matrix, stack = (normal(shape) for shape in ((10,), (6, 10), (2, 6, 10)))
    assert_same_leaves(quantize(vector, form), form.encode(vector))
    assert_same_leaves(quantize(matrix, form.name), form.encode(matrix, axis=-2))
    assert_same_leaves(quantize(stack, format=form.name), form.encode(stack, axis=-2))
    assert_same_leaves(quantize(matrix, dtype=form.name), form.encode(matrix))  # as documented
    assert_same_leaves(quantize(matrix, QuantizationConfig(form.name)), form.encode(matrix))


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("transposed", [False, True])
def test_explain_says_that_blocks_run_along_the_other_axis(axis, transposed):
    q = quantize(normal((6, 10)), "int4", axis=axis)
    told = explain(lambda x, q: x @ (q.T if transposed else q))(normal((2, 10 if transposed else 6)), q)
    summed = -1 if transposed else -2
    remark = f"packed along axis {axis}, and the matmul sums over axis {summed}: quantized with `axis={summed}`"
    assert [remark in each for each in told.remarks] == [True] * (axis != summed)
    assert (remark in repr(told)) == (axis != summed)


def test_names_for_type_checkers_are_those_of_the_package():
    names = [each for alias in typing.get_args(FormatName) for each in typing.get_args(alias) or [alias]]
    assert {str(name) for name in names} == {t.value for t in QuantizationType}


@pytest.mark.parametrize(("name", "meant"), [("group_size", "block_size"), ("sym", "symmetric"), ("axs", "axis")])
def test_a_near_miss_is_answered_with_the_right_name(name, meant):
    with pytest.raises(TypeError, match=f"'int4' has no option '{name}'; it has .*Did you mean '{meant}'"):
        quantize(W, "int4", **{name: 1})
    with pytest.raises(ValueError, match=r"unknown format 'q4_k'.*did you mean 'int4'"):
        quantize(W, "q4_k")


def test_a_config_has_its_format_by_both_names():
    config = QuantizationConfig(format="ternary")
    assert config.dtype is config.format is QuantizationType.TERNARY
    assert dataclasses.replace(config, simulate=True) == QuantizationConfig("ternary", simulate=True)


WITHOUT_BLOCKS = [form.name for form in formats() if "block_size" not in form.options]
ASK_FOR_BLOCKS: dict[str, Any] = {
    "quantize": lambda form: quantize(normal(), format=form, block_size=32),
    "straight_through": lambda form: straight_through(normal(), format=form, block_size=32),
    "simulate": lambda form: quantize(normal(), format=form, block_size=32, simulate=True),
    "config": lambda form: QuantizationConfig(form, block_size=32),
    "replace": lambda form: dataclasses.replace(QuantizationConfig(form), block_size=32),
}


@pytest.mark.parametrize("form", WITHOUT_BLOCKS)
@pytest.mark.parametrize("ask", ASK_FOR_BLOCKS.values(), ids=ASK_FOR_BLOCKS)
def test_formats_without_blocks_refuse_a_block_size(ask, form):
    has = ", ".join(repr(name) for name in find_format(form).options if name not in ("use_kernel", "activation_dtype"))
    with pytest.raises(TypeError, match=f"'{form}' has no option 'block_size'; it has {has}"):
        ask(form)


@pytest.mark.parametrize("form", WITHOUT_BLOCKS)
def test_the_documented_block_size_says_nothing(form):
    assert_same_leaves(quantize(normal(), QuantizationConfig(form, block_size=64)), quantize(normal(), dtype=form))


@pytest.mark.parametrize("form", formats(), ids=str)
def test_every_format_refuses_options_it_does_not_have(form):
    every = {option for each in formats() for option in each.options} | {"no_such_option"}
    for_quantize = every - {"use_kernel", "block_size", "activation_dtype"}  # these are its own
    unknown = sorted(for_quantize - form.options.keys())
    with pytest.raises(TypeError, match=f"'{form.name}' has no option '{unknown[0]}'; it has "):
        quantize(normal(), dtype=form.name, **{unknown[0]: 1})
    with pytest.raises(TypeError, match=f"'{form.name}' has no option '{unknown[-1]}'; it has "):
        quantize(normal(), dtype=form.name, **{unknown[-1]: 1})


W = np.ones((6, 10), np.float32)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown type": (lambda: quantize(W, dtype="int99"), ValueError, "unknown format 'int99'.*'nf4'"),
    "unknown type of config": (lambda: QuantizationConfig("fp4"), ValueError, "'fp4'.*'int8'"),
    "type that is a number": (lambda: quantize(W, dtype=8), TypeError, "'int8'.*'nf4'.*; got int 8"),
    "type of an element": (lambda: quantize(W, dtype=jnp.int8), TypeError, "'int8'.*'nf4'.*; got .*jax.numpy.int8"),
    "NumPy's type": (lambda: quantize(W, dtype=np.dtype("int8")), TypeError, "'int8'.*'nf4'.*; got Int8DType dtype"),
    "type of config that is no name": (lambda: QuantizationConfig(dtype=4), TypeError, "'int8'.*'nf4'.*; got int 4"),
    "number as config": (lambda: quantize(W, 8), TypeError, "a format is a name.*got int 8; for 8 bits write 'int8'"),
    "format twice": (lambda: quantize(W, "int8", format="nf4"), TypeError, "second argument is 'int8' and `format` is"),
    "option twice": (lambda: quantize(W, "nf4,axis=0", axis=1), TypeError, "`axis` is given twice: 0 in .* and 1"),
    "no options": (lambda: quantize(W, "int4,32"), ValueError, "is no format with options: write 'int4,block_size=32'"),
    "config with options": (lambda: QuantizationConfig("int4,axis=0"), TypeError, "takes options as arguments"),
    "unknown option": (lambda: quantize(W, dtype="int8", group=3), TypeError, "'int8' has no option 'group'.*'axis'"),
    "block size 0": (lambda: quantize(W, block_size=0), ValueError, "`block_size=0` must be even and at least 2"),
    "odd block size": (lambda: quantize(W, block_size=7), ValueError, "`block_size=7` must be even"),
    "negative block size": (lambda: ArrayNF4.quantize(W, -4), ValueError, "`block_size=-4` must be even"),
    "block size no int": (lambda: quantize(W, block_size=4.0), TypeError, "must be an int, got float 4.0"),
    "block size a bool": (lambda: QuantizationConfig(block_size=True), TypeError, "must be an int, got bool"),
    "axis out of range": (lambda: Array8B.quantize(W, axis=2), ValueError, "axis 2 is out of range for .* 2 axes"),
    "axis of nf4": (lambda: quantize(W, axis=-3), ValueError, "axis -3 is out of range"),
    "axis repeated": (lambda: Array8B.quantize(W, axis=(0, -2)), ValueError, "names an axis twice"),
    "axis no int": (lambda: Array8B.quantize(W, axis="rows"), TypeError, "int or a tuple of ints, got 'rows'"),
    "axis of 1-bit": (lambda: Array1B.quantize(W, axis=5), ValueError, "axis 5 is out of range"),
    "complex": (lambda: quantize(W.astype(np.complex64)), TypeError, "floating point and integer.* got complex64"),
    "bool": (lambda: quantize(W > 0, dtype="int8"), TypeError, "got bool"),
    "no array": (lambda: quantize([1.0, 2.0]), TypeError, "takes an array, got list"),
    "scale of 1-bit": (lambda: quantize(W, dtype="ternary", scale="row"), ValueError, "`scale='row'` must be one of"),
    "simulate no bool": (lambda: QuantizationConfig(simulate=1), TypeError, "`simulate` must be True or False, got 1"),
    "integers to train": (lambda: straight_through(W.astype(np.int32)), TypeError, "floating point.*int32"),
    "scale of another rank": (
        lambda: Array8B(W[0], W.astype(np.int8)),
        ValueError,
        r"scale \(10,\) must have the 2 axes",
    ),
    "scale that does not fit": (lambda: Array8B(W[:, :2], W.astype(np.int8)), ValueError, "does not broadcast over"),
    "packed that is no uint8": (lambda: ArrayNF4(W, W), TypeError, "packed must be uint8.* got float32"),
    "blocks that do not fit": (
        lambda: ArrayNF4(W.astype(np.uint8), W, 4),
        ValueError,
        r"absmax \(6, 10\) of blocks of 4",
    ),
    "shape that does not fit": (
        lambda: Array8B(W[:, :1], W.astype(np.int8), shape=(10, 6)),
        ValueError,
        r"`shape=\(10, 6\)`.*\(6, 10\)",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    call, error, message = BAD[bad]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


@pytest.fixture
def toy_format():
    """Half precision as a format: one class and one registration."""

    class Half(LeafwiseArray):
        _code_fields = ("weight",)
        weight: jax.Array

        @property
        def shape(self):
            return self.weight.shape

        def decode(self):
            return self.weight.astype(jnp.float32)

        def _encoded_again(self, array):
            return make(array)

        def _step_bound(self, original):
            return jnp.abs(original) * 2.0**-8

        def _grain(self, *_):
            return 1

        def _rebuilt(self, leaves, *_):
            return Half(leaves["weight"], dtype=self.dtype)

    def make(array: Any) -> QuantizedArray:
        return Half(array.astype(jnp.bfloat16), dtype=array.dtype)

    yield register_format("half", Half, make)
    del registry._formats["half"]


def test_a_new_format_is_one_class_and_one_line(toy_format):
    w, x = normal(), normal((3, 6), seed=1)
    assert toy_format in formats()
    q = quantize(w, dtype="half")
    assert type(q) is toy_format.array_type
    assert np.all(np.abs(q.materialize() - w) <= q.error_bound(w))
    assert_same_array(straight_through(w, dtype="half"), q.materialize())
    assert q.T.shape == (10, 6)
    with pytest.warns(MaterializationWarning):  # it has no scale to negate
        assert_same_array(-q, -q.materialize())
    assert np.allclose(x @ q, x @ q.materialize(), atol=1e-5)
    with pytest.raises(ValueError, match="there is a format 'half' already"):
        register_format("half", toy_format.array_type, toy_format.encode)


@pytest.mark.parametrize("function", [quantize, straight_through, QuantizationConfig])
def test_the_documented_block_size_is_the_default_in_signatures(function):
    assert inspect.signature(function).parameters["block_size"].default == 64


WITH_BLOCKS = [form.name for form in formats() if "block_size" in form.options]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", WITH_BLOCKS)
def test_a_block_that_is_longer_than_the_array_takes_no_memory_of_its_own(form, axis):
    """It is compiled, so that what it would allocate is known without allocating."""
    w = normal((64, 48))
    make = jax.jit(lambda w: quantize(w, format=form, block_size=10**9, axis=axis).materialize())
    memory = make.lower(w).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 64 * w.nbytes
    one_level = {"double_quantization": False} if "double_quantization" in find_format(form).options else {}
    exact = quantize(w, format=form, block_size=w.shape[axis], axis=axis, **one_level)
    assert_same_array(make(w), jax.jit(lambda q: q.materialize())(exact))


@pytest.mark.parametrize("form", [form for form in formats() if "fit" in form.options], ids=str)
def test_a_number_can_be_fitted(form):
    q = quantize(jnp.float32(3), format=form.name, fit=True)
    assert abs(q.materialize() - 3) <= q.error_bound(jnp.float32(3))


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_scale_for_each_element_can_be_fitted(form):
    w = normal()
    q = quantize(w, format=form, axis=(), fit=True)
    assert_within(q.materialize(), w, q.error_bound(w))
