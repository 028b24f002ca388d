"""`eformer quantize`: a checkpoint in fewer bits."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

from eformer._text import as_bits, in_bytes
from eformer.checkpoint import open_checkpoint, quantize_checkpoint
from eformer.model import UnusedRuleWarning

from ._answer import Answer
from ._arguments import byte_count, format_names, format_rule, model_rules, rule, target
from ._compared import Totals, compare_checkpoints, largest_dense, totals
from ._output import Place, check_page, page_path, write_page
from ._progress import showing

HELP = "write a checkpoint again with its weights in fewer bits"
EXAMPLE = """\
examples:
  eformer quantize model.safetensors small.safetensors --format nf4
  eformer quantize ./model ./small --format nf4,block_size=32 --embeddings int8 --report small.html
  eformer quantize ./model ./small --rule 'lm_head=int8,axis=-1' --rule 'layers[.]0[.]=keep'

The first --rule that finds its pattern (a regular expression) in the name of an array decides. What none finds goes by
--format: large matrices are quantized; norms, biases, embeddings and small arrays are kept.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="IN", help="a .safetensors or .gguf file, an index of shards, or a folder with one"
    )
    parser.add_argument(
        "target",
        metavar="OUT",
        type=target,
        help="a .safetensors file, or a folder; from folder to folder, configuration and tokenizer are copied along",
    )
    parser.add_argument(
        "--format",
        type=format_rule,
        default="nf4",
        metavar="FORMAT[,OPTION=VALUE...]",
        help="nf4 (default), int8, ternary, binary; keep leaves all to the rules",
    )
    parser.add_argument(
        "--rule",
        type=rule,
        action="append",
        default=[],
        metavar="PATTERN=FORMAT[,OPTION=VALUE...]",
        help="a format for the arrays whose name has the pattern; may be given again",
    )
    parser.add_argument("--embeddings", choices=format_names(), metavar="FORMAT", help="a format for embeddings too")
    parser.add_argument("--shard", type=byte_count, metavar="SIZE", help="split what is larger than that: 5GB, 500MB")
    parser.add_argument(
        "--report", type=page_path, metavar="PAGE.html", help="write the errors, array by array, as a page"
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")


def run(args: argparse.Namespace) -> Answer:
    if args.embeddings is not None and args.format.format is None:
        raise ValueError("--embeddings goes with a --format for the rest; with --format keep, write a --rule for them")
    rules = model_rules(args.rule, args.format, args.embeddings)
    if args.target.suffix == ".gguf":
        raise ValueError(f"{args.target}: `eformer quantize` writes safetensors; `eformer convert` makes GGUF of them")
    if args.report is not None:
        check_page(args.report, force=args.force)
    start = time.monotonic()
    with open_checkpoint(args.source) as checkpoint:
        before = totals(checkpoint)
    with (
        warnings.catch_warnings(),
        Place(args.target, force=args.force) as place,
        showing("quantizing", sys.stderr) as progress,
    ):
        warnings.simplefilter("error", UnusedRuleWarning)  # a misspelt pattern: better to stop than to write
        written = quantize_checkpoint(
            args.source, place.path, rules, overwrite=args.force, progress=progress, max_shard_bytes=args.shard
        )
    with open_checkpoint(written) as checkpoint:
        after, kept = totals(checkpoint), largest_dense(checkpoint)
    seconds = time.monotonic() - start
    summary, data = _summary(written, before, after, seconds)
    text, data["replaced"] = [f"{summary}{place.said}"], place.replaced
    if kept is not None:
        text, data["largest_kept"] = [*text, f"largest array kept as it was: {kept}"], kept
    if args.report is not None:
        with showing("comparing", sys.stderr) as progress:
            found = compare_checkpoints(args.source, written, progress).report
        page = write_page(found, args.report, title=Path(args.source).name, force=args.force)
        text, data["report"] = [*text, f"report: {page}"], str(page)
        data["error"] = found.distance.relative_error if found.distance else None
    return Answer(text, data)


def _summary(path: Path, before: Totals, after: Totals, seconds: float) -> tuple[str, dict[str, object]]:
    text = (
        f"wrote {path}: {in_bytes(before.nbytes)} became {in_bytes(after.nbytes)}, {as_bits(after.bits)} bits a "
        f"weight; {after.quantized} of {after.arrays} arrays are quantized; {seconds:.1f} s"
    )
    data = {
        "path": str(path),
        "arrays": after.arrays,
        "quantized": after.quantized,
        "bytes_before": before.nbytes,
        "bytes_after": after.nbytes,
        "bits": after.bits,
        "seconds": seconds,
    }
    return text, data
