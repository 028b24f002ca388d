"""Writing safetensors: one file, or shards and their index, streamed and never half."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from ._atomic import check_free, sync_folder
from ._describe import KEY, VERSION
from ._dtypes import dtype_name
from ._header import MAX_HEADER, METADATA
from ._processes import from_first, is_first, shared_file
from ._progress import Meter, Progress
from ._records import Part, Record, contiguous_bytes
from ._sources import INDEX_SUFFIX, SUFFIX, shards_of

CHUNK = 1 << 24  # bytes between two calls of `progress`
ALIGNMENT = 64  # of the first tensor: what vector instructions, and JAX on CPU, like


def write_safetensors(
    path: str | os.PathLike[str],
    records: Sequence[Record],
    *,
    tree: Any,
    metadata: Mapping[str, str] | None,
    max_shard_bytes: int | None,
    overwrite: bool,
    progress: Progress | None,
) -> Path:
    """The file that was written, or the index of its shards; a folder gets a "model.safetensors"."""
    single = Path(path) if Path(path).suffix == SUFFIX else Path(path) / f"model{SUFFIX}"
    index = single.with_name(single.name + INDEX_SUFFIX)
    _check_names(records)
    shards = _shards(records, max_shard_bytes)

    def plan() -> Any:
        for target in (single, index):
            check_free(target, overwrite=overwrite)
        old = [str(path) for path in _written_before(single, index)]
        return old, _shard_names(single, len(shards)) if len(shards) > 1 else []

    old, names = from_first(plan)
    old = set(map(Path, old))
    meter = Meter(progress, sum(record.nbytes for record in records))
    given = _checked_metadata(metadata)
    if len(shards) == 1:
        _write_file(single, shards[0], {**given, **_ours(shards[0], tree)}, overwrite, meter)
        from_first(lambda: _remove(old - {single}))
        return single
    weight_map = {p.name: name for name, shard in zip(names, shards, strict=True) for r in shard for p in r.parts}
    summary = {"total_size": meter.total, **given, KEY: {"version": VERSION, "tree": tree}}
    try:
        for name, shard in zip(names, shards, strict=True):
            _write_file(single.with_name(name), shard, {**given, **_ours(shard, None)}, False, meter)
        text = json.dumps({"metadata": summary, "weight_map": weight_map}, indent=1).encode()
        with shared_file(index, size=len(text), overwrite=overwrite) as file:
            if is_first():
                file.write(text)
    except BaseException:
        from_first(lambda: _remove({single.with_name(name) for name in names}))
        raise
    from_first(lambda: _remove(old - {index}))
    return index


def _ours(records: Sequence[Record], tree: Any) -> dict[str, str]:
    arrays = {record.name: record.described for record in records if record.described}
    return {KEY: json.dumps({"version": VERSION, "arrays": arrays, "tree": tree}, separators=(",", ":"))}


def _shards(records: Sequence[Record], most: int | None) -> list[list[Record]]:
    """Records in their order, a new shard where the next would go beyond `most` bytes; a larger one is alone."""
    if most is None:
        return [list(records)]
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"`max_shard_bytes` must be a positive int or None, got {most!r}")
    shards: list[list[Record]] = [[]]
    size = 0
    for record in records:
        if shards[-1] and size + record.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(record)
        size += record.nbytes
    return shards


def _shard_names(single: Path, count: int) -> list[str]:
    """The usual names; if one is taken, all get a number more: an old index keeps its shards until the new is there."""
    for attempt in range(10_000):
        tag = f"-{attempt}" if attempt else ""
        names = [f"{single.stem}{tag}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]
        if not any(os.path.lexists(single.with_name(name)) for name in names):
            return names
    raise FileExistsError(f"{single.parent} is full of shards that no index names; remove them")


def _written_before(single: Path, index: Path) -> set[Path]:
    """What the checkpoint of that name consists of now."""
    found = {path for path in (single, index) if os.path.lexists(path)}
    return found | (shards_of(index) if index in found else set())


def _remove(paths: set[Path]) -> None:
    # The index first, so that none is left without its shards.
    for path in sorted(paths, key=lambda path: path.suffix == SUFFIX):
        path.unlink(missing_ok=True)
    if paths:
        sync_folder(next(iter(paths)).parent)


def _check_names(records: Sequence[Record]) -> None:
    seen: dict[str, str] = {}
    for record in records:
        for part in record.parts:
            if not _is_text(part.name):
                raise ValueError(f"{part.name!r} can't be written as UTF-8; give that leaf another name")
            if part.name == METADATA:
                raise ValueError(f"{METADATA!r} is reserved by safetensors; give that leaf another name")
            if part.name in seen:
                raise ValueError(f"{record.name!r} and {seen[part.name]!r} would both write a tensor {part.name!r}")
            seen[part.name] = record.name


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    given = dict(metadata or {})
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"metadata maps text to text, got {name!r}: {value!r}; `json.dumps` makes text of a value")
        if name in (KEY, "total_size"):
            raise ValueError(f"the metadata name {name!r} is taken")
    return given


def _write_file(path: Path, records: Sequence[Record], metadata: dict[str, str], overwrite: bool, meter: Meter) -> None:
    # Widest elements first: then each tensor lies at a multiple of its element's size, and there are no gaps.
    parts = sorted((part for record in records for part in record.parts), key=lambda part: -part.dtype.itemsize)
    offsets: dict[str, int] = {}
    end = 0
    for part in parts:
        offsets[part.name] = end
        end += part.nbytes
    header = _header(parts, offsets, metadata)
    with shared_file(path, size=len(header) + end, overwrite=overwrite) as file:
        if is_first():
            file.write(header)
        for record in records:
            for part, value in zip(record.parts, record.values(), strict=True):
                done = meter.done
                for index, piece in _pieces(value):
                    _write_piece(file, len(header) + offsets[part.name], part, index, piece, record.name, meter)
                others = done + part.nbytes - meter.done  # bytes that other processes write
                if others:
                    meter.add(record.name, others)
                del value
            record.done()


def _pieces(value: Any) -> Iterable[tuple[Any, Any]]:
    """The parts of an array that this process writes, and where they belong; those that devices have, one by one."""
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        return ((shard.index, shard.data) for shard in value.addressable_shards if shard.replica_id == 0)
    return [((), value)] if is_first() else []


def _write_piece(file: BinaryIO, offset: int, part: Part, index: Any, piece: Any, name: str, meter: Meter) -> None:
    slices = [slice(*each.indices(n)) for each, n in zip(index, part.shape, strict=False)]
    shape = tuple(each.stop - each.start for each in slices) or part.shape
    data = contiguous_bytes(piece, Part(part.name, part.dtype, shape))
    if not len(data):
        return
    if shape[1:] != part.shape[1:]:  # it does not lie in one run
        file.flush()
        target = np.memmap(file, np.uint8, "r+", offset, (*part.shape, part.dtype.itemsize))
        target[tuple(slices)] = np.frombuffer(data, np.uint8).reshape(*shape, part.dtype.itemsize)
        target.flush()
        meter.add(name, len(data))
        return
    file.seek(offset + (slices[0].start * len(data) // shape[0] if slices else 0))
    for start in range(0, len(data), CHUNK):
        file.write(data[start : start + CHUNK])
        meter.add(name, len(data[start : start + CHUNK]))


def _header(parts: Sequence[Part], offsets: Mapping[str, int], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {METADATA: metadata}
    for part in parts:
        start = offsets[part.name]
        shape, name = list(part.shape), dtype_name(part.dtype, part.name)
        entries[part.name] = {"dtype": name, "shape": shape, "data_offsets": [start, start + part.nbytes]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes; the format allows {MAX_HEADER}: `max_shard_bytes` splits it")
    return len(text).to_bytes(8, "little") + text
