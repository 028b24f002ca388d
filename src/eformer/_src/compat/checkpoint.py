"""Older names of `save`, and how GGUF files hold RSR operators: rounded, if someone asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eformer._src.checkpoint.file import StrPath
from eformer._src.checkpoint.gguf.codecs import GgufCodec, register_gguf_codec
from eformer._src.checkpoint.gguf.write import TypeFor
from eformer._src.checkpoint.saving.save import save
from eformer._src.progress import Progress

from .rsr import RSROperatorBinary, RSROperatorTernary

for _cls in (RSROperatorBinary, RSROperatorTernary):
    register_gguf_codec(GgufCodec("Q8_0", _cls))


def save_gguf(
    path: StrPath,
    tree: object,
    *,
    type: TypeFor = None,
    metadata: Mapping[str, object] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """`save(..., kind="gguf")`."""
    return save(path, tree, kind="gguf", type=type, metadata=metadata, overwrite=overwrite, progress=progress)


def save_bitsandbytes(
    path: StrPath,
    tree: object,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """`save(..., kind="bitsandbytes")`."""
    how = {"metadata": metadata, "overwrite": overwrite, "progress": progress}
    return save(path, tree, kind="bitsandbytes", max_shard_bytes=max_shard_bytes, **how)
