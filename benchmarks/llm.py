"""Language models beside llama.cpp: tokens/s of decode and prefill, memory, cold start, and what int8 activations cost.

    make llm-bench                                                   # SmolLM2-135M, Qwen2.5-Coder 0.5B and 1.5B
    python benchmarks/llm.py model.gguf --peer other/bin/python      # llama-cpp-python may be in another environment

Ours is `examples/llm` on the weights of the file, quantized again to each form; llama.cpp runs what it makes itself of
the same file. Each contender is a process of its own, with all cores, that waits while the others are measured. They
take turns, and the median of the rounds counts. Read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PREFILL, CONTEXT, DECODE = 512, 64, 64  # tokens: a prompt; a short prompt, and those that are written after it
PROMPT = "Write a function that adds two numbers."
# Our forms: the format, and the activations.
OURS = {
    "float32": ("float32", "float"),
    "int8": ("int8", "float"),
    "int8, int8 x": ("int8", "int8"),
    "int4": ("int4,fit=false", "float"),
    "int4, int8 x": ("int4,fit=false", "int8"),
    "nf4": ("nf4", "float"),
    "nf4, int8 x": ("nf4", "int8"),
    "ternary, int8 x": ("ternary", "int8"),
    "as in the file": ("file", "float"),
    "as in the file, int8 x": ("file", "int8"),
}
# What llama.cpp makes, by its numbers of file types.
PEERS = {"llama.cpp F16": 1, "llama.cpp Q8_0": 7, "llama.cpp Q4_0": 2, "llama.cpp Q4_K": 15, "llama.cpp TQ2_0": 37}
# Rows of the table of ratios: ours, the contenders of which the best counts, what is compared, and the goals for models
# below and above 200 million weights.
RATIOS = (
    ("int8, int8 x", ("llama.cpp Q8_0",), "decode", 0.85, 1.0),
    ("int4, int8 x", ("llama.cpp Q4_0", "llama.cpp Q4_K"), "decode", 0.85, 1.0),
    ("ternary, int8 x", ("llama.cpp TQ2_0",), "decode", None, 1.0),
    ("int8", ("float32",), "prefill", 1.0, 1.0),
    ("int4", ("float32",), "prefill", 1.0, 1.0),
    ("nf4", ("float32",), "prefill", 1.0, 1.0),
    ("int4, int8 x", ("float32",), "prefill", 1.6, 1.6),
    ("int4, int8 x", ("llama.cpp Q4_0",), "prefill", 1.0, 1.0),
)
MOST_LOGITS, MOST_PERPLEXITY, MOST_MEMORY, MOST_START = 0.04, 0.01, 1.25, 1.5


# --- the processes that are measured ---


def clock() -> float:
    """Seconds; those of the processor, if it is the only one."""
    return time.process_time() if len(os.sched_getaffinity(0)) == 1 else time.perf_counter()


def peak_memory() -> int:
    """Bytes of resident memory since the process began, at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def serve(measure: Any) -> None:
    """Answer each line of standard input with a line of JSON."""
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), flush=True)


