"""What is not read is refused by its name, wherever it is opened; and what every model may have is not."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from eformer.examples.llm import load_model

from eformer._src.checkpoint.prequantized.methods import METHODS, Method
from eformer.checkpoint import CheckpointError, convert, load, open_checkpoint, quantize_checkpoint, save
from eformer.cli import main
from eformer.model import default_rules

from .files import safetensors_file
from .refused_page import PAGE, written

Tensors = Mapping[str, np.ndarray]
DENSE = {"m.weight": np.ones((4, 8), np.float32)}
CODES = np.arange(32, dtype=np.int8).reshape(4, 8)
SCALE = np.ones((4, 1), np.float16)
FP8 = np.ones((4, 8), ml_dtypes.float8_e4m3fn)


def folder_of(folder: Path, tensors: Tensors = DENSE, metadata: Any = None, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors_file(tensors, metadata))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def says(method: Any, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


# --- by configuration ---

UNREAD = [(method, name) for method in METHODS if not method.reads for name in method.says]


@pytest.mark.parametrize(("method", "name"), UNREAD, ids=[name for _, name in UNREAD])
def test_a_method_that_is_not_read_is_refused_by_name(method: Method, name: str, tmp_path: Path):
    with pytest.raises(CheckpointError) as raised:
        load(folder_of(tmp_path, config=says(name.upper())))
    assert all(part in str(raised.value) for part in (method.name, method.instead, "raw=True", "config.json"))


READ = [name for method in METHODS if method.reads for name in method.says]


@pytest.mark.parametrize("name", READ)
def test_a_method_that_is_read_is_not_refused(name: str, tmp_path: Path):
    assert load(folder_of(tmp_path, config=says(name))).keys() == DENSE.keys()


FORMATS = [(method, key) for method in METHODS if method.reads for key in method.only]


@pytest.mark.parametrize(("method", "key"), FORMATS, ids=[f"{method.name} {key}" for method, key in FORMATS])
def test_a_format_of_it_that_is_not_read_is_refused(method: Method, key: str, tmp_path: Path):
    folder = folder_of(tmp_path, config=says(method.says[0], layers={"m": {key: "new"}}))
    with pytest.raises(CheckpointError, match=f"`{key}` 'new', which is not read for {method.name}"):
        load(folder)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"config": says("foo")}, "'foo', a method that is unknown here"),
    "unknown, with known keys": ({"config": says("foo", bits=4, group_size=32)}, "'foo'"),
    "of the text model": ({"config": {"text_config": says("aqlm")}}, "AQLM"),
    "of a part of a part": ({"config": {"a": {"b": says("foo")}}}, "'foo'"),
    "as text": ({"config": {"quantization": "q4"}}, "'q4'"),
    "as a number": ({"config": {"quantization_config": 3}}, "names no method: 3"),
    "no method at all": ({"config": {"quantization_config": {"secret": 1}}}, "names no method"),
    "early compressed-tensors": ({"config": {"compression_config": {"format": "new", "config_groups": {}}}}, "'new'"),
    "a group": ({"config": says("compressed-tensors", config_groups={"a": {"format": "mxfp5"}})}, "'mxfp5'"),
    "rotations": ({"config": says("compressed-tensors", transform_config={"config_groups": {"a": 1}})}, "rotates"),
    "sparsity": ({"config": says("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"})}, "sparse-24"),
    "MLX": ({"config": {"quantization": {"bits": 4, "group_size": 32, "mode": "nf4"}}}, "`mode` 'nf4'"),
    "a module of MLX": ({"config": {"quantization": {"bits": 4, "m": {"mode": "mxint4"}}}}, "'mxint4'"),
    "Marlin of GPTQ": ({"config": says("gptq", checkpoint_format="marlin")}, "'marlin', which is not read for GPTQ"),
    "old Marlin": ({"quantize_config": {"bits": 4, "desc_act": False, "is_marlin_format": True}}, "interleaved"),
    "Marlin of AWQ": ({"config": says("awq", version="marlin")}, "not read for AWQ"),
    "llm-awq": ({"quant_config": {"w_bit": 4, "version": "gemv_fast"}}, "'gemv_fast'"),
    "auto-round": ({"config": says("auto-round", packing_format="auto_round:fp8_static")}, "fp8_static"),
    "ModelOpt": ({"hf_quant_config": {"quantization": {"quant_algo": "W4A8_AWQ"}}}, "'W4A8_AWQ'"),
    "a layer of ModelOpt": (
        {"hf_quant_config": {"quantization": {"quant_algo": "MIXED_PRECISION", "l": {"quant_algo": "INT4"}}}},
        "'INT4'",
    ),
    "bitsandbytes": ({"config": says("bitsandbytes", bnb_4bit_quant_type="af4")}, "'af4'"),
    "auto-round's own": ({"quantization_config": {"quant_method": "foo"}}, "quantization_config.json says"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_are_refused(name: str, tmp_path: Path):
    files, words = CONFIGS[name]
    folder = folder_of(tmp_path, **files)
    with pytest.raises(CheckpointError, match=words):
        load(folder)
    assert np.array_equal(load(folder, raw=True)["m.weight"], DENSE["m.weight"])


def test_the_header_of_a_file_speaks_too():
    metadata = {"quantization_config": json.dumps({"method": "svdquant"})}
    with pytest.raises(CheckpointError, match=r"the header says by `quantization_config` .* SVDQuant"):
        load(safetensors_file(DENSE, metadata))


FINE: dict[str, dict[str, Any]] = {
    "nothing": {"config": {"model_type": "llama"}},
    "null": {"config": {"quantization_config": None}},
    "an audio codec": {"config": {"encoder": {"quantization": {"codebooks": 8}}}},
    "of ONNX": {"quantize_config": {"per_channel": True, "reduce_range": True}},
    "of a weight that is dense": {"config": says("gptq", bits=4, group_size=32)},
}


@pytest.mark.parametrize("name", FINE)
def test_configurations_that_are_not_refused(name: str, tmp_path: Path):
    assert load(folder_of(tmp_path, **FINE[name])).keys() == DENSE.keys()


# --- by tensors ---

ENDS = [(method, ends) for method in METHODS for ends in method.tensors]


@pytest.mark.parametrize(("method", "ends"), ENDS, ids=[f"{method.name} {ends[0]}" for method, ends in ENDS])
def test_the_tensors_of_a_method_are_refused_by_its_name(method: Method, ends: tuple[str, ...]):
    tensors = {f"layers.0.m{end}": np.ones((4, 8), np.int16) for end in ends}
    with pytest.raises(CheckpointError, match="layers") as raised:
        load(safetensors_file(tensors))
    assert method.name in str(raised.value)
    assert len(load(safetensors_file(tensors), raw=True)) == len(ends)


def test_codes_that_are_written_as_floats():
    with pytest.raises(CheckpointError, match="HQQ"):
        load(safetensors_file({"m.W_q": SCALE, "m.scale": SCALE}))


def test_floats_with_such_names_are_floats():
    tensors = {"m.B": SCALE, "m.s": SCALE, "m.codes": SCALE, "m.codebooks": SCALE}
    assert load(safetensors_file(tensors)).keys() == tensors.keys()


UNKNOWN: dict[str, Tensors] = {
    "integers and scales": {"m.stuff": CODES, "m.stuff_scale": SCALE},
    "FP8 and scales": {"m.stuff": FP8, "m.scale_of_it": SCALE},
    "bytes and tables": {"m.blob": CODES.view(np.uint8), "m.lut": SCALE},
    "flat codes": {"m.blob": CODES.ravel(), "m.absmax": SCALE},
    "experts": {"gate_up_proj": CODES[None], "gate_up_proj_scales": SCALE},
    "names of nobody": {"m.alpha": CODES.view(np.int32), "m.beta": SCALE},
    "a weight of integers": {"m.weight": CODES.astype(np.int64)},
    "an index of codes": {"attn.key": CODES, "attn.key_scale": SCALE},
    "codes that are named like scales": {"m.q_blob": CODES[0], "m.step": SCALE, "m.zeros": SCALE},
    "a vector of bytes": {"m.blob": np.zeros(256, np.uint8), "m.beta": SCALE},
    "a weight of integers alone": {"weight": CODES},
    "inside a weight": {"m.weight.data": CODES, "m.weight.step": SCALE},
    "powers of two": {"m.weight": np.ones((4, 8), np.float16), "m.e": SCALE.astype(ml_dtypes.float8_e8m0fnu)},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_tensors_of_nobody_are_refused(name: str):
    source = safetensors_file(UNKNOWN[name])
    with pytest.raises(CheckpointError, match="most likely codes of a quantization that is not read"):
        load(source)
    assert load(source, raw=True).keys() == UNKNOWN[name].keys()


def test_a_layout_with_one_more_scale_is_another_layout():
    tensors = {"m.weight": FP8, "m.weight_scale": SCALE, "m.input_scale": np.float32(1), "m.k_scale": np.float32(1)}
    assert load(safetensors_file(tensors)).keys() == {"m.weight", "m.input_scale", "m.k_scale"}
    with pytest.raises(CheckpointError, match=r"'m\.weight_scale_3': it is beside 'm\.weight', of the layout f"):
        load(safetensors_file({**tensors, "m.weight_scale_3": SCALE}))


INTS = np.arange(32).reshape(4, 8)
LEGITIMATE: dict[str, dict[str, Any]] = {
    "positions": {"embeddings.position_ids": INTS, "embeddings.weight": SCALE},
    "32-bit positions": {"embeddings.position_ids": INTS.astype(np.int32), "embeddings.scale": SCALE},
    "batch norm": {"bn.num_batches_tracked": np.int64(3), "bn.weight": SCALE[0], "bn.running_mean": SCALE[0]},
    "Swin": {"attn.relative_position_index": INTS, "attn.relative_position_bias_table": np.ones((4, 2), np.float32)},
    "masks": {"attn.bias": np.ones((1, 1, 4, 4), bool), "attn.masked_bias": np.float32(-1e4)},
    "masks of bytes": {"attn.bias": np.ones((1, 1, 4, 4), np.uint8), "attn.masked_bias": np.float32(-1e4)},
    "random keys": {"state.rng_keys": INTS.astype(np.uint32), "state.loss": SCALE},
    "flags": {"m.enabled": np.ones(8, np.uint8), "m.beta": SCALE},
    "tokens": {"input_ids": INTS.astype(np.int32), "labels": INTS, "loss_scale": np.float32(3)},
    "images": {"images": CODES.view(np.uint8), "mean": SCALE},
    "a graph": {"edge_index": INTS, "x": np.ones((8, 4), np.float32)},
    "optimizer": {"opt.count": np.int32(7), "opt.mu.w": SCALE, "step": INTS[0]},
    "FP8 as a cast": {"m.weight": FP8, "m.bias": SCALE[:, 0]},
    "integers alone": {"x": CODES},
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_integers_of_every_model_load(name: str):
    found = load(safetensors_file(LEGITIMATE[name]))
    assert all(np.array_equal(found[key], value) for key, value in LEGITIMATE[name].items())


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_was_saved_as_arrays_comes_back_as_arrays(name: str, tmp_path: Path):
    tensors = {key: jnp.asarray(value) for key, value in UNKNOWN[name].items()}
    found = load(save(tmp_path / "a.safetensors", tensors))
    assert all(np.array_equal(found[key], value) for key, value in tensors.items())


# --- on every way in ---


def in_shards(folder: Path) -> Path:
    shards = {"a.safetensors": {"m.codes": CODES}, "b.safetensors": {"m.codebooks": SCALE}}
    for name, tensors in shards.items():
        (folder / name).write_bytes(safetensors_file(tensors))
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "open": lambda source, to: open_checkpoint(source),
    "load": lambda source, to: load(source),
    "load like": lambda source, to: load(source, like={"m": {"codes": jnp.asarray(CODES)}}),
    "load a copy": lambda source, to: load(source, copy=True),
    "quantize": lambda source, to: quantize_checkpoint(source, to, default_rules("nf4")),
    "convert": lambda source, to: convert(source, to, "safetensors"),
    "the example": lambda source, to: load_model(source),
}


@pytest.mark.parametrize("source", [folder_of, in_shards], ids=["file", "shards"])
@pytest.mark.parametrize("way", WAYS)
def test_no_way_goes_around(way: str, source: Callable[[Path], Path], tmp_path: Path):
    (tmp_path / "a").mkdir()
    folder = source(tmp_path / "a")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **says("aqlm")}))
    with pytest.raises(CheckpointError, match="AQLM"):
        WAYS[way](folder, tmp_path / "b")
    assert not (tmp_path / "b").exists()


COMMANDS = [["inspect"], ["quantize", "b"], ["convert", "b"], ["convert", "b", "--to", "mlx"], ["compare", "{}"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nor_does_a_command(command: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    folder = str(in_shards(tmp_path))
    name, *rest = command
    assert main([name, folder, *(each.format(folder) for each in rest)]) == 1
    assert "AQLM" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_inspect_lists_what_is_there(tmp_path: Path, capsys: Any):
    assert main(["inspect", str(in_shards(tmp_path)), "--raw"]) == 0
    assert "m.codes" in capsys.readouterr().out


# --- other kinds of files ---

ZIP = b"PK\x03\x04" + bytes(60)
FILES: dict[str, tuple[str, bytes, str]] = {
    "PyTorch": ("model.pt", ZIP, "PyTorch.*torch.load"),
    "old PyTorch": ("pytorch_model.bin", b"\x80\x02\x8a\nl\xfc\x9c", "pickle.*torch.load"),
    "renamed": ("model.safetensors", ZIP, "PyTorch"),
    "npz": ("a.npz", ZIP, "NumPy"),
    "npy": ("a.npy", b"\x93NUMPY\x01\x00", "numpy.load"),
    "onnx": ("a.onnx", b"\x08\x07\x12\x07pytorch", "ONNX"),
    "h5": ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(50), "HDF5.*Keras"),
    "keras": ("a.keras", ZIP, "Keras"),
    "msgpack": ("flax_model.msgpack", b"\x81\xa6params", "flax.serialization"),
    "Git LFS": ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "Git LFS, GGUF": ("model.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "HTML": ("model.safetensors", b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML.*fetch"),
    "HTML after a space": ("model.gguf", b"\n <html><body>Sign in</body></html>", "HTML"),
    "JSON": ("model.safetensors", b'{"error": "not found"}', "JSON"),
    "gzip": ("a.tar.gz", b"\x1f\x8b\x08" + bytes(50), "unpack"),
    "zip": ("model.zip", ZIP, "archive.*unpack"),
    "tar": ("model.nemo", bytes(257) + b"ustar\x0000" + bytes(200), "tar archive.*tar -xf"),
    "xz": ("model.safetensors.xz", b"\xfd7zXZ\x00" + bytes(50), "unxz"),
    "pickle of protocol 0": ("model.pkl", b"(dp0\nS'a'\np1\n", "pickle"),
    "what a server answered": ("model.safetensors", b"Access denied. Please log in.", "text, 'Access denied"),
    "a pointer of Xet": ("model.safetensors", b"# xet version 0\nfilesize = 12\n", "text, '# xet version 0"),
    "nothing known": (
        "model.safetensors",
        b"\x7fELF\x02\x01" + bytes(50),
        r"no safetensors file.*begins with b'\\x7fELF",
    ),
    "big-endian GGUF": ("model.gguf", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "old GGML": ("ggml.bin", b"tjgg" + bytes(50), "GGUF"),
}


@pytest.mark.parametrize("name", FILES)
def test_other_files_are_named(name: str, tmp_path: Path):
    file, data, words = FILES[name]
    (tmp_path / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / file)


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path):
    (in_shards(tmp_path) / "a.safetensors").write_bytes(safetensors_file({"m.codes": SCALE, "n.weight": SCALE}))
    with pytest.raises(
        CheckpointError, match=r"'n\.weight': it is in 'a\.safetensors', and the index does not name it"
    ):
        load(tmp_path)
    assert load(tmp_path, raw=True, flat=True).keys() == {"m.codes", "m.codebooks", "n.weight"}


def test_a_shard_that_was_not_fetched(tmp_path: Path):
    (in_shards(tmp_path) / "b.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid\n")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: it is a Git LFS pointer"):
        load(tmp_path)


def test_a_folder_of_other_files(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(ZIP)
    with pytest.raises(
        CheckpointError, match=r"no \.safetensors file.*'pytorch_model\.bin', it is a checkpoint of PyTorch"
    ):
        load(tmp_path)


@pytest.mark.parametrize("name", ["org/model-7b", "hf://org/Model.v1"])
def test_the_name_of_a_model_on_a_hub(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    own = name.removeprefix("hf://")
    with pytest.raises(FileNotFoundError, match=f"hf download {own} --local-dir"):
        load(name)
    assert main(["inspect", name]) == 1
    assert f"hf download {own}" in capsys.readouterr().err


def test_the_page_is_made_from_the_registry():
    text = PAGE.read_text()
    assert text == written(text), "run `python -m tests.checkpoint.refused_page`"
    assert all(f"| {method.name} |" in text for method in METHODS)
