"""The examples run, do what they say, and are what a newcomer should copy."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eformer.jaximus import explain, implicit, materialization_error

pytestmark = pytest.mark.usefixtures("compile_quickly")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def lora():
    """The example's names; a module with rules is run once."""
    return runpy.run_path(str(EXAMPLES / "lora.py"))


def test_lora_runs(lora, capsys):
    lora["main"]()
    out = capsys.readouterr().out
    before, after = (float(number) for number in re.findall(r"loss (?:before|after): +(\S+)", out))
    assert after < before / 20
    assert "LoRA(float32[64, 64], 18,432 bytes)" in out
    assert re.search(r"dot_general +LoRA +\S*multiply +1 +0\n", out)
    assert "materialize" not in out


def integers(shape, dtype="float32", seed=3):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def make(lora, dtype="float32"):
    w, a, b = (integers(shape, dtype, seed) for seed, shape in enumerate([(6, 5), (6, 2), (2, 5)]))
    return lora["LoRA"](w, a, b, alpha=2.0)


@pytest.mark.parametrize(("shape", "dtype"), [((6,), "float32"), ((2, 3, 6), "float32"), ((3, 6), "bfloat16")], ids=str)
def test_lora_product(shape, dtype, lora):
    """Of small integers, so exact in either order."""
    q, x = make(lora, dtype), integers(shape, dtype)
    with materialization_error():
        actual = x @ q
    expected = x @ q.materialize()
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    assert explain(jnp.matmul)(x, q).dense_bytes == 0


@pytest.mark.filterwarnings("ignore::eformer.jaximus.MaterializationWarning")
def test_lora_other_layouts_are_materialized(lora):
    q, x = make(lora), jnp.ones((3, 5))
    np.testing.assert_array_equal(implicit(lambda x, q: x @ q.T)(x, q), x @ q.materialize().T)
    np.testing.assert_array_equal(q @ x.T, q.materialize() @ x.T)


def test_lora_trains_only_the_adapter(lora):
    q, x = make(lora), jnp.ones((3, 6))
    trained = lora["train"](q, x, jnp.zeros((3, 5)), rate=1.0)
    np.testing.assert_array_equal(trained.w, q.w)
    assert jnp.any(trained.a != q.a)
    assert jnp.any(trained.b != q.b)


def test_adam_in_8_bits(capsys):
    example = runpy.run_path(str(EXAMPLES / "adam8bit.py"))
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        example["main"](steps=60)
    found = re.findall(r"loss (\S+) after 60 steps, state of (\S+) bytes", capsys.readouterr().out)
    (exact, size), (rounded, small) = ((float(loss), int(size.replace(",", ""))) for loss, size in found)
    assert abs(rounded - exact) < 0.05 * exact
    assert small < 0.28 * size  # 8 bits and a scale for every 64, of 32


@pytest.mark.parametrize(
    "wrap",
    [
        lambda adam: optax.MultiSteps(adam, 2),
        lambda adam: optax.masked(adam, lambda params: jax.tree.map(lambda _: True, params)),
        lambda adam: optax.chain(
            optax.clip_by_global_norm(1.0), optax.apply_if_finite(adam, 2), optax.add_decayed_weights(0.1)
        ),
    ],
    ids=["MultiSteps", "masked", "chain"],
)
def test_transformations_of_optax_take_a_quantized_state(wrap):
    """And a tree of parameters with None where leaves are frozen."""
    optimizer = wrap(runpy.run_path(str(EXAMPLES / "adam8bit.py"))["adam8bit"](0.1))
    params = {"w": jnp.ones((64, 64)), "frozen": None}
    with jax.numpy_dtype_promotion("standard"):
        start = optimizer.init(params)
        _, state = jax.jit(optimizer.update)(params, start, params)
        updates, state = jax.jit(optimizer.update)(params, state, params)
    assert jax.tree.structure(state) == jax.tree.structure(start)
    assert jnp.all(updates["w"] != 0)


def test_demo_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    assert stopped.value.code == 0
    assert "usage: eformer demo" in capsys.readouterr().out
