"""`save`: trees as files; safetensors, one file or shards and their index, streamed and never half."""

from __future__ import annotations

import difflib
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from eformer._src.atomic_files import Target, room_for, to_disk
from eformer._src.checkpoint.arrays import (
    ArrayToWrite,
    CheckpointToWrite,
    Dense,
    TensorSpec,
    TensorsToWrite,
    arrays_to_write,
    contiguous_bytes,
    tensors_to_write,
)
from eformer._src.checkpoint.file import CheckpointError, StrPath, check_path
from eformer._src.checkpoint.gguf.write import TypeFor, write_gguf
from eformer._src.checkpoint.header import BY_NUMPY_NAME, MAX_HEADER, METADATA, NAMES, Json, checked_shape
from eformer._src.checkpoint.layouts.bitsandbytes import bitsandbytes_record
from eformer._src.checkpoint.layouts.compressed_tensors_write import compressed_tensors_records
from eformer._src.checkpoint.layouts.mlx import mlx_records
from eformer._src.checkpoint.paths import GGUF_SUFFIX, SUFFIX, parse_index, target_file
from eformer._src.checkpoint.prequantized.quantization_config import CONFIG, OwnConfig, config_with
from eformer._src.checkpoint.serialization import KEY, VERSION
from eformer._src.checkpoint.tree import as_stored, flattened
from eformer._src.progress import Meter, Progress
from eformer._src.quantization.registry import is_format_name

from .folder import CHUNK, CheckpointSaving, index_path, is_first, saved_together

ALIGNMENT = 64  # of the first tensor: vector instructions, and JAX on CPU, want it
Index = tuple[slice, ...]  # of a piece in its tensor

GGUF = "gguf"
Kind: TypeAlias = Literal["safetensors", "bitsandbytes", "compressed-tensors", "mlx", "gguf"]
# The layouts that safetensors files are written in, by the project that has them.
KINDS: dict[str, Callable[[Iterable[ArrayToWrite]], CheckpointToWrite]] = {
    "safetensors": lambda items: CheckpointToWrite([tensors_to_write(item) for item in items]),
    "bitsandbytes": lambda items: CheckpointToWrite([bitsandbytes_record(item) for item in items]),
    "compressed-tensors": compressed_tensors_records,
    "mlx": mlx_records,
}


