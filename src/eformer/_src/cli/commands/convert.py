"""`eformer convert`: write a checkpoint as another kind of file."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter

from eformer._src.checkpoint.open import open_checkpoint
from eformer._src.checkpoint.saving.rewrite import NotRunnableWarning, convert
from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import READS, SOURCE, byte_count, target
from eformer._src.cli.output import said, writing_to
from eformer._src.cli.progress import showing
from eformer._src.text import in_bytes

from .inspect import Totals

NOT_RUNNABLE = "it has no metadata of a model, such as `general.architecture`: `load` reads it, and no program runs it"
EXAMPLE = f"""\
examples:
  eformer convert model.gguf model.safetensors
  eformer convert small.safetensors model.gguf --type Q8_0
  eformer convert ./small ./for-torch --to bitsandbytes
  eformer convert ./small ./for-vllm --to compressed-tensors
  eformer convert ./model-gptq small.safetensors
{READS}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help=SOURCE)
    parser.add_argument("target", metavar="OUT", type=target, help="a .safetensors or .gguf file, or a folder")
    parser.add_argument(
        "--to",
        choices=("safetensors", "bitsandbytes", "compressed-tensors", "mlx", "gguf"),
        help="by default as OUT ends, else safetensors",
    )
    parser.add_argument(
        "--type",
        help="for GGUF: F32, F16, BF16, Q8_0, Q6_K, Q4_K, Q4_1, Q4_0, TQ2_0; rows that fill no whole blocks stay plain",
    )
    parser.add_argument("--shard", type=byte_count, metavar="SIZE", help="write files of at most this size: 5GB, 500MB")
    parser.add_argument("--force", action="store_true", help="replace existing files")


def run(args: argparse.Namespace) -> Answer:
    suffix = args.target.suffix
    kind = args.to or ("gguf" if suffix == ".gguf" else "safetensors")
    if suffix in (".safetensors", ".gguf") and (suffix == ".gguf") != (kind == "gguf"):
        raise ValueError(f"{args.target} would be {kind}: give OUT the other ending, or none for a folder")
    with (
        warnings.catch_warnings(),
        writing_to(args.target, force=args.force) as replaced,
        showing("converting", sys.stderr) as progress,
    ):
        warnings.simplefilter("ignore", NotRunnableWarning)  # the answer says it
        written = convert(
            args.source,
            args.target,
            kind,
            type=args.type,
            max_shard_bytes=args.shard,
            overwrite=args.force,
            progress=progress,
        )
    with open_checkpoint(written) as checkpoint:
        sums, runs = Totals(checkpoint), kind != "gguf" or "general.architecture" in checkpoint.metadata
    formats = Counter(info.format or info.dtype.name for info in sums.infos.values())
    counts = ", ".join(f"{count} {name}" for name, count in formats.most_common())
    text = f"wrote {written}: {kind}, {len(sums.infos)} arrays in {in_bytes(sums.nbytes)} ({counts}){said(replaced)}"
    data = {"path": str(written), "kind": kind, "arrays": len(sums.infos), "bytes": sums.nbytes}
    notes = [] if runs else [NOT_RUNNABLE]
    return Answer([text, *notes], {**data, "notes": notes, "formats": dict(formats), "replaced": replaced})
