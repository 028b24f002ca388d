"""A GGUF model in several files, as `llama-gguf-split` writes it: each says how many they are, and which it is."""

from __future__ import annotations

import re
from pathlib import Path

from eformer._src.checkpoint.arrays import Entry
from eformer._src.checkpoint.file import CheckpointError, MappedFile
from eformer._src.checkpoint.paths import check_inside

from .read import MAGIC, Metadata, read_gguf

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"


def read_split(path: Path | None, file: MappedFile, copy: bool) -> tuple[dict[str, Entry], Metadata, list[MappedFile]]:
    """The arrays and the metadata of a model, of which `file` is a part or the whole, and all files that are open."""
    entries, metadata = read_gguf(file)
    count = metadata.get(COUNT, 1)
    if type(count) is int and count <= 1:
        return entries, metadata, [file]
    number = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})", path.stem) if path is not None else None
    if path is None or number is None or type(count) is not int or int(number[3]) != count:
        what = f"it is one of {str(count)[:20]} parts of a model, and is not named as they are"
        raise file.wrong(f"{what}: NAME-00001-of-{str(count)[:20]:0>5}.gguf")
    files, merged, first = [], dict[str, Entry](), metadata
    for i in range(count):
        part = path.with_name(f"{number[1]}-{i + 1:05}-of-{count:05}{path.suffix}")
        if not part.is_file():
            what = f"it is one of {count} parts of a model, and {part.name!r} is not beside it"
            raise file.wrong(f"{what}: fetch all of them")
        check_inside(path, part)
        files.append(file if part == path else MappedFile(part, copy=copy))
        if files[-1].data[:4].tobytes() != MAGIC:
            raise files[-1].wrong("it is no GGUF file, and a part of a model")
        entries, found = read_gguf(files[-1])
        if (found.get(NUMBER), found.get(COUNT)) != (i, count):
            said = f"part {str(found.get(NUMBER))[:20]} (counted from 0) of {str(found.get(COUNT))[:20]}"
            raise files[-1].wrong(f"it says that it is {said}, and its name that it is part {i} of {count}")
        first = found if i == 0 else first
        twice = min(entries.keys() & merged.keys(), default=None)
        if twice is not None:
            raise CheckpointError("two parts of the model have it", file=files[-1].name, tensor=twice)
        merged |= entries
    if first.get(TENSORS, len(merged)) != len(merged):
        raise file.wrong(f"the parts have {len(merged)} tensors, and the first says {str(first.get(TENSORS))[:20]}")
    for name in (COUNT, NUMBER, TENSORS):  # the whole is not split
        first.pop(name, None)
        first.kinds.pop(name, None)
    return merged, first, files
