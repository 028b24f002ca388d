"""`eformer inspect`: list the arrays of a checkpoint from its headers."""

from __future__ import annotations

import argparse

from eformer._text import as_bits, as_shape, in_bytes, printable, table
from eformer.checkpoint import open_checkpoint

from ._answer import Answer
from ._compare_checkpoints import totals

HELP = "list the arrays of a checkpoint; reads no data"
EXAMPLE = """\
examples:
  eformer inspect model.safetensors
  eformer inspect ./model --json
"""
WIDTH = 60  # of a metadata value


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="FILE", help="a .safetensors or .gguf file, an index of shards, or a folder with one"
    )


def run(args: argparse.Namespace) -> Answer:
    with open_checkpoint(args.source) as checkpoint:
        infos = {name: checkpoint.info(name) for name in checkpoint}
        sums, kind, path, metadata = totals(checkpoint), checkpoint.kind, checkpoint.path, checkpoint.metadata
    rows = [
        [name, as_shape(info.shape), info.format or info.dtype.name, in_bytes(info.nbytes)]
        for name, info in infos.items()
    ]
    text = [f"{path}: {kind}", *(f"  {_short(name)}: {_short(value)}" for name, value in metadata.items()), ""]
    text += table(["name", "shape", "format", "bytes"], rows, words=3)
    sizes = f"{sums.size:,} values in {in_bytes(sums.nbytes)}, {as_bits(sums.bits)} bits each"
    text += ["", f"{sums.arrays} arrays, {sums.quantized} quantized: {sizes}"]
    arrays = [
        {"name": n, "shape": i.shape, "dtype": i.dtype.name, "format": i.format, "bytes": i.nbytes}
        for n, i in infos.items()
    ]
    total = {"arrays": sums.arrays, "quantized": sums.quantized, "bytes": sums.nbytes, "size": sums.size}
    data = {"path": str(path), "kind": kind, "metadata": metadata, "total": {**total, "bits": sums.bits}}
    return Answer(text, {**data, "arrays": arrays})


def _short(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
