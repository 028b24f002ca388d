"""The command `python -m eformer.examples.llm`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from eformer.model import stored_bytes

from . import _no_collection
from .caches import CACHES
from .files import open_model
from .generation import Request, Sampling, prefill
from .quantize import AS_IN_FILE, quantizing
from .tokenizer import Tokenizer

SWITCH = 1e-4  # seconds that threads which read weights wait for Python's lock while JAX traces; they need it often
LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
HELP = """\
Write text with a language model (Llama, Mistral, Qwen, Gemma 3), in plain JAX, on dense or quantized weights.

The model is a GGUF file, or a folder with config.json, tokenizer.json and safetensors. By default the weights stay as
the file has them: GGUF blocks, GPTQ, AWQ and the like are multiplied as they are, dense arrays become float32."""
EXAMPLES = """\
examples:
  python -m eformer.examples.llm model.gguf "Once upon a time" --count 100
  python -m eformer.examples.llm model.gguf "Why is the sky blue?" --chat --format int4 --activations int8
  python -m eformer.examples.llm ./folder "A poem" "A joke" --chat --temperature 0.8 --top-k 40 --seed 7
  echo "What is 2 + 2?" | python -m eformer.examples.llm model.gguf - --chat

formats: float32 decodes all weights; int8, int4, nf4, ... quantize them again as they are loaded, one array at a time,
with options after commas (int4,block_size=64,fit=false). Embeddings and the output layer get --embeddings.
--activations int8 rounds the activations too, as llama.cpp always does: faster, and a little less exact.

The first run compiles, for some seconds. JAX keeps what it compiled if JAX_COMPILATION_CACHE_DIR names a folder; each
length of prompt and text (in steps of 64 tokens) is compiled once. With that, and the file in memory, a model of 1.1 GB
starts within two seconds: its weights are read while the compiled program is loaded.
"""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m eformer.examples.llm",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("prompts", nargs="+", metavar="prompt", help="texts, run as one batch; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="answer each prompt, with the model's chat template")
    parser.add_argument("--system", help="with --chat: what the model is told about its role")
    parser.add_argument("--count", type=int, default=128, help="tokens to write, at most (default: 128)")
    parser.add_argument("--format", default="file", help="file, float32, or a format (default: file)")
    parser.add_argument("--embeddings", default="int8", help="with a format: that of embeddings and output (int8)")
    parser.add_argument("--activations", choices=("float", "int8"), default="float", help="in matmuls (default: float)")
    parser.add_argument("--cache", choices=CACHES, default="float32", help="of keys and values (float32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the K most likely tokens (0: off)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of these, the fewest with this probability (1: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="print no times to standard error")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error(f"--count must be at least 1, got {args.count}")
    if args.system is not None and not args.chat:
        parser.error("--system is for answers: it needs --chat")
    try:
        run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    sys.setswitchinterval(SWITCH)
    if LEAST_SECONDS not in os.environ:
        jax.config.update(LEAST_SECONDS.lower(), 0.0)  # a layer is compiled more quickly than what JAX keeps else
    sampling = Sampling(args.temperature, args.top_k, args.top_p).checked()
    change = quantizing(args.format, embeddings=args.embeddings, activations=args.activations)
    prompts = [sys.stdin.read().strip() if text == "-" else text for text in args.prompts]
    with (
        _no_collection(),
        open_model(args.model) as opened,
        showing(args.quiet) as progress,
        ThreadPoolExecutor(1) as reader,
    ):
        reading = reader.submit(opened.read, change, progress)
        tokenizer = opened.tokenizer()
        if args.chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            prompts = [tokenizer.chat([*system, {"role": "user", "content": text}]) for text in prompts]
        tokens, cache = [tokenizer.encode(text) for text in prompts], CACHES[args.cache]
        request = Request(opened.config, tokens, args.count, sampling, args.seed, tokenizer.ends, cache)
        if args.format == AS_IN_FILE:  # else weights take their shapes only as they are quantized
            request.compile(opened.like(change))
        params = reading.result()
    times, counts = [time.perf_counter()], []
    found: list[list[int]] = [[] for _ in prompts]
    stream = Stream(tokenizer)
    made = request.run(params)
    for portion in made:
        times.append(time.perf_counter())
        counts.append(sum(map(len, portion)))
        found = [old + new for old, new in zip(found, portion, strict=True)]
        if len(prompts) == 1:
            stream.show(found[0])
        # The loop's program takes the place of this one: 40 MB for 28 layers.
        prefill.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]  # the type in JAX lacks it
    stream.end()
    if len(prompts) > 1:
        for text, answer in zip(args.prompts, found, strict=True):
            print(f"--- {text}\n{tokenizer.decode(answer)}")
    if not args.quiet:
        # The first two portions wait for compilation, of the prefill and of the loop.
        rate = f"; then {sum(counts[2:]) / (times[-1] - times[2]):.1f} tokens/s" if len(counts) > 2 else ""
        size = f"{stored_bytes(params) / 1e6:.0f} MB"
        waits = f"{times[0] - started:.1f} s to load {size}, {times[1] - times[0]:.1f} s to the first token"
        print(f"[{waits}, compiling included{rate}]", file=sys.stderr)


@contextlib.contextmanager
def showing(quiet: bool) -> Iterator[Callable[[str, int, int], object] | None]:
    """Progress of loading, on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    yield lambda name, done, total: print(f"\rloading {done / total:4.0%}", end="", file=sys.stderr, flush=True)
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Stream:
    """Prints what is new of a text that grows; waits where a character is not complete yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._shown = tokenizer, 0

    def show(self, tokens: Sequence[int]) -> None:
        text = self._tokenizer.decode(tokens).removesuffix("\ufffd")
        print(text[self._shown :], end="", flush=True)
        self._shown = max(self._shown, len(text))

    def end(self) -> None:
        if self._shown:
            print()


if __name__ == "__main__":
    sys.exit(main())
