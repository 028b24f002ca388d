"""Files that are well-formed and lie: fields, dtypes, shapes, names, offsets, codes and shards that do not agree."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from quantization.cases import normal

from eformer._src.checkpoint.gguf.read import SCALARS
from eformer._src.checkpoint.gguf.types import GROUPED, IDS, PLAIN, TYPES
from eformer._src.checkpoint.header import DTYPES
from eformer._src.kernels.reference import NF4_CODES
from eformer._src.quantization.registry import array_types
from eformer.ops.quantization import RSROperatorBinary, RSROperatorTernary, quantize

from .files import ours, parts_of, safetensors_file, split, with_header
from .layout_examples import examples, write_folder

Lie = Callable[[random.Random, Path], bytes | Path]

CLASSES = list(array_types())
FIELDS = [
    "block_size",
    "axis",
    "padding",
    "k",
    "org_dtype",
    "dtype",
    "use_kernel",
    "activation_dtype",
    "scale",
    "nested",
]
DTYPE_NAMES = ["float32", "bfloat16", "float16", "int8", "uint8", "int32", "float8_e4m3fn", "bool", "complex64", "int3"]
VALUES: list[Any] = [0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 32, 64, 65, -1, -2, -3, 2**15, 2**30, 2**31, 2**62, 2**63, 10**25]
VALUES += [
    True,
    False,
    None,
    "64",
    "int8",
    "bogus",
    "",
    2.5,
    1e308,
    [],
    [-1],
    [-2],
    [-2, -1],
    [-1, -1],
    [0],
    ["-1"],
    {},
]
VALUES += [{"dtype": name} for name in DTYPE_NAMES]
TENSOR_DTYPES = [*DTYPES.values()]
SPECIAL = [np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-40, 0.0]


@functools.cache
def arrays() -> dict[str, Any]:
    bits = jnp.asarray(np.arange(60).reshape(6, 10) % 2)
    w = normal((6, 10))
    return {
        "nf4": quantize(w, dtype="nf4", block_size=4),
        "rows": quantize(w, dtype="nf4", block_size=4, axis=0),
        "nested": quantize(w, dtype="nf4", block_size=4, double_quantization=True),
        "int8": quantize(w, dtype="int8"),
        "columns": quantize(w, dtype="int8", axis=0),
        "ternary": quantize(w, dtype="ternary"),
        "scaled": quantize(w, dtype="ternary", scale="channel"),
        "rsr": RSROperatorBinary.from_matrix(bits, k=4),
        "wide": RSROperatorBinary.from_matrix(bits, k=9),
        "signed": RSROperatorTernary.from_matrix(bits - 1, k=3),
    }


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a description."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from nodes(each)


def another_tensor(tensor: np.ndarray, rng: random.Random) -> np.ndarray:
    """The same bytes or size in another dtype or shape, or other values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that another dtype does not have
        return _another_tensor(tensor, rng)


def _another_tensor(tensor: np.ndarray, rng: random.Random) -> np.ndarray:
    choice = rng.randrange(7)
    if choice == 0:
        small = tensor.dtype.name.startswith("float8")  # which is not cast to all others
        return (tensor.astype(np.float32) if small else tensor).astype(rng.choice(TENSOR_DTYPES))
    if choice == 1 and tensor.ndim:
        same = [dtype for dtype in TENSOR_DTYPES if dtype.itemsize == tensor.dtype.itemsize]
        return np.ascontiguousarray(tensor).view(rng.choice(same))
    if choice == 2:
        return tensor.reshape(rng.choice([(-1,), (1, *tensor.shape), (*tensor.shape, 1), tensor.shape[::-1]]))
    if choice == 3:
        return np.resize(tensor, [max(0, n + rng.choice([-1, 0, 0, 1, n])) for n in tensor.shape])
    if choice == 4 and tensor.size:
        changed = tensor.copy()
        changed.reshape(-1)[rng.randrange(tensor.size)] = np.float32(rng.choice(SPECIAL)).astype(tensor.dtype)
        return changed
    raw = np.frombuffer(rng.randbytes(tensor.nbytes), np.uint8)
    return raw.view(tensor.dtype).reshape(tensor.shape) if tensor.nbytes else tensor


def change_description(described: dict[str, Any], names: list[str], rng: random.Random) -> None:
    """Another value, name or class somewhere in it."""
    place = rng.choice([node for node in nodes(described) if node] or [described])
    if not place:
        return
    key = rng.choice(list(place))
    choice = rng.randrange(6)
    statics = [node["static"] for node in nodes(described) if isinstance(node.get("static"), dict)]
    if choice < 3 and statics:
        inner = rng.choice(statics)
        inner[rng.choice([*inner, rng.choice(FIELDS)])] = rng.choice(VALUES)
    elif choice == 3:
        place[key] = rng.choice([*VALUES, *names, *CLASSES])
    elif choice == 4:
        del place[key]
    else:
        named = [node["leaves"] for node in nodes(described) if isinstance(node.get("leaves"), dict) and node["leaves"]]
        leaves = rng.choice(named or [place])
        leaves[rng.choice(list(leaves))] = rng.choice(names)


