"""`eformer calibrate`: find what the weights of a language model are multiplied by."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import SOURCE, positive
from eformer._src.cli.progress import showing
from eformer._src.model.calibration.calibrate import calibrate
from eformer._src.model.calibration.statistics import Statistics

EXAMPLE = """\
examples:
  eformer calibrate model.gguf text.txt statistics.npz
  eformer calibrate ./model text.txt statistics.npz --second-moments
  eformer quantize ./model ./small --format int4 --statistics statistics.npz --method gptq

It runs the models of `python -m eformer.examples.llm`: Llama, SmolLM2 and Qwen2.5. Take text of the kind that the
model is for; some thousand tokens are enough. Of functions of your own, `eformer.calibrate` finds the same.
"""
LANGUAGE_MODELS = "eformer.examples.llm"  # the folder `examples`, as a wheel holds it


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="MODEL", help=SOURCE)
    parser.add_argument("text", metavar="TEXT", type=Path, help="a file of text")
    parser.add_argument("target", metavar="OUT", type=Path, help="the file of statistics (.npz)")
    parser.add_argument("--windows", type=positive, default=32, metavar="N", help="how many texts to run (32)")
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="tokens in each of them (512)")
    parser.add_argument("--second-moments", action="store_true", help="what GPTQ needs, too; a larger file")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: argparse.Namespace) -> Answer:
    if args.target.exists() and not args.force:
        raise FileExistsError(f"{args.target} exists; --force replaces it")
    models: Any = importlib.import_module(LANGUAGE_MODELS)
    start = time.monotonic()
    with models.open_model(args.source) as opened:
        params, config = opened.read(), opened.config
        tokens = opened.tokenizer().encode(args.text.read_text(encoding="utf-8"))
        names = {own: name for name, own in opened.names.items()}
    windows = np.array(tokens[: len(tokens) // args.length * args.length], np.int32).reshape(-1, 1, args.length)
    if not len(windows):
        raise ValueError(f"{args.text} has {len(tokens)} tokens, and a window takes {args.length}: give --length")
    params = {name: _dense(array) for name, array in params.items()}
    function = functools.partial(models.forward, config=config)
    with showing("calibrating", sys.stderr) as progress:
        run = calibrate(function, second_moments=args.second_moments, progress=progress)
        found = run(params, map(jnp.asarray, windows[: args.windows]))
    missing = {names[own]: why for own, why in found.missing.items()}
    found = Statistics({names[own]: each for own, each in found.items()}, missing)
    found.save(args.target)
    seconds, used = time.monotonic() - start, min(args.windows, len(windows))
    of = f"statistics of {len(found)} arrays from {used} windows of {args.length} tokens"
    line = f"wrote {args.target}: {of}; {seconds:.1f} s"
    data = {"path": str(args.target), "arrays": len(found), "windows": used, "seconds": seconds}
    return Answer([line, *repr(found).splitlines()], {**data, "missing": found.missing})


def _dense(array: Any) -> Any:
    return array.materialize() if hasattr(array, "materialize") else array
