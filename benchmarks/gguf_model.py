"""A GGUF model as it is: time and memory of loading it, and its logits beside those of llama.cpp for the same file.

    pip install ".[gguf]" llama-cpp-python
    python benchmarks/gguf_model.py model.gguf

llama.cpp may be in an environment of its own, which needs nothing of this package:

    python benchmarks/gguf_model.py model.gguf --write-logits logits.npz
    python benchmarks/gguf_model.py model.gguf --logits logits.npz

Differences are by the range of the logits at each token, the largest minus the least. llama.cpp rounds activations to
8 bits where weights are quantized, and that is nearly all of the difference. With the same weights in float32 it does
not, and then few digits differ; its cache has 16 bits. So run it on those, and compare:

    eformer convert model.gguf float32.gguf --type F32
    python benchmarks/gguf_model.py float32.gguf --write-logits exact.npz
    python benchmarks/gguf_model.py model.gguf --logits exact.npz

`--dense` compares with our own run of the weights in float32.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TEXT = "The quick brown fox jumps over the lazy dog. A function that adds two numbers in Python is written as follows:"
GIGA = 1e9

# Goals.
MOST_MEMORY, MOST_SECONDS = 1.15, 10.0  # by the bytes of the file; for a file of 1.1 GB
MOST_DIFFERENCE = 2e-2


class Reference(NamedTuple):
    """The logits (length, vocabulary) of llama.cpp after each of the tokens (length)."""

    tokens: np.ndarray
    logits: np.ndarray


def llama(path: Path, text: str) -> Reference:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]  # of another environment, perhaps

    model = Llama(str(path), n_ctx=256, logits_all=True, verbose=False)
    tokens = model.tokenize(text.encode(), add_bos=False)
    model.eval(tokens)
    return Reference(np.array(tokens, np.int32), np.array(model.scores[: len(tokens)], np.float32))


def resident(field: str) -> int:
    """Bytes of resident memory, VmRSS, or their peak, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def loaded(path: Path) -> tuple[Any, Any]:
    """The weights and the configuration; prints what loading took."""
    import jax
    from eformer.examples.llm import read_config  # pyright: ignore[reportMissingImports]

    from eformer import load, open_checkpoint

    jax.block_until_ready(jax.device_put(np.zeros(1)))  # the backend is no part of the measurement
    size = path.stat().st_size
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, start, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    params = load(path, flat=True)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    grown, kept = resident("VmHWM") - before, resident("VmRSS") - before
    print(
        f"loaded {size / GIGA:.3f} GB in {seconds:.1f} s ({cpu:.1f} s of CPU; goal for 1.1 GB: {MOST_SECONDS:.0f} s); "
        f"memory peaks at {grown / size:.3f} of the file (goal: {MOST_MEMORY}), and stays at {kept / size:.3f}"
    )
    with open_checkpoint(path) as checkpoint:
        return params, read_config(checkpoint.metadata)


def logits_of(params: Any, tokens: np.ndarray, config: Any) -> np.ndarray:
    import jax
    import jax.numpy as jnp
    from eformer.examples.llm import forward  # pyright: ignore[reportMissingImports]

    from eformer import implicit

    run = jax.jit(implicit(functools.partial(forward, config=config)))
    return np.asarray(run(params, jnp.asarray(tokens)[None]))[0]


def compare(name: str, found: np.ndarray, expected: np.ndarray) -> float:
    """Print and return the largest difference by the range of `expected`, and print the mean.

    The first token is apart. It sees only itself, and models put huge activations there, which lose most by rounding.
    """
    off = np.abs(found - expected) / np.ptp(expected, axis=1, keepdims=True)
    same = np.mean(np.argmax(found, axis=1) == np.argmax(expected, axis=1))
    print(
        f"beside {name}: {off[1:].max():.1e} of the range at most, {off[1:].mean():.1e} on average, {off[0].max():.1e} "
        f"at the first token; the likeliest is the same at {same:.0%} of {len(found)} tokens"
    )
    return float(off[1:].max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file of a model that examples/llm runs")
    parser.add_argument("--text", default=TEXT, help="the prompt")
    parser.add_argument("--write-logits", type=Path, metavar="FILE", help="only run llama.cpp, and write its logits")
    parser.add_argument("--logits", type=Path, metavar="FILE", help="what --write-logits has written")
    parser.add_argument("--dense", action="store_true", help="compare with float32 weights: four bytes for each")
    args = parser.parse_args()
    if args.write_logits is not None:
        np.savez(args.write_logits, **llama(args.model, args.text)._asdict())
        return
    params, config = loaded(args.model)
    if args.logits is None:
        reference = llama(args.model, args.text)
    else:
        with np.load(args.logits) as file:
            reference = Reference(file["tokens"], file["logits"])
    found = logits_of(params, reference.tokens, config)
    if args.dense:
        from eformer.model import dequantize_model

        compare("float32 weights", found, logits_of(dequantize_model(params), reference.tokens, config))
    if compare("llama.cpp", found, reference.logits) > MOST_DIFFERENCE:
        raise SystemExit(f"more than {MOST_DIFFERENCE} of the range")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # memory is that of the process
    main()
