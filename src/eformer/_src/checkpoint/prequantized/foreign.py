"""Files that are no checkpoint of a kind that is read: what each is, and what to do with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DENSE = "save its arrays as safetensors where they are loaded"
FLAX = "`eformer.save` what `flax.serialization.msgpack_restore` reads"
UNPACK = "unpack it, and give the file with the weights"
TORCH = "load it with `torch.load(path, weights_only=True)` and write it by `safetensors.torch.save_file`"


class Foreign(NamedTuple):
    """A kind of file: the bytes it begins with, the endings it has where these are not enough, and what to do."""

    name: str
    begins: bytes | None
    suffixes: tuple[str, ...]
    instead: str
    at: int = 0  # where these bytes are


# The first that fits. Bytes alone decide where there are some; an ending alone where there are none.
KINDS: tuple[Foreign, ...] = (
    Foreign("a Git LFS pointer", b"version https://git-lfs", (), "fetch the file itself: `git lfs pull`"),
    Foreign("a page of HTML", b"<!doctype html", (), "the download failed, or needs a login: fetch the file again"),
    Foreign("a page of HTML", b"<html", (), "the download failed, or needs a login: fetch the file again"),
    Foreign("a page of XML", b"<?xml", (), "the download failed, or needs a login: fetch the file again"),
    Foreign("an archive of NumPy arrays", b"PK\x03\x04", (".npz",), "write `dict(numpy.load(path))` by `eformer.save`"),
    Foreign("a model of Keras", b"PK\x03\x04", (".keras",), "load it with Keras, and `eformer.save` its weights"),
    Foreign("an archive", b"PK\x03\x04", (".zip",), UNPACK),
    Foreign("a checkpoint of PyTorch", b"PK\x03\x04", (), TORCH),
    Foreign("a pickle, most likely of PyTorch", b"\x80\x02", (), TORCH),
    Foreign("a pickle", b"\x80\x03", (), DENSE),
    Foreign("a pickle", b"\x80\x04", (), DENSE),
    Foreign("a pickle", b"\x80\x05", (), DENSE),
    Foreign("an array of NumPy", b"\x93NUMPY", (), "write `numpy.load(path)` by `eformer.save`"),
    Foreign("HDF5, of Keras or others", b"\x89HDF", (), "load it with Keras or h5py, and `eformer.save` its weights"),
    Foreign("GGML of before August 2023", b"lmgg", (), "llama.cpp converted such files to GGUF"),
    Foreign("GGML of before August 2023", b"tjgg", (), "llama.cpp converted such files to GGUF"),
    Foreign("GGML of before August 2023", b"fmgg", (), "llama.cpp converted such files to GGUF"),
    Foreign("GGUF with its bytes the other way round", b"FUGG", (), "convert the model again on this machine"),
    Foreign("a file of gzip", b"\x1f\x8b", (), "unpack it: `gunzip`, or `tar -xzf`"),
    Foreign("a file of zstandard", b"\x28\xb5\x2f\xfd", (), "unpack it: `zstd -d`"),
    Foreign("a file of xz", b"\xfd7zXZ", (), "unpack it: `unxz`, or `tar -xJf`"),
    Foreign("a file of bzip2", b"BZh", (), "unpack it: `bunzip2`, or `tar -xjf`"),
    Foreign("a file of LZ4", b"\x04\x22\x4d\x18", (), "unpack it: `lz4 -d`"),
    Foreign("an archive", b"7z\xbc\xaf", (), UNPACK),
    Foreign("an archive", b"Rar!", (), UNPACK),
    Foreign("a tar archive", b"ustar", (), "unpack it: `tar -xf`", 257),
    Foreign("a pickle", None, (".pkl", ".pickle", ".joblib"), DENSE),
    Foreign("a table of Parquet", b"PAR1", (), "it holds data, not weights"),
    Foreign("a model of ONNX", None, (".onnx", ".onnx_data"), "export its weights by `onnx.numpy_helper.to_array`"),
    Foreign("MessagePack, as Flax writes", None, (".msgpack",), FLAX),
    Foreign("a checkpoint of PyTorch", None, (".pt", ".pth", ".bin", ".ckpt"), TORCH),
    Foreign("an archive of NumPy arrays", None, (".npz",), "write `dict(numpy.load(path))` by `eformer.save`"),
    Foreign("a model of Keras", None, (".h5", ".hdf5", ".keras"), "load it with Keras, and `eformer.save` its weights"),
    Foreign("a model of TensorFlow Lite", None, (".tflite",), DENSE),
    Foreign("a model of OpenVINO", None, (".xml",), DENSE),
    Foreign("JSON", b"{", (), "give the file with the weights, or its index, which ends in .safetensors.index.json"),
)  # fmt: skip
SHOWN = 60  # bytes of a text
BEGINNING = 512  # bytes of a file that tell its kind
OTHER_WEIGHTS = tuple(sorted({suffix for kind in KINDS if kind.begins is None for suffix in kind.suffixes} - {".xml"}))
HUB_NAME = re.compile(r"(hf://)?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def what_it_is(data: bytes, path: Path | None) -> str | None:
    """What a file that begins with these bytes is, and what to do; None if it is of no kind that is known."""
    suffix = "" if path is None else path.suffix.lower()
    start = data.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for kind in KINDS:
        begins = kind.begins is None or data[kind.at :].startswith(kind.begins)
        begins = begins or (kind.at == 0 and kind.begins is not None and start.startswith(kind.begins.lower()))
        if begins and (suffix in kind.suffixes or not kind.suffixes):
            return f"it is {kind.name}, which is not read here: {kind.instead}"
    text = data[:SHOWN].decode("ascii", "replace")
    if data and all(each.isprintable() or each.isspace() for each in text):
        return f"it is text, {text!r}: a pointer to the file, or what a server answered; fetch the file itself"
    return None


def how_to_fetch(name: str) -> str:
    """What to say of a path that is not there and may be the name of a model on a hub; empty if it can't be one."""
    if "://" in name and not name.startswith("hf://"):
        return "; addresses are not read: fetch the files first"
    if not HUB_NAME.fullmatch(name) or Path(name).suffix in (".safetensors", ".gguf", ".json", *OTHER_WEIGHTS):
        return ""
    own = name.removeprefix("hf://")
    return f"; if it is the name of a model on the Hugging Face Hub, `hf download {own} --local-dir FOLDER` fetches it"
