"""`eformer inspect`: list the arrays of a checkpoint from its headers."""

from __future__ import annotations

import argparse
import math

from eformer._src.checkpoint.adapter import adapter_facts
from eformer._src.checkpoint.open import Checkpoint, open_checkpoint
from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import READS, SOURCE
from eformer._src.text import as_bits, as_shape, in_bytes, printable, table

EXAMPLE = f"""\
examples:
  eformer inspect model.safetensors
  eformer inspect ./model --json
  eformer inspect ./adapter
  eformer inspect ./model-hqq --raw
{READS}"""
WIDTH = 60  # of a metadata value


class Totals:
    """The arrays of a checkpoint and the sums over them, from its headers alone."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.infos = {name: checkpoint.info(name) for name in checkpoint}
        infos = self.infos.values()
        self.quantized = sum(info.format is not None for info in infos)
        self.nbytes = sum(info.nbytes for info in infos)
        self.size = sum(math.prod(info.shape) for info in infos)
        self.bits = 8 * self.nbytes / self.size if self.size else math.nan  # per weight


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILE", help=SOURCE)
    parser.add_argument("--raw", action="store_true", help="list the tensors as they are, also of what is not read")


def run(args: argparse.Namespace) -> Answer:
    with open_checkpoint(args.source, raw=args.raw) as checkpoint:
        sums, kind, path = Totals(checkpoint), checkpoint.kind, checkpoint.path
        metadata = {**checkpoint.metadata, **adapter_facts(checkpoint)}
    rows, arrays = [], []
    for name, info in sums.infos.items():
        dtype = info.dtype.name
        rows.append([name, as_shape(info.shape), info.format or dtype, in_bytes(info.nbytes)])
        arrays.append({"name": name, "shape": info.shape, "dtype": dtype, "format": info.format, "bytes": info.nbytes})
    text = [f"{path}: {kind}", *(f"  {_short(name)}: {_short(value)}" for name, value in metadata.items()), ""]
    text += table(["name", "shape", "format", "bytes"], rows, words=3)
    sizes = f"{sums.size:,} values in {in_bytes(sums.nbytes)}, {as_bits(sums.bits)} bits each"
    text += ["", f"{len(rows)} arrays, {sums.quantized} quantized: {sizes}"]
    total = {"arrays": len(rows), "quantized": sums.quantized, "bytes": sums.nbytes, "size": sums.size}
    data = {"path": str(path), "kind": kind, "metadata": metadata, "total": {**total, "bits": sums.bits}}
    return Answer(text, {**data, "arrays": arrays})


def _short(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
