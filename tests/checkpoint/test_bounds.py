"""Loading takes memory in proportion to the file, and opening it takes work in proportion, whatever it says."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantization.cases import normal

from eformer._src.checkpoint.gguf import read as gguf
from eformer._src.checkpoint.gguf.types import GROUPED, IDS, PLAIN, TYPES
from eformer._src.kernels.reference import NF4_CODES
from eformer.checkpoint import CheckpointError, load, open_checkpoint, save, save_bitsandbytes, save_gguf
from eformer.ops.quantization import Array8B, quantize

from .files import ours, parts_of, safetensors_file, with_header
from .layout_examples import write_folder

SLACK = 1 << 21  # bytes that reading takes whatever the size: pieces that are decoded, and Python's own
ROWS, COLUMNS = 512, 2048


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that Python and NumPy had at once; what JAX holds on CPU is NumPy's memory."""
    tracemalloc.start()
    try:
        jax.block_until_ready(call())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def dense(folder: Path) -> Path:
    return save(folder, {f"w{i}": np.ones((ROWS, 256), np.float32) for i in range(8)})


def quantized(folder: Path) -> Path:
    return save(folder, {"w": quantize(normal((ROWS, COLUMNS)), dtype="nf4")})


def eight_bits(folder: Path) -> Path:
    return save_bitsandbytes(folder, {"weight": quantize(normal((ROWS, COLUMNS)), dtype="int8")})


