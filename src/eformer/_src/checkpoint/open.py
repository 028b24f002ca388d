"""Checkpoints as mappings from names to arrays, which are read when they are asked for."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax import tree_util as jtu

from eformer._src.checkpoint.gguf.read import MAGIC, read_split, with_gguf_metadata
from eformer._src.checkpoint.layouts.bitsandbytes import recognise
from eformer._src.checkpoint.prequantized.layout import PrequantizedEntry, find_prequantized
from eformer._src.checkpoint.prequantized.quantization_config import Configuration, OwnConfig, own_config
from eformer._src.checkpoint.prequantized.refusal import check_methods, check_said, check_tensors

from .arrays import ArrayInfo, DenseEntry, Entry, QuantizedEntry
from .file import CheckpointError, MappedFile, StrPath, check_path
from .header import Json, Tensor, parse_json, read_header
from .paths import check_inside, find_file, is_index, read_index, state_of
from .placement import ShardingFor, place, sharding_for
from .serialization import KEY, VERSION, rebuild
from .tree import rebuilt

ATTEMPTS = 100  # to open a checkpoint that other processes keep replacing


@dataclass(eq=False, repr=False)
class Checkpoint(Mapping[str, Any], AbstractContextManager["Checkpoint"]):
    """The arrays of a checkpoint by name, read anew at each access; a context manager that closes the file.

    `kind` is "safetensors", "gguf", or the project that quantized the arrays: "bitsandbytes", "gptq", ...
    `metadata` is the file's own: text, or for GGUF also numbers and lists. `tree` is the structure that was saved, as
    JSON with names at the leaves; None if the file has none. `path` is the file opened, None for bytes.
    """

    path: Path | None
    kind: str
    _entries: dict[str, Entry]
    metadata: Mapping[str, object]
    tree: Json
    _files: list[MappedFile]
    _own: OwnConfig = field(default_factory=dict)  # what the weights themselves say of the files beside them
    _closed: bool = False

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
        return self._entry(name).info

    def read(self, name: str, sharding: ShardingFor = None) -> Any:
        """The array, laid out over devices by `sharding`: each reads its shard from the file, none holds the whole."""
        entry = self.entry(name)
        made = place(name, entry.unread(), sharding_for(sharding, name, entry.info.shape))
        jax.block_until_ready(made)
        entry.drop()
        return made

    def entry(self, name: str) -> Entry:
        """The array as it is in the file, for writers of other files."""
        if self._closed:
            raise ValueError(f"{name!r} can't be read any more: the checkpoint is closed")
        return self._entry(name)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            near = difflib.get_close_matches(str(name), self._entries, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, list(self)[:5]))}, ..."
            raise KeyError(f"the checkpoint has no array {name!r}; {hint}")
        return self._entries[name]

    @property
    def files(self) -> list[Path]:
        """The files that it is read from; none for bytes."""
        return sorted({path for path in (self.path, *(file.path for file in self._files)) if path is not None})

    def _needs_config(self) -> bool:
        """Whether a file beside says how arrays are read, or that they are not: their own file does not say it."""
        theirs = any(isinstance(entry, PrequantizedEntry) for entry in self._entries.values())
        return (theirs or (self.tree is None and self.kind != "gguf")) and not self._own

    def close(self) -> None:
        self._closed = True
        for file in self._files:
            file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path or '<bytes>')!r}, {self.kind}, {len(self)} arrays)"


def open_checkpoint(source: StrPath | bytes, *, copy: bool = False, raw: bool = False) -> Checkpoint:
    """Open a checkpoint by its file, its index of shards, its folder, or its bytes; only headers are read.

    `copy` reads the whole files at once, for files that may be truncated or written to while they are in use.

    Safetensors and GGUF files are told apart by their first bytes. Arrays that this package, bitsandbytes or another
    project of a known layout quantized come as quantized arrays, and so do most types of GGUF; the others come as
    float32, with a warning. A file that contradicts itself raises a CheckpointError, and so does one that is quantized
    in a way that is not read. `raw` gives the tensors of safetensors as they are, and reads no meaning into them.

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
        return _of_file(None, MappedFile(source), copy, raw)
    check_path(source, "load(path)")
    for attempts_left in reversed(range(ATTEMPTS)):
        found = state_of(source)
        try:
            path = find_file(source)
            mapped = None if is_index(path) else MappedFile(path, copy=copy)
            opened = _of_index(path, copy, raw) if mapped is None else _of_file(path, mapped, copy, raw)
        except (CheckpointError, FileNotFoundError):
            # If the state changed, another save replaced the checkpoint meanwhile, and removed the files of this one.
            if not attempts_left or state_of(source) == found:
                raise
            continue
        if not opened._needs_config() or state_of(source) == found:
            return opened
        opened.close()  # the configuration that was read may be that of the checkpoint which took its place
    raise CheckpointError(f"it was replaced {ATTEMPTS} times while it was opened", file=str(source))


