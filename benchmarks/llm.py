"""Language models beside llama.cpp: tokens/s of decode and prefill, memory, cold start, and what int8 activations cost.

    make llm-bench                                                   # SmolLM2-135M, Qwen2.5-Coder 0.5B and 1.5B
    make llm-bench ARGS=--docs                                       # and write docs/benchmarks.md
    python benchmarks/llm.py model.gguf --peer other/bin/python      # llama-cpp-python may be in another environment

Ours is `examples/llm` on the weights of the file, quantized again to each format; llama.cpp runs what it makes itself
of the same file. Each format is a process of its own, with all cores, that waits while the others are measured. They
take turns, and the median of the rounds counts. Read the ratios. Table, chart and JSON go to `results`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PREFILL, CONTEXT, DECODE = 512, 64, 64  # tokens: a prompt; a short prompt, and those that are written after it
CACHED = 4096  # tokens, for `--cache`
PROMPT = "Write a function that adds two numbers."
# Our formats, each with float and int8 activations.
OURS = {
    "float32": "float32",
    "int8": "int8",
    "int4": "int4,block_size=64,fit=false",  # fitting takes long, and changes values, but not speed
    "int4 in blocks of 32": "int4,fit=false",
    "nf4": "nf4",
    "ternary": "ternary",
    "as in the file": "file",
}
ROUNDED = ", int8 x"  # after the name of a format: with int8 activations
# What llama.cpp makes, by its numbers of file types.
PEERS = {"llama.cpp F16": 1, "llama.cpp Q8_0": 7, "llama.cpp Q4_0": 2, "llama.cpp Q4_K": 15, "llama.cpp TQ2_0": 37}
GROUPS = {
    "16 and 32 bits": ("float32", "llama.cpp F16"),
    "8 bits": ("int8", "int8, int8 x", "llama.cpp Q8_0"),
    "4 bits": ("int4", "int4, int8 x", "int4 in blocks of 32, int8 x", "nf4", "nf4, int8 x", "llama.cpp Q4_0"),
    "the file, Q4_K_M": ("as in the file", "as in the file, int8 x", "llama.cpp Q4_K"),
    "2 bits": ("ternary, int8 x", "llama.cpp TQ2_0"),
}
FOUR_BITS = tuple(f"{name}{x}" for name in ("int4", "int4 in blocks of 32", "nf4") for x in ("", ROUNDED))
# Rows of the table of ratios: ours and the others, of each of which the best counts, what is compared, and the goals
# for models below and above 200 million weights.
RATIOS = (
    (("int8", "int8, int8 x"), ("llama.cpp Q8_0",), "decode", 0.85, 1.0),
    (FOUR_BITS, ("llama.cpp Q4_0", "llama.cpp Q4_K"), "decode", 0.85, 1.0),
    (("as in the file", "as in the file, int8 x"), ("llama.cpp Q4_K",), "decode", 0.85, 1.0),
    (("ternary", "ternary, int8 x"), ("llama.cpp TQ2_0",), "decode", None, 1.0),
    (("int8",), ("float32",), "prefill", 1.0, 1.0),
    (("int4",), ("float32",), "prefill", 1.0, 1.0),
    (("nf4",), ("float32",), "prefill", 1.0, 1.0),
    (("int4, int8 x",), ("float32",), "prefill", 1.6, 1.6),
    (("int4, int8 x",), ("llama.cpp Q4_0",), "prefill", 1.0, 1.0),
)
MOST_LOGITS, MOST_PERPLEXITY, MOST_MEMORY, MOST_START = 0.04, 0.01, 1.25, 1.5

Rows = dict[str, dict[str, float]]  # what was measured, by contender


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
        print(json.dumps(measure(*line.strip().split(": "))), flush=True)


def serve_ours(model: str, form: str, text: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from eformer.examples.llm import empty_cache, generation, load_model  # pyright: ignore[reportMissingImports]
    from eformer.examples.llm.quantize import quantizing  # pyright: ignore[reportMissingImports]

    from eformer import QuantizedArray
    from eformer.model import stored_bytes

    weights, config, tokenizer = load_model(model, quantizing(OURS[form]))
    options = {"config": config, "sampling": generation.GREEDY, "ends": ()}
    tokens = jnp.asarray(np.random.default_rng(0).integers(100, 1000, (1, PREFILL)), jnp.int32)
    padding, seed = jnp.zeros(1, jnp.int32), jnp.uint32(0)

    def switched(name: str) -> Any:
        def switch(array: Any) -> Any:
            rounding = "int8" if name.endswith(ROUNDED) else None
            return array.with_activation_dtype(rounding) if isinstance(array, QuantizedArray) else array

        return jax.tree.map(switch, weights, is_leaf=lambda array: isinstance(array, QuantizedArray))

    def prefill(params: Any, length: int, capacity: int) -> Any:
        new = {"new_cache": empty_cache, "capacity": capacity}
        return jax.block_until_ready(generation.prefill(params, tokens[:, :length], padding, seed, **new, **options))

    def measure(what: str, name: str) -> dict[str, float]:
        params, rates = switched(name), {}
        if what == "quality":
            found = tokenizer().encode(Path(text).read_text(encoding="utf-8"))
            return quality(switched(form), switched(form + ROUNDED), config, found)
        state, steps = prefill(params, CONTEXT, CONTEXT + DECODE), generation.STEPS
        begun = clock()
        for _ in range(DECODE // steps):
            state, found = generation.advance(params, state, jnp.int32(steps if what == "speed" else 1), **options)
            jax.block_until_ready(found)
        rates["decode"] = DECODE / (clock() - begun)
        rates["peak"] = peak_memory()  # of a short text: a long prompt takes memory for its activations
        begun = clock()
        prefill(params, PREFILL, PREFILL)
        rates["prefill"] = PREFILL / (clock() - begun)
        return {"bytes": stored_bytes(params), **rates}

    serve(measure)


def quality(exact: Any, rounded: Any, config: Any, tokens: list[int]) -> dict[str, float]:
    """What int8 activations change: logits of 512 tokens in relative norm, and perplexity of the whole text."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from eformer.examples.llm import forward  # pyright: ignore[reportMissingImports]
    from eformer.examples.llm.score import perplexity  # pyright: ignore[reportMissingImports]

    from eformer import implicit

    run = jax.jit(implicit(forward), static_argnames="config")
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

    def measure(what: str, name: str) -> dict[str, float]:
        del what, name
        forget()
        token, begun = decode(tokens[:CONTEXT]), clock()
        for _ in range(DECODE):
            token = decode(np.array([token]))
        rates = {"decode": DECODE / (clock() - begun), "peak": peak_memory()}
        forget()
        begun = clock()
        decode(tokens)
        rates["prefill"] = PREFILL / (clock() - begun)
        return {"bytes": Path(made).stat().st_size, **rates}

    serve(measure)