def metadata(rng: random.Random, folder: Path) -> bytes:
    """Two quantized arrays and a dense one; what is said of them, or their tensors, is changed."""
    del folder
    described: dict[str, Any] = {}
    tensors: dict[str, np.ndarray] = {"x": np.ones((2, 3), np.float32)}
    for name in ("v", "w"):
        described[name], found = parts_of(rng.choice(list(arrays().values())), name)
        tensors |= found
    tree: Any = {"dict": {"v": "v", "w": "w", "x": {"list": ["x"]}}}
    for _ in range(rng.randrange(1, 4)):
        choice = rng.randrange(8)
        if choice < 4:
            change_description(described[rng.choice("vw")], list(tensors), rng)
        elif choice < 6:
            name = rng.choice(list(tensors))
            tensors[name] = another_tensor(tensors[name], rng)
        elif choice == 6:
            tree = rng.choice(
                [{"list": ["v"] * 50}, {"dict": {"": "x", "a": tree}}, "w", None, {"list": ["v", "u"]}, [tree]]
            )
        else:
            described[rng.choice(["v", "w", "x", "y", "v.weight"])] = copy.deepcopy(described[rng.choice("vw")])
        described = {name: each for name, each in described.items() if each}
        if not {"v", "w"} <= described.keys():
            break
    return safetensors_file(tensors, ours(described, tree))


