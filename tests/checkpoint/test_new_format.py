"""A format that this package does not know: its own layout holds it at once, other kinds by a codec or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantization.cases import assert_same_leaves, normal

from eformer._src.checkpoint.arrays import ArrayToWrite, TensorSpec, TensorsToWrite
from eformer._src.checkpoint.gguf import codecs
from eformer._src.checkpoint.layouts import bitsandbytes as bitsandbytes_module
from eformer._src.checkpoint.layouts.bitsandbytes import FourBit
from eformer._src.quantization import registry
from eformer.checkpoint import (
    BitsandbytesCodec,
    GgufCodec,
    convert,
    load,
    open_checkpoint,
    quantize_checkpoint,
    register_bitsandbytes_codec,
    register_gguf_codec,
    save,
    save_bitsandbytes,
    save_gguf,
)
from eformer.cli import main
from eformer.jaximus import aux_field
from eformer.model import Rule
from eformer.ops.quantization import QuantizedArray, formats, quantize, register_format

BLOCK = 32


class Digits(QuantizedArray):
    """`materialize() == (4 * high + low - 8) * scale`: two code leaves, and a float16 scale per block of a row."""

    high: jax.Array
    low: jax.Array
    scale: jax.Array
    block_size: int = aux_field(default=BLOCK)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.high.shape)

    @property
    def sharding(self) -> None:
        return None

    def _leaf_shardings(self, sharding: Any) -> Any:
        raise NotImplementedError

    def decode(self) -> jax.Array:
        codes = 4 * self.high.astype(jnp.float32) + self.low.astype(jnp.float32) - 8
        return codes * jnp.repeat(self.scale.astype(jnp.float32), self.block_size, axis=-1)

    def _step_bound(self, original: jax.Array) -> jax.Array:
        del original
        return jnp.repeat(self.scale.astype(jnp.float32), self.block_size, axis=-1)


def encode(array: Any, block_size: int = BLOCK) -> Digits:
    blocks = array.astype(jnp.float32).reshape(*array.shape[:-1], -1, block_size)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True).astype(jnp.float16).astype(jnp.float32) / 8
    codes = jnp.clip(jnp.round(blocks / scale) + 8, 0, 15).astype(jnp.uint8).reshape(array.shape)
    return Digits(codes >> 2, codes & 3, scale[..., 0].astype(jnp.float16), block_size, dtype=array.dtype)


@pytest.fixture(autouse=True)
def _digits() -> Iterator[None]:
    register_format("digits", Digits, encode)
    yield
    del registry._formats["digits"]


W = normal((6, 2 * BLOCK))


@pytest.mark.parametrize("most", [None, 100], ids=["one file", "shards"])
def test_it_comes_back(most: int | None, tmp_path: Path):
    q = encode(W, 16)
    found = load(save(tmp_path, {"w": q, "b": W}, max_shard_bytes=most))["w"]
    assert_same_leaves(found, q)
    assert found.block_size == 16


def test_inspect_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = save(tmp_path, {"w": encode(W)})
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.info("w").format, checkpoint.info("w").shape) == ("digits", W.shape)
    assert main(["inspect", str(path)]) == 0
    assert "digits" in capsys.readouterr().out


def test_checkpoints_are_quantized_to_it(tmp_path: Path):
    dense = save(tmp_path / "dense", {"w": W, "b": jnp.ones(3)})
    path = quantize_checkpoint(dense, tmp_path / "small", [Rule("w", "digits", {"block_size": 16})])
    assert_same_leaves(load(path)["w"], encode(W, 16))


def test_checkpoints_of_it_are_converted(tmp_path: Path):
    path = save(tmp_path / "a", {"w": encode(W)})
    assert_same_leaves(load(convert(path, tmp_path / "b", "safetensors"))["w"], encode(W))


REFUSALS = {
    "gguf": (save_gguf, "'w' is a Digits.*no codec.*dequantize.*`type`"),
    "bitsandbytes": (save_bitsandbytes, "'w'.*Digits.*no such format.*'int8'.*'nf4'"),
}


@pytest.mark.parametrize(("write", "match"), REFUSALS.values(), ids=REFUSALS.keys())
def test_without_a_codec_it_is_refused(write: Any, match: str, tmp_path: Path):
    with pytest.raises(ValueError, match=match):
        write(tmp_path, {"w": encode(W)})
    assert not list(tmp_path.iterdir())


def test_convert_refuses_it_too(tmp_path: Path):
    path = save(tmp_path / "a", {"w": encode(W)})
    with pytest.raises(ValueError, match="no codec"):
        convert(path, tmp_path / "b.gguf", "gguf")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_type_that_is_asked_for_is_no_silent_choice(tmp_path: Path):
    path = save_gguf(tmp_path / "a.gguf", {"w": encode(W)}, type="Q8_0")
    assert open_checkpoint(path).info("w").format == "Q8_0"


# --- with a codec ---


def to_blocks(q: Digits) -> np.ndarray:
    """Q4_0: a float16 scale, then bytes of element j in the low and j + 16 in the high four bits."""
    codes = (4 * np.asarray(q.high) + np.asarray(q.low)).reshape(-1, BLOCK)
    scale = np.asarray(q.scale).reshape(-1, 1).view(np.uint8)
    return np.concatenate([scale, codes[:, :16] | codes[:, 16:] << 4], axis=1)


def from_blocks(blocks: np.ndarray, shape: tuple[int, ...]) -> Digits:
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).reshape(shape)
    scale = blocks[:, :2].copy().view(np.float16).reshape(*shape[:-1], -1)
    return Digits(codes >> 2, codes & 3, scale, dtype=np.dtype(np.float32))  # pyright: ignore[reportArgumentType]


def like(shape: tuple[int, ...]) -> Digits:
    return jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.fixture
def codec() -> Iterator[None]:
    register_gguf_codec(GgufCodec("Q4_0", Digits, to_blocks, from_blocks, like, lambda q: q.block_size == BLOCK))
    yield
    del codecs.CODECS["Q4_0", Digits]


@pytest.mark.usefixtures("codec")
def test_with_a_codec_the_blocks_come_back(tmp_path: Path):
    path = save_gguf(tmp_path / "a.gguf", {"w": encode(W), "b": W})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.info("w").format == "Q4_0"
    assert_same_leaves(load(path)["w"], encode(W))


@pytest.mark.usefixtures("codec")
def test_the_blocks_of_a_codec_are_what_others_read(tmp_path: Path):
    gguf = pytest.importorskip("gguf", reason="the judge of the format")
    tensor = gguf.GGUFReader(save_gguf(tmp_path / "a.gguf", {"w": encode(W)})).tensors[0]
    assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), encode(W).materialize())


@pytest.mark.usefixtures("codec")
def test_blocks_stay_quantized_from_kind_to_kind(tmp_path: Path):
    path = save_gguf(tmp_path / "a.gguf", {"w": encode(W)})
    ours = convert(path, tmp_path / "b", "safetensors")
    assert_same_leaves(load(ours)["w"], encode(W))
    again = convert(ours, tmp_path / "c.gguf", "gguf")
    assert_same_leaves(load(again)["w"], encode(W))
    with open_checkpoint(path) as one, open_checkpoint(again) as other:
        assert np.array_equal(one.entry("w").tensors[0].raw(), other.entry("w").tensors[0].raw())


@pytest.mark.usefixtures("codec")
def test_a_layout_that_the_codec_does_not_have_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'w' is a Digits.*Q4_0.*does not hold this layout"):
        save_gguf(tmp_path / "a.gguf", {"w": encode(W, 16)})


@pytest.mark.usefixtures("codec")
def test_a_codec_is_registered_once():
    with pytest.raises(ValueError, match=r"Q4_0.*Digits already"):
        register_gguf_codec(GgufCodec("Q4_0", Digits, to_blocks))


@pytest.mark.parametrize(
    ("kind", "functions", "match"),
    [
        ("Q9_9", {"encode": to_blocks}, "'Q9_9'.*Q8_0"),
        ("F32", {"encode": to_blocks}, "'F32'.*Q8_0"),
        ("Q4_0", {"decode": from_blocks}, "`decode` or `leaf` goes with `like`"),
    ],
)
def test_a_codec_that_can_not_work_is_refused(kind: str, functions: Any, match: str):
    with pytest.raises(ValueError, match=match):
        register_gguf_codec(GgufCodec(kind, Digits, **functions))


@pytest.mark.usefixtures("codec")
def test_a_codec_that_gives_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrong = lambda q: to_blocks(q)[1:]  # noqa: E731
    monkeypatch.setitem(codecs.CODECS, ("Q4_0", Digits), codecs.GgufCodec("Q4_0", Digits, encode=wrong))
    with pytest.raises(ValueError, match=r"announced as uint8\[12, 18\]"):
        save_gguf(tmp_path / "a.gguf", {"w": encode(W)})
    assert not list(tmp_path.iterdir())


# --- the same for bitsandbytes, as 4-bit codes with a table of their own ---


def bitsandbytes_record(item: ArrayToWrite, like: Digits) -> TensorsToWrite:
    rows, row = like.shape
    state = {"quant_type": "fp4", "blocksize": BLOCK, "dtype": "float32", "shape": [rows, row]}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    sizes = {"": (np.uint8, (rows * row // 2, 1)), ".absmax": (np.float32, (rows * row // BLOCK,))}
    sizes |= {".quant_map": (np.float32, (16,)), ".quant_state.bitsandbytes__fp4": (np.uint8, text.shape)}

    def values() -> list[Any]:
        q: Any = item.make()
        codes = (4 * np.asarray(q.high) + np.asarray(q.low)).reshape(-1, 2)
        packed = codes[:, :1] << 4 | codes[:, 1:]
        return [packed, np.asarray(q.scale, np.float32).reshape(-1), np.arange(-8, 8, dtype=np.float32), text]

    parts = [TensorSpec(item.name + name, np.dtype(dtype), shape) for name, (dtype, shape) in sizes.items()]
    return TensorsToWrite(item.name, parts, values, item.done)


def digits_of(weight: FourBit, like: Digits) -> Digits:
    packed = weight.parts["packed"].raw()
    codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(like.shape)
    scale = weight.absmax().astype(np.float16).reshape(like.scale.shape)
    return Digits(codes >> 2, codes & 3, scale, dtype=np.dtype(np.float32))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def four_bit_codec() -> Iterator[BitsandbytesCodec]:
    made = BitsandbytesCodec("fp4", Digits, lambda weight: like(weight.shape), digits_of, bitsandbytes_record)
    register_bitsandbytes_codec(made)
    yield made
    del bitsandbytes_module.CODECS["fp4", Digits]


def test_with_a_codec_bitsandbytes_keeps_it(four_bit_codec: BitsandbytesCodec, tmp_path: Path):
    path = save_bitsandbytes(tmp_path, {"w": encode(W)})
    assert open_checkpoint(path).kind == "bitsandbytes"
    assert_same_leaves(load(path)["w"], encode(W))
    with pytest.raises(ValueError, match="fp4 for Digits already"):
        register_bitsandbytes_codec(four_bit_codec)


@pytest.mark.usefixtures("four_bit_codec")
def test_without_the_codec_its_file_is_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save_bitsandbytes(tmp_path, {"w": encode(W)})
    monkeypatch.delitem(bitsandbytes_module.CODECS, ("fp4", Digits))
    assert np.array_equal(load(path)["w"], encode(W).materialize())


OWN = [form for form in formats() if form.name != "digits"]


@pytest.mark.parametrize("form", OWN, ids=str)
def test_every_format_can_be_rounded_to_a_type(form: Any, tmp_path: Path):
    path = save_gguf(tmp_path / "a.gguf", {"w": quantize(normal((2, 256)), dtype=form.name)}, type="Q8_0")
    assert open_checkpoint(path).info("w").format == "Q8_0"