def save(
    path: StrPath,
    tree: object,
    *,
    kind: Kind | None = None,
    type: TypeFor = None,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, object] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a tree of arrays, dense and quantized; the result is the file, or the index of its shards.

    The suffix of the path decides what is written, ".safetensors" or ".gguf", or else the `kind` does. Any other path
    is a folder, which gets a "model.safetensors". With
    `max_shard_bytes`, a larger checkpoint is split into "model-1f0a93c2-00001-of-00003.safetensors" and so on, with
    eight digits that no other save has, and an index beside them; an array stays whole. Any program that reads
    safetensors reads the file; a quantized array is there as its leaves, `NAME.packed` and so on.

    The file appears when it is complete and on the disk. A kill at any moment leaves the old one as it was, and the
    next save removes the leftovers. Others may save to the same path at once: the checkpoint of one of them remains,
    whole. `progress` is called with a name, the bytes done and the total bytes.

    With a `kind`, quantized arrays have the tensors of another project, which opens the file: "bitsandbytes",
    "compressed-tensors" or "mlx". The last two take a folder, whose config.json says how each module is quantized; what
    else it said before remains. Codes and scales stay as they are, and an array that the project can't hold raises a
    ValueError that says what would do. docs/checkpoints.md says what each of them holds.

    A GGUF file has the names of the leaves and no other structure. Dense arrays keep their type, and quantized ones
    take the type that has their codes. `type` rounds all floating point arrays of two axes or more whose rows are a
    multiple of its block to "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_1", "Q4_0" or "TQ2_0"; a function of name
    and shape chooses for each array, None for its own type. `metadata` maps names to text, in GGUF also to numbers,
    booleans and lists of these.

    Random keys are written as their data, and `load` makes keys of it where `like` has keys.

    Sharded arrays are written shard by shard. If there are several processes (`jax.distributed.initialize`), all of
    them call this, each writes the shards of its devices, and the folder is one that all of them see.

    >>> import os, tempfile
    >>> import jax.numpy as jnp
    >>> from eformer import load, quantize, save
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = save(path, {"w": quantize(jnp.ones((64, 128)), "nf4"), "b": jnp.zeros(128)})
    >>> load(path)["w"]
    ArrayNF4(float32[64, 128], 4,608 bytes)
    """
    check_path(path, "save(path, tree)")
    named, structure = flattened(tree)
    chosen = kind_of(path, kind, type, max_shard_bytes)
    if chosen == GGUF:
        return write_gguf(Target(path, overwrite, progress), arrays_to_write(named), type, metadata)
    ours = chosen == "safetensors"
    if ours:
        named = [(name, as_stored(leaf)) for name, leaf in named]
    written = KINDS[chosen](arrays_to_write(named, spread=ours))
    target = with_config(Target(path, overwrite, progress), written, target_file(path, SUFFIX))
    return write_safetensors(target, written, structure, metadata, max_shard_bytes)


def kind_of(path: StrPath, kind: str | None, type: TypeFor, max_shard_bytes: int | None) -> str:
    """The kind of file to write: `kind`, or else what the suffix says. Options of the other kinds raise."""
    if kind is None:
        kind = GGUF if Path(path).suffix == GGUF_SUFFIX else "safetensors"
    known = (*KINDS, GGUF)
    if kind not in known:
        near = difflib.get_close_matches(str(kind).lower(), known, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        hint = "; `quantize_checkpoint` changes the format of arrays" if is_format_name(kind) else hint
        raise ValueError(f"`kind={kind!r}` must be one of {', '.join(map(repr, known))}{hint}")
    if kind == GGUF and max_shard_bytes is not None:
        raise ValueError("`max_shard_bytes` is for safetensors; a GGUF file is written whole")
    if kind != GGUF and type is not None:
        raise ValueError(f"`type={type!r}` is for GGUF; `quantize_checkpoint` changes the format of arrays")
    return kind


def with_config(target: Target, written: CheckpointToWrite, beside: Path | None) -> Target:
    """The target with a config.json: the one beside `beside`, and what is written says of quantization."""
    if not written.own:
        return target
    if Path(target.path).suffix == SUFFIX:
        raise ValueError(f"{target.path} must be a folder: its config.json says how the arrays are quantized")
    return replace(target, texts={CONFIG: config_with(beside, written.own[CONFIG])})


def write_safetensors(
    target: Target,
    written: CheckpointToWrite,
    tree: Json,
    metadata: Mapping[str, object] | None,
    max_shard_bytes: int | None,
) -> Path:
    """The file that was written, or the index of its shards; a folder gets a "model.safetensors"."""
    single, records = target_file(target.path, SUFFIX), written.records
    _check_records(records)
    shards = _shards(records, max_shard_bytes)
    meter = Meter(target.progress, sum(record.nbytes for record in records))
    given = {**written.metadata, **_checked_metadata(metadata)}
    several = len(shards) > 1
    layouts = [_laid_out(shard, given, None if several else tree, written.own) for shard in shards]

    def index(names: Sequence[str]) -> bytes:
        weight_map = {p.name: name for name, shard in zip(names, shards, strict=True) for r in shard for p in r.parts}
        summary = {"total_size": meter.total, **given, KEY: {"version": VERSION, "tree": tree, **_own(written.own)}}
        return json.dumps({"metadata": summary, "weight_map": weight_map}, indent=1).encode()

    def start() -> CheckpointSaving:
        saving = CheckpointSaving(target, single, [each.size for each in layouts])
        try:
            if several:
                parse_index(index(saving.names), index_path(single))
        except CheckpointError as error:  # it could not be read again
            saving.abandon()
            raise ValueError(f"{single} can't be split: {error.what}") from None
        return saving

    with saved_together(start, index if several else None) as temporaries:
        for temporary, shard, layout in zip(temporaries, shards, layouts, strict=True):
            with room_for(single, layout.size), to_disk(temporary) as file:
                _write_file(file, shard, layout, meter)
    return index_path(single) if several else single


def _shards(records: Sequence[TensorsToWrite], most: int | None) -> list[list[TensorsToWrite]]:
    """Records in their order, with a new shard where the next would exceed `most` bytes; a larger one is alone."""
    if most is None:
        return [list(records)]
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"`max_shard_bytes` must be a positive int or None, got {most!r}")
    shards: list[list[TensorsToWrite]] = [[]]
    size = 0
    for record in records:
        if shards[-1] and size + record.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(record)
        size += record.nbytes
    return shards


# --- what could not be read again ---


def _check_records(records: Sequence[TensorsToWrite]) -> None:
    seen: dict[str, str] = {}
    for record in records:
        for part in record.parts:
            if any("\ud800" <= letter <= "\udfff" for letter in part.name):  # half of a surrogate pair
                raise ValueError(f"{part.name!r} can't be written as UTF-8; give that leaf another name")
            if part.name == METADATA:
                raise ValueError(f"{METADATA!r} is reserved by safetensors; give that leaf another name")
            if part.name in seen:
                raise ValueError(f"{record.name!r} and {seen[part.name]!r} would both write a tensor {part.name!r}")
            if checked_shape(list(part.shape)) is None:
                raise ValueError(f"{part.name!r} has the shape {part.shape}, which no reader of ours takes")
            seen[part.name] = record.name


def _checked_metadata(metadata: Mapping[str, object] | None) -> dict[str, str]:
    given = {}
    for name, value in (metadata or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata maps text to text, got {name!r}: {value!r}; `json.dumps` makes text of a value")
        if name in (KEY, "total_size"):
            raise ValueError(f"the metadata name {name!r} is taken")
        given[name] = value
    return given


# --- the bytes of a file ---


class _Layout(NamedTuple):
    """Where the tensors of a file go."""

    header: bytes
    offsets: Mapping[str, int]  # from the end of the header
    size: int


def _own(own: OwnConfig) -> dict[str, Json]:
    """What the metadata of the weights has of the files beside them: a reader of ours needs only one file."""
    return {"config": {**own}} if own else {}


def _laid_out(records: Sequence[TensorsToWrite], metadata: dict[str, str], tree: Json, own: OwnConfig) -> _Layout:
    arrays = {record.name: record.described for record in records if record.described}
    ours = json.dumps({"version": VERSION, "arrays": arrays, "tree": tree, **_own(own)}, separators=(",", ":"))
    # Widest elements first: then each tensor lies at a multiple of its element's size, and there are no gaps.
    parts = sorted((part for record in records for part in record.parts), key=lambda part: -part.dtype.itemsize)
    offsets: dict[str, int] = {}
    entries: dict[str, Json] = {METADATA: {**metadata, KEY: ours}}
    end = 0
    for part in parts:
        if part.dtype not in NAMES:
            known = ", ".join(BY_NUMPY_NAME)
            raise TypeError(f"{part.name!r} is {part.dtype}, which safetensors can't hold; it has {known}")
        start, end = end, end + part.nbytes
        offsets[part.name] = start
        entries[part.name] = {"dtype": NAMES[part.dtype], "shape": [*part.shape], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes; the format allows {MAX_HEADER}: `max_shard_bytes` splits it")
    header = len(text).to_bytes(8, "little") + text
    return _Layout(header, offsets, len(header) + end)


def _write_file(file: BinaryIO, records: Sequence[TensorsToWrite], layout: _Layout, meter: Meter) -> None:
    if is_first():
        file.write(layout.header)
    for record in records:
        for part, value in zip(record.parts, record.values(), strict=True):
            done, offset = meter.done, len(layout.header) + layout.offsets[part.name]
            for index, piece in _pieces(value):
                _write_piece(file, offset, part, index, piece, record.name, meter)
            others = done + part.nbytes - meter.done  # bytes that other processes write
            if others:
                meter.add(record.name, others)
            del value
        record.done()


def _pieces(value: Dense) -> Iterable[tuple[Index, Dense]]:
    """The pieces of an array that this process writes, one shard at a time, and where they belong."""
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        return ((shard.index, shard.data) for shard in value.addressable_shards if shard.replica_id == 0)
    return [((), value)] if is_first() else []


def _write_piece(
    file: BinaryIO, offset: int, part: TensorSpec, index: Index, piece: Dense, name: str, meter: Meter
) -> None:
    """Write a piece of a tensor, run by run of consecutive bytes, in the order of the file.

    The file is not mapped: if the disk is full after all, writing raises, where a mapping would end the process.
    """
    slices = [slice(*each.indices(n)) for each, n in zip(index, part.shape, strict=False)]
    shape = tuple(each.stop - each.start for each in slices) or part.shape
    data = contiguous_bytes(piece, TensorSpec(part.name, part.dtype, shape))
    for start, length, at in _runs(part, slices, shape):
        for begin in range(0, length, CHUNK):
            count = min(CHUNK, length - begin)
            file.seek(offset + at + begin)
            file.write(data[start + begin : start + begin + count])
            meter.add(name, count)


def _runs(part: TensorSpec, slices: Sequence[slice], shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """For each run of bytes of a piece: its start in the piece, its length, and its start in the tensor."""
    outer = len(shape)  # the axes after this one are whole: together with it, they are one run
    while outer and shape[outer:] == part.shape[outer:]:
        outer -= 1
    length = math.prod(shape[outer:]) * part.dtype.itemsize
    strides = [math.prod(part.shape[i + 1 :]) * part.dtype.itemsize for i in range(len(shape))]
    base = sum(each.start * stride for each, stride in zip(slices, strides, strict=False))
    for number, position in enumerate(np.ndindex(*shape[:outer])):
        yield number * length, length, base + sum(map(operator.mul, position, strides))