def serve_ours(model: str, form: str, text: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from eformer.examples.llm import empty_cache, generation, load_model  # pyright: ignore[reportMissingImports]
    from eformer.examples.llm.quantize import quantizing  # pyright: ignore[reportMissingImports]

    from eformer.model import stored_bytes

    weights, activations = OURS[form]
    params, config, tokenizer = load_model(model, quantizing(weights, activations=activations))
    options = {"config": config, "sampling": generation.GREEDY, "ends": ()}
    tokens = jnp.asarray(np.random.default_rng(0).integers(100, 1000, (1, PREFILL)), jnp.int32)
    padding, key = jnp.zeros(1, jnp.int32), jax.random.key(0)

    def prefill(length: int, capacity: int) -> Any:
        cache = empty_cache(config, 1, capacity)
        return jax.block_until_ready(generation.prefill(params, tokens[:, :length], padding, key, cache, **options))

    def measure(what: str) -> dict[str, float]:
        if what == "quality":
            return quality(params, config, tokenizer().encode(Path(text).read_text(encoding="utf-8")))
        start = clock()
        prefill(PREFILL, PREFILL)
        middle, state = clock(), prefill(CONTEXT, CONTEXT + DECODE)
        begun = clock()
        for _ in range(DECODE // generation.STEPS):
            state, found = generation.advance(params, state, jnp.int32(generation.STEPS), **options)
            jax.block_until_ready(found)
        rates = {"prefill": PREFILL / (middle - start), "decode": DECODE / (clock() - begun)}
        return {**rates, "bytes": stored_bytes(params), "peak": peak_memory()}

    serve(measure)


def quality(params: Any, config: Any, tokens: list[int]) -> dict[str, float]:
    """What int8 activations change: logits of 512 tokens in relative norm, and perplexity of the whole text."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from eformer.examples.llm import forward  # pyright: ignore[reportMissingImports]
    from eformer.examples.llm.score import perplexity  # pyright: ignore[reportMissingImports]

    from eformer import QuantizedArray, implicit

    run = jax.jit(implicit(forward), static_argnames="config")

    def switched(dtype: str | None) -> Any:
        return {n: a.with_activation_dtype(dtype) if isinstance(a, QuantizedArray) else a for n, a in params.items()}

    exact, rounded = switched(None), switched("int8")
    right, found = (np.asarray(run(p, jnp.asarray([tokens[:512]]), config=config)) for p in (exact, rounded))
    right_perplexity, found_perplexity = (perplexity(p, config, tokens) for p in (exact, rounded))
    return {
        "logits": float(np.linalg.norm(found - right) / np.linalg.norm(right)),
        "perplexity": right_perplexity,
        "rounded perplexity": found_perplexity,
    }


def serve_peer(model: str, file_type: int, made: str) -> None:
    import llama_cpp as llama  # pyright: ignore[reportMissingImports]  # of another environment, perhaps
    import numpy as np

    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, None)
    if not Path(made).exists():
        options = llama.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = file_type, True
        if llama.llama_model_quantize(model.encode(), made.encode(), options):
            raise SystemExit(f"llama.cpp could not quantize {model}")
    cores = len(os.sched_getaffinity(0))
    run = llama.Llama(made, n_ctx=1024, n_batch=512, n_threads=cores, n_threads_batch=cores, verbose=False)
    tokens = np.random.default_rng(0).integers(100, 1000, PREFILL).astype(np.int32)

    def decode(some: np.ndarray) -> int:
        given = np.ascontiguousarray(some, np.int32)
        pointer = given.ctypes.data_as(llama.llama_cpp.ctypes.POINTER(llama.llama_token))
        if llama.llama_decode(run.ctx, llama.llama_batch_get_one(pointer, len(given))):
            raise SystemExit("llama_decode failed")
        return int(np.argmax(np.ctypeslib.as_array(llama.llama_get_logits(run.ctx), (run.n_vocab(),))))

    def forget() -> None:
        llama.llama_memory_clear(llama.llama_get_memory(run.ctx), True)

    def measure(what: str) -> dict[str, float]:
        del what
        forget()
        start = clock()
        decode(tokens)
        middle = clock()
        forget()
        token, begun = decode(tokens[:CONTEXT]), clock()
        for _ in range(DECODE):
            token = decode(np.array([token]))
        rates = {"prefill": PREFILL / (middle - start), "decode": DECODE / (clock() - begun)}
        return {**rates, "bytes": Path(made).stat().st_size, "peak": peak_memory()}

    serve(measure)


PEER_START = """
import sys, llama_cpp
run = llama_cpp.Llama(sys.argv[1], n_ctx=512, verbose=False)
print(next(iter(run.create_completion(sys.argv[2], max_tokens=1, stream=True)))["choices"][0]["text"], flush=True)
"""


# --- the comparison ---


class Contender:
    """A process that measures when it is told to."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a contender ended: {self._process.args}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(model: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of each contender over the rounds."""
    chosen = [name for name in (*OURS, *PEERS) if re.search(args.only, name) and (args.peer or name in OURS)]
    running: dict[str, Contender] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    try:
        for name in chosen:
            say(f"  {name}: loading and compiling ...")
            running[name] = Contender(command(name, model, args))
            running[name].ask("measure")
        for turn in range(args.rounds):
            say(f"  round {turn + 1} of {args.rounds} ...")
            for name, contender in running.items():
                found[name].append(contender.ask("measure"))
        medians = {
            name: {key: statistics.median(r[key] for r in rows) for key in rows[0]} for name, rows in found.items()
        }
        for name in ("int4", "int8"):
            if name in running:
                say(f"  what int8 activations change, {name} ...")
                medians[name] |= running[name].ask("quality")
    finally:
        for contender in running.values():
            contender.close()
    return medians


def command(name: str, model: Path, args: argparse.Namespace) -> list[str]:
    how = ["--serve", name, *(["--one-core"] if args.one_core else [])]
    if name in OURS:
        return [sys.executable, __file__, str(model), *how, "--text", str(args.text)]
    made = args.folder / f"{model.stem}-{PEERS[name]}.gguf"
    return [args.peer, __file__, str(model), *how, "--made", str(made)]


def cold_start(model: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds from the start of a process to its first token: ours, with what JAX compiled before, and llama.cpp's."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(args.folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    ours = [sys.executable, "-m", "eformer.examples.llm", str(model), PROMPT, "--count", "1", "--activations", "int8"]
    commands = {"ours": ours, "peer": [args.peer, "-c", PEER_START, str(model), PROMPT]}
    times: dict[str, list[float]] = {name: [] for name in commands}

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime if args.one_core else time.perf_counter()

    nowhere = subprocess.DEVNULL
    for turn in range(args.rounds + 1):
        for name, each in commands.items():
            start = spent()
            subprocess.run(each, check=True, env=os.environ | cache, stdout=nowhere, stderr=nowhere)
            if turn:  # the first fills caches
                times[name].append(spent() - start)
    return statistics.median(times["ours"]), statistics.median(times["peer"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(model: Path, medians: dict[str, dict[str, float]]) -> None:
    print(f"\n## {model.stem}\n\n| | MB | decode, tokens/s | prefill {PREFILL}, tokens/s | peak memory, MB |")
    print("|---|--:|--:|--:|--:|")
    for name, row in medians.items():
        sizes = f"{row['bytes'] / 1e6:.0f} | {row['decode']:.1f} | {row['prefill']:.0f} | {row['peak'] / 1e6:.0f}"
        print(f"| {name} | {sizes} |")
    print("\n| ratio, same run | | goal |\n|---|--:|--:|")
    small = model.stat().st_size < 2e8
    for name, others, what, goal_small, goal in RATIOS:
        there = [other for other in others if other in medians]
        wanted = goal_small if small else goal
        if name in medians and there and wanted is not None:
            best = max(there, key=lambda other: medians[other][what])
            print(f"| {what}, {name} : {best} | {medians[name][what] / medians[best][what]:.2f}x | {wanted}x |")
    for name, row in medians.items():
        if "logits" in row:
            change = row["rounded perplexity"] / row["perplexity"] - 1
            print(f"| logits, {name}, int8 x : float x, relative norm | {row['logits']:.4f} | {MOST_LOGITS} |")
            print(f"| perplexity, {name}, int8 x : {row['perplexity']:.3f} | {change:+.2%} | {MOST_PERPLEXITY:.0%} |")
    if "as in the file, int8 x" in medians:
        ratio = medians["as in the file, int8 x"]["peak"] / model.stat().st_size
        print(f"| peak memory of the process, as in the file : file | {ratio:.2f}x | {MOST_MEMORY}x |")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2", "qwen-0.5b", "qwen-1.5b"], help="names or GGUF files")
    parser.add_argument("--peer", help="a Python with llama-cpp-python (default: this one, if it has it)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (3)")
    parser.add_argument("--only", default="", help="a regular expression for the names of contenders (all)")
    parser.add_argument("--text", type=Path, help="for what int8 activations change (default: that of the demo)")
    parser.add_argument(
        "--folder", type=Path, help="for models and files that llama.cpp makes (default: a temporary one)"
    )
    parser.add_argument("--cold", action="store_true", help="measure only the time to the first token")
    parser.add_argument(
        "--one-core", action="store_true", help="one core for each, and its CPU time: for a machine that others use"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--made", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_core and args.serve is not None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before libraries count the cores
    if args.serve in OURS:
        return serve_ours(args.models[0], args.serve, str(args.text))
    if args.serve is not None:
        return serve_peer(args.models[0], PEERS[args.serve], args.made)
    from eformer.examples.llm import models, score  # pyright: ignore[reportMissingImports]

    args.text = args.text or score.TEXT
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or Path(temporary)
        args.folder.mkdir(parents=True, exist_ok=True)
        args.peer = args.peer or (sys.executable if _has_llama() else None)
        for name in args.models:
            model = models.find(name, args.folder, say)
            say(f"{model.stem}:")
            if not args.cold:
                show(model, compare(model, args))
            if args.peer:
                ours, peer = cold_start(model, args)
                times = f"ours {ours:.2f} s : llama.cpp {peer:.2f} s"
                print(f"| process start to first token, {times} | {ours / peer:.2f}x | {MOST_START}x |", flush=True)
    return None


def _has_llama() -> bool:
    import importlib.util

    return importlib.util.find_spec("llama_cpp") is not None


if __name__ == "__main__":
    main()
