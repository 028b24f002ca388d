"""Bits against perplexity and divergence: what data are worth when a language model is quantized.

    python benchmarks/calibration.py smollm2 --text wikitext2.txt --bits 4.5 3.5 2.6

Weights are calibrated on the first tenth of the text and measured on the rest, in windows of 512 tokens. Bits a weight
count all that is stored: embeddings, norms, scales. Each line of a table adds to the one before it:

    rounded      scales from the extremes of each block
    fitted       scales of the smallest squared error
    importance   errors count as much as the inputs of a channel are large
    budget       each leaf gets as many bits as its errors cost
    gptq         errors of codes make up for each other
    sequential   later leaves see what became of earlier ones
    tuned        scales, offsets and norms are trained by the divergence from the model as it was
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from eformer.examples.llm import forward, load_model  # pyright: ignore[reportMissingImports]
from eformer.examples.llm.models import find  # pyright: ignore[reportMissingImports]

from eformer import Statistics, calibrate, materialize, quantize_model, stored_bytes, tune
from eformer.model import Rule, plan_budget
from eformer.ops.quantization import FormatName

WINDOW = 512
WEIGHTS = r"(attn_(q|k|v|output)|ffn_(gate|up|down)|token_embd|^output)\.weight$"
BLOCKS = {size: {"axis": -1, "block_size": size, "double_quantization": True} for size in (32, 64)}
# For the lines without a budget: the format of all leaves, by bits a weight; the nearest is taken.
FORMATS: dict[float, tuple[FormatName, int]] = {
    2.6: ("int2", 32),
    3.3: ("int3", 64),
    3.5: ("int3", 32),
    4.25: ("int4", 64),
    4.5: ("int4", 32),
    5.3: ("int5", 64),
}
STEPS = ("rounded", "fitted", "importance", "budget", "gptq", "sequential", "tuned")


class Quality(NamedTuple):
    perplexity: float
    divergence: float  # of the reference from it, mean by token
    same: float  # how often the likeliest token is the same


class Model:
    """The dense weights of a file, and windows of a text."""

    def __init__(self, name: str, folder: Path, text: Path, windows: int, measured: int) -> None:
        params, config, tokenizer = load_model(find(name, folder))
        self.params = {path: jnp.asarray(materialize(leaf), jnp.float32) for path, leaf in params.items()}
        self.weights = sum(leaf.size for leaf in self.params.values())
        self.function = functools.partial(forward, config=config)
        words = text.read_text(encoding="utf-8")
        first, rest = (tokenizer().encode(each) for each in (words[: len(words) // 10], words[len(words) // 10 :]))
        self.seen = _windows(first)[:windows]
        others = _windows(rest)
        self.held_out = others[:: max(len(others) // measured, 1)][:measured]
        self.score = jax.jit(functools.partial(_score, self.function))

    def quality(self, small: Any) -> Quality:
        dense = materialize(small)  # quality depends on values alone
        found = [jax.device_get(self.score(dense, self.params, window)) for window in self.held_out]
        loss, divergence, same = np.mean(np.asarray(found, np.float64), axis=0)
        return Quality(float(np.exp(loss)), float(divergence), float(same))

    def bits(self, small: Any) -> float:
        return 8 * stored_bytes(small) / self.weights


def _windows(tokens: Sequence[int]) -> list[jax.Array]:
    whole = np.array(tokens[: len(tokens) // WINDOW * WINDOW], np.int32).reshape(-1, 1, WINDOW)
    return list(map(jnp.asarray, whole))


def _score(function: Any, params: Any, reference: Any, window: jax.Array) -> tuple[jax.Array, ...]:
    after, before = (jax.nn.log_softmax(function(each, window[:, :-1])) for each in (params, reference))
    loss = -jnp.mean(jnp.take_along_axis(after, window[:, 1:, None], axis=-1))
    divergence = jnp.mean(jnp.sum(jnp.exp(before) * (before - after), axis=-1))
    return loss, divergence, jnp.mean(jnp.argmax(after, -1) == jnp.argmax(before, -1))


def forms(
    model: Model, bits: float, statistics: Statistics, steps: Sequence[str], epochs: int
) -> Iterator[tuple[str, Any]]:
    """The model in each of the `steps` at about `bits` bits a weight."""
    form, size = FORMATS[min(FORMATS, key=lambda each: abs(each - bits))]
    rules = [Rule(WEIGHTS, form, BLOCKS[size])]
    plain = [Rule(WEIGHTS, form, {**BLOCKS[size], "fit": False})]
    last: Any = None
    if "rounded" in steps:
        yield "rounded", quantize_model(model.params, plain)
    if "fitted" in steps:
        yield "fitted", quantize_model(model.params, rules)
    if "importance" in steps:
        yield "importance", quantize_model(model.params, rules, statistics=statistics)
    planned: Sequence[Rule] = rules
    if "budget" in steps:
        options = {"function": model.function, "inputs": iter(model.seen), "statistics": statistics}
        planned = plan_budget(bits, model.params, rules, **options)
        print(planned)
        last = quantize_model(model.params, planned, statistics=statistics)
        yield "budget", last
    if "gptq" in steps:
        last = quantize_model(model.params, planned, statistics=statistics, method="gptq")
        yield "gptq", last
    if "sequential" in steps:
        options = {"function": model.function, "inputs": (iter(model.seen),), "statistics": statistics}
        keep = Rule("", None, optional=True)
        last = quantize_model(model.params, [*planned, keep], method="gptq", sequential=True, **options)
        yield "sequential", last
    if "tuned" in steps and last is not None:
        show = lambda name, done, total: print(f"  {name} of {total}", flush=True)  # noqa: E731
        yield "tuned", tune(model.function, last, model.seen, reference=model.params, epochs=epochs, progress=show)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2, qwen-0.5b, qwen-1.5b, or a GGUF file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "eformer", help="where models are kept")
    parser.add_argument("--bits", type=float, nargs="+", default=[4.5, 4.0, 3.5, 3.0, 2.6])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--windows", type=int, default=32, help="to calibrate with (32)")
    parser.add_argument("--measured", type=int, default=32, help="windows to measure with (32)")
    parser.add_argument("--epochs", type=int, default=2, help="of tuning (2)")
    parser.add_argument("--results", type=Path, help="a file of JSON")
    args = parser.parse_args()
    model = Model(args.model, args.folder, args.text, args.windows, args.measured)
    reference = model.quality(model.params)
    print(f"{args.model}: {model.weights / 1e6:.1f} million weights, perplexity {reference.perplexity:.3f}", flush=True)
    begun = time.perf_counter()
    statistics = calibrate(model.function, second_moments=WEIGHTS)(model.params, iter(model.seen))
    print(f"calibrated with {len(model.seen)} windows in {time.perf_counter() - begun:.0f} s", flush=True)
    rows = []
    for bits in args.bits:
        begun = time.perf_counter()
        for step, small in forms(model, bits, statistics, args.steps, args.epochs):
            seconds = time.perf_counter() - begun
            found = model.quality(small)
            more = found.perplexity / reference.perplexity - 1
            rows.append({"bits": model.bits(small), "step": step, "loss": more, **found._asdict(), "seconds": seconds})
            print(
                f"{step:11} {model.bits(small):5.2f} bits  perplexity {found.perplexity:9.3f} {more:+9.2%}  "
                f"divergence {found.divergence:.4f}  same {found.same:.1%}  {seconds:5.0f} s",
                flush=True,
            )
            begun = time.perf_counter()
    if args.results is not None:
        args.results.write_text(
            json.dumps({"model": args.model, "reference": reference.perplexity, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
