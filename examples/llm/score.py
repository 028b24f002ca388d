"""How well a model predicts a text: its perplexity."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from eformer import implicit

from .model import Config, Params, forward

TEXT = Path(__file__).with_name("text.txt")  # prose that was written for this purpose
WINDOW = 512  # tokens; each window is a text of its own


def perplexity(params: Params, config: Config, tokens: Sequence[int], window: int = WINDOW) -> float:
    """Perplexity over whole windows; tokens after the last window do not count."""
    windows = np.asarray(tokens[: len(tokens) // window * window], np.int32).reshape(-1, window)
    if not len(windows):
        raise ValueError(f"the text has {len(tokens)} tokens, and a window takes {window}")
    loss = sum(float(_loss(params, jnp.asarray(each)[None], config)) for each in windows)
    return math.exp(loss / (windows.size - len(windows)))


@functools.partial(jax.jit, static_argnames="config")
def _loss(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    found = jax.nn.log_softmax(implicit(forward)(params, tokens[:, :-1], config))
    return -jnp.sum(jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1))
