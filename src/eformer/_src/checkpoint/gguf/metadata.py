"""The metadata of a GGUF file inside safetensors, whose own metadata is text: numbers, lists and their types stay."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from eformer._src.checkpoint.file import CheckpointError, MappedFile

from .pairs import pairs_of
from .read import Metadata, Reader, read_pairs

KEY = "eformer.gguf"  # its value: the pairs as in a GGUF file, in base64
COUNT = "total_size"  # of an index of shards, which says it of its own files


def text_metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    """The metadata that safetensors holds: text as it is, and what came from GGUF under one name."""
    typed = typed_metadata(metadata)
    if not isinstance(metadata, Metadata):
        return {name: str(value) for name, value in typed.items() if isinstance(value, (str, int, float))}
    text = {name: str(value) for name, value in typed.items() if name not in metadata.kinds}
    own = {name: value for name, value in typed.items() if name in metadata.kinds}
    return {**text, KEY: base64.b64encode(pairs_of(own, metadata.kinds)).decode()}


def typed_metadata(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """The metadata of the arrays, without what an index says of its files."""
    kept = Metadata()
    kept.kinds |= metadata.kinds if isinstance(metadata, Metadata) else {}
    kept |= {name: value for name, value in metadata.items() if name != COUNT or name in kept.kinds}
    return kept if isinstance(metadata, Metadata) else dict(kept)


def with_gguf_metadata(metadata: Mapping[str, object], file: str) -> Mapping[str, object]:
    """The metadata of safetensors with what `text_metadata` put under one name."""
    text = metadata.get(KEY)
    if not isinstance(text, str):
        return metadata
    try:
        data = MappedFile(base64.b64decode(text, validate=True))
        reader = Reader(data)
        found = read_pairs(reader, reader.pairs())
    except (CheckpointError, binascii.Error, ValueError) as error:
        what = error.what if isinstance(error, CheckpointError) else str(error)
        raise CheckpointError(f"the metadata `{KEY}` can't be read: {what}", file=file) from None
    rest = {name: value for name, value in metadata.items() if name != KEY and (name != COUNT or name not in found)}
    twice = min(found.keys() & rest.keys(), default=None)
    if twice is not None:
        raise CheckpointError(f"the metadata has {twice[:100]!r} twice", file=file)
    found |= rest
    return found
