"""Checkpoints as mappings from names to arrays, which are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
from jax import tree_util as jtu

from ._arrays import ArrayInfo, DenseEntry, Entry, QuantizedEntry, dtype_here
from ._bitsandbytes import recognise
from ._describe import KEY, VERSION, rebuild
from ._error import CheckpointError
from ._file import MappedFile, StrPath
from ._gguf import MAGIC, read_gguf
from ._header import Json, Tensor, parse_json, read_header
from ._paths import check_inside, find_file, is_index, read_index, state_of
from ._place import ShardingFor, place, sharding_for

ATTEMPTS = 100  # to open a checkpoint that other processes keep replacing


class Checkpoint(Mapping[str, Any]):
    """The arrays of a checkpoint by name, read anew at each access; a context manager that closes the file.

    `kind` is "safetensors", "bitsandbytes" or "gguf". `metadata` is the file's own: text, or for GGUF also numbers and
    lists. `tree` is the structure that was saved, as JSON with names at the leaves; None if the file has none. `path`
    is the file opened, None for bytes.
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        entries: dict[str, Entry],
        metadata: Mapping[str, object],
        tree: Json,
        files: list[MappedFile],
    ) -> None:
        self.path, self.kind, self.metadata, self.tree = path, kind, metadata, tree
        self._entries, self._files, self._closed = entries, files, False

    def __getitem__(self, name: str) -> Any:  # the class depends on the file
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
        """The array, laid out over devices by `sharding`: each reads its shard from the file, none holds the whole."""
        entry = self.entry(name)
        made = place(name, entry.host(), sharding_for(sharding, name, entry.info.shape))
        jax.block_until_ready(made)
        entry.drop()
        return made

    def entry(self, name: str) -> Entry:
        """The array as it is in the file, for writers of other files."""
        if self._closed:
            raise ValueError(f"{name!r} can't be read any more: the checkpoint is closed")
        return self._entries[name]

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