def _of_file(path: Path | None, file: MappedFile, copy: bool, raw: bool) -> Checkpoint:
    if file.data[:4].tobytes() == MAGIC:
        if raw:
            raise file.wrong("`raw` is for safetensors: GGUF says how each of its tensors is read")
        entries, metadata, files = read_split(path, file, copy)
        return Checkpoint(path, "gguf", entries, metadata, None, files)
    tensors, metadata = read_header(file)
    if raw:
        return _raw(path, tensors, metadata, [file])
    arrays, tree, config = _ours(metadata.pop(KEY, None), file)
    own = own_config(config, path)
    found = _entries(tensors, arrays, file.name, tree, Configuration(path, own), metadata)
    return Checkpoint(path, *found, with_gguf_metadata(metadata, file.name), tree, [file], own)


def _raw(
    path: Path | None, tensors: dict[str, Tensor], metadata: Mapping[str, object], files: list[MappedFile]
) -> Checkpoint:
    entries: dict[str, Entry] = {name: DenseEntry(tensor) for name, tensor in tensors.items()}
    return Checkpoint(path, "safetensors", entries, metadata, None, files)


def _of_index(path: Path, copy: bool, raw: bool) -> Checkpoint:
    metadata, weight_map = read_index(path)
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, Json] = {}
    files: list[MappedFile] = []
    said: dict[str, str] = {}  # the metadata of all shards
    by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        by_shard.setdefault(shard, []).append(name)
    for shard, names in by_shard.items():
        check_inside(path, path.with_name(shard))
        files.append(MappedFile(path.with_name(shard), copy=copy))
        found, header = read_header(files[-1])
        missing = next((name for name in names if name not in found), None)
        if missing is not None:
            what = f"the index says it is in {shard!r}, and it is not"
            raise CheckpointError(what, file=str(path), tensor=missing)
        more = next((name for name in found if name not in weight_map), None)
        if more is not None and not raw:
            what = f"it is in {shard!r}, and the index does not name it: that is of another model, or cut"
            raise CheckpointError(what, file=str(path), tensor=more)
        tensors |= {name: each for name, each in found.items() if weight_map.get(name, shard) == shard}
        said |= header
        described, _, _ = _ours(header.get(KEY), files[-1])
        twice = min(arrays.keys() & described.keys(), default=None)
        if twice is not None:
            raise CheckpointError("two shards describe an array of that name", file=str(path), tensor=twice)
        arrays |= described
    if raw:
        return _raw(path, tensors, metadata, files)
    given = metadata.pop(KEY, None)
    tree, config = (given.get("tree"), given.get("config")) if isinstance(given, dict) else (None, None)
    own = own_config(config, path)
    tensors = {name: tensors[name] for name in weight_map}
    file = files[0].name if files else str(path)
    found = _entries(tensors, arrays, file, tree, Configuration(path, own), {**said, **metadata})
    return Checkpoint(path, *found, with_gguf_metadata(metadata, str(path)), tree, files, own)