def cache_cost(model: Path, text: Path) -> str:
    """A table: memory of caches of CACHED tokens, the logits of the last 512 beside the first cache, and perplexity."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from eformer.examples.llm import (  # pyright: ignore[reportMissingImports]
        CACHES,
        hidden,
        load_model,
        logits,
    )
    from rings import markdown

    from eformer import implicit
    from eformer.model import stored_bytes

    params, config, tokenizer = load_model(model)
    tokens = tokenizer().encode(text.read_text(encoding="utf-8"))[: CACHED + 1]
    if len(tokens) <= CACHED:
        raise SystemExit(f"{text} has {len(tokens)} tokens; --text names a file with more than {CACHED}")

    @jax.jit
    @implicit
    def step(params: Any, part: jax.Array, start: jax.Array, cache: Any, following: jax.Array) -> Any:
        x, cache = hidden(params, part[None], start, cache, config)
        scores = logits(params, x)[0]
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores), following[:, None], axis=-1)
        return cache, scores, -jnp.sum(picked)

    lines, right = [], None
    for name, make in CACHES.items():
        cache, loss, scores = make(config, 1, CACHED), 0.0, jnp.zeros(0)
        for start in range(0, CACHED, PREFILL):
            part = jnp.asarray(tokens[start : start + PREFILL + 1], jnp.int32)
            cache, scores, more = step(params, part[:-1], jnp.int32(start), cache, part[1:])
            loss += float(more)
        found = np.asarray(scores)
        right = found if right is None else right
        error = np.linalg.norm(found - right) / np.linalg.norm(right)
        lines.append([name, f"{stored_bytes(cache) / 1e6:.0f}", f"{error:.3f}", f"{np.exp(loss / CACHED):.2f}"])
    header = [f"cache of {CACHED} tokens, {model.stem}", "MB", "logits of the last 512, relative change", "perplexity"]
    return markdown(header, lines)


# A process that writes `count` tokens, as ours does, and says on standard error what memory it took at most.
PEER_RUN = """
import sys, llama_cpp
run = llama_cpp.Llama(sys.argv[1], n_ctx=512, verbose=False)
for part in run.create_completion(sys.argv[2], max_tokens=int(sys.argv[3]), stream=True):
    print(part["choices"][0]["text"], end="", flush=True)
