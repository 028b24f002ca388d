"""`eformer compare`: the errors between two checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from eformer.model import SORTS

from ._answer import Answer
from ._compare_checkpoints import compare_checkpoints
from ._output import check_page, page_path, write_page
from ._progress import showing

HELP = "show the error of each array of a checkpoint against another"
EXAMPLE = """\
examples:
  eformer compare model.safetensors small.safetensors
  eformer compare ./model ./small --sort error --report small.html
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="what to compare with: a file, an index of shards or a folder")
    parser.add_argument("after", metavar="B", help="the same model in another form")
    parser.add_argument("--sort", choices=SORTS, help="largest first")
    parser.add_argument("--report", type=page_path, metavar="PAGE.html", help="write a page with plots too")
    parser.add_argument("--force", action="store_true", help="replace an existing page")


def run(args: argparse.Namespace) -> Answer:
    if args.report is not None:
        check_page(args.report, force=args.force)
    with showing("comparing", sys.stderr) as progress:
        found = compare_checkpoints(args.before, args.after, progress)
    only = {"only_before": list(found.only_before), "only_after": list(found.only_after)}
    text = found.report.table(args.sort).split("\n")
    text += [f"only in {args.before}: {name}" for name in found.only_before]
    text += [f"only in {args.after}: {name}" for name in found.only_after]
    data = {**json.loads(found.report.to_json()), **only}
    if args.report is not None:
        page = write_page(found.report, args.report, title=Path(args.after).name, force=args.force)
        text, data["report"] = [*text, f"report: {page}"], str(page)
    return Answer(text, data)