def open_checkpoint(source: StrPath | bytes, *, copy: bool = False) -> Checkpoint:
    """Open a checkpoint by its file, its index of shards, its folder, or its bytes; only headers are read.

    `copy` reads the whole files at once, for files that may be truncated or written to while they are in use.

    Safetensors and GGUF files are told apart by their first bytes. Arrays that this package or bitsandbytes quantized
    come as quantized arrays; GGUF blocks come as float32, unless a codec keeps them quantized. A file that contradicts
    itself raises a CheckpointError.

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
        return _of_file(None, MappedFile(source))
    for attempts_left in reversed(range(ATTEMPTS)):
        found = state_of(source)
        try:
            path = find_file(source)
            return _of_index(path, copy) if is_index(path) else _of_file(path, MappedFile(path, copy=copy))
        except (CheckpointError, FileNotFoundError):
            # If the state changed, another save replaced the checkpoint meanwhile, and removed the files of this one.
            if not attempts_left or state_of(source) == found:
                raise
    raise AssertionError


def _of_file(path: Path | None, file: MappedFile) -> Checkpoint:
    if file.data[:4].tobytes() == MAGIC:
        return Checkpoint(path, "gguf", *read_gguf(file), None, [file])
    tensors, metadata = read_header(file)
    arrays, tree = _ours(metadata.pop(KEY, None), file.name)
    return _made(path, tensors, arrays, metadata, tree, [file])


def _of_index(path: Path, copy: bool) -> Checkpoint:
    metadata, weight_map = read_index(path)
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, Json] = {}
    files: list[MappedFile] = []
    by_shard: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        by_shard.setdefault(shard, []).append(name)

    def wrong(what: str, tensor: str) -> CheckpointError:
        return CheckpointError(what, file=str(path), tensor=tensor)

    for shard, names in by_shard.items():
        check_inside(path, shard)
        files.append(MappedFile(shard, copy=copy))
        found, own = read_header(files[-1])
        missing = [name for name in names if name not in found]
        if missing:
            raise wrong(f"the index says it is in {shard.name!r}, and it is not", missing[0])
        tensors |= {name: found[name] for name in names}
        described = _ours(own.get(KEY), str(shard))[0]
        twice = min(arrays.keys() & described.keys(), default=None)
        if twice is not None:
            raise wrong("two shards describe an array of that name", twice)
        arrays |= described
    given = metadata.pop(KEY, None)
    tree = given.get("tree") if isinstance(given, dict) else None
    return _made(path, {name: tensors[name] for name in weight_map}, arrays, metadata, tree, files)


def _ours(text: str | None, file: str) -> tuple[dict[str, Json], Json]:
    """The descriptions of quantized arrays, and the tree, from our part of the metadata."""
    if text is None:
        return {}, None
    given = parse_json(text.encode("utf-8", "surrogatepass"), file, f"the metadata `{KEY}`")
    version = given.get("version") if isinstance(given, dict) else None
    if not isinstance(given, dict) or type(version) is not int or not 1 <= version <= VERSION:
        what = f"the metadata `{KEY}` has version {str(version)[:20]}; this release reads {VERSION}"
        raise CheckpointError(what, file=file)
    arrays = given.get("arrays", {})
    if not isinstance(arrays, dict):
        raise CheckpointError("`arrays` must map names to descriptions", file=file)
    return arrays, given.get("tree")


def _made(
    path: Path | None,
    tensors: dict[str, Tensor],
    arrays: dict[str, Json],
    metadata: Mapping[str, object],
    tree: Json,
    files: list[MappedFile],
) -> Checkpoint:
    file = files[0].name if files else str(path)
    entries: dict[str, Entry] = {name: _quantized(name, each, tensors, file) for name, each in arrays.items()}
    used = {tensor.name for entry in entries.values() for tensor in entry.tensors}
    theirs = recognise({name: t for name, t in tensors.items() if name not in used})
    used = _owners({**theirs, **entries})
    rest: dict[str, Entry] = {name: DenseEntry(t) for name, t in tensors.items() if name not in used}
    twice = (entries.keys() & rest.keys()) | (entries.keys() & theirs.keys())
    if twice:
        raise CheckpointError("there is a tensor and a quantized array of that name", file=file, tensor=min(twice))
    kind = "bitsandbytes" if theirs else "safetensors"
    return Checkpoint(path, kind, {**entries, **theirs, **rest}, metadata, tree, files)


def _owners(entries: dict[str, Entry]) -> dict[str, str]:
    """The array that each tensor belongs to. Arrays that shared tensors could be larger together than the file."""
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for tensor in entry.tensors:
            if tensor.name in owners:
                what = f"it is a part of {owners[tensor.name][:100]!r}, and again of {name[:100]!r}"
                raise CheckpointError(what, file=tensor.file.name, tensor=tensor.name)
            owners[tensor.name] = name
    return owners


def _quantized(name: str, described: Json, tensors: dict[str, Tensor], file: str) -> QuantizedEntry:
    known: dict[int, Tensor] = {}
    alive: list[jax.ShapeDtypeStruct] = []  # so that no two have the same id

    def leaf(tensor: str) -> jax.ShapeDtypeStruct:
        if tensor not in tensors:
            raise CheckpointError(f"its tensor {tensor[:100]!r} is missing")
        alive.append(jax.ShapeDtypeStruct(tensors[tensor].shape, dtype_here(tensors[tensor])))
        known[id(alive[-1])] = tensors[tensor]
        return alive[-1]

    try:
        like = rebuild(described, leaf)
        leaves = jtu.tree_leaves(like)
        if not leaves or any(id(each) not in known for each in leaves):
            raise CheckpointError("it has no leaves of its own")
        assert isinstance(described, dict)
        codes = described.get("codes", 1)
        assert isinstance(codes, int)  # `rebuild` has checked it
        return QuantizedEntry(name, like, [known[id(each)] for each in leaves], codes)
    except CheckpointError as error:
        raise CheckpointError(error.what, file=file, tensor=name) from None
