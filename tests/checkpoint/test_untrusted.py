"""Files that lie: each is refused in words, before anything is allocated for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantization.cases import normal

from eformer.checkpoint import CheckpointError, load, open_checkpoint, save
from eformer.ops.quantization import quantize


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: Any = 0, stop: Any = 4, shape: Any = (1,), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **more}


FOUR = bytes(4)
WRONG = {
    "nothing": (b"", "0 bytes are too few"),
    "no header": (b"\0" * 7, "too few"),
    "a header beyond the end": (file_of({}, length=2**63), "a header of 9223372036854775808 bytes"),
    "a huge header": (file_of({}, length=10**9), "a header of 1000000000 bytes"),
    "an empty header": (file_of(b"", length=0), "a header of 0 bytes"),
    "no JSON": (file_of(b"{nope}"), "the header can't be read"),
    "no object": (file_of(b"[]"), "no JSON object"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "the header can't be read"),
    "too deep": (file_of(b'{"a":' + b"[" * 100_000), "the header can't be read"),
    "deep": (file_of(b'{"a":' + b"[" * 450 + b"]" * 450 + b"}"), "more than 400 levels deep"),
    "a number of a million digits": (file_of(b'{"a":' + b"1" * 10**6 + b"}"), "the header can't be read"),
    "a name twice": (file_of(b'{"x":1,"x":2}'), "'x' is there twice"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "must map text to text"),
    "a list of metadata": (file_of({"__metadata__": []}), "must map text to text"),
    "no entry": (file_of({"x": 1}), "tensor 'x': an entry of the header has"),
    "a part missing": (file_of({"x": {"dtype": "F32", "shape": []}}), "an entry of the header has"),
    "a part more": (file_of({"x": entry(pickle="x")}, FOUR), "an entry of the header has"),
    "an unknown dtype": (file_of({"x": entry(dtype="F128")}, FOUR), "the dtype 'F128' is not one of"),
    "a list as dtype": (file_of({"x": entry(dtype=["F32"])}, FOUR), "is not one of"),
    "a negative size": (file_of({"x": entry(shape=[-1])}, FOUR), "the shape"),
    "a fraction": (file_of({"x": entry(shape=[1.0])}, FOUR), "the shape"),
    "true": (file_of({"x": entry(shape=[True])}, FOUR), "the shape"),
    "many axes": (file_of({"x": entry(shape=[1] * 99)}, FOUR), "the shape"),
    "a product that overflows": (file_of({"x": entry(shape=[2**40, 2**40])}, FOUR), "absurd"),
    "absurd and empty": (file_of({"x": entry(stop=0, shape=[2**60, 0])}), "absurd"),
    "offsets beyond": (file_of({"x": entry(stop=8, shape=[2])}, FOUR), "outside of the 4 bytes"),
    "offsets before": (file_of({"x": entry(start=-4, stop=0)}, FOUR), "outside of"),
    "offsets reversed": (file_of({"x": entry(start=4, stop=0)}, FOUR), "outside of"),
    "offsets of text": (file_of({"x": entry("0", "4")}, FOUR), "two integers"),
    "three offsets": (file_of({"x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4, 4]}}, FOUR), "two integers"),
    "too few bytes": (file_of({"x": entry(shape=[2])}, FOUR), "takes 8 bytes"),
    "overlapping": (file_of({"x": entry(), "y": entry()}, FOUR), "overlaps the one before"),
    "a gap": (file_of({"x": entry(4, 8)}, bytes(8)), "4 stray bytes before it"),
    "bytes at the end": (file_of({"x": entry()}, bytes(9)), "5 stray bytes after"),
}


@pytest.mark.parametrize(("data", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_header_that_lies_is_refused(data: bytes, match: str):
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(data)


def test_an_error_says_file_tensor_and_what(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"x": entry(shape=[2])}, FOUR))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert (caught.value.file, caught.value.tensor) == (str(path), "x")
    assert str(caught.value).startswith(f"{path}: tensor 'x': F32[2] takes 8 bytes")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(CheckpointError, match="the file is empty"):
        open_checkpoint(tmp_path / "empty.safetensors")


# --- our metadata ---


def described(**changes: Any) -> bytes:
    """A file with the quantized array "w", described in another way; "a/b" is key "b" in key "a"."""
    q = quantize(normal((4, 64)), dtype="nf4")
    packed, absmax = np.asarray(q.packed).tobytes(), np.asarray(q.absmax).tobytes()
    static = {"block_size": 64, "axis": -1, "padding": 0, "dtype": {"dtype": "float32"}, "use_kernel": True}
    leaves = {"packed": "w.packed", "absmax": "w.absmax"}
    ours: Any = {
        "version": 1,
        "tree": {"dict": {"w": "w"}},
        "arrays": {"w": {"class": "ArrayNF4", "static": static, "leaves": leaves}},
    }
    for path, value in changes.items():
        *keys, last = path.split("/")
        place = ours
        for key in keys:
            place = place[key]
        place[last] = value
    header = {
        "__metadata__": {"eformer": json.dumps(ours)},
        "w.absmax": entry(0, len(absmax), [4, 1]),
        "w.packed": entry(len(absmax), len(absmax) + len(packed), [4, 32], "U8"),
    }
    return file_of(header, absmax + packed)


def test_the_file_that_is_changed_below_is_right():
    assert load(described())["w"].shape == (4, 64)


STATIC, LEAVES = "arrays/w/static/", "arrays/w/leaves/"
LIES = {
    "a later version": ({"version": 2}, "version 2; this release reads 1"),
    "no version": ({"version": None}, "version None"),
    "a class from elsewhere": ({"arrays/w/class": "os.system"}, "the class 'os.system' is not one of"),
    "a class that is no name": ({"arrays/w/class": ["ArrayNF4"]}, "is not one of"),
    "no description": ({"arrays/w": "w"}, "is described by"),
    "arrays of another type": ({"arrays": []}, "must map names"),
    "a field of its own": ({STATIC + "__class__": 1}, "has no static field '__class__'"),
    "a leaf as static": ({STATIC + "packed": 1}, "has no static field 'packed'"),
    "a static as leaf": ({LEAVES + "axis": "w.packed"}, "has no leaf 'axis'"),
    "a method": ({STATIC + "materialize": 1}, "has no static field"),
    "a tensor that is not there": ({LEAVES + "packed": "nope"}, "its tensor 'nope' is missing"),
    "no leaves": ({"arrays/w/leaves": {}}, "tensor 'w'"),
    "leaves mixed up": ({LEAVES + "packed": "w.absmax", LEAVES + "absmax": "w.packed"}, "packed must be uint8"),
    "an odd block": ({STATIC + "block_size": 63}, "must be even"),
    "a block of text": ({STATIC + "block_size": "64"}, "must be an int"),
    "an axis too far": ({STATIC + "axis": 5}, "`axis` is counted from the end"),
    "an axis of another": ({STATIC + "axis": -2}, "that is no array of shape"),
    "too much padding": ({STATIC + "padding": 10**9}, "that is no"),
    "a dtype that is none": ({STATIC + "dtype": {"dtype": "object"}}, "which is no dtype"),
    "an object": ({STATIC + "dtype": {"a": 1}}, "which is no dtype"),
    "itself": ({LEAVES + "packed": {"class": "ArrayNF4", "static": {}, "leaves": {}}}, "tensor 'w'"),
    "a huge block": ({STATIC + "block_size": 2**40}, "at most 2147483647"),
}


@pytest.mark.parametrize(("changes", "match"), LIES.values(), ids=LIES.keys())
def test_metadata_that_lies_is_refused(changes: dict[str, Any], match: str):
    with pytest.raises(CheckpointError, match=match):
        load(described(**changes))


TREES = {
    "an unknown name": ({"dict": {"a": "nope"}}, "tensor 'nope': the tree names it"),
    "a number": ({"dict": {"a": 1}}, "the tree has a node"),
    "two kinds": ({"dict": {}, "list": []}, "the tree has a node"),
    "a list as dict": ({"dict": []}, "the tree has a node"),
    "odd pairs": ({"items": [["a"]]}, "the tree has a node"),
    "a list as key": ({"items": [[["a"], "w"]]}, "the tree has a node"),
    "a strange kind": ({"pickle": "w"}, "the tree has a node"),
}


@pytest.mark.parametrize(("tree", "match"), TREES.values(), ids=TREES.keys())
def test_a_tree_that_lies_is_refused(tree: Any, match: str):
    with pytest.raises(CheckpointError, match=match):
        load(described(tree=tree))


def test_a_deep_tree_is_refused():
    tree: Any = "w"
    for _ in range(150):
        tree = {"list": [tree]}
    with pytest.raises(CheckpointError, match="more than 100 levels deep"):
        load(described(tree=tree))


# --- indexes ---


def index_file(folder: Path, weight_map: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


NAMES = [
    "/etc/passwd",
    "../other.safetensors",
    "sub/x.safetensors",
    "..\\x.safetensors",
    "c:x.safetensors",
    "",
    "x\0.safetensors",
]
NAMES += ["config.json", "a\n.safetensors", 3, None, ["a.safetensors"]]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_index_names_files_of_its_folder(name: Any, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"must be the name of a \.safetensors file in the folder of the index"):
        open_checkpoint(index_file(tmp_path, {"x": name}))


def test_a_shard_is_no_link_to_elsewhere(tmp_path: Path):
    elsewhere, here = tmp_path / "a", tmp_path / "b"
    save(elsewhere, {"x": np.ones(2)})
    here.mkdir()
    (here / "x.safetensors").symlink_to(elsewhere / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'x\.safetensors' is a link to another folder"):
        open_checkpoint(index_file(here, {"x": "x.safetensors"}))
    (here / "loop.safetensors").symlink_to(here / "loop.safetensors")
    with pytest.raises(CheckpointError, match=r"'loop.safetensors' can't be read"):
        open_checkpoint(index_file(here, {"x": "loop.safetensors"}))
    with pytest.raises(CheckpointError, match=r"'gone.safetensors' can't be read"):
        open_checkpoint(index_file(here, {"x": "gone.safetensors"}))


def test_a_shard_holds_what_the_index_says(tmp_path: Path):
    save(tmp_path / "a.safetensors", {"x": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"tensor 'y': the index says it is in 'a.safetensors'"):
        open_checkpoint(index_file(tmp_path, {"y": "a.safetensors"}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}, "metadata": 1}', "{"], ids=repr
)
def test_an_index_is_an_object_with_a_map(text: str, tmp_path: Path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        open_checkpoint(path)