def header(rng: random.Random, folder: Path) -> bytes:
    """Entries of the header change names, dtypes, shapes or offsets with each other."""
    whole = metadata(random.Random(rng.randrange(50)), folder)
    found, data = split(whole)
    names = [name for name in found if name != "__metadata__"]
    for _ in range(rng.randrange(1, 3)):
        a, b = rng.choice(names), rng.choice(names)
        key = rng.choice(["dtype", "shape", "data_offsets", None])
        if key is None:
            found[a], found[b] = found[b], found[a]
        elif rng.randrange(2):
            found[a][key], found[b][key] = found[b][key], found[a][key]
        elif key == "shape":
            size = math.prod(found[a]["shape"])
            found[a]["shape"] = rng.choice([[size], [1, size], [size, 1], [2, size // 2], found[a]["shape"][::-1], []])
        elif key == "dtype":
            found[a]["dtype"] = rng.choice(list(DTYPES))
    return with_header(json.dumps(found).encode(), data)


def bitsandbytes(rng: random.Random, folder: Path) -> bytes:
    """A 4-bit weight whose state says other things than its tensors, or an 8-bit one."""
    del folder
    rows, columns, block = rng.choice([2, 3]), rng.choice([8, 10, 64]), rng.choice([2, 4, 6, 64])
    size, kind = rows * columns, rng.choice(["nf4", "nf4", "fp4"])
    blocks, nested = -(-size // block), rng.randrange(2)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [rows, columns]}
    tensors = {
        "w": np.frombuffer(rng.randbytes((size + 1) // 2), np.uint8)[:, None],
        "w.absmax": np.ones(blocks, np.uint8 if nested else np.float32),
        "w.quant_map": NF4_CODES,
        "weight": np.frombuffer(rng.randbytes(6), np.int8).reshape(2, 3),
        "SCB": np.ones(2, np.float32),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        tensors |= {"w.nested_absmax": np.ones(-(-blocks // 256), np.float32)}
        tensors |= {"w.nested_quant_map": np.linspace(-1, 1, 256, dtype=np.float32)}
    for _ in range(rng.randrange(1, 3)):
        if rng.randrange(2):
            state[rng.choice([*state, "nested_blocksize"])] = rng.choice(
                [
                    *VALUES,
                    "fp4",
                    "nf4",
                    "float16",
                    "bfloat16",
                    [size],
                    [1, size],
                    [columns, rows],
                    [size, 1],
                    [0],
                    [2**40],
                ]
            )
        else:
            name = rng.choice(list(tensors))
            tensors[name] = another_tensor(tensors[name], rng)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return safetensors_file({**tensors, f"w.quant_state.bitsandbytes__{kind}": text})


def gguf(rng: random.Random, folder: Path) -> bytes:
    """Tensors of any type and shape at any offset, in a file that has about as much data as they need."""
    del folder
    kinds = [*GROUPED, *PLAIN, rng.choice(list(IDS))]
    infos, needed = b"", 0
    count = rng.randrange(1, 4)
    for i in range(count):
        form = TYPES[IDS[rng.choice(kinds)]]
        shape = [form.elements * rng.choice([1, 1, 2]), rng.choice([1, 2, 3])][: rng.choice([1, 2, 2])]
        if not rng.randrange(6):
            shape[rng.randrange(len(shape))] = rng.choice([0, 1, 3, 33, 2**20, 2**32, 2**63, 2**64 - 1])
        name = f"t{rng.choice([i] * 9 + [0])}".encode()
        offset = rng.choice([needed] * 12 + [0, 32, 33, 2**40])
        kind = IDS[form.name] if rng.randrange(9) else rng.choice([*TYPES, 4, 5, 36, 99])
        infos += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", kind, offset)
        size = math.prod(shape) // form.elements * form.bytes if max(shape) < 2**16 else 64
        needed += size + -size % 32
    pairs = b""
    number = rng.randrange(3)
    for i in range(number):
        name = rng.choice([b"k%d" % i] * 6 + [b"a", b"general.alignment"])
        kind = rng.choice([*SCALARS, 8, 9, 9, 13])
        value = struct.pack("<IQ", rng.choice([0, 4, 8, 9, 13]), rng.choice([0, 1, 2, 2**62])) + bytes(24)
        value = value if kind == 9 else bytes(rng.choice([SCALARS[kind].size])) if kind in SCALARS else bytes(8)
        pairs += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    start = b"GGUF" + struct.pack("<IQQ", rng.choice([3] * 12 + [2, 1]), count, number) + pairs + infos
    data = rng.randbytes(max(0, needed + rng.choice([0, 0, 0, -32, 32])))
    return start + bytes(-len(start) % 32) + data


def index(rng: random.Random, folder: Path) -> Path:
    """Two shards and an index that says of tensors where they are not, or of shards what they do not describe."""
    q, other = rng.choice(list(arrays().values())), rng.choice(list(arrays().values()))
    shards = {"a.safetensors": ("v", *parts_of(q, "v")), "b.safetensors": ("w", *parts_of(other, "w"))}
    weight_map = {name: shard for shard, (_, _, tensors) in shards.items() for name in tensors}
    for _ in range(rng.randrange(1, 3)):
        name, choice = rng.choice(list(weight_map)), rng.randrange(5)
        if choice == 0:
            weight_map[name] = rng.choice(
                [*shards, "c.safetensors", "../a.safetensors", "/dev/zero", "pipe.safetensors"]
            )
        elif choice == 1 and len(weight_map) > 1:
            del weight_map[name]
        elif choice == 2:
            weight_map[rng.choice(["u", "v", "w", "v.other"])] = rng.choice(list(shards))
        else:
            shard = rng.choice(list(shards))
            array, described, tensors = shards[shard]
            if choice == 3:
                change_description(described, list(weight_map), rng)
            shards[shard] = (rng.choice([array, "v", "w"]), described, tensors)
    for shard, (array, described, tensors) in shards.items():
        (folder / shard).write_bytes(safetensors_file(tensors, ours({array: described} if described else {}, None)))
    tree = rng.choice([None, {"dict": {"v": "v", "w": "w"}}, {"list": ["v"] * 9}, {"dict": {"u": "u"}}])
    summary = {"eformer": {"version": 1, "tree": tree}, "total_size": rng.choice(VALUES)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": summary, "weight_map": weight_map}))
    return path


SAID = [
    "gptq",
    "gptq_v2",
    "gptq_p",
    "awq",
    "gemm",
    "gemv",
    "auto-round",
    "auto_round:auto_awq",
    "bitnet",
    "autobitlinear",
]
SAID += ["compressed-tensors", "pack-quantized", "fp8", "mxfp4", "mxfp8", "affine", [128, 128], [2, 4], {"bits": 3}]


def layouts(rng: random.Random, folder: Path) -> Path:
    """Arrays of other projects whose tensors, or what the configuration says of them, are changed."""
    tensors: dict[str, np.ndarray] = {}
    config: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for prefix in ("v.", "w.")[: rng.choice([1, 1, 2])]:
        example = rng.choice([each for each in examples().values() if not each.refused])
        tensors |= {prefix + name: each for name, each in example.tensors.items()}
        config |= copy.deepcopy(dict(example.config))
        metadata |= example.said(prefix)
    for _ in range(rng.randrange(1, 4)):
        name, choice = rng.choice(list(tensors)), rng.randrange(8)
        if choice < 4:
            tensors[name] = another_tensor(tensors[name], rng)
        elif choice == 4 and len(tensors) > 1:
            del tensors[name]
        elif choice == 5:
            other = rng.choice([*tensors, "v.weight", "w.g_idx", "v.weight_g_idx", "v.scales", "w.weight_scale"])
            tensors[other] = another_tensor(tensors[name], rng)
        else:
            inner = rng.choice([node for node in nodes(config) if node] or [config])
            keys = [*inner, "bits", "group_size", "sym", "checkpoint_format", "quant_method", "linear_class", "version"]
            inner[rng.choice(keys)] = rng.choice([*VALUES, *SAID])
    return write_folder(folder / "layouts", tensors, rng.choice([config] * 9 + [None]), metadata)


LIES: dict[str, Lie] = {f.__name__: f for f in (metadata, header, bitsandbytes, gguf, index, layouts)}
