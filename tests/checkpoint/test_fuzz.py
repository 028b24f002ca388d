"""Mutated files, by the hundred thousand with `make fuzz`: each opens or raises CheckpointError, with little memory.

Seeds are small real files. A mutation changes, removes, repeats or inserts bytes, or puts another value or name into
the JSON. What still opens is read too, as NumPy arrays.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._src.checkpoint.gguf.types import GROUPED, IDS, TYPES
from eformer._src.checkpoint.tree import rebuilt
from eformer._src.quantization.registry import array_types
from eformer.checkpoint import CheckpointError, load, open_checkpoint, save, save_bitsandbytes
from eformer.jaximus import materialize
from eformer.ops.quantization import Array1B, Array8B, ArrayNF4, RSROperatorBinary

from .files import gguf_bytes, safetensors_file, split, text, with_header, write_anew
from .layout_examples import examples

pytestmark = pytest.mark.filterwarnings("ignore::eformer.checkpoint.DecodedWarning")
PARTS = 4  # in which they are tried, so that processes can share them
TRACED = 50  # one file in 50 is read with all allocations traced, which is slow
USED = 25  # one file in 25 that opens is used
LIMIT = 1 << 26  # bytes that may be taken at once; a file has some hundred
MORE = 1 << 18  # kilobytes by which the process may grow when it compiles and runs what decodes them

# What hides in JSON: other types, sizes beyond every limit, names of other things.
NAMES = ["", "F32", "U8", "BF16", "w", "w.packed", "w.absmax", "x", "\x00", "../x", "nf4", "float32", "object", "class"]
NAMES += [*array_types(), "__metadata__", "SCB", "weight"]
NUMBERS = [True, -1, 0, 1, 2, 3, 4, 32, 63, 64, 2**31, 2**63, 10**30, 1.5, 1e308, float("nan"), None]
OTHERS = [
    [],
    [0],
    [-1],
    [2, 16],
    [2**40, 2**40],
    [0, 4],
    [[[]]],
    {},
    {"dtype": "int8"},
    {"dtype": "O"},
    {"list": ["w"]},
]
TEXTS = [json.dumps(value).encode() for value in (*NAMES, *NUMBERS, *OTHERS)]
KEYS = [json.dumps(name).encode() for name in NAMES]
PIECES = [b"\0", b"\xff", b"{", b"}", b"[", b'"', b"\\", b",", b":", b"9" * 30, b"-", b"null", b"\0" * 8, b"\xff" * 8]
SIZES = [0, 1, 2, 8, 9, 35, 39, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1]

Stream = Iterator[bytes]
Sources = Iterator[bytes | Path]


def with_bytes_changed(seed: bytes, length: int, rng: random.Random) -> Stream:
    """`seed` with one to three changes within its first `length` bytes."""
    while True:
        data = bytearray(seed)
        for _ in range(rng.randrange(1, 4)):
            at, choice = rng.randrange(length), rng.randrange(6)
            if choice < 3:
                data[at : at + 1] = rng.randbytes(1)
            elif choice == 3:
                piece = rng.choice(PIECES)
                data[at : at + len(piece)] = piece
            elif choice == 4:
                del data[at : at + rng.randrange(1, 20)]
            else:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
        yield bytes(data)


def spans(value: Any, start: int = 0) -> tuple[bytes, list[tuple[int, int, bool]]]:
    """The JSON text of `value`, and where each value (False) and name (True) lies in it, counted from `start`."""
    if not isinstance(value, (dict, list)) or not value:
        text = json.dumps(value).encode()
        return text, [(start, start + len(text), False)]
    text, found = b"{" if isinstance(value, dict) else b"[", []
    for key in value if isinstance(value, dict) else range(len(value)):
        text += b"," if len(text) > 1 else b""
        if isinstance(value, dict):
            name = json.dumps(key).encode()
            found.append((start + len(text), start + len(text) + len(name), True))
            text += name + b":"
        inner, places = spans(value[key], start + len(text))
        text, found = text + inner, found + places
    text += b"}" if isinstance(value, dict) else b"]"
    return text, [*found, (start, start + len(text), False)]


def with_values_changed(value: Any, rng: random.Random) -> Stream:
    """The JSON text of `value` with another value or name in one or two places."""
    text, places = spans(value)
    while True:
        changed, end = text, len(text) + 1
        for start, stop, is_name in sorted(rng.choices(places, k=rng.randrange(1, 3)), reverse=True):
            if stop <= end:  # not within what was replaced already
                changed = changed[:start] + rng.choice(KEYS if is_name else TEXTS) + changed[stop:]
                end = start
        yield changed


def alternately(*streams: Stream) -> Stream:
    while True:
        for stream in streams:
            yield next(stream)


def int8() -> Array8B:
    return Array8B(jnp.ones((2, 1)), jnp.ones((2, 3), jnp.int8), (-1,))


def safetensors(path: Path, rng: random.Random) -> Stream:
    tree = {"x": np.ones((2, 3), np.float32), "y": np.ones(2, np.uint8), "z": np.float16(1)}
    header, data = split(save(path, tree).read_bytes())
    header["__metadata__"] = {"format": "pt"}
    whole = with_header(json.dumps(header).encode(), data)
    structured = (with_header(text, data) for text in with_values_changed(header, rng))
    return alternately(with_bytes_changed(whole, len(whole) - len(data), rng), structured)


def metadata(path: Path, rng: random.Random) -> Stream:
    nf4 = ArrayNF4(jnp.ones((2, 4), jnp.uint8), jnp.ones((2, 2)), 4)
    ternary = Array1B(jnp.ones((1, 3), jnp.uint8), scale=jnp.ones((1, 3)), axis=-2)
    rsr = RSROperatorBinary.from_matrix(jnp.eye(2, 3, dtype=jnp.int8), 2)
    trees = {"a": {"w": nf4}, "b": {"w": [int8()]}, "c": {"w": ternary}, "d": {"w": {"w": rsr}}}
    return alternately(*(_metadata_of(path / name, tree, rng) for name, tree in trees.items()))


def _metadata_of(path: Path, tree: Any, rng: random.Random) -> Stream:
    header, data = split(save(path, tree).read_bytes())
    ours = json.loads(header["__metadata__"]["eformer"])
    before, _, after = json.dumps({**header, "__metadata__": {"eformer": "@"}}).encode().partition(b"@")

    def packed(text: bytes) -> bytes:
        return with_header(before + json.dumps(text.decode("utf-8", "replace"))[1:-1].encode() + after, data)

    text = json.dumps(ours).encode()
    return map(packed, alternately(with_bytes_changed(text, len(text), rng), with_values_changed(ours, rng)))


def bitsandbytes(path: Path, rng: random.Random) -> Stream:
    q = ArrayNF4(jnp.ones((2, 16), jnp.uint8), jnp.ones((2, 1)), 32)
    header, data = split(save_bitsandbytes(path / "8", {"weight": int8()}).read_bytes())
    del header["__metadata__"]
    eight = (with_header(text, data) for text in with_values_changed(header, rng))
    header, data = split(save_bitsandbytes(path / "4", {"w": q}).read_bytes())
    del header["__metadata__"]
    state = "w.quant_state.bitsandbytes__nf4"
    start, stop = header.pop(state)["data_offsets"]
    described = {**json.loads(data[start:stop]), "nested_blocksize": None, "nested_offset": 0.5}
    for each in header.values():  # the state goes to the end, where its length is free
        each["data_offsets"] = [at - (stop - start) if at >= stop else at for at in each["data_offsets"]]
    data = data[:start] + data[stop:]

    def with_state(text: bytes) -> bytes:
        entry = {"dtype": "U8", "shape": [len(text)], "data_offsets": [len(data), len(data) + len(text)]}
        return with_header(rest + json.dumps(entry).encode() + b"}", data + text)

    rest = json.dumps({**header, state: 0}).encode().removesuffix(b"0}")
    whole = with_state(json.dumps(described).encode())
    full, content = split(whole)
    headers = (with_header(text, content) for text in with_values_changed(full, rng))
    states = map(with_state, with_values_changed(described, rng))
    return alternately(with_bytes_changed(whole, len(whole), rng), states, headers, eight)


def gguf(path: Path, rng: random.Random) -> Stream:
    del path
    tensors, data = [], b""
    for kind in ("F32", *rng.sample(list(GROUPED), 4)):  # each part of the test has others
        form = TYPES[IDS[kind]]
        tensors.append((kind, (form.elements * 2, 1), IDS[kind], len(data)))
        data += rng.randbytes(form.bytes * 2)
        data += bytes(-len(data) % 32)
    pairs = text("a") + struct.pack("<IIQ2I", 9, 4, 2, 1, 2) + text("c") + struct.pack("<IIQ", 9, 8, 1) + text("x")
    start = gguf_bytes(*tensors, pairs=pairs, count=2, data=0)
    seed, header = start + data, len(start)

    def with_numbers_changed() -> Stream:
        """Whole fields of four and eight bytes, which byte by byte takes long."""
        while True:
            data, value = bytearray(seed), rng.choice(SIZES)
            wide = value >= 2**32 or rng.randrange(2)
            struct.pack_into("<Q" if wide else "<I", data, rng.randrange(4, header), value)
            yield bytes(data)

    return alternately(with_bytes_changed(seed, header, rng), with_numbers_changed())


def index(path: Path, rng: random.Random) -> Sources:
    """An index of two shards, which are whole; it is written again for each mutation."""
    tree = {"x": np.ones((2, 3), np.float32), "w": int8()}
    file = save(path, tree, max_shard_bytes=1)
    text = file.read_bytes()
    for changed in alternately(with_bytes_changed(text, len(text), rng), with_values_changed(json.loads(text), rng)):
        write_anew(file, changed)
        yield file


def layouts(path: Path, rng: random.Random) -> Sources:
    """Arrays of other projects in a folder; the header, the data or the configuration is written again each time."""
    path.mkdir(exist_ok=True)
    seeds = []
    for example in examples().values():
        tensors = {f"w.{name}": each for name, each in example.tensors.items()}
        header, data = split(safetensors_file(tensors, example.said("w.")))
        whole, config = with_header(json.dumps(header).encode(), data), {"quantization_config": dict(example.config)}
        changed = with_values_changed(header, rng), with_bytes_changed(whole, len(whole), rng)
        seeds.append((changed, data, whole, config, with_values_changed(config, rng)))
    while True:
        (headers, files), data, whole, config, configs = rng.choice(seeds)
        choice = rng.randrange(3)
        file = with_header(next(headers), data) if choice == 0 else next(files) if choice == 1 else whole
        write_anew(path / "model.safetensors", file)
        write_anew(path / "config.json", next(configs) if choice == 2 else json.dumps(config).encode())
        yield path


def opens(source: bytes | Path) -> bool:
    """Whether the file opens and can be read; whatever is raised but a CheckpointError fails the test."""
    try:
        with open_checkpoint(source) as checkpoint:
            for name in checkpoint:
                checkpoint.info(name)
                checkpoint.entry(name).host()
            if checkpoint.tree is not None:
                rebuilt(checkpoint.tree, checkpoint.__contains__)
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("seeds", [metadata, bitsandbytes], ids=lambda f: f.__name__)
def test_mutated_files_that_open_can_be_used(seeds: Callable[[Path, random.Random], Stream], tmp_path: Path):
    resource = pytest.importorskip("resource", reason="this system does not tell how much memory a process had")
    usable = filter(opens, seeds(tmp_path, random.Random(1)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in itertools.islice(usable, USED):
        jax.block_until_ready(materialize(load(data, flat=True)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MORE


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("seeds", [safetensors, metadata, bitsandbytes, gguf, index, layouts], ids=lambda f: f.__name__)
def test_mutated_files(
    seeds: Callable[[Path, random.Random], Sources], part: int, tmp_path: Path, pytestconfig: pytest.Config
):
    count, mutated = pytestconfig.getoption("--fuzz") // PARTS, seeds(tmp_path, random.Random(part))
    traced = count // TRACED
    opened = sum(opens(next(mutated)) for _ in range(count - traced))
    tracemalloc.start()
    try:
        opened += sum(opens(next(mutated)) for _ in range(traced))
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()
    assert count // 1000 < opened < count * 9 // 10  # if all failed, or none, this would test little
