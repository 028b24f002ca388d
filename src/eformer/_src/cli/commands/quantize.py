"""`eformer quantize`: write a checkpoint with quantized weights."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

from eformer._src.checkpoint.load import load
from eformer._src.checkpoint.open import open_checkpoint
from eformer._src.checkpoint.saving.rewrite import quantize_checkpoint
from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import READS, SOURCE, add_format, byte_count, format_text, formats_help, rule, target
from eformer._src.cli.output import check_page, page_path, said, write_page, writing_to
from eformer._src.cli.progress import showing
from eformer._src.model.calibration.budget import plan_budget
from eformer._src.model.calibration.statistics import Statistics
from eformer._src.model.defaults import default_rules
from eformer._src.model.rules import Rule, UnusedRuleWarning
from eformer._src.quantization.base import QuantizedArray
from eformer._src.quantization.registry import find_format
from eformer._src.text import as_bits, in_bytes

from .compare import compare_checkpoints
from .inspect import Totals

EXAMPLE = f"""\
examples:
  eformer quantize model.safetensors small.safetensors
  eformer quantize ./model ./small --format int3 --embeddings int8 --report small.html
  eformer quantize ./model ./small --statistics statistics.npz --method gptq
  eformer quantize ./model ./small --rule 'lm_head=int8,axis=-1' --rule 'layers[.]0[.]=keep'

The first --rule whose pattern (a regular expression) is found in the name of an array decides. For all other arrays
--format decides: large matrices are quantized; norms, biases, embeddings and small arrays are kept. So is every array
that is quantized already, whatever matches it.
{READS}"""
more_help = formats_help


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help=SOURCE)
    parser.add_argument(
        "target",
        metavar="OUT",
        type=target,
        help="a .safetensors file, or a folder; from folder to folder, configuration and tokenizer are copied too",
    )
    add_format(parser, "--format", "keep leaves everything to the rules (default: int4)", default="int4")
    parser.add_argument(
        "--rule",
        type=rule,
        action="append",
        default=[],
        metavar="PATTERN=FORMAT[,OPTION=VALUE...]",
        help="a format for the arrays whose name matches the pattern; may be repeated",
    )
    add_format(parser, "--embeddings", "quantizes embeddings too")
    parser.add_argument("--statistics", type=Path, metavar="FILE", help="what `eformer calibrate` found")
    parser.add_argument("--method", choices=["gptq"], help="how codes are chosen; gptq needs statistics")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="BITS",
        help="bits a weight on average: formats from 2 to 8 bits in place of those of the rules; needs statistics",
    )
    parser.add_argument("--shard", type=byte_count, metavar="SIZE", help="write files of at most this size: 5GB, 500MB")
    parser.add_argument(
        "--report", type=page_path, metavar="PAGE.html", help="write a page with the error of each array"
    )
    parser.add_argument("--force", action="store_true", help="replace existing files")


def run(args: argparse.Namespace) -> Answer:
    rules, rest = list(args.rule), args.format
    if rest.format is not None:
        gathered = args.embeddings and format_text(args.embeddings)
        rules += default_rules(find_format(rest.format), embeddings=gathered, **rest.options)
    elif args.embeddings is not None:
        raise ValueError("--embeddings goes with a --format for the rest; with --format keep, write a --rule for them")
    if args.target.suffix == ".gguf":
        raise ValueError(f"{args.target}: `eformer quantize` writes safetensors; `eformer convert` makes GGUF of them")
    check_page(args.report, force=args.force)
    statistics = None if args.statistics is None else Statistics.load(args.statistics)
    if statistics is None and (args.method or args.budget):
        raise ValueError("--method and --budget need --statistics, which `eformer calibrate` finds")
    if args.method is not None:
        rules = [replace(rule, method=args.method) if rule.format else rule for rule in rules]
    if args.budget is not None:
        arrays = load(args.source, flat=True)
        rules = [*plan_budget(args.budget, arrays, rules, statistics=statistics), Rule("", None, optional=True)]
        del arrays
    start = time.monotonic()
    with open_checkpoint(args.source) as checkpoint:
        before = Totals(checkpoint)
        already = sum(isinstance(checkpoint.entry(name).like, QuantizedArray) for name in checkpoint)
    with (
        warnings.catch_warnings(),
        writing_to(args.target, force=args.force) as replaced,
        showing("quantizing", sys.stderr) as progress,
    ):
        warnings.simplefilter("error", UnusedRuleWarning)  # stop at a misspelt pattern instead of writing
        written = quantize_checkpoint(
            args.source,
            args.target,
            rules,
            overwrite=args.force,
            progress=progress,
            max_shard_bytes=args.shard,
            statistics=statistics,
        )
    with open_checkpoint(written) as checkpoint:
        after = Totals(checkpoint)
    dense = {name: info.nbytes for name, info in after.infos.items() if info.format is None}
    seconds = time.monotonic() - start
    data = {
        "path": str(written),
        "arrays": len(after.infos),
        "quantized": after.quantized,
        "bytes_before": before.nbytes,
    }
    data |= {"bytes_after": after.nbytes, "bits": after.bits, "seconds": seconds, "replaced": replaced}
    text = [
        f"wrote {written}: {in_bytes(before.nbytes)} became {in_bytes(after.nbytes)}, {as_bits(after.bits)} bits a "
        f"weight; {after.quantized} of {len(after.infos)} arrays are quantized; {seconds:.1f} s{said(replaced)}"
    ]
    if already:
        text.append(
            f"{already} arrays were quantized already, and stay as they were; `eformer convert IN dense.gguf "
            f"--type F16` decodes them"
        )
    if dense:
        kept = max(dense, key=dense.__getitem__)
        text, data["largest_kept"] = [*text, f"largest array kept as it was: {kept}"], kept
    if args.report is not None:
        with showing("comparing", sys.stderr) as progress:
            found, _, _ = compare_checkpoints(args.source, written, progress)
        page = write_page(found, args.report, title=Path(args.source).name, force=args.force)
        text, data["report"] = [*text, f"report: {page}"], str(page)
        data["error"] = found.distance.relative_error if found.distance else None
    return Answer(text, data)
