"""What must hold for a format that was added by two files; `test_add_a_format.py` runs it in a copy that has `sym3`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer
from eformer.checkpoint import save_gguf
from eformer.cli import main
from eformer.kernels import cpu

COPY = Path(__file__).parents[1]


@pytest.fixture
def w(getkey) -> jax.Array:
    return jax.random.normal(getkey(), (200, 96))  # blocks of 64: the last is short


def test_sym3_is_the_copys_and_the_core_knows_it():
    assert Path(eformer.__file__).is_relative_to(COPY)
    assert "sym3" in cpu.formats()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("transposed", [False, True])
def test_sym3_matmuls_run_on_the_core(getkey, w, axis, rows, transposed):
    q = eformer.quantize(w, format="sym3", axis=axis)
    x = jax.random.normal(getkey(), (rows, w.shape[transposed]))

    def matmul(x, w):
        return x @ (w.T if transposed else w)

    program = jax.jit(eformer.implicit(matmul))
    assert "eformer_matmul" in program.lower(x, q).as_text()
    assert eformer.explain(matmul)(x, q).dense_bytes == 0
    dense = q.materialize()
    # Sums of k terms in two orders: each is off by at most k eps sum |x| |w|.
    bound = 2 * x.shape[1] * jnp.finfo(jnp.float32).eps * matmul(jnp.abs(x), jnp.abs(dense))
    assert jnp.all(jnp.abs(program(x, q) - matmul(x, dense)) <= bound)


def test_sym3_takes_three_bits_and_a_scale(w):
    q = eformer.quantize(w, format="sym3", axis=0)
    assert q.nbytes == 200 // 8 * 3 * 96 + 4 * 4 * 96  # three bits a value, four blocks a column
    assert jnp.all(jnp.abs(q.materialize() - w) <= q.error_bound(w))


def test_sym3_checkpoints_round_trip(w, tmp_path):
    q = eformer.quantize(w, format="sym3", block_size=32)
    eformer.save(tmp_path / "model.safetensors", {"w": q})
    found = eformer.load(tmp_path / "model.safetensors")["w"]
    assert type(found) is type(q)
    assert found.block_size == 32
    assert jax.tree.structure(found) == jax.tree.structure(q)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(q)))


def test_sym3_is_refused_where_it_has_no_codec(w, tmp_path):
    with pytest.raises(ValueError, match=r"ArraySym3.*no codec"):
        save_gguf(tmp_path / "model.gguf", {"w": eformer.quantize(w, format="sym3")})
    assert not (tmp_path / "model.gguf").exists()


def test_sym3_rules_and_quantize_agree_on_the_options(w):
    by_rule = eformer.quantize_model({"w": w}, rules=[eformer.Rule("w", "sym3")])["w"]
    assert by_rule.block_size == eformer.quantize(w, format="sym3").block_size == 64
    assert type(eformer.quantize_model({"w": w}, format="sym3")["w"]) is type(by_rule)


def test_sym3_report(w):
    quantized = eformer.quantize_model({"w": w}, format="sym3")
    assert "sym3" in str(eformer.report({"w": w}, quantized))


def test_sym3_on_the_command_line(w, tmp_path, capsys):
    dense, small = tmp_path / "dense.safetensors", tmp_path / "small.safetensors"
    eformer.save(dense, {"w": w})
    assert main(["quantize", str(dense), str(small), "--rule", "w=sym3"]) == 0
    assert main(["inspect", str(small), "--json"]) == 0
    assert "sym3" in capsys.readouterr().out
    assert type(eformer.load(small)["w"]).__name__ == "ArraySym3"
