"""Checkpoints as mappings from names to arrays, which are read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
from jax import tree_util as jtu

from ._bitsandbytes import recognise
from ._describe import KEY, VERSION, rebuild
from ._entries import ArrayInfo, DenseEntry, Entry, QuantizedEntry, dtype_here
from ._error import CheckpointError
from ._file import MappedFile
from ._gguf import MAGIC, read_gguf
from ._header import Tensor, parse_json, read_header
from ._place import ShardingFor, place, sharding_for
from ._sources import check_inside, find_file, is_index, read_index, state_of

ATTEMPTS = 100  # to open what other processes replace at the same time


class Checkpoint(Mapping[str, Any]):
    """The arrays of a checkpoint by name, read anew at each access; a context manager that closes the file.

    `kind` is "safetensors", "bitsandbytes" or "gguf". `metadata` is the file's own: text, or for GGUF also numbers and
    lists. `path` is the file opened, None for bytes.
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        entries: dict[str, Entry],
        metadata: dict[str, Any],
        tree: Any,
        files: list[MappedFile],
    ) -> None:
        self.path, self.kind, self.metadata = path, kind, metadata
        self._entries, self._tree, self._files, self._closed = entries, tree, files, False

    def __getitem__(self, name: str) -> Any:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def info(self, name: str) -> ArrayInfo:
        """Shape, dtype, format and bytes, without reading the data."""
        return self._entries[name].info

    def read(self, name: str, sharding: ShardingFor = None) -> Any:
        """The array, laid out over devices by `sharding`: each gets its part from the file, none holds the whole."""
        entry = self.entry(name)
        made = place(name, entry.host(), sharding_for(sharding, name, entry.info.shape))
        jax.block_until_ready(made)
        entry.drop()
        return made

    def entry(self, name: str) -> Entry:
        """How the array lies in the file, for writers of other files."""
        if self._closed:
            raise ValueError(f"{name!r} can't be read any more: the checkpoint is closed")
        return self._entries[name]

    @property
    def tree(self) -> Any:
        """The structure that was saved, as JSON with names at the leaves; None if the file tells of none."""
        return self._tree

    def close(self) -> None:
        self._closed = True
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path or '<bytes>')!r}, {self.kind}, {len(self)} arrays)"


def open_checkpoint(source: str | os.PathLike[str] | bytes, *, copy: bool = False) -> Checkpoint:
    """A checkpoint by its file, its index of shards, its folder, or its bytes; only headers are read.

    `copy` reads all of the files at once, for those that may be cut or written to while they are in use.

    Safetensors and GGUF files are told apart by their first bytes. Arrays that this package or bitsandbytes quantized
    come as quantized arrays, blocks of GGUF as float32. What does not hold together raises a CheckpointError.

    >>> import os, tempfile
    >>> import jax.numpy as jnp
    >>> from eformer.checkpoint import open_checkpoint, save
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = save(path, {"layer": {"bias": jnp.zeros(8)}})
    >>> with open_checkpoint(path) as checkpoint:
    ...     print(list(checkpoint), checkpoint.info("layer.bias").shape)
    ['layer.bias'] (8,)
    """
    if isinstance(source, bytes):
        return _of_files(None, [MappedFile(source)])
    for attempts_left in reversed(range(ATTEMPTS)):
        found = state_of(source)
        try:
            path = find_file(source)
            return _of_index(path, copy) if is_index(path) else _of_files(path, [MappedFile(path, copy=copy)])
        except (CheckpointError, FileNotFoundError):
            # Else another save took its place meanwhile, and removed what this one had.
            if not attempts_left or state_of(source) == found:
                raise
    raise AssertionError


def _of_files(path: Path | None, files: list[MappedFile]) -> Checkpoint:
    (file,) = files
    if file.data[:4].tobytes() == MAGIC:
        entries, metadata = read_gguf(file)
        return Checkpoint(path, "gguf", entries, metadata, None, files)
    tensors, metadata = read_header(file)
    arrays, tree = _ours(metadata.pop(KEY, None), file.name)
    return _made(path, tensors, arrays, metadata, tree, files)


