"""`eformer run`: one answer of a language model."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from eformer._src.cli.answer import Answer

from . import language_model

EXAMPLE = (
    """\
examples:
  eformer run smollm2 "Why is the sky blue?"
  eformer run model.gguf "Once upon a time" --raw --max-tokens 100 --temperature 0.8 --min-p 0.05
  cat question.txt | eformer run ./folder - --format int4 --activations int8
"""
    + language_model.MODELS
)


def configure(parser: argparse.ArgumentParser) -> None:
    language_model.configure(parser)
    language_model.configure_answers(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="what it answers; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="go on with the text, without the model's chat template")


def run(args: argparse.Namespace) -> Answer:
    if args.raw and args.system is not None:
        raise ValueError("--system is for answers, and --raw goes on with a text: give one of them")
    options = language_model.options(args)
    text = sys.stdin.read().strip() if args.prompt == "-" else args.prompt
    model = language_model.load(args)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    prompt = text if args.raw else [*system, {"role": "user", "content": text}]
    answer = language_model.shown(model.stream(prompt, **options), show=not args.json)
    if model.last.reason == "closed":
        raise KeyboardInterrupt
    if not args.quiet:
        print(language_model.times(model.last, args.max_tokens), file=sys.stderr, flush=True)
    return Answer([], {"text": answer, **dataclasses.asdict(model.last)})