print(open("/proc/self/status").read(), file=sys.stderr)
"""
OUR_RUN = """
import sys
from eformer.examples.llm.__main__ import main
main([*sys.argv[1:3], "--count", sys.argv[3], "--activations", "int8", "--quiet"])
print(open("/proc/self/status").read(), file=sys.stderr)
"""
# What it takes on the way, step by step: what is resident then, and the most so far.
MEMORY_RUN = """
import sys
def say(what):
    found = dict(line.split(":") for line in open("/proc/self/status"))
    print(what, *(found[name].split()[0] for name in ("VmRSS", "VmHWM")), sep=": ", flush=True)
import jax
say("JAX is imported")
from eformer.examples.llm import Request, open_model
from eformer.examples.llm.quantize import quantizing
say("the example is imported")
with open_model(sys.argv[1]) as opened:
    tokenizer = opened.tokenizer()
    request = Request(opened.config, [tokenizer.encode(sys.argv[2])], int(sys.argv[3]))
    say("the prompt is tokens")
    change = quantizing("file", activations="int8")
    request.compile(opened.like(change))
    say("the programs for the prompt are loaded")
    params = opened.read(change)
say("the weights are read")
made = request.run(params)
next(made)
say("the first token is there")
next(made)
say("the program of the loop is loaded")
for _ in made:
    pass
