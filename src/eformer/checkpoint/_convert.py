"""From one kind of checkpoint to another."""

from __future__ import annotations

import os
from pathlib import Path

from ._bitsandbytes_write import write_bitsandbytes
from ._gguf_write import TypeFor, write_gguf
from ._open import open_checkpoint
from ._progress import Progress
from ._quantize import files_of, small_files, stored_item, text_metadata
from ._save import write_items

KINDS = ("safetensors", "bitsandbytes", "gguf")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    kind: str,
    *,
    type: TypeFor = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint of any kind as `kind`: "safetensors", "bitsandbytes" or "gguf"; one array at a time.

    Quantized arrays stay quantized, code for code, where the other kind can hold them; `save`, `save_bitsandbytes` and
    `save_gguf` say which those are. `type` is for GGUF. From folder to folder, the small files beside the weights come
    along. What would be replaced must not be a part of `source`.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind={kind!r}` must be one of {', '.join(map(repr, KINDS))}")
    if kind == "gguf" and max_shard_bytes is not None:
        raise ValueError("`max_shard_bytes` is for safetensors; a GGUF file is written whole")
    if kind != "gguf" and type is not None:
        raise ValueError(f"`type={type!r}` is for GGUF; `quantize_checkpoint` changes the format of arrays")
    with open_checkpoint(source) as checkpoint:
        how = {"sources": files_of(checkpoint), "beside": small_files(source, target)}
        items = [stored_item(name, checkpoint.entry(name)) for name in checkpoint]
        if kind == "gguf":
            metadata = {name: value for name, value in checkpoint.metadata.items() if name != "total_size"}
            return write_gguf(
                target, items, type=type, metadata=metadata, overwrite=overwrite, progress=progress, **how
            )
        write = write_items if kind == "safetensors" else write_bitsandbytes
        return write(
            target,
            items,
            tree=checkpoint.tree,
            metadata=text_metadata(checkpoint),
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
            progress=progress,
            **how,
        )
