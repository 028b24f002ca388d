"""Files of bitsandbytes: golden ones everywhere, and the package itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from quantization.cases import assert_same_leaves, assert_within, normal

from eformer.checkpoint import CheckpointError, load, open_checkpoint, save, save_bitsandbytes
from eformer.ops.quantization import Array8B, ArrayNF4, quantize

GOLDEN = Path(__file__).with_name("bitsandbytes.safetensors")
NAMES = [name for name in open_checkpoint(GOLDEN) if not name.startswith("expected.")]
# The block sizes that arrays come with, and dense ones.
BLOCKS = {"rows": 64, "across": 32, "odd": None, "one": 64, "stack": 64}


def dense(x: Any) -> np.ndarray:
    return np.asarray(x.materialize() if isinstance(x, (ArrayNF4, Array8B)) else x)


def test_the_golden_file_has_all_layouts():
    assert {name.removesuffix(".weight").rpartition("-")[2] for name in NAMES} == {*BLOCKS, "int8"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "int8.weight"])
def test_four_bits_decode_bit_for_bit(name: str):
    with open_checkpoint(GOLDEN) as golden:
        found, expected = golden[name], golden[f"expected.{name}"]
        assert golden.info(name).format == name[:3]
    kind = name.removesuffix(".weight").rpartition("-")[2]
    assert getattr(found, "block_size", None) == (BLOCKS[kind] if name.startswith("nf4") else None)
    assert dense(found).dtype == expected.dtype
    assert np.array_equal(dense(found), expected)  # but for the sign of zeros, which FP4 has two of


def test_scales_of_scales_stay_as_they_are():
    with open_checkpoint(GOLDEN) as golden:
        found = golden["nf4-bfloat16-nested-rows.weight"]
        assert found.absmax.dtype == jnp.uint8
        assert found.nested.shape == (1,)
        assert golden["nf4-bfloat16-nested-stack.weight"].nested is None  # theirs run over both matrices


def test_eight_bits():
    with open_checkpoint(GOLDEN) as golden:
        found, expected = golden["int8.weight"], golden["expected.int8.weight"]
    # They multiply by the scale and then by 1/127; here the scale is divided first: one rounding each.
    assert_within(found.materialize(), expected, np.abs(expected) * 3 * np.finfo(np.float32).eps)


NF4 = {
    "rows": lambda: quantize(normal((4, 128)), dtype="nf4"),
    "bfloat16": lambda: quantize(normal((4, 64), jnp.bfloat16), dtype="nf4"),
    "one row": lambda: quantize(normal((77,)), dtype="nf4"),
    "stack": lambda: quantize(normal((2, 3, 64), jnp.float16), dtype="nf4"),
    "double": lambda: quantize(normal((10, 2048)), dtype="nf4", double_quantization=True),
    "larger blocks": lambda: quantize(normal((4, 256)), dtype="nf4", block_size=128),
}


@pytest.mark.parametrize("make", NF4.values(), ids=NF4.keys())
def test_nf4_comes_back_bit_for_bit(make: Any, tmp_path: Path):
    q = make()
    path = save_bitsandbytes(tmp_path, {"layer": {"weight": q}, "b": np.ones(3)})
    assert open_checkpoint(path).kind == "bitsandbytes"
    assert_same_leaves(load(path)["layer"]["weight"], q)


def test_blocks_that_end_within_rows_are_cut(tmp_path: Path):
    q = quantize(normal((4, 96)), dtype="nf4")
    found = load(save_bitsandbytes(tmp_path, {"w": q}))["w"]
    assert found.block_size == 32
    assert dense(found).tobytes() == dense(q).tobytes()


def test_double_quantization_of_a_stack_is_decoded_once(tmp_path: Path):
    q = quantize(normal((2, 4, 64)), dtype="nf4", double_quantization=True)
    found = load(save_bitsandbytes(tmp_path, {"w": q}))["w"]
    assert found.nested is None
    assert dense(found).tobytes() == dense(q).tobytes()


def test_int8_comes_back(tmp_path: Path):
    q = quantize(normal((6, 10)), dtype="int8")
    found = load(save_bitsandbytes(tmp_path, {"a": {"weight": q}}))["a"]["weight"]
    assert np.array_equal(found.weight, q.weight)
    assert_within(found.scale, q.scale, q.scale * 2 * np.finfo(np.float32).eps)


REFUSED = {
    "along another axis": ("w", lambda: quantize(normal((64, 8)), dtype="nf4", axis=0), "transpose it"),
    "odd blocks": ("w", lambda: quantize(normal((3, 10)), dtype="nf4", block_size=6), "Quantize it again"),
    "float8's": ("w", lambda: quantize(normal((3, 64)), dtype="nf4").with_dtype(jnp.float8_e5m2), "its dtype must be"),
    "ternary": ("w", lambda: quantize(normal((3, 64)), dtype="ternary"), "no such format"),
    "int8 by its name": ("w", lambda: quantize(normal(), dtype="int8"), 'end in "weight"'),
    "int8 by columns": ("weight", lambda: quantize(normal(), dtype="int8", axis=0), "a scale for each row"),
}


@pytest.mark.parametrize(("name", "make", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_what_it_has_no_layout_for_is_refused(name: str, make: Any, match: str, tmp_path: Path):
    with pytest.raises(ValueError, match=match):
        save_bitsandbytes(tmp_path, {name: make()})
    assert not list(tmp_path.iterdir())


def parts(**changed: Any) -> dict[str, Any]:
    """The tensors of an NF4 weight (2, 64), some of them changed."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 64], **changed.pop("state", {})}
    own = {
        "w": np.zeros((64, 1), np.uint8),
        "w.absmax": np.ones(2, np.float32),
        "w.quant_map": np.zeros(16, np.float32),
        "w.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
    return {name: value for name, value in own.items() if value is not None}


def test_another_map_is_decoded_by_it(tmp_path: Path):
    tensors = parts(w__quant_map=np.arange(16, dtype=np.float32), w=np.full((64, 1), 0x3C, np.uint8))
    found = load(save(tmp_path, tensors), flat=True)["w"]
    assert np.array_equal(found, np.tile([3.0, 12.0], (2, 32)))


WRONG = {
    "no scales": (parts(w__absmax=None), "'w.absmax' is missing"),
    "no codes": (parts(w=None), "tensor 'w'"),
    "too few codes": (parts(w=np.zeros((63, 1), np.uint8)), "128 codes take 64 bytes, got 63"),
    "too few scales": (parts(w__absmax=np.ones(1, np.float32)), "`absmax` must be 2 of float32"),
    "scales of another dtype": (parts(w__absmax=np.ones(2, np.uint8)), "`absmax` must be 2 of float32"),
    "odd blocks": (parts(state={"blocksize": 63}), "`blocksize` must be even"),
    "no dtype": (parts(state={"dtype": "complex64"}), "`dtype` one of"),
    "a negative shape": (parts(state={"shape": [-2, 64]}), "`shape` must be"),
    "another type": (parts(state={"quant_type": "fp4"}), "`quant_type` must be nf4"),
    "nested without": (parts(state={"nested_blocksize": 256}), "'w.nested_absmax' is missing"),
    "an infinite mean": (parts(state={"nested_offset": float("inf")}), "`nested_offset` must be a number"),
    "no JSON": ({**parts(), "w.quant_state.bitsandbytes__nf4": np.ones(3, np.uint8)}, "no JSON"),
    "int8 of another order": (
        {"weight": np.ones((2, 2), np.int8), "SCB": np.ones(2, np.float32), "weight_format": np.array(1, np.uint8)},
        "`weight_format` must be 0",
    ),
    "int8 without rows": ({"weight": np.ones(2, np.int8), "SCB": np.ones(2, np.float32)}, "two axes"),
}


@pytest.mark.parametrize(("tensors", "match"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_hold_together_is_refused(tensors: dict[str, Any], match: str, tmp_path: Path):
    path = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(path)


# --- the package itself ---


@pytest.fixture
def bnb() -> Any:
    pytest.importorskip("torch", reason="bitsandbytes needs torch")
    pytest.importorskip("safetensors", reason="to load our files as torch does")
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


@pytest.mark.filterwarnings("ignore")  # torch's and bitsandbytes' own
@pytest.mark.parametrize("make", NF4.values(), ids=NF4.keys())
def test_the_package_decodes_ours(bnb: Any, make: Any, tmp_path: Path):
    from safetensors.torch import load_file

    q = make()
    tensors = load_file(save_bitsandbytes(tmp_path, {"w": q}))
    state = bnb.functional.QuantState.from_dict({k: v for k, v in tensors.items() if k != "w"}, device="cpu")
    decoded = bnb.functional.dequantize_4bit(tensors["w"], state)
    assert tuple(decoded.shape) == q.shape
    assert np.array_equal(decoded.float().numpy(), np.asarray(q.materialize(), np.float32))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_of_the_package_loads_ours(bnb: Any, nested: bool, tmp_path: Path):
    import torch
    from safetensors.torch import load_file

    q = quantize(normal((32, 128)), dtype="nf4", double_quantization=nested)
    tensors = load_file(save_bitsandbytes(tmp_path, {"weight": q}))
    layer = bnb.nn.Linear4bit(128, 32, bias=False, quant_type="nf4")
    stats = {k.removeprefix("weight."): v for k, v in tensors.items() if k != "weight"}
    layer.weight = bnb.nn.Params4bit.from_prequantized(tensors["weight"], stats, device="cpu")
    x = normal((3, 128))
    got = layer(torch.from_numpy(np.array(x))).detach().numpy()
    exact = np.asarray(x, np.float64) @ np.asarray(q.materialize(), np.float64).T
    magnitude = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(q.materialize(), np.float64)).T
    # Their CPU kernel takes bfloat16 where the processor has it: two operands rounded to 8 bits.
    assert_within(got, exact, magnitude * 2 * 2.0**-8)


@pytest.mark.filterwarnings("ignore")
def test_the_package_decodes_our_int8(bnb: Any, tmp_path: Path):
    from safetensors.torch import load_file

    q = quantize(normal((6, 10)), dtype="int8")
    tensors = load_file(save_bitsandbytes(tmp_path, {"weight": q}))
    got = bnb.functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"]).numpy()
    assert_within(got, q.materialize(), np.abs(got) * 4 * np.finfo(np.float32).eps)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(64, 128), (96, 1000), (5, 7), (130, 64)], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_ours_decodes_the_packages(bnb: Any, kind: str, shape: tuple[int, ...], nested: bool, tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    weight = torch.from_numpy(np.array(normal(shape)))
    q, state = bnb.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    parts = {f"w.{name}": value for name, value in state.as_dict(packed=True).items()}
    save_file({"w": q, **parts}, tmp_path / "a.safetensors")
    found = load(tmp_path / "a.safetensors")["w"]
    assert np.array_equal(dense(found), bnb.functional.dequantize_4bit(q, state).numpy())