say("all tokens are there")
"""


# --- the comparison ---


class Contender:
    """A process that measures when it is told to."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | compiled_once(folder)
        )

    def ask(self, what: str, name: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(f"{what}: {name}", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a contender ended: {self._process.args}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compiled_once(folder: Path) -> dict[str, str]:
    """The environment in which JAX keeps what it compiled, and Python too, as for a package that pip installed."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**kept, "PYTHONDONTWRITEBYTECODE": ""}


def compare(model: Path, args: argparse.Namespace) -> Rows:
    """Medians of each contender over the rounds, and what int8 activations change."""
    names = [*(name for form in OURS for name in (form, form + ROUNDED) if name != "float32" + ROUNDED), *PEERS]
    chosen = [name for name in names if re.search(args.only, name) and (args.peer or name not in PEERS)]
    running: dict[str, Contender] = {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    try:
        for name in chosen:
            say(f"  {name}: loading and compiling ...")
            form = name.removesuffix(ROUNDED)
            if form not in running:
                running[form] = Contender(command(form, model, args), args.folder)
            running[form].ask("compile", name)
        for turn in range(args.rounds):
            say(f"  round {turn + 1} of {args.rounds} ...")
            for name in chosen:
                found[name].append(running[name.removesuffix(ROUNDED)].ask("speed", name))
        medians = {
            name: {key: statistics.median(r[key] for r in rows) for key in rows[0]} for name, rows in found.items()
        }
        for name in medians.keys() & {"int4", "int8"} if args.quality else ():
            say(f"  what int8 activations change, {name} ...")
            medians[name] |= running[name].ask("quality", name)
    finally:
        for contender in running.values():
            contender.close()
    return medians


def command(form: str, model: Path, args: argparse.Namespace) -> list[str]:
    how = ["--serve", form, *(["--one-core"] if args.one_core else [])]
    if form in OURS:
        return [sys.executable, __file__, str(model), *how, "--text", str(args.text)]
    made = args.folder / f"{model.stem}-{PEERS[form]}.gguf"
    return [args.peer, __file__, str(model), *how, "--made", str(made)]


def whole_runs(model: Path, args: argparse.Namespace) -> Rows:
    """Seconds from the start of a process to its first token, and its peak memory when it writes DECODE tokens.

    Ours is the command, with what JAX compiled before; the other is llama.cpp on the same file. They take turns.
    """
    runs = {"as in the file, int8 x": [sys.executable, "-c", OUR_RUN], "llama.cpp Q4_K": [args.peer, "-c", PEER_RUN]}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for turn in range(args.rounds + 1):
        for name, each in runs.items():
            start, _ = whole_run([*each, str(model), PROMPT, "1"], args)
            _, peak = whole_run([*each, str(model), PROMPT, str(DECODE)], args) if turn in (0, args.rounds) else (0, 0)
            if turn:  # the first fills caches
                found[name].append({"start": start} | ({"peak": peak} if peak else {}))
    return {
        name: {"start": statistics.median(row["start"] for row in rows), "peak": rows[-1]["peak"]}
        for name, rows in found.items()
    }


def whole_run(command: list[str], args: argparse.Namespace) -> tuple[float, int]:
    """Seconds until a process shows its first text, of the processor with --one-core; and the most memory it took."""
    begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    where = os.environ | compiled_once(args.folder)
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, env=where, stdout=subprocess.PIPE, stderr=said) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds = time.perf_counter() - begun
            process.stdout.read()
        said.seek(0)
        told = said.read()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {told[-500:]}")
    if args.one_core:  # of the whole process
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return seconds, next(int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("VmHWM"))


def memory_steps(model: Path, args: argparse.Namespace) -> str:
    """A table: memory of a process that writes DECODE tokens, at each step, with what JAX compiled before."""
    from rings import markdown

    command = [sys.executable, "-c", MEMORY_RUN, str(model), PROMPT, str(DECODE)]
    where = os.environ | compiled_once(args.folder)
    subprocess.run(command, env=where, stdout=subprocess.DEVNULL, check=True)  # fills caches
    told = subprocess.run(command, env=where, stdout=subprocess.PIPE, check=True, text=True).stdout
    steps = [line.split(": ") for line in told.splitlines()]
    lines = [[what, *(f"{int(kibibytes) * 1024 / 1e6:.0f}" for kibibytes in each)] for what, *each in steps]
    return markdown([f"{model.stem}, as in the file, when", "resident, MB", "peak so far, MB"], lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- what is written ---


class Goal(NamedTuple):
    what: str
    found: float
    shown: str
    goal: str
    reached: bool


def goals(rows: Rows, file_bytes: int) -> list[Goal]:
    """Each comparison that has a goal, and some that have none."""
    found, small = [], file_bytes < 2e8
    for names, others, what, goal_small, goal in RATIOS:
        ours, there = ([name for name in each if what in rows.get(name, {})] for each in (names, others))
        wanted = goal_small if small else goal
        if ours and there:
            name, best = (max(each, key=lambda name: rows[name][what]) for each in (ours, there))
            ratio = rows[name][what] / rows[best][what]
            shown = "" if wanted is None else f"{wanted}x"
            found.append(Goal(f"{what}, {name} : {best}", ratio, f"{ratio:.2f}x", shown, ratio >= (wanted or 0)))
    for name, row in rows.items():
        if "logits" in row:
            change = row["rounded perplexity"] / row["perplexity"] - 1
            what = f"logits, {name}, int8 x : float x, relative norm"
            found.append(
                Goal(what, row["logits"], f"{row['logits']:.4f}", str(MOST_LOGITS), row["logits"] <= MOST_LOGITS)
            )
            what = f"perplexity, {name}, int8 x : float x, {row['perplexity']:.3f}"
            found.append(Goal(what, change, f"{change:+.2%}", f"{MOST_PERPLEXITY:.0%}", change <= MOST_PERPLEXITY))
    ours, peer = rows.get("as in the file, int8 x", {}), rows.get("llama.cpp Q4_K", {})
    if "peak" in ours:
        ratio = ours["peak"] / file_bytes
        what = f"peak memory, as in the file : file; llama.cpp {peer.get('peak', 0) / file_bytes:.2f}x"
        found.append(Goal(what, ratio, f"{ratio:.2f}x", f"{MOST_MEMORY}x", ratio <= MOST_MEMORY))
    if "start" in ours and "start" in peer:
        ratio = ours["start"] / peer["start"]
        what = f"process start to first token, {ours['start']:.2f} s : llama.cpp {peer['start']:.2f} s"
        found.append(Goal(what, ratio, f"{ratio:.2f}x", f"{MOST_START}x", ratio <= MOST_START))
    return found


def tables(title: str, rows: Rows, file_bytes: int) -> str:
    """Markdown: what was measured, and the ratios beside their goals."""
    from rings import markdown

    header = [title, "MB", "decode, tokens/s", f"prefill {PREFILL}, tokens/s", "peak memory, MB"]
    lines = [
        [
            name,
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['decode']:.1f}",
            f"{row['prefill']:.0f}",
            f"{row['peak'] / 1e6:.0f}",
        ]
        for name, row in rows.items()
        if "decode" in row
    ]
    said = {True: "yes", False: "no"}
    compared = [[g.what, g.shown, g.goal, said[g.reached] if g.goal else ""] for g in goals(rows, file_bytes)]
    parts = [markdown(header, lines)] if lines else []
    return "\n\n".join([*parts, markdown([f"{title}, same run", "ratio", "goal", "reached"], compared)])


def chart(models: Mapping[str, Mapping[str, Any]], what: str, title: str, where: str) -> str:
    from chart import Line, bars

    lines: list[Line] = []
    for group, names in GROUPS.items():
        for name in names:
            speeds = {model: each["rows"][name][what] for model, each in models.items() if name in each["rows"]}
            label = name if name in PEERS else f"eformer {name}"
            if speeds:
                lines.append((group, label, name not in PEERS, name.endswith(ROUNDED) or name in PEERS, speeds))
    return bars(lines, list(models), title, where, shown="{:.0f}", mark=None)


def write(models: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> None:
    """JSON, markdown and charts of all models; with --docs the page too."""
    from rings import machine, rewrite

    where, out = machine(), HERE / "results"
    facts = f"On {where}; eformer {importlib.metadata.version('eformer')}, JAX {importlib.metadata.version('jax')}"
    peer = f"llama-cpp-python {args.peer_version}, built for this processor" if args.peer else "without llama.cpp"
    text = "\n\n".join(
        [f"{facts}, {peer}.", *(tables(name, each["rows"], each["file_bytes"]) for name, each in models.items())]
    )
    out.mkdir(parents=True, exist_ok=True)
    found = {"machine": where._asdict(), "peer": peer, "models": models}
    (out / "llm.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "llm.md").write_text(f"{text}\n")
    measured = {name: each for name, each in models.items() if any("decode" in row for row in each["rows"].values())}
    (out / "llm.svg").write_text(chart(measured, "decode", "Decode, tokens/s", str(where)))
    (out / "llm-prefill.svg").write_text(chart(measured, "prefill", f"Prefill of {PREFILL}, tokens/s", str(where)))
    say(f"wrote llm.json, llm.md, llm.svg and llm-prefill.svg to {out}")
    if args.docs:
        pictures = [
            f"![{what} of language models, beside llama.cpp]({os.path.relpath(out / name, PAGE.parent)})"
            for what, name in (("Decode", "llm.svg"), ("Prefill", "llm-prefill.svg"))
        ]
        rewrite(PAGE, "llm", "\n\n".join([*pictures, text]))


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
    parser.add_argument("--cache", action="store_true", help="measure only what quantized caches cost; --text is long")
    parser.add_argument("--cold", action="store_true", help="measure only the time to the first token, and memory")
    parser.add_argument("--memory", action="store_true", help="show only where the memory of a process goes")
    parser.add_argument("--no-quality", dest="quality", action="store_false", help="leave out int8 activations' cost")
    parser.add_argument("--docs", action="store_true", help="write the results into docs/benchmarks.md too")
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
    return measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    from eformer.examples.llm import models, score  # pyright: ignore[reportMissingImports]

    args.text = args.text or score.TEXT
    args.peer, args.peer_version = _llama(args.peer or sys.executable)
    measured = {}
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = (args.folder or Path(temporary)).absolute()
        args.folder.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            model = models.find(name, args.folder, say)
            say(f"{model.stem}:")
            if args.cache or args.memory:
                print(f"\n{memory_steps(model, args) if args.memory else cache_cost(model, args.text)}", flush=True)
                continue
            rows = {} if args.cold else compare(model, args)
            if args.peer:
                say("  time to the first token, and memory ...")
                for each, row in whole_runs(model, args).items():
                    rows[each] = rows.get(each, {}) | row
            measured[model.stem] = {"file_bytes": model.stat().st_size, "rows": rows}
            print(f"\n{tables(model.stem, rows, model.stat().st_size)}", flush=True)
    if not (args.only or args.cold or args.cache or args.memory):
        write(measured, args)


def _llama(python: str) -> tuple[str | None, str]:
    """The interpreter and the version of its llama-cpp-python; no interpreter if it has none."""
    asked = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
    done = subprocess.run([python, "-c", asked], capture_output=True, text=True)
    return (None, "") if done.returncode else (python, done.stdout.strip())


if __name__ == "__main__":
    main()
