"""What must hold for formats that were added as CONTRIBUTING says: `test_add_a_format.py` runs it where they are."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer
from eformer._src.kernels import cpu
from eformer.checkpoint import save_gguf
from eformer.cli import main

COPY = Path(__file__).parents[1]


class Added(NamedTuple):
    name: str
    class_name: str
    block_size: int
    column_bytes: int  # of 200 elements and their scales
    refusal: str  # of GGUF

    def __str__(self) -> str:
        return self.name


SYM3 = Added("sym3", "ArraySym3", 64, 200 // 8 * 3 + 4 * 4, "ArraySym3.*no codec")
LOG4 = Added("log4", "ArrayGrouped", 32, 200 // 2 + 7 * 2, "ArrayGrouped.*no type of GGUF holds this layout")
pytestmark = pytest.mark.parametrize("added", [SYM3, LOG4], ids=str)


@pytest.fixture
def w(getkey) -> jax.Array:
    return jax.random.normal(getkey(), (200, 96))  # the last block is short


def test_it_is_the_copys_and_the_core_knows_it(added):
    assert Path(eformer.__file__).is_relative_to(COPY)
    assert any(name.startswith(added.name) for name in cpu.formats())


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmuls_run_on_the_core(getkey, w, axis, rows, transposed, added):
    q = eformer.quantize(w, format=added.name, axis=axis)
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


def test_it_takes_its_bits_and_a_scale(w, added):
    q = eformer.quantize(w, format=added.name, axis=0)
    assert q.nbytes == added.column_bytes * 96
    assert jnp.all(jnp.abs(q.materialize() - w) <= q.error_bound(w))


def test_checkpoints_round_trip(w, tmp_path, added):
    q = eformer.quantize(w, format=added.name, block_size=16)
    eformer.save(tmp_path / "model.safetensors", {"w": q})
    found = eformer.load(tmp_path / "model.safetensors")["w"]
    assert type(found) is type(q)
    assert found.block_size == 16
    assert jax.tree.structure(found) == jax.tree.structure(q)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(q)))


def test_it_is_refused_where_it_has_no_codec(w, tmp_path, added):
    with pytest.raises(ValueError, match=added.refusal):
        save_gguf(tmp_path / "model.gguf", {"w": eformer.quantize(w, format=added.name)})
    assert not (tmp_path / "model.gguf").exists()


def test_rules_and_quantize_agree_on_the_options(w, added):
    by_rule = eformer.quantize_model({"w": w}, rules=[eformer.Rule("w", added.name)])["w"]
    assert by_rule.block_size == eformer.quantize(w, format=added.name).block_size == added.block_size
    assert type(eformer.quantize_model({"w": w}, format=added.name)["w"]) is type(by_rule)


def test_report(w, added):
    quantized = eformer.quantize_model({"w": w}, format=added.name)
    assert added.name in str(eformer.report({"w": w}, quantized))


def test_command_line(w, tmp_path, capsys, added):
    dense, small = tmp_path / "dense.safetensors", tmp_path / "small.safetensors"
    eformer.save(dense, {"w": w})
    assert main(["quantize", str(dense), str(small), "--rule", f"w={added.name}"]) == 0
    assert main(["inspect", str(small), "--json"]) == 0
    assert added.name in capsys.readouterr().out
    assert type(eformer.load(small)["w"]).__name__ == added.class_name
