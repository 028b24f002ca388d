"""Mistakes with files."""

from __future__ import annotations

from pathlib import Path

import pytest

import eformer
from eformer import quantize

from .common import PARAMS, Mistakes, W, check, q

FILES: Mistakes = {
    "a model of the hub": (
        lambda path: eformer.load("org/model"),
        FileNotFoundError,
        "there is no such file | hf download org/model",
    ),
    "a file that is not there": (
        lambda path: eformer.load(path / "none.safetensors"),
        FileNotFoundError,
        "there is no such file | none.safetensors",
    ),
    "a misspelt file": (
        lambda path: eformer.load(path / "modle.safetensors"),
        FileNotFoundError,
        "did you mean | model.safetensors",
    ),
    "an empty folder": (
        lambda path: eformer.load(path / "empty"),
        eformer.CheckpointError,
        "the folder has no .safetensors file",
    ),
    "a folder of torch": (
        lambda path: eformer.load(path / "torch"),
        eformer.CheckpointError,
        "pytorch_model.bin | torch.load(path, weights_only=True)",
    ),
    "a file of torch": (
        lambda path: eformer.load(path / "torch" / "pytorch_model.bin"),
        eformer.CheckpointError,
        "a checkpoint of PyTorch | safetensors.torch.save_file",
    ),
    "bytes of nothing": (
        lambda path: eformer.load(b"12345678"),
        eformer.CheckpointError,
        "fetch the file itself",
    ),
    "a number": (lambda path: eformer.load(3), TypeError, "a path is a text | got int | `load(path)`"),
    "a tree": (lambda path: eformer.load(PARAMS), TypeError, "a path is a text | got dict | `load(path)`"),
    "like of another shape": (
        lambda path: eformer.load(path / "model.safetensors", like={"w": W.T}),
        eformer.CheckpointError,
        "'w' | (64, 96) | (96, 64)",
    ),
    "like with other names": (
        lambda path: eformer.load(path / "model.safetensors", like={"v": W}),
        eformer.CheckpointError,
        "'v' | which has 'b', 'w'",
    ),
    "flat and like": (
        lambda path: eformer.load(path / "model.safetensors", flat=True, like=PARAMS),
        ValueError,
        "two different trees | give one",
    ),
    "a name that is not there": (
        lambda path: eformer.open_checkpoint(path / "model.safetensors")["weigth"],
        KeyError,
        "no array 'weigth' | 'b', 'w'",
    ),
    "arguments the other way round": (
        lambda path: eformer.save(PARAMS, path / "new.safetensors"),
        TypeError,
        "got dict | save(path, tree)",
    ),
    "a misspelt suffix": (
        lambda path: eformer.save(path / "new.saftensors", PARAMS),
        ValueError,
        "did you mean | new.safetensors",
    ),
    "torch's suffix": (
        lambda path: eformer.save(path / "new.bin", PARAMS),
        ValueError,
        "must end in .safetensors | .bin files are not written here",
    ),
    "a file that is there": (
        lambda path: eformer.save(path / "model.safetensors", PARAMS),
        FileExistsError,
        "exists | `overwrite=True` replaces it",
    ),
    "a kind that is none": (
        lambda path: eformer.save(path / "new", PARAMS, kind="compressed_tensors"),
        ValueError,
        "'compressed_tensors' | did you mean 'compressed-tensors'?",
    ),
    "GGUF by the wrong suffix": (
        lambda path: eformer.save(path / "new.safetensors", PARAMS, kind="gguf"),
        ValueError,
        "must end in .gguf | another kind",
    ),
    "scales that MLX lacks": (
        lambda path: eformer.save(path / "new", {"m": {"weight": quantize(W, dtype="int4")}}, kind="mlx"),
        ValueError,
        "'m.weight' | `double_quantization=False`",
    ),
    "columns for MLX": (
        lambda path: eformer.save(path / "new", {"m": {"weight": q("int4")}}, kind="mlx"),
        ValueError,
        "'m.weight' | along the last axis | `q.mT`",
    ),
    "nf4 as compressed-tensors": (
        lambda path: eformer.save(path / "new", {"w": q("nf4")}, kind="compressed-tensors"),
        ValueError,
        "'w' | int4, int8 or fp8",
    ),
    "nf4 as GGUF": (
        lambda path: eformer.save(path / "new.gguf", {"w": q("nf4")}),
        ValueError,
        "'w' | `type='Q8_0'` | `type='F32'`",
    ),
    "a type of GGUF for safetensors": (
        lambda path: eformer.save(path / "new.safetensors", PARAMS, type="Q8_0"),
        ValueError,
        "`type='Q8_0'` is for GGUF",
    ),
    "a type that is none": (
        lambda path: eformer.save(path / "new.gguf", PARAMS, type="Q9_0"),
        ValueError,
        "'Q9_0' | Q4_K",
    ),
    "shards of GGUF": (
        lambda path: eformer.save(path / "new.gguf", PARAMS, max_shard_bytes=9),
        ValueError,
        "`max_shard_bytes` is for safetensors",
    ),
    "shards of nothing": (
        lambda path: eformer.save(path / "new", PARAMS, max_shard_bytes=0),
        ValueError,
        "a positive int or None | got 0",
    ),
    "metadata that is no text": (
        lambda path: eformer.save(path / "new", PARAMS, metadata={"layers": 3}),
        TypeError,
        "'layers': 3 | `json.dumps`",
    ),
    "a leaf that is no array": (
        lambda path: eformer.save(path / "new", {"w": W, "name": "model"}),
        TypeError,
        "'name' is a str | only arrays and numbers",
    ),
    "quantize a checkpoint into itself": (
        lambda path: eformer.quantize_checkpoint(path, path, overwrite=True),
        ValueError,
        "would be replaced | another place",
    ),
    "a checkpoint in no format": (
        lambda path: eformer.quantize_checkpoint(path, path / "new", "int44"),
        ValueError,
        "unknown format 'int44' | did you mean 'int4'?",
    ),
    "a checkpoint that is not there": (
        lambda path: eformer.quantize_checkpoint(path / "none", path / "new"),
        FileNotFoundError,
        "there is no such file",
    ),
    "the target forgotten": (
        lambda path: eformer.quantize_checkpoint(path),
        TypeError,
        "missing 1 required | 'target'",
    ),
    "the format where the target is": (
        lambda path: eformer.quantize_checkpoint(path, "int4"),
        ValueError,
        "`target='int4'` is where to write | quantize_checkpoint(source, target, 'int4') | ./int4",
    ),
    "convert to a format": (
        lambda path: eformer.convert(path, path / "new", "int4"),
        ValueError,
        "`kind='int4'` | `quantize_checkpoint` changes the format",
    ),
    "convert to what is none": (
        lambda path: eformer.convert(path, path / "new", "mxl"),
        ValueError,
        "'mxl' | did you mean 'mlx'?",
    ),
    "statistics that are not there": (
        lambda path: eformer.Statistics.load(path / "none.npz"),
        FileNotFoundError,
        "No such file | none.npz",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "empty").mkdir()
    (path / "torch").mkdir()
    (path / "torch" / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    eformer.save(path / "model.safetensors", PARAMS)
    return path


@pytest.mark.parametrize("mistake", FILES.values(), ids=FILES)
def test_mistakes_with_files(mistake, folder):
    check(*mistake, folder)