def four_bits(kind: str, columns: int) -> dict[str, np.ndarray]:
    """A weight as bitsandbytes has it, in blocks of 64."""
    size = ROWS * columns
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [ROWS, columns]}
    return {
        "w": np.ones((size // 2, 1), np.uint8),
        "w.absmax": np.ones(-(-size // 64), np.float32),
        "w.quant_map": NF4_CODES,
        f"w.quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def blocks(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        form, name = TYPES[IDS[kind]], b"w"
        path = folder / "x.gguf"
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name
        header += struct.pack("<IQQIQ", 2, COLUMNS, ROWS, IDS[kind], 0)
        header += bytes(-len(header) % 32)
        path.write_bytes(header + bytes(ROWS * COLUMNS // form.elements * form.bytes))
        return path

    return make


# What a byte of the file may become: its own copy, and one more of the largest array while it is placed.
LOADED: dict[str, tuple[Callable[[Path], Any], float]] = {
    "ours, dense": (dense, 2),
    "ours, quantized": (quantized, 2),
    "bitsandbytes, int8": (eight_bits, 2),
    "bitsandbytes, nf4": (lambda _: safetensors_file(four_bits("nf4", COLUMNS)), 2),
    # A float32 for each byte of codes where blocks are cut to 2, and two where they are decoded.
    "bitsandbytes, nf4 cut": (lambda _: safetensors_file(four_bits("nf4", 2050)), 10),
    "bitsandbytes, fp4": (lambda _: safetensors_file(four_bits("fp4", COLUMNS)), 16),
    **{
        f"gguf, {kind}": (blocks(kind), 1.25 if kind in GROUPED else 2)
        for kind in (*GROUPED, *(kind for kind in PLAIN if PLAIN[kind].itemsize < 8))
    },
}


@pytest.mark.parametrize(("make", "times"), LOADED.values(), ids=LOADED)
def test_memory_of_loading(make: Callable[[Path], Any], times: float, tmp_path: Path):
    source = make(tmp_path)
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    load(source)  # what is compiled or imported once is not counted
    assert peak(lambda: load(source)) <= times * size + SLACK


OUT, IN, GROUPS = 2048, 4096, 32


def qweight(bits: int, shape: tuple[int, int], words: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    """An array (OUT, IN) of GPTQ or AWQ, which have `words` of zeros in a row."""
    random = np.random.default_rng(bits)
    parts = {name: random.integers(0, 2**31, each).astype(np.int32) for name, each in (("qweight", shape),)}
    return {**parts, "qzeros": np.ones((GROUPS, words), np.int32), "scales": np.ones((GROUPS, OUT), np.float16), **more}


def shuffled() -> np.ndarray:
    return np.random.default_rng(0).permutation(IN).astype(np.int32) // (IN // GROUPS)


LAYOUTS: dict[str, tuple[Callable[[], dict[str, np.ndarray]], dict[str, Any]]] = {
    "gptq": (lambda: qweight(4, (IN // 8, OUT), OUT // 8), {"quant_method": "gptq"}),
    "gptq, desc_act": (lambda: qweight(4, (IN // 8, OUT), OUT // 8, g_idx=shuffled()), {"quant_method": "gptq"}),
    "gptq, 3 bits": (lambda: qweight(3, (IN // 32 * 3, OUT), OUT // 32 * 3), {"quant_method": "gptq"}),
    "awq": (lambda: qweight(4, (IN, OUT // 8), OUT // 8), {"quant_method": "awq"}),
    "awq, 5 bits": (lambda: qweight(5, (IN, OUT // 32 * 5), OUT // 32 * 5), {"quant_method": "auto-round"}),
    "bitnet": (
        lambda: {"weight": np.full((OUT // 4, IN), 0b01100001, np.uint8), "weight_scale": np.ones(1, np.float32)},
        {"quant_method": "bitnet"},
    ),
}


@pytest.mark.parametrize(("make", "config"), LAYOUTS.values(), ids=LAYOUTS)
def test_memory_of_layouts(
    make: Callable[[], dict[str, np.ndarray]],
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Codes are unpacked some at a time: all of them are up to four times as large as the file."""
    for module in ("prequantized.layout", "layouts.awq", "layouts.bitnet"):
        monkeypatch.setattr(f"eformer._src.checkpoint.{module}.AT_ONCE", 1 << 18)
    folder = write_folder(tmp_path, {f"layer.{name}": each for name, each in make().items()}, config)
    load(folder)  # what is compiled or imported once is not counted
    assert peak(lambda: load(folder)) <= 2 * (folder / "model.safetensors").stat().st_size + SLACK


def test_a_tensor_is_a_part_of_one_array():
    description, tensors = parts_of(quantize(normal((64, 128)), dtype="int8"))
    arrays = {f"w{i}": description for i in range(200)}
    with pytest.raises(CheckpointError, match=r"tensor 'w\.scale': it is a part of 'w0', and again of 'w1'"):
        open_checkpoint(safetensors_file(tensors, ours(arrays, None)))


def test_a_tensor_is_one_leaf_of_an_array():
    description, tensors = parts_of(quantize(normal((4, 64)), dtype="nf4", double_quantization=True))
    description["leaves"]["packed"] = description["leaves"]["absmax"]
    with pytest.raises(CheckpointError, match="it is a part of 'w', and again of 'w'"):
        open_checkpoint(safetensors_file(tensors, ours({"w": description}, None)))


def test_a_tree_that_names_an_array_twice_has_it_once():
    tree = {"list": ["x"] * 200}
    found = load(safetensors_file({"x": np.ones(1000, np.float32)}, ours({}, tree)))
    assert len(found) == 200
    assert len({id(each) for each in found}) == 1


def test_two_states_of_a_weight_are_refused():
    with pytest.raises(CheckpointError, match="tensor 'w': two quantization states"):
        open_checkpoint(safetensors_file(four_bits("nf4", 64) | four_bits("fp4", 64)))


def test_two_shards_that_describe_an_array_are_refused(tmp_path: Path):
    q = Array8B(jnp.ones((2, 1)), jnp.ones((2, 3), jnp.int8), (-1,))
    description, tensors = parts_of(q)
    other = {f"{name}.": tensor for name, tensor in tensors.items()}
    (tmp_path / "a.safetensors").write_bytes(safetensors_file(tensors, ours({"w": description}, None)))
    (tmp_path / "b.safetensors").write_bytes(safetensors_file(other, ours({"w": description}, None)))
    index = tmp_path / "model.safetensors.index.json"
    weight_map = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(other, "b.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="tensor 'w': two shards describe an array of that name"):
        open_checkpoint(index)


# --- headers that are all there is of a file ---


def gguf_file(pairs: int, content: bytes, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + content


def pair(name: str, value: bytes, kind: int = gguf.ARRAY) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


MANY = 20_000
EMPTY_ARRAY = struct.pack("<IQ", gguf.ARRAY, 0)
HEADERS = {
    "lists in JSON": with_header(b'{"x":[' + b"[]," * MANY + b"[]]}", b""),
    "objects in JSON": with_header(b'{"x":[' + b"{}," * MANY + b"{}]}", b""),
    "texts in JSON": with_header(b'{"x":[' + b'"ab",' * MANY + b'"ab"]}', b""),
    "numbers in JSON": with_header(b'{"x":[' + b"999," * MANY + b"1]}", b""),
    "one wide letter": with_header(b'{"' + b"a" * MANY * 5 + '\U0001f600":1}'.encode(), b""),
    "bytes in GGUF": gguf_file(1, pair("x", struct.pack("<IQ", 0, MANY * 4) + b"\x7f" * MANY * 4)),
    "shorts in GGUF": gguf_file(1, pair("x", struct.pack("<IQ", 2, MANY) + b"\x7f" * MANY * 2)),
    "texts in GGUF": gguf_file(1, pair("x", struct.pack("<IQ", 8, MANY) + (struct.pack("<Q", 2) + b"ab") * MANY)),
    "arrays in GGUF": gguf_file(1, pair("x", struct.pack("<IQ", 9, MANY) + EMPTY_ARRAY * MANY)),
}
PER_BYTE = 40  # bytes that Python makes of a byte of a header, at most: an empty dict is 64 and takes three letters


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_memory_of_headers(data: bytes):
    def opened() -> None:
        with contextlib.suppress(CheckpointError):
            open_checkpoint(data)

    assert peak(opened) <= PER_BYTE * len(data) + SLACK


TOO_MUCH = {
    "arrays in an array": gguf_file(
        1, pair("x", struct.pack("<IQ", 9, 2**18 + 1) + EMPTY_ARRAY * (2**18 + 1)), tensors=0
    ),
    "arrays in arrays": gguf_file(
        2, b"".join(pair(name, struct.pack("<IQ", 9, 2**17) + EMPTY_ARRAY * 2**17) for name in "xy")
    ),
    "texts": gguf_file(1, pair("x", struct.pack("<IQ", 8, 2**21 + 1) + bytes(8 * (2**21 + 1)))),
    "tensors": gguf_file(0, bytes(24 * 2**18), tensors=2**18),
    "metadata entries": gguf_file(2**19, bytes(13 * 2**19)),
    "objects": with_header(b'{"x":[' + b"{}," * 2**20 + b"{}]}", b""),
    "lists": with_header(b'{"x":[' + b"[]," * 2**22 + b"[]]}", b""),
    "empty tensors": with_header(b"{" + b",".join(b'"%d":0' % i for i in range(2**18 + 1)) + b"}", b""),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_work_of_headers(name: str):
    with pytest.raises(CheckpointError, match=r"are more than a model has|no model has"):
        open_checkpoint(TOO_MUCH[name])


@pytest.mark.parametrize("kind", [13, 99, 2**32 - 1])
def test_an_array_of_an_unknown_type_is_refused(kind: int):
    with pytest.raises(CheckpointError, match=f"array of type {kind}"):
        open_checkpoint(gguf_file(1, pair("x", struct.pack("<IQ", kind, 0))))


def test_a_vocabulary_is_read(tmp_path: Path):
    words = [str(i) for i in range(50_000)]
    path = save_gguf(tmp_path / "a.gguf", {"x": np.ones(2, ml_dtypes.bfloat16)}, metadata={"tokens": words})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["tokens"] == words
