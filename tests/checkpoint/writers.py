"""All that writes files, in one table: how each writes the one or the other of two contents, and which one is there.

The contents are chosen so that files of one beside files of the other are read without an error and as other values,
unless something tells: tensors of the same shapes under another configuration, an adapter with another factor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._src.atomic_files import atomic_file
from eformer.checkpoint import (
    Checkpoint,
    convert,
    load_adapter,
    open_checkpoint,
    quantize_checkpoint,
    save,
    save_adapter,
    save_bitsandbytes,
    save_gguf,
)
from eformer.cli import main
from eformer.model import Leaf, LoraArray, Report
from eformer.ops.quantization import quantize

CONTENTS = (0, 1)
COUNT, SIZE = 4, 1000
BESIDE = ("config.json", "tokenizer.json", "vocabulary.txt")


@dataclass(frozen=True)
class Writer:
    """`write(folder, content, sources)` replaces what is in the folder; `read(folder)` is the content that is there.

    `read` raises if what is there is none of both. `beside` are files that a program other than ours needs to read it.
    """

    write: Callable[[Path, int, Path], object]
    read: Callable[[Path], int]
    beside: tuple[str, ...] = ()
    command: bool = False  # it answers with an exit code in place of an exception


def one(found: set[int]) -> int:
    (content,) = found
    return content


def dense(content: int) -> dict[str, np.ndarray]:
    return {f"array {i}": np.full(SIZE, content, np.float32) for i in range(COUNT)}


def content_of(checkpoint: Checkpoint) -> int:
    return one({int(value) for name in checkpoint for value in np.unique(checkpoint.entry(name).host())})


def read_dense(folder: Path) -> int:
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint) == COUNT
        return content_of(checkpoint)


# --- quantized arrays ---

# Codes of 4 bits in blocks of 64, and of 8 bits in blocks of 32: words, scales and biases have the same shapes.
BLOCKS = (64, 32)
SHAPES = ((8, 128), (8, 64))


def weights(content: int) -> np.ndarray:
    rows, count = SHAPES[content]
    return np.linspace(-1, 1, rows * count, dtype=np.float32).reshape(count, rows).T


STEP = 0.16  # half of the largest step between two values of 4 bits over -1 to 1, which NF4 has


def quantized(content: int, *, symmetric: bool = False) -> dict[str, Any]:
    """A quantized matrix that MLX can hold, or compressed-tensors if it is symmetric, and what a tree has besides."""
    name, how = ("int4", "int8_grouped")[content], {"block_size": BLOCKS[content], "symmetric": symmetric}
    q = quantize(jnp.asarray(weights(content)), format=name, axis=-1, **how)
    return {"m": {"weight": q}, "norm": jnp.full(3, content, jnp.float32)}


def nf4(content: int) -> dict[str, Any]:
    return {"m": {"weight": quantize(jnp.asarray(weights(content)), format="nf4", axis=-1)}}


def make_sources(folder: Path) -> None:
    """What the writers begin with, so that a process which writes starts no backend of JAX."""
    save(folder / "base", {"one": {"weight": np.zeros((4, 8), np.float32)}})
    for content in CONTENTS:
        save(folder / f"quantized{content}", quantized(content))
        save(folder / f"symmetric{content}", quantized(content, symmetric=True))
        save(folder / f"nf4{content}", nf4(content))
        save_adapter(folder / f"adapter{content}", adapter(content))
        for name, symmetric in {"model": True, "asymmetric": False}.items():
            model = folder / f"{name}{content}"
            save(model, quantized(content, symmetric=symmetric), max_shard_bytes=600)
            for beside in BESIDE:
                (model / beside).write_text(json.dumps({"content": content}))


def hosted(file: Path) -> dict[str, Any]:
    """The arrays of a checkpoint as NumPy arrays, by name."""
    with open_checkpoint(file, copy=True) as checkpoint:
        return {name: checkpoint.entry(name).host() for name in checkpoint}


def read_quantized(folder: Path) -> int:
    with open_checkpoint(folder) as checkpoint:
        w = np.asarray(checkpoint["m.weight"].materialize())
        content = SHAPES.index(w.shape)
        np.testing.assert_allclose(w, weights(content), atol=STEP)
        if "norm" in checkpoint:
            assert np.all(checkpoint.entry("norm").host() == content)
    return content


def check_beside(folder: Path, content: int) -> None:
    """All files beside are of this content, unless their configuration says that they are being replaced."""
    texts = {path.name: path.read_text() for path in folder.glob("*") if path.name in BESIDE}
    if "eformer_save" in texts.get("config.json", ""):
        return
    said = {json.loads(text).get("content", content) for text in texts.values()}
    assert said <= {content}, texts


# --- adapters ---

RANK = 2


def adapter(content: int) -> dict[str, Any]:
    a, b = np.full((4, RANK), content, np.float32), np.full((RANK, 8), content, np.float32)
    return {"one": {"weight": LoraArray(np.zeros((4, 8), np.float32), a, b, np.float32(content + 1))}}


def read_adapter(folder: Path) -> int:
    q = load_adapter(folder, {"one": {"weight": jnp.zeros((4, 8))}})["one"]["weight"]
    found = {int(value) for leaf in (q.a, q.b) for value in np.unique(leaf)}
    return one(found | {int(q.scaling) - 1})


# --- other files ---


def report(content: int) -> Report:
    return Report((Leaf(f"content {content}", (3,), "float32", "float32", False, False, 12, 12, None),) * 20)


def read_text(path: Path) -> int:
    text = path.read_text()
    assert text.rstrip().endswith(("</html>", "the end"))
    return one({content for content in CONTENTS if f"content {content}" in text})


def write_text(path: Path, content: int) -> None:
    with atomic_file(path, overwrite=True) as file:
        file.writelines(f"content {content}\n".encode() for _ in range(SIZE))
        file.write(b"the end")


def training_state(content: int) -> dict[str, Any]:
    return {**dense(content), "optimizer": {"count": np.int64(content)}, "step": content}


def read_training_state(folder: Path) -> int:
    with open_checkpoint(folder / "training.safetensors") as checkpoint:
        return content_of(checkpoint)


def saved(kind: str, source: str, most: int | None = None) -> Writer:
    def write(folder: Path, content: int, sources: Path) -> None:
        tree = hosted(sources / f"{source}{content}")
        save(folder, tree, kind=kind, max_shard_bytes=most, overwrite=True)

    return Writer(write, read_quantized, ("config.json",) if kind != "safetensors" else ())


SHARD = 3 * 4 * SIZE // 2  # bytes: an array is larger than half of it, so each is a shard of its own

WRITERS: dict[str, Writer] = {
    "save": Writer(lambda folder, content, _: save(folder, dense(content), overwrite=True), read_dense),
    "save, shards": Writer(
        lambda folder, content, _: save(folder, dense(content), max_shard_bytes=SHARD, overwrite=True), read_dense
    ),
    "save, a file or shards": Writer(
        lambda folder, content, _: save(
            folder, dense(content), max_shard_bytes=SHARD if content else None, overwrite=True
        ),
        read_dense,
    ),
    "save, quantized": saved("safetensors", "quantized"),
    "save_bitsandbytes": Writer(
        lambda folder, content, sources: save_bitsandbytes(folder, hosted(sources / f"nf4{content}"), overwrite=True),
        read_quantized,
    ),
    "save_gguf": Writer(lambda folder, content, _: save_gguf(folder, dense(content), overwrite=True), read_dense),
    "save, compressed-tensors": saved("compressed-tensors", "symmetric"),
    "save, mlx": saved("mlx", "quantized"),
    "save, mlx, shards": saved("mlx", "quantized", 600),
    "save_adapter": Writer(
        lambda folder, content, _: save_adapter(folder, adapter(content), overwrite=True), read_adapter
    ),
    "quantize_checkpoint": Writer(
        lambda folder, content, sources: quantize_checkpoint(sources / f"model{content}", folder, [], overwrite=True),
        read_quantized,
        BESIDE,
    ),
    "convert, mlx": Writer(
        lambda folder, content, sources: convert(sources / f"asymmetric{content}", folder, "mlx", overwrite=True),
        read_quantized,
        BESIDE,
    ),
    "convert, gguf": Writer(
        lambda folder, content, sources: convert(
            sources / f"nf4{content}", folder, "gguf", type="Q8_0", overwrite=True
        ),
        read_quantized,
    ),
    "eformer quantize": Writer(
        lambda folder, content, sources: main(
            ["quantize", f"{sources}/model{content}", f"{folder}", "--format", "keep", "--shard", "600", "--force"]
        ),
        read_quantized,
        BESIDE,
        command=True,
    ),
    "eformer convert": Writer(
        lambda folder, content, sources: main(
            ["convert", f"{sources}/model{content}", f"{folder}", "--to", "compressed-tensors", "--force"]
        ),
        read_quantized,
        BESIDE,
        command=True,
    ),
    "eformer lora": Writer(
        lambda folder, content, sources: main(
            ["lora", "merge", f"{sources}/base", f"{sources}/adapter{content}", f"{folder}", "--force"]
        ),
        lambda folder: one({int(value > 0) for value in np.unique(hosted(folder)["one.weight"])}),
        command=True,
    ),
    "Report.to_html": Writer(
        lambda folder, content, _: report(content).to_html(folder / "report.html", overwrite=True),
        lambda folder: read_text(folder / "report.html"),
    ),
    "atomic_file": Writer(
        lambda folder, content, _: write_text(folder / "a.txt", content), lambda folder: read_text(folder / "a.txt")
    ),
    "state of training": Writer(
        lambda folder, content, _: save(folder / "training.safetensors", training_state(content), overwrite=True),
        read_training_state,
    ),
}