def _of_index(path: Path, copy: bool) -> Checkpoint:
    metadata, weight_map = read_index(path)
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, Any] = {}
    files: dict[Path, MappedFile] = {}
    by_shard: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        by_shard.setdefault(shard, []).append(name)
    for shard, names in by_shard.items():
        check_inside(path, shard)
        files[shard] = MappedFile(shard, copy=copy)
        found, own = read_header(files[shard])
        missing = [name for name in names if name not in found]
        if missing:
            raise CheckpointError(
                f"the index says it is in {shard.name!r}, and it is not", file=str(path), tensor=missing[0]
            )
        tensors |= {name: found[name] for name in names}
        described = _ours(own.get(KEY), str(shard))[0]
        twice = min(arrays.keys() & described.keys(), default=None)
        if twice is not None:
            raise CheckpointError("two shards describe an array of that name", file=str(path), tensor=twice)
        arrays |= described
    given = metadata.pop(KEY, None)
    tree = given.get("tree") if isinstance(given, dict) else None
    return _made(path, {name: tensors[name] for name in weight_map}, arrays, metadata, tree, list(files.values()))


def _ours(text: str | None, file: str) -> tuple[dict[str, Any], Any]:
    """The descriptions of quantized arrays, and the tree, from our part of the metadata."""
    if text is None:
        return {}, None
    given = parse_json(text.encode("utf-8", "surrogatepass"), file, f"the metadata `{KEY}`")
    version = given.get("version") if isinstance(given, dict) else None
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"the metadata `{KEY}` has version {str(version)[:20]}; this release reads {VERSION}", file=file
        )
    arrays = given.get("arrays", {})
    if not isinstance(arrays, dict):
        raise CheckpointError("`arrays` must map names to descriptions", file=file)
    return arrays, given.get("tree")


def _made(
    path: Path | None,
    tensors: dict[str, Tensor],
    arrays: dict[str, Any],
    metadata: dict[str, Any],
    tree: Any,
    files: list[MappedFile],
) -> Checkpoint:
    entries: dict[str, Entry] = {name: _quantized(name, each, tensors, files[0].name) for name, each in arrays.items()}
    used = {tensor.name for entry in entries.values() for tensor in entry.tensors}
    theirs = recognise({name: t for name, t in tensors.items() if name not in used})
    used = _owners({**theirs, **entries})
    rest: dict[str, Entry] = {name: DenseEntry(t) for name, t in tensors.items() if name not in used}
    twice = (entries.keys() & rest.keys()) | (entries.keys() & theirs.keys())
    if twice:
        raise CheckpointError(
            "there is a tensor and a quantized array of that name", file=files[0].name, tensor=min(twice)
        )
    kind = "bitsandbytes" if theirs else "safetensors"
    return Checkpoint(path, kind, {**entries, **theirs, **rest}, metadata, tree, files)


def _owners(entries: dict[str, Entry]) -> dict[str, str]:
    """Which array each tensor is a part of. One of two would make them larger together than the file is."""
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for tensor in entry.tensors:
            if tensor.name in owners:
                raise CheckpointError(
                    f"it is a part of {owners[tensor.name][:100]!r}, and again of {name[:100]!r}",
                    file=tensor.file.name,
                    tensor=tensor.name,
                )
            owners[tensor.name] = name
    return owners


def _quantized(name: str, described: Any, tensors: dict[str, Tensor], file: str) -> QuantizedEntry:
    known: dict[int, Tensor] = {}
    alive: list[jax.ShapeDtypeStruct] = []

    def leaf(tensor: str) -> jax.ShapeDtypeStruct:
        if tensor not in tensors:
            raise CheckpointError(f"its tensor {tensor[:100]!r} is missing")
        alive.append(jax.ShapeDtypeStruct(tensors[tensor].shape, dtype_here(tensors[tensor])))
        known[id(alive[-1])] = tensors[tensor]
        return alive[-1]

    try:
        like = rebuild(described, leaf)
        leaves = [known.get(id(each)) for each in jtu.tree_leaves(like)]
        if not leaves or None in leaves:
            raise CheckpointError("it has no leaves of its own")
        tensors_of = [each for each in leaves if each is not None]
        return QuantizedEntry(name, like, tensors_of, described.get("codes", 1))
    except CheckpointError as error:
        raise CheckpointError(error.what, file=file, tensor=name) from None