def _ours(text: str | None, file: MappedFile) -> tuple[dict[str, Json], Json, Json]:
    """The descriptions of quantized arrays, the tree, and the configuration, from our part of the metadata."""
    if text is None:
        return {}, None, None
    given = parse_json(text.encode("utf-8", "surrogatepass"), file.name, f"the metadata `{KEY}`")
    version = given.get("version") if isinstance(given, dict) else None
    if not isinstance(given, dict) or type(version) is not int or not 1 <= version <= VERSION:
        raise file.wrong(f"the metadata `{KEY}` has version {str(version)[:20]}; this release reads {VERSION}")
    arrays = given.get("arrays", {})
    if not isinstance(arrays, dict):
        raise file.wrong("`arrays` must map names to descriptions")
    return arrays, given.get("tree"), given.get("config")


def _entries(
    tensors: dict[str, Tensor],
    arrays: dict[str, Json],
    file: str,
    tree: Json,
    config: Configuration,
    metadata: Mapping[str, object],
) -> tuple[str, dict[str, Entry]]:
    """The kind of a checkpoint, and its arrays by name."""
    own = _leaves(tree)
    check_said(config, metadata, file)
    check_methods(tensors, tensors, own, before_layouts=True)
    entries: dict[str, Entry] = {name: _quantized(name, each, tensors, file) for name, each in arrays.items()}
    used = {tensor.name for entry in entries.values() for tensor in entry.tensors}
    theirs = recognise({name: t for name, t in tensors.items() if name not in used})
    used |= _owners(theirs).keys()
    found = find_prequantized({name: t for name, t in tensors.items() if name not in used}, config, own, metadata)
    used = _owners({**theirs, **found, **entries})
    rest: dict[str, Entry] = {name: DenseEntry(t) for name, t in tensors.items() if name not in used}
    counted = Counter(name for each in (entries, theirs, found, rest) for name in each)
    twice = min((name for name, count in counted.items() if count > 1), default=None)
    if twice is not None:
        raise CheckpointError("there is a tensor and a quantized array of that name", file=file, tensor=twice)
    check_methods(rest, tensors, own, before_layouts=False)
    check_tensors(tensors, rest, own, {**theirs, **found})
    kind = "bitsandbytes" if theirs else next((each.kind for each in found.values()), "safetensors")
    return kind, {**entries, **theirs, **found, **rest}


def _leaves(tree: Json) -> set[str]:
    """The names of arrays in a tree; of one that can't be read, those before the mistake, which `load` reports."""
    names: set[str] = set()
    with suppress(CheckpointError):
        rebuilt(tree, names.add)
    return names


def _owners(entries: dict[str, Entry]) -> dict[str, str]:
    """The array that each tensor belongs to. Arrays that shared tensors could be larger together than the file."""
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for tensor in entry.tensors:
            if tensor.name in owners:
                what = f"it is a part of {owners[tensor.name][:100]!r}, and again of {name[:100]!r}"
                raise tensor.file.wrong(what, tensor.name)
            owners[tensor.name] = name
    return owners


def _quantized(name: str, described: Json, tensors: dict[str, Tensor], file: str) -> QuantizedEntry:
    known: dict[int, tuple[jax.ShapeDtypeStruct, Tensor]] = {}  # by the id of the struct, which it keeps alive

    def leaf(tensor: str) -> jax.ShapeDtypeStruct:
        if tensor not in tensors:
            raise CheckpointError(f"its tensor {tensor[:100]!r} is missing")
        found = tensors[tensor]
        made = jax.ShapeDtypeStruct(found.shape, jax.dtypes.canonicalize_dtype(found.dtype))
        known[id(made)] = made, found
        return made

    try:
        like, codes = rebuild(described, leaf)
        leaves = jtu.tree_leaves(like)
        if not leaves or any(id(each) not in known for each in leaves):
            raise CheckpointError("it has no leaves of its own")
        return QuantizedEntry(name, like, [known[id(each)][1] for each in leaves], codes)
    except CheckpointError as error:
        raise CheckpointError(error.what, file=file, tensor=name) from None
