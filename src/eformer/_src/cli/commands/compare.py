"""`eformer compare`: the errors between two checkpoints, array by array, with one pair in memory at a time.

With a text, what two language models predict on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from eformer._src.checkpoint.file import CheckpointError
from eformer._src.checkpoint.open import Checkpoint, open_checkpoint
from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import positive
from eformer._src.cli.output import check_page, page_path, write_page
from eformer._src.cli.progress import showing
from eformer._src.model.report.compare_models import report
from eformer._src.model.report.report import Leaf, Report
from eformer._src.model.report.table import SORTS
from eformer._src.progress import Meter, Progress

LANGUAGE_MODELS = "eformer.examples.llm"  # the folder `examples`, as a wheel holds it
EXAMPLE = """\
examples:
  eformer compare model.safetensors small.safetensors
  eformer compare ./model ./small --sort error --report small.html
  eformer compare model.gguf small.safetensors --text text.txt
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="what to compare with: a file, an index of shards or a folder")
    parser.add_argument("after", metavar="B", help="the same model in another form")
    parser.add_argument("--sort", choices=SORTS, help="largest first")
    parser.add_argument("--report", type=page_path, metavar="PAGE.html", help="write a page with plots too")
    parser.add_argument("--force", action="store_true", help="replace an existing page")
    parser.add_argument("--text", type=Path, metavar="FILE", help="of language models: how they differ on this text")
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help="of the text, at most (4096)")
    parser.add_argument(
        "--window", type=least_two, default=512, metavar="N", help="tokens that are read together (512)"
    )


def least_two(text: str) -> int:
    number = positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("a window needs two tokens: one to read, and one to predict")
    return number


def run(args: argparse.Namespace) -> Answer:
    if args.text is not None:
        return _on_a_text(args)
    check_page(args.report, force=args.force)
    with showing("comparing", sys.stderr) as progress:
        found, only_before, only_after = compare_checkpoints(args.before, args.after, progress)
    text = found.table(args.sort).split("\n")
    text += [f"only in {args.before}: {name}" for name in only_before]
    text += [f"only in {args.after}: {name}" for name in only_after]
    data = {**json.loads(found.to_json()), "only_before": only_before, "only_after": only_after}
    if args.report is not None:
        page = write_page(found, args.report, title=Path(args.after).name, force=args.force)
        text, data["report"] = [*text, f"report: {page}"], str(page)
    return Answer(text, data)


def _on_a_text(args: argparse.Namespace) -> Answer:
    """Perplexities, the divergence, and how often both have the same likeliest token."""
    for option in ("sort", "report"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option} is about arrays, and --text about what models predict: give one of them")
    text = args.text.read_text(encoding="utf-8")
    models: Any = importlib.import_module(LANGUAGE_MODELS)
    score: Any = importlib.import_module(f"{LANGUAGE_MODELS}.score")
    before, after = (models.load_model(path) for path in (args.before, args.after))
    tokens = before.tokenizer().encode(text)[: args.tokens]
    if after.tokenizer().encode(text)[: args.tokens] != tokens:
        raise ValueError("the two models cut this text into other tokens, so their predictions can't be compared")
    found = score.apart(before.params, after.params, (before.config, after.config), tokens, args.window)
    first, second = found.perplexities
    lines = [
        f"{found.tokens} tokens of {args.text}, in windows of {args.window}",
        f"perplexity       {first:.3f} -> {second:.3f} ({second / first - 1:+.2%})",
        f"KL divergence    {found.divergence:.5f} nats a token",
        f"same top token   {found.same:.2%}",
    ]
    return Answer(
        lines,
        {"perplexity": [first, second], "divergence": found.divergence, "same_top": found.same, "tokens": found.tokens},
    )


def compare_checkpoints(
    before: str | os.PathLike[str], after: str | os.PathLike[str], progress: Progress | None = None
) -> tuple[Report, list[str], list[str]]:
    """A report on the arrays that both checkpoints have, and the names that only one has.

    An array that differs counts as quantized, whatever its dtype.
    """
    with open_checkpoint(before) as old, open_checkpoint(after) as new:
        names = [name for name in old if name in new]
        if not names:
            raise CheckpointError(
                f"it has no array that {before} has: {_some(new)} here, {_some(old)} there", file=str(after)
            )
        meter = Meter(progress, sum(old.info(name).nbytes for name in names))
        leaves: list[Leaf] = []
        worst, histogram = 0.0, None
        for name in names:
            found = report({name: old[name]}, {name: new[name]})
            (leaf,) = found.leaves
            changed = leaf.quantized or bool(leaf.distance and leaf.distance.noise)
            leaves.append(dataclasses.replace(leaf, quantized=changed))
            if found.histogram is not None and (leaf.error or 0.0) >= worst:
                worst, histogram = leaf.error or 0.0, found.histogram
            meter.add(name, old.info(name).nbytes)
        only_old, only_new = ([name for name in a if name not in b] for a, b in ((old, new), (new, old)))
    return Report(tuple(leaves), histogram=histogram), only_old, only_new


def _some(checkpoint: Checkpoint) -> str:
    return ", ".join(map(repr, list(checkpoint)[:2])) or "none"
