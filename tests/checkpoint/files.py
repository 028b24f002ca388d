"""Files made by hand, whose metadata and tensors need not agree."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer._src.checkpoint.header import NAMES
from eformer._src.checkpoint.serialization import describe
from eformer.ops.quantization import QuantizedArray


def bits(x: Any) -> tuple[Any, ...]:
    """What is equal if two arrays are, bit for bit."""
    array = np.asarray(x)
    return array.shape, array.dtype, array.tobytes()


def write_anew(path: Path, data: bytes) -> None:
    """Write a file that may be there. To remove it first is faster: ext4 flushes a file that was truncated."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def with_header(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def split(seed: bytes) -> tuple[Any, bytes]:
    """The header of a safetensors file as JSON, and what comes after it."""
    end = 8 + int.from_bytes(seed[:8], "little")
    return json.loads(seed[8:end]), seed[end:]


def safetensors_file(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file that holds together, of these tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    data = b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += np.ascontiguousarray(tensor).tobytes()
    return with_header(json.dumps(header).encode(), data)


def ours(arrays: Mapping[str, Any], tree: Any) -> dict[str, str]:
    """Our metadata, of these descriptions."""
    return {"eformer": json.dumps({"version": 1, "tree": tree, "arrays": dict(arrays)})}


def parts_of(q: QuantizedArray, name: str = "w") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description of an array, and its tensors by name."""
    description, names = describe(name, q)
    leaves = map(np.asarray, jax.tree.leaves(q))
    return copy.deepcopy(description), dict(zip(names, leaves, strict=True))


def changed(value: Any, changes: Mapping[str, Any]) -> Any:
    """JSON with other values in it: "a/b" is key "b" in key "a"; `...` takes the key away."""
    for path, new in changes.items():
        *keys, last = path.split("/")
        place = value
        for key in keys:
            place = place[key]
        if new is ...:
            del place[last]
        else:
            place[last] = new
    return value


def file_of(q: QuantizedArray, changes: Mapping[str, Any], leaves: Mapping[str, Any]) -> bytes:
    """A file with "w", which is `q` with these changes of its description and other arrays in place of some tensors."""
    description, tensors = parts_of(q)
    description = changed(description, changes)
    tensors |= {f"w.{name}": np.asarray(leaf) for name, leaf in leaves.items()}
    return safetensors_file(tensors, ours({"w": description}, {"dict": {"w": "w"}}))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_bytes(
    *tensors: tuple[str, tuple[int, ...], int, int], pairs: bytes = b"", count: int = 0, data: int = 64
) -> bytes:
    """A file with these tensors (name, dimensions, type, offset), and `size` bytes of data."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + pairs
    for name, shape, kind, offset in tensors:
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return header + bytes(-len(header) % 32) + bytes(data)
